"""Scores by the objective in a benchmark: which steps measure them, what is shown, and what is judged."""

import json
import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hddm.benchmark.objective import JUDGED, compare_objective
from hddm.benchmark.plan import SeedPlan
from hddm.benchmark.report import REPORT_FILE, tables_text
from hddm.benchmark.results import Results, read_results
from hddm.benchmark.run import commands, run_benchmark
from hddm.objective import scores as scoring
from hddm.objective.records import BITS, MEAN_ERROR, HeldOutScores, error_at, read_scores
from hddm_cli.lines import LINES
from tests.artefacts import Command, printed, refusal
from tests.benchmark.small import SMALL, plan_of, small
from tests.benchmark_files import inline, run_inline

FEW = "--num-images 8 --likelihood-images 3"
MEASURED = SMALL["evaluate"] | {"objective": FEW}
STEPS = SMALL["steps"] | {
    "pair": "assemble $one $other --router moments --strategy full",
    "drawn": "assemble $one $other --router moments",
}
ROWS = {"one": "$one", "pair": "$pair --strategy full", "drawn": "$drawn"}
TABLES = {
    "models": {},
    "settings": {
        "rows": ["pair"],
        "vary": {
            "strategy": ["draw", "full", "top-1", "commit-0.5"],
            "steps": [2],
        },
    },
    "own": {"rows": ["one"], "vary": {"native": ["ddim"]}},
}


def planned(data: Path, folder: Path, **changes: Any) -> SeedPlan:
    return plan_of(data, folder, **{"steps": STEPS, "rows": ROWS, "evaluate": MEASURED} | changes)


def lines(plan: SeedPlan) -> dict[str, str]:
    """The command that scores each row; why it has none, where it has none."""
    found = {}
    for row in plan.rows:
        found[row.name] = row.why_unscored
        if row.objective is not None:
            found[row.name] = " ".join(row.objective.line.words)
    return found


# Which steps measure them.


def test_rows_that_differ_in_how_they_are_sampled_share_a_step(data: Path, tmp_path: Path) -> None:
    plan = planned(data, tmp_path, tables=TABLES)
    scored = lines(plan)
    of_pair = f"evaluate $pair --strategy full --held-out $data/test {FEW}"
    assert scored["one"] == f"evaluate $one --held-out $data/test {FEW}"
    assert scored["drawn"] == f"evaluate $drawn --strategy draw --held-out $data/test {FEW}"
    for name in ("pair", "full", "2 steps"):
        assert scored[name] == of_pair, name
    assert scored["top-1"] == of_pair.replace("full", "top-1")
    labels = [step.label for step in plan.all if step.label.startswith("objective/")]
    assert sorted(labels) == [
        "objective/drawn-draw",
        "objective/one",
        "objective/pair-draw",
        "objective/pair-full",
        "objective/pair-top-1",
    ]


def test_rows_without_a_velocity_have_a_reason(data: Path, tmp_path: Path) -> None:
    steps = STEPS | {
        "student": "distill $one --data $parts --init $one --steps 2 --sampling-steps 1",
        "early": "train expert $parts/shard_0 --size tiny --noise-range 0:0.5",
        "late": "train expert $parts/shard_0 --size tiny --noise-range 0.5:1",
        "halves": "assemble $early $late",
    }
    rows = ROWS | {
        "student": "$student",
        "large": "$one --height 8 --width 8",
        "half": "$halves --expert 0",
        "halves": "$halves",
        "expert": "$pair --expert 1",
    }
    defaults = SMALL["defaults"] | {"sample": "--num-images 12"}
    scored = lines(
        planned(data, tmp_path, steps=steps, rows=rows, tables=TABLES, defaults=defaults)
    )
    assert "follows no common velocity" in scored["ddim"]
    assert "a state has no velocity of its own" in scored["commit-0.5"]
    assert "student of few steps" in scored["student"]
    assert "another size" in scored["large"]
    assert "part of the noise" in scored["half"]
    assert scored["halves"] == f"evaluate $halves --held-out $data/test {FEW}"
    assert scored["expert"] == f"evaluate $pair/experts/1 --held-out $data/test {FEW}"


def test_it_is_scored_on_the_images_of_the_split(data: Path, tmp_path: Path) -> None:
    measured = MEASURED | {"validation": "$parts/held_out", "objective": True}
    for split, images in (("validation", "$parts/held_out"), ("held_out", "$data/test")):
        plan = planned(data, tmp_path, evaluate=measured, split=split)
        assert lines(plan)["one"] == f"evaluate $one --held-out {images}"
    # Nothing but the key adds steps.
    plan = planned(data, tmp_path, evaluate=SMALL["evaluate"])
    assert not [step for step in plan.all if step.label.startswith("objective/")]
    assert set(lines(plan).values()) == {""}


def test_options_of_other_evaluations_do_not_reach_it(data: Path, tmp_path: Path) -> None:
    defaults = SMALL["defaults"] | {"evaluate": "--mirrored"}
    assert "--mirrored" not in lines(planned(data, tmp_path, defaults=defaults))["one"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--brief", "--brief: cannot be chosen here; choose from --batch-size"),
        ("--strategy full", "--strategy: cannot be chosen here"),
        ("--held-out other", "--held-out: cannot be chosen here"),
        ("--num-images 0", "num_images"),
        ("--num-image 8", "--num-image"),
        ("8", "8: is no option"),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_runs(
    options: str, message: str, data: Path, tmp_path: Path
) -> None:
    measured = MEASURED | {"objective": options}
    told = refusal(lambda: planned(data, tmp_path, evaluate=measured).rows)
    assert message in told


def test_its_folder_is_no_name_of_a_step() -> None:
    assert "taken" in refusal(small, steps=STEPS | {"objective": STEPS["pair"]})


# What is measured, and shown.


@pytest.fixture(scope="module", autouse=True)
def coarse_likelihoods() -> Iterator[None]:
    """Likelihoods of few steps: how exact they are is tested with the objective."""
    coarse = partial(scoring.LikelihoodSettings, steps=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "LikelihoodSettings", coarse)
        yield


@pytest.fixture(scope="module")
def out(data: Path, jobs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A benchmark of one seed with scores by the objective."""
    folder = tmp_path_factory.mktemp("objective") / "out"
    run_inline(measured(), folder, data, jobs=jobs)
    return folder


def measured(**changes: Any) -> Any:
    compare = {"baselines": ["one"]}
    content = {"steps": STEPS, "rows": ROWS, "evaluate": MEASURED, "compare": compare}
    return small(**content | {"tables": TABLES} | changes)


@pytest.mark.slow
def test_figures_are_those_of_the_command(out: Path, hddm: Command, tmp_path: Path) -> None:
    results = read_results(out)
    by_name = {row.name: row for row in results.rows}
    pair = by_name["pair"].one.objective
    assert pair is not None
    assert (pair.images, pair.likelihood_images) == (8, 3)
    command = next(one.command for one in results.steps if one.name == pair.step)
    words = shlex.split(command)[1:]
    # Steps are named by links in the folder, and the images lie where they lay.
    words[1], words[-1] = str(out / words[1]), str(tmp_path / "again.json")
    printed(hddm, *words)
    again, ours = read_scores(tmp_path / "again.json"), read_scores(out / f"{pair.step}.json")
    assert again.strategies == ours.strategies
    (scores,) = ours.strategies
    bits = sum(scores.bits.by_image) / 3  # type: ignore[union-attr]
    assert pair.figures[BITS].value == pytest.approx(bits, rel=1e-12)
    for level in scores.levels:
        assert pair.figures[error_at(level.t)].value == pytest.approx(sum(level.by_image) / 8)
    # One expert per sample has a likelihood, and no velocity.
    drawn = by_name["drawn"].one.objective
    assert drawn is not None
    assert set(drawn.figures) == {BITS}
    assert by_name["full"].one.objective == by_name["2 steps"].one.objective == pair


@pytest.mark.integration
def test_tables_say_what_rows_lack(out: Path) -> None:
    results = read_results(out)
    for text in (tables_text(results), (out / REPORT_FILE).read_text()):
        assert "bits per dimension" in text
        assert "error at t = 0.02" in text
        assert "without guidance" in text
        assert "No errors of drawn, draw: each sample has one expert" in text
        assert "No errors and bits of commit-0.5: below its noise level" in text
        assert "No errors and bits of ddim: by its experts&#39; own sampler" in text.replace(
            "experts' own", "experts&#39; own"
        )
    lines = [one for one in tables_text(results).splitlines() if one.startswith("| drawn")]
    (row,) = [one for one in lines if "over images" in one]
    assert row.count("–") == 6
    # A table without any figure is left out.
    assert "own, by the objective" not in tables_text(results)
    page = (out / REPORT_FILE).read_text()
    assert f"All {len(results.by_objective)} comparisons by the objective" in page


@pytest.mark.slow
def test_finished_scores_are_not_measured_again(
    data: Path, jobs: Path, out: Path, tmp_path: Path
) -> None:
    rows = ROWS | {
        "more": "$pair --strategy full --steps 3",
        "nucleus": "$pair --strategy nucleus-0.5",
    }
    with inline() as told:
        run_benchmark(measured(rows=rows), tmp_path / "out", LINES, data=data, jobs=jobs)
    scored = [words for words in told if words[0] == "evaluate" and "--num-images" in words]
    assert [words[words.index("--strategy") + 1] for words in scored] == ["nucleus-0.5"]
    results = read_results(tmp_path / "out")
    assert len(results.scored) == len(read_results(out).scored) + 2


@pytest.mark.integration
def test_commands_by_hand_make_its_folder(data: Path) -> None:
    first, *others = commands(measured(seeds=[0, 3]), LINES, data)
    assert first == "mkdir -p objective scores"
    assert "mkdir -p scores seed_3/objective seed_3/scores" in others


# What is judged.


@pytest.mark.integration
def test_one_seed_is_judged_over_images(out: Path) -> None:
    results = read_results(out)
    models = [one for one in results.by_objective if one.table == "models"]
    assert [(one.row, one.figure, one.over) for one in models] == [
        ("pair", MEAN_ERROR, "images"),
        ("pair", BITS, "images"),
        ("drawn", BITS, "images"),
    ]
    one, other = (read_scores(out / f"objective/{name}.json") for name in ("pair-full", "one"))
    pairs = zip(one.strategies[0].bits.by_image, other.strategies[0].bits.by_image, strict=True)  # type: ignore[union-attr]
    gaps = [a - b for a, b in pairs]
    assert models[1].verdict.gap == pytest.approx(sum(gaps) / 3)
    assert models[1].verdict.interval is not None
    low, high = models[1].verdict.interval
    assert low < models[1].verdict.gap < high
    # Settings of one model are judged where they matter to it.
    rows = {one.row for one in results.by_objective if one.table == "settings"}
    assert rows == {"draw", "top-1"}


def of_seeds(results: Results, gaps: dict[str, list[float]], **changes: Any) -> Results:
    """Results of more seeds, of which rows' figures are these above 1.0."""
    scored = []
    for one in results.scored:
        for seed, gap in enumerate(gaps.get(one.of, [0.0, 0.02, -0.02])):
            objective = one.objective
            assert objective is not None
            figures = {}
            for name, mean in objective.figures.items():
                figures[name] = mean.model_copy(update={"value": 1.0 + gap})
            source = one.model if one.of in changes.get("fixed", ()) else f"{one.model} {seed}"
            sampling = one.evaluation.sampling
            assert sampling is not None
            new = sampling.model_copy(update={"source_sha256": source})
            update = {
                "seed": seed,
                "objective": objective.model_copy(update={"figures": figures}),
                "evaluation": one.evaluation.model_copy(update={"sampling": new}),
            }
            scored.append(one.model_copy(update=update))
    several = results.model_copy(update={"scored": tuple(scored), "seeds": (0, 1, 2)})
    nothing: dict[str, HeldOutScores] = {}
    found = tuple(compare_objective(several, nothing))
    return several.model_copy(update={"by_objective": found})


@pytest.mark.integration
def test_three_seeds_are_judged_seed_by_seed(out: Path) -> None:
    ahead = {"pair": [-0.1, -0.081, -0.12], "drawn": [0.01, 0.0, -0.02]}
    results = of_seeds(read_results(out), ahead)
    models = [one for one in results.by_objective if one.table == "models"]
    assert {one.over for one in results.by_objective} == {"seeds"}
    assert {one.figure for one in models} == set(JUDGED)
    verdicts = {(one.row, one.figure): one.verdict.judgement for one in models}
    assert verdicts["pair", BITS] == "better"
    assert verdicts["drawn", BITS] == "within noise"
    assert "better" in tables_text(results)
    assert "over images" not in tables_text(results)


@pytest.mark.integration
def test_no_other_training_and_other_strategies_are_not_judged(out: Path) -> None:
    fixed = of_seeds(read_results(out), {}, fixed=("one",))
    assert "one set of weights" in str(fixed.by_objective[0].verdict.why)
    chosen = {"baselines": ["pair"]}
    results = read_results(out)
    settings = results.settings.model_copy(
        update={"compare": type(results.settings.compare)(**chosen)}  # type: ignore[arg-type]
    )
    found = of_seeds(results.model_copy(update={"settings": settings}), {}).by_objective
    why = {one.row: str(one.verdict.why) for one in found if one.table == "models"}
    assert "not sampled alike: strategy" in why["drawn"]
    assert why["one"] == "None"


def copied(out: Path, folder: Path, shift: float = 0.0) -> Path:
    """The benchmark as one whose distances compare, its scores larger by ``shift``."""
    content = json.loads((out / "results.json").read_text())
    for row in content["scored"]:
        row["evaluation"] |= {"comparable": True, "reasons": []}
        # Not with few images either.
        for one in row["evaluation"]["splits"]:
            one["distance"]["few_images"] = False
        if shift and row["row"] == "drawn":
            row["objective"] = {"why_none": "a reason"}
    (folder / "objective").mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(content))
    for file in (out / "objective").glob("*.json"):
        scores = json.loads(file.read_text())
        for one in scores["strategies"]:
            for level in [*one["levels"], one["bits"]]:
                level["by_image"] = [value + shift for value in level["by_image"]]
        (folder / "objective" / file.name).write_text(json.dumps(scores))
    return folder


@pytest.mark.integration
def test_benchmarks_are_compared_by_it_too(out: Path, tmp_path: Path, hddm: Command) -> None:
    first, other = copied(out, tmp_path / "first"), copied(out, tmp_path / "other", 0.25)
    text = printed(hddm, "compare", first, other / "results.json")
    of_row = {part.split("\n")[0]: part for part in text.split("## ")[1:]}
    assert list(of_row) == ["one", "pair", "drawn"]
    for name in ("one", "pair"):
        (bits,) = [one for one in of_row[name].splitlines() if one.startswith(f"| {BITS}")]
        assert "+0.25, +0.25 … +0.25, worse" in bits
        assert f"| {MEAN_ERROR} |" in of_row[name]
    assert f"{other}: no errors and bits: a reason" in of_row["drawn"]
    (other / "objective" / "pair-full.json").unlink()
    text = printed(hddm, "compare", first, other)
    assert "pair-full.json: is not there, so errors and bits are not compared" in text
    # One alone is shown.
    assert f"| {MEAN_ERROR} |" in printed(hddm, "compare", first)


def test_results_of_before_have_none(data: Path, jobs: Path, tmp_path: Path) -> None:
    results = run_inline(small(), tmp_path / "out", data, jobs=jobs)
    content = json.loads(results.model_dump_json())
    for one in content["scored"]:
        del one["objective"]
    del content["by_objective"], content["settings"]["evaluate"]["objective"]
    content["format"] = "5.1"
    (tmp_path / "out" / "results.json").write_text(json.dumps(content))
    assert read_results(tmp_path / "out").by_objective == ()
    assert "by the objective" not in tables_text(results)


def test_without_a_likelihood_a_row_that_draws_has_no_step_and_says_why(
    data: Path, tmp_path: Path
) -> None:
    """Presets leave bits out, and their first rows draw: their step would be refused after all trainings."""
    errors_alone = MEASURED | {"objective": "--num-images 8 --likelihood-images 0"}
    plan = planned(data, tmp_path, evaluate=errors_alone)
    scored = lines(plan)
    assert "nothing is left to score" in scored["drawn"]
    assert scored["one"].startswith("evaluate $one ")
    assert scored["pair"].startswith("evaluate $pair --strategy full ")
