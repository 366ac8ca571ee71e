"""What the tables and the page of a benchmark say, and what compares benchmarks."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hddm.benchmark.report import REPORT_FILE, _pictured, tables_text, write_report
from hddm.benchmark.results import Results, StepRecord, read_results
from hddm.data.partition import partition
from hddm.evaluation.score_records import PrecisionRecall, Recognised
from tests.artefacts import Command, write_images
from tests.benchmark_files import (
    ALONE,
    FLOW,
    MIXED,
    SINGLE,
    THREE,
    Finished,
    again,
    compared,
    file,
    more_seeds,
)
from tests.browser import CHROMIUM, Browser


@pytest.fixture
def three(miniature: Finished) -> Results:
    """Three training seeds, the mixed experts ahead of both others."""
    return more_seeds(miniature.results, THREE)


def test_verdicts_over_seeds_are_said_in_a_sentence_and_a_column(three: Results) -> None:
    sentences = [one.sentence for one in three.answers]
    assert sentences[0].startswith(f"{MIXED} against {SINGLE}: −1.00, better (95 % interval")
    assert sentences[1].startswith(f"{MIXED} against {FLOW}: −2.00, better (95 % interval")
    text = tables_text(three)
    # The first table comes first.
    lines = [line for line in reversed(text.splitlines()) if line.startswith("| ")]
    rows = {line.split("|")[1].strip(): line for line in lines}
    assert "8.00 ± 0.50 (s 0.100)" in rows[MIXED]
    assert "−2.00 better" in rows[MIXED]
    assert "training seeds 0, 1, 2." in text
    assert f"- {sentences[0]}" in text


def test_the_cost_of_a_row_is_known_where_that_of_all_its_seeds_is(miniature: Finished) -> None:
    three = more_seeds(miniature.results, THREE, fixed=tuple(THREE))

    def without(seeds: tuple[int, ...]) -> Results:
        models = []
        for one in three.models:
            is_unknown = one.model == "flow" and one.seed in seeds
            models.append(one.model_copy(update={"training_flop": None}) if is_unknown else one)
        return three.model_copy(update={"models": tuple(models)})

    for seeds in ((), (1,), (0, 1, 2)):
        flop = {row.name: row.training_flop for row in without(seeds).first}
        assert (flop[FLOW] is None) == bool(seeds)
        assert flop[SINGLE] is not None
    # Nor does a budget judge what is not known.
    assert [one for one, *_ in three.unequal] == ["all"]
    assert not list(without((1,)).unequal)


def test_too_few_seeds_few_images_and_one_set_of_weights_have_no_verdict(
    miniature: Finished,
) -> None:
    def whys(*seeds: Any, **options: Any) -> list[str | None]:
        two = {name: values[:2] for name, values in THREE.items()}
        results = more_seeds(miniature.results, *(seeds or (two,)), **options)
        return [one.verdict.why for one in results.answers]

    assert whys() == ["2 training seeds, and 3 or more give a verdict"] * 2
    assert whys(THREE, few=(FLOW,)) == [None, "too few images"]
    fixed = more_seeds(miniature.results, THREE, fixed=(SINGLE,))
    assert (
        fixed.answers[0].verdict.why
        == f"{SINGLE}: one set of weights in every seed, so no other training is judged"
    )
    assert f"† {SINGLE}: one set of weights in every seed" in tables_text(fixed)


@pytest.mark.parametrize(
    ("lacking", "why"),
    [
        (
            "recognised",
            "a classifier recognises too few of its samples (recognised 0.40, real images 0.90)",
        ),
        (
            "precision",
            "too few of its samples look like real images (precision 0.40, real images 0.90)",
        ),
        (
            "recall",
            "its samples look like too few of the real images (recall 0.40, real images 0.90)",
        ),
    ],
)
def test_a_model_that_did_not_learn_is_shown_and_not_compared(
    lacking: str, why: str, three: Results
) -> None:
    scored = []
    for one in three.scored:
        figures = {name: 0.5 for name in ("recognised", "precision", "recall")}
        if one.of == FLOW:
            figures[lacking] = 0.4
        recognised = Recognised(share=figures["recognised"], real=0.9)
        overlap = PrecisionRecall(
            precision=figures["precision"], recall=figures["recall"], images=40
        )
        real = PrecisionRecall(precision=0.9, recall=0.9, images=40)
        (split,) = one.evaluation.splits
        splits = (split.model_copy(update={"overlap": overlap, "real_overlap": real}),)
        evaluation = one.evaluation.model_copy(update={"recognised": recognised, "splits": splits})
        scored.append(one.model_copy(update={"evaluation": evaluation}))
    results = compared(three.model_copy(update={"scored": tuple(scored)}))
    assert results.answers[0].verdict.judgement == "better"
    assert results.answers[1].verdict.why == f"{FLOW}: did not learn, since {why}"


def test_the_page_needs_no_other_file_and_names_are_no_html(
    miniature: Finished, tmp_path: Path
) -> None:
    page = (miniature.out / REPORT_FILE).read_text()
    assert set(re.findall(r'(?:src|href)="([a-z]+:)', page)) == {"data:"}
    assert page.count('<section class="strip">') == 3
    assert all(step.command.replace("&", "&amp;") in page for step in miniature.results.steps)
    scored = tuple(
        one.model_copy(update={"row": f"<b>{one.row}"}) for one in miniature.results.scored
    )
    write_report(
        tmp_path, miniature.results.model_copy(update={"scored": scored, "comparisons": ()})
    )
    assert "<b>single" not in (tmp_path / REPORT_FILE).read_text()


def test_real_images_in_a_folder_with_a_space_in_its_name_are_shown(
    miniature: Finished, tmp_path: Path
) -> None:
    photos = write_images(tmp_path / "my photos")
    command = shlex.join(
        ["hddm", "evaluate", str(photos), "--reference", "all", "--out", "scores/real.json"]
    )
    steps = tuple(
        step.model_copy(update={"command": command}) if step.name == "scores/real" else step
        for step in miniature.results.steps
    )
    # Beside no samples, so that the only picture is of the real images.
    write_report(tmp_path, miniature.results.model_copy(update={"steps": steps}))
    assert (tmp_path / REPORT_FILE).read_text(encoding="utf-8").count("data:image/png") == 1


def test_a_partition_is_scored_on_the_images_that_it_holds_out(
    miniature: Finished, tmp_path: Path
) -> None:
    measured = {
        "reference": "$all",
        "held_out": "$all",
        "features": "classifier",
        "options": "--allow-few",
    }
    changed = file(evaluate=measured, tables={"models": {"rows": [SINGLE]}}, **ALONE)
    results = again(miniature, tmp_path / "out", changed)
    real = results.real
    assert real.data.images == real.data.held_out
    assert real.data.held_out.hash != real.data.reference.hash
    assert real.to("training").value > 1e-3
    assert f"Real held-out images ({real.images:,}) are at" in tables_text(results)


def test_of_a_partition_those_that_it_holds_out_are_shown_as_real_images(
    miniature: Finished, tmp_path: Path
) -> None:
    partition(write_images(tmp_path / "images", per_class=40), tmp_path / "all", 1, held_out=0.4)

    def sheet(place: str) -> str:
        command = f"hddm evaluate {place} --reference all --out scores/real.json"
        steps = [one for one in miniature.results.steps if one.name != "scores/real"]
        steps.append(StepRecord(name="scores/real", command=command, seconds=1.0))
        results = miniature.results.model_copy(update={"steps": tuple(steps)})
        return str(next(_pictured(tmp_path, results))["sheet"])

    assert sheet("all") == sheet("all/held_out/shard_0") != sheet("all/shard_0")


@pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on PATH: apt-get install chromium, or a Chrome"
)
def test_a_column_of_the_page_sorts_up_down_and_back(miniature: Finished, tmp_path: Path) -> None:
    table = "document.querySelectorAll('.sortable')[0]"
    head = f"{table}.tHead.rows[0].cells[1]"

    def numbers() -> list[float]:
        texts = browser.evaluate(
            f"[...{table}.tBodies[0].rows].map(row => row.cells[1].textContent)"
        )
        return [float(text.split(" ")[0]) for text in texts]

    with Browser(tmp_path) as browser:
        browser.open(miniature.out / REPORT_FILE, 1280)
        as_written = numbers()
        for expected, said in (
            (sorted(as_written), "ascending"),
            (sorted(as_written, reverse=True), "descending"),
            (as_written, "none"),
        ):
            browser.evaluate(f"{head}.querySelector('button').click()")
            assert numbers() == expected
            assert browser.evaluate(f"{head}.getAttribute('aria-sort')") == said


@pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on PATH: apt-get install chromium, or a Chrome"
)
def test_a_table_fits_a_window_by_wrapping_names_and_else_shows_that_it_goes_on(
    miniature: Finished, tmp_path: Path
) -> None:
    scored = tuple(
        one.model_copy(
            update={"row": f"{one.row}, in a name that says all that there is to say of it"}
        )
        for one in miniature.results.scored
    )
    write_report(
        tmp_path, miniature.results.model_copy(update={"scored": scored, "comparisons": ()})
    )
    beyond = "(box => box.scrollWidth - box.clientWidth)(document.querySelector('.scroll'))"
    style = "getComputedStyle(document.querySelector('.scroll'))"
    profile = tmp_path / "profile"
    profile.mkdir()
    with Browser(profile) as browser:
        browser.open(tmp_path / REPORT_FILE, 1200)
        assert browser.evaluate(beyond) == 0
        browser.open(tmp_path / REPORT_FILE, 500)
        assert browser.evaluate(beyond) > 0
        assert browser.evaluate(f"{style}.overflowX") == "auto"
        # Shadows stay at the edges, and what covers them moves with the table.
        assert browser.evaluate(f"{style}.backgroundAttachment").startswith(
            "local, local, scroll, scroll"
        )


def test_a_table_by_domain_is_followed_by_why_a_model_has_other_figures_in_an_ensemble(
    miniature: Finished,
) -> None:
    why = "So they differ between a model alone and an ensemble that holds it"
    before, found, _ = (miniature.out / REPORT_FILE).read_text().partition(why)
    assert found
    assert before.rpartition('aria-label="Table: ')[2].partition('"')[0].endswith(", by domain")
    assert why in tables_text(miniature.results)


Copy = Callable[..., Path]


@pytest.fixture
def copy(miniature: Finished, tmp_path: Path) -> Copy:
    """Write the miniature's results, of enough images, into a folder: ``change`` changes each scored row."""

    def write(name: str, change: Callable[[dict[str, Any]], object] = lambda row: None) -> Path:
        content = json.loads((miniature.out / "results.json").read_text())
        for row in content["scored"]:
            row["evaluation"] |= {"comparable": True, "reasons": []}
            for side in row["evaluation"]["splits"]:
                side["distance"]["few_images"] = False
            change(row)
        folder = tmp_path / name
        folder.mkdir()
        (folder / "results.json").write_text(json.dumps(content))
        read_results(folder)
        return folder

    return write


def test_rows_of_benchmarks_are_held_against_each_other(
    copy: Copy, miniature: Finished, hddm: Command
) -> None:
    ours = miniature.results.scored[0].evaluation.to("validation").value
    shifted = {"value": ours + 3.0, "half_width": 0.125}
    b = copy("b", lambda row: row["evaluation"]["splits"][1]["distance"].update(shifted))
    code, out, err = hddm("compare", copy("a"), b / "results.json")
    assert (code, err) == (0, "")
    assert [line for line in out.splitlines() if line.startswith("## ")] == [
        f"## {name}" for name in (SINGLE, FLOW, MIXED)
    ]
    first = next(line for line in out.splitlines() if "to validation images" in line)
    assert f"{ours + 3:.3f} ± 0.12" in first
    assert "worse (+3.0)" in first
    assert "held-out" not in out
    assert "training, 1e12 operations" in out
    renamed = copy("c", lambda row: row.update(row=f"my {row['row']}"))
    assert "no row of their first tables in common" in hddm("compare", b, renamed)[2]
