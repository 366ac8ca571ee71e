"""Comparisons of a benchmark and their sentences, and what its report says does not compare."""

from pathlib import Path
from typing import Any

import pytest

from hddm.benchmark.report import about_figures, about_measures, limits, models_table, tables_text
from hddm.benchmark.results import Comparison, Results, number
from tests.benchmark_files import FLOW, MIXED, SINGLE, THREE, Finished, compared, more_seeds


def _answers(results: Results) -> list[Comparison]:
    assert [one.against for one in results.answers] == [FLOW, SINGLE]
    return results.answers


@pytest.mark.parametrize(
    ("mixed", "said"),
    [
        # Gaps -2, -2.1, -1.9 and against the single model -22, -13.1, -18.9. The stronger is tried at 0.025,
        # where Student's t of two degrees of freedom is 6.2053: 6.2053 · 0.1/3^½ = 0.358.
        ([8.0, 17.9, 13.1], "−2.00, better (95 % interval −2.36 … −1.64)"),
        ([12.0, 22.1, 16.9], "+2.00, worse (95 % interval +1.64 … +2.36)"),
    ],
)
def test_a_sentence_has_the_gap_and_the_corrected_interval(
    mixed: list[float], said: str, miniature: Finished
) -> None:
    distances = {FLOW: [10.0, 20.0, 15.0], MIXED: mixed, SINGLE: [30.0, 31.0, 32.0]}
    to_flow, _ = _answers(more_seeds(miniature.results, distances))
    assert to_flow.sentence == f"{MIXED} against {FLOW}: {said}"
    assert to_flow.ratio == pytest.approx(sum(mixed) / 45)
    gaps = [a - b for a, b in zip(mixed, distances[FLOW], strict=True)]
    assert to_flow.gaps == pytest.approx(dict(enumerate(gaps)))


def test_of_a_table_all_comparisons_are_corrected_together(miniature: Finished) -> None:
    # Of gaps of mean 1 and deviation 0.3, 4.3027 · 0.3/3^½ = 0.745 decides alone, and 1.075 the first of two.
    distances = {FLOW: [10.0, 10.0, 10.0], MIXED: [11.0, 11.3, 10.7], SINGLE: [10.0, 10.0, 10.0]}
    results = more_seeds(miniature.results, distances)
    assert [one.verdict.judgement for one in _answers(results)] == ["within noise"] * 2
    compare = results.settings.compare.model_copy(update={"baselines": (FLOW,), "candidates": (MIXED,)})
    settings = results.settings.model_copy(update={"compare": compare})
    (alone,) = compared(results.model_copy(update={"settings": settings})).answers
    assert alone.verdict.judgement == "worse"
    assert alone.verdict.interval == pytest.approx((0.255, 1.745), abs=1e-3)


def test_one_seed_judges_nothing(miniature: Finished) -> None:
    to_flow, _ = _answers(more_seeds(miniature.results, {FLOW: [10.0], MIXED: [8.0]}))
    assert to_flow.sentence.endswith("no verdict (1 training seed, and 3 or more give a verdict)")


def test_one_set_of_weights_in_every_seed_is_judged_by_nothing(miniature: Finished) -> None:
    results = more_seeds(miniature.results, THREE, fixed=(SINGLE,))
    to_flow, to_single = _answers(results)
    assert to_flow.verdict.judgement == "better"
    why = "one set of weights in every seed, so no other training is judged"
    assert to_single.sentence == f"{MIXED} against {SINGLE}: −1.00, no verdict ({SINGLE}: {why})"
    assert to_single.verdict.interval is None
    both = more_seeds(miniature.results, THREE, fixed=(SINGLE, MIXED)).comparisons
    assert {one.verdict.judgement for one in both} == {"no verdict"}
    assert f"{MIXED} and {SINGLE}: one set of weights" in both[1].sentence


def test_what_does_not_compare_gets_no_verdict_of_any_number_of_seeds(miniature: Finished) -> None:
    results = more_seeds(miniature.results, THREE, few=(SINGLE,))
    to_flow, to_single = _answers(results)
    assert (to_flow.verdict.judgement, to_flow.verdict.why) == ("better", None)
    assert to_single.sentence == f"{MIXED} against {SINGLE}: −1.00, no verdict (too few images)"
    more = tuple(
        one.model_copy(update={"point": one.point.model_copy(update={"num_images": 2000})})
        if one.row == "top-1"
        else one
        for one in results.scored
    )
    found = compared(results.model_copy(update={"scored": more})).comparisons
    (unequal,) = (one for one in found if one.row == "top-1")
    assert unequal.verdict.why == "2,000 against 40 samples"


def test_rows_that_are_one_model_by_two_names_are_not_called_within_noise(miniature: Finished) -> None:
    drawn = {(one.row, one.model): one.samples for one in miniature.results.scored if one.table == "models"}
    scored = tuple(
        one.model_copy(update={"samples": drawn[FLOW, FLOW]}) if one.row == MIXED else one
        for one in miniature.results.scored
    )
    results = more_seeds(
        miniature.results.model_copy(update={"scored": scored}), THREE | {MIXED: THREE[FLOW]}
    )
    to_flow, to_single = _answers(results)
    assert to_flow.sentence == f"{MIXED} against {FLOW}: +0.00, no verdict (the same samples in every seed)"
    assert to_single.verdict.judgement == "worse"


def _limits(results: Results, **changes: Any) -> str:
    return "\n".join(limits(results.model_copy(update=changes)))


def test_what_does_not_compare_is_said(miniature: Finished) -> None:
    results = miniature.results
    plain = _limits(results)
    assert "With published FID: distances are on features of" in plain
    assert "different numbers of images" not in plain
    dear = tuple(
        one.model_copy(update={"training_flop": 2 * (one.training_flop or 0)}) if one.model == MIXED else one
        for one in results.models
    )
    assert f"Training compute: {MIXED} costs" in _limits(results, models=dear)
    inception = results.features | {"option": "inception", "is_classifier": False}
    few = "With published FID of 50,000 samples: these are of 40, and distances fall with that number."
    assert _limits(results, features=inception).startswith(few)


def test_what_was_not_trained_here_is_said(miniature: Finished) -> None:
    results = miniature.results
    single, flow, mixed = results.settings.models

    def said(*models: Any) -> str:
        return _limits(results, settings=results.settings.model_copy(update={"models": models}))

    elsewhere = {"kind": "finished", "path": Path("elsewhere")}
    lines = said(single.model_copy(update=elsewhere), flow, mixed)
    assert f"Not trained here: {SINGLE}. Their data and compute are not known." in lines
    lines = said(single, flow, mixed.model_copy(update={"init": Path("elsewhere")}))
    assert f"Trained on from weights that were there (init): {MIXED}." in lines


def test_held_out_images_that_were_trained_on_are_said(miniature: Finished) -> None:
    results = miniature.results
    first = results.scored[0]

    def said(**memory: object) -> str:
        scores = first.scores | {"memorisation": first.scores["memorisation"] | memory}
        scored = (first.model_copy(update={"scores": scores}),)
        return about_measures(results.model_copy(update={"scored": scored}))

    assert "training images too" not in about_measures(results)
    assert "A mirrored copy of a training image is not seen." in about_measures(results)
    assert "2 validation images are training images too" in said(copies=2)
    assert "of a training image and its mirror image the nearer counts" in said(mirrored=True)
    assert "not seen" not in said(mirrored=True)


def test_tables_in_markdown_stand_alone(miniature: Finished) -> None:
    results = miniature.results
    text = tables_text(results.model_copy(update={"complete": False, "seeds": (5,)}))
    fresh = results.images["fresh"]
    assert text.startswith(
        f"miniature, {results.date}: training seeds 5, scored on {fresh} validation images.\n"
    )
    assert "- Not finished: 1 of 1 training seeds are in: 5." in text
    real = results.real["to_training"]
    distance = f"{number(real['value'])} ± {number(real['half_width'])}"
    assert f"Real validation images are at {distance} from the training images." in text
    for line in limits(results):
        assert f"\n- {line}" in text


def test_names_in_markdown_neither_end_a_cell_nor_become_html(miniature: Finished) -> None:
    content = miniature.results.model_dump_json().replace(MIXED, "<script>a|b")
    text = tables_text(Results.model_validate_json(content))
    assert "<" not in text
    assert "| &lt;script>a\\|b " in text


def test_what_calibration_and_router_took_of_equal_compute_is_said(miniature: Finished) -> None:
    mixed = next(one for one in miniature.results.models if one.model == MIXED)
    assert mixed.experts_flop
    assert mixed.calibration_flop
    assert 0 < mixed.calibration_flop < mixed.experts_flop
    table = models_table(miniature.results)
    row = next(row for row in table.rows if row[0].text == MIXED)
    shown = dict(zip(table.head, (cell.key for cell in row), strict=True))
    assert (shown["of it calibration"], shown["router FLOP"]) == (mixed.calibration_flop, mixed.router_flop)


def test_a_spread_that_is_of_samples_alone_is_marked(miniature: Finished) -> None:
    results = more_seeds(miniature.results, THREE, fixed=(SINGLE,))
    text = tables_text(results)
    note = f"† {SINGLE}: one set of weights in every seed, so s is over other samples alone."
    assert note in about_figures(results)
    assert note in text
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ")}
    assert ["(s 0.100†)" in lines[name] for name in (SINGLE, FLOW, MIXED)] == [True, False, False]
    assert "†" not in tables_text(more_seeds(miniature.results, THREE))
