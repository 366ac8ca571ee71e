"""What the report says in words follows from the figures, and says where they do not compare."""

from pathlib import Path
from typing import Any

import pytest

from hddm.benchmark.markdown import tables_text
from hddm.benchmark.numbers import number
from hddm.benchmark.report_comparable import comparable
from hddm.benchmark.report_details import models_table
from hddm.benchmark.report_words import about_choice, about_measures, answers, ratios
from hddm.benchmark.results import figure
from hddm.benchmark.verdicts import judge
from tests.benchmark_files import FLOW, MIXED, SINGLE, THREE, Finished, more_seeds


@pytest.mark.parametrize(
    ("mixed", "judgement", "told"),
    [
        ([8.0, 17.9, 13.1], "better", "13.0 (gap −2.00, 95 % interval −2.25 … −1.75, s 0.10, ratio 0.867"),
        ([12.0, 22.1, 16.9], "worse", "17.0 (gap +2.00, 95 % interval +1.75 … +2.25, s 0.10, ratio 1.133"),
        (
            [9.5, 21.0, 14.0],
            "within noise",
            "14.8 (gap −0.17, 95 % interval −2.75 … +2.42, s 1.04, ratio 0.989",
        ),
    ],
)
def test_the_answer_is_one_sentence_with_its_numbers(
    mixed: list[float], judgement: str, told: str, miniature: Finished
) -> None:
    results = more_seeds(
        miniature.results, {FLOW: [10.0, 20.0, 15.0], MIXED: mixed, SINGLE: [30.0, 31.0, 32.0]}
    )
    against_flow, against_single = answers(results)
    assert against_flow.sentence == (
        f"{MIXED} against {FLOW} (15.0): {judgement}, {told} over 3 paired training seeds)."
    )
    assert against_flow.judgement == judgement
    assert against_single.judgement == "better"


def test_many_candidates_are_counted_and_one_seed_judges_nothing(miniature: Finished) -> None:
    results = miniature.results
    (flow, _) = answers(more_seeds(results, {FLOW: [10.0], MIXED: [8.0]}))
    assert flow.sentence.endswith("no verdict from 1 training seed (3 or more give one).")
    three = more_seeds(results, {FLOW: [10.0, 10.1, 9.9], MIXED: [8.0, 8.1, 7.9], SINGLE: [9.0, 11.0, 10.0]})
    first = next(one for one in three.verdicts if one.row == MIXED)
    other = first.model_copy(update={"row": SINGLE, "judgement": "within noise"})
    (flow, *_) = answers(three.model_copy(update={"verdicts": (first, other)}))
    assert (
        flow.sentence
        == f"Against {FLOW} (10.0), over 3 paired training seeds: of 2 candidates 1 better, 1 within noise."
    )
    assert [judgement for judgement, _ in flow.lines] == ["better", "within noise"]


def test_one_set_of_weights_in_every_seed_is_judged_by_nothing(miniature: Finished, tmp_path: Path) -> None:
    results = more_seeds(miniature.results, THREE, fixed=(SINGLE,))
    verdicts = [one for one in results.verdicts if one.kind == "model"]
    assert [(one.against, one.judgement) for one in verdicts] == [(FLOW, "better"), (SINGLE, "no verdict")]
    why = "is one set of weights in every seed: the spread says nothing of another training"
    assert verdicts[1].sentence == f"{MIXED} against {SINGLE}: −1.00, no verdict ({SINGLE} {why})"
    assert verdicts[1].interval is None
    flow, single = answers(results)
    assert flow.judgement == "better"
    assert single.sentence == f"Against {SINGLE} (9.00): no verdict ({SINGLE} {why})."
    both = more_seeds(miniature.results, THREE, fixed=(SINGLE, MIXED)).verdicts
    assert {one.judgement for one in both} == {"no verdict"}
    assert f"{MIXED} and {SINGLE} are each one set of weights" in both[1].sentence
    (other,) = (one.sentence for one in both if (one.row, one.kind) == ("top-1", "setting"))
    assert f"no verdict ({MIXED} is one set" in other


def test_what_does_not_compare_gets_no_verdict_of_any_number_ofmore_seeds(miniature: Finished) -> None:
    results = more_seeds(miniature.results, THREE, few=(SINGLE,))
    to_flow, to_single = (one for one in results.verdicts if one.kind == "model")
    assert (to_flow.judgement, to_flow.why) == ("better", None)
    assert (to_single.judgement, to_single.interval) == ("no verdict", None)
    assert (
        to_single.sentence == f"{MIXED} against {SINGLE}: −1.00, no verdict (too few images for the features)"
    )
    (_, answer) = answers(results)
    assert answer.sentence == f"Against {SINGLE} (9.00): no verdict (too few images for the features)."
    more = [
        one.model_copy(update={"point": one.point.model_copy(update={"num_images": 2000})})
        if one.row == "top-1"
        else one
        for one in results.records
    ]
    rows = {"strategies": {name: [one for one in more if one.row == name] for name in ("draw", "top-1")}}
    (unequal,) = judge(results.settings, results.models, rows, "to_validation")
    assert unequal.why == "no verdict (2,000 images against 40: distances fall with that number)"


def test_of_some_candidates_that_have_a_verdict_the_others_say_why_they_have_none(
    miniature: Finished,
) -> None:
    compare = miniature.results.settings.compare.model_copy(update={"baselines": (FLOW,)})
    settings = miniature.results.settings.model_copy(update={"compare": compare})
    given = miniature.results.model_copy(update={"settings": settings})
    (answer,) = answers(more_seeds(given, THREE, fixed=(SINGLE,)))
    assert answer.sentence == (
        f"Against {FLOW} (10.0), over 3 paired training seeds: of 2 candidates 1 better, 1 no verdict."
    )
    assert [judgement for judgement, _ in answer.lines] == ["no verdict", "better"]
    assert answer.lines[0][1].startswith(f"{SINGLE}: no verdict ({SINGLE} is one set of weights")
    (answer,) = answers(more_seeds(given, THREE, fixed=(SINGLE, MIXED)))
    assert answer.sentence == f"Against {FLOW} (10.0): of 2 candidates 2 no verdict."


def test_ratios_stand_beside_the_papers_where_the_same_was_asked(miniature: Finished) -> None:
    results = more_seeds(miniature.results, {FLOW: [10.0, 20.0], MIXED: [9.0, 19.0], SINGLE: [30.0, 30.0]})
    mixture, top_two = ratios(results)
    assert "11.88 / 12.45 = 0.954" in mixture.theirs
    assert mixture.ours == (f"{MIXED} against {FLOW}: 14.0 / 15.0 = 0.933 (by seed 0.900 … 0.950)",)
    assert "22.60 / 29.64 = 0.763" in top_two.theirs
    assert top_two.ours[0].startswith("not measured here")
    asked = results.tables["strategies"][1]
    assert asked.point.strategy == "top-1"
    as_two = {"point": asked.point.model_copy(update={"strategy": "top-2"})}
    tables = results.tables | {"strategies": (asked.model_copy(update=as_two),)}
    records = tuple(
        one.model_copy(update=as_two) if one.row == asked.name else one for one in results.records
    )
    (_, found) = ratios(results.model_copy(update={"tables": tables, "records": records}))
    assert found.ours == (f"{MIXED} top-2 against {SINGLE}: 14.0 / 30.0 = 0.467 (by seed 0.300 … 0.633)",)
    warmer = {"point": as_two["point"].model_copy(update={"router_temperature": 2.0})}
    other = results.tables["strategies"][0].model_copy(update=warmer)
    more = {**tables, "temperatures": (other,)}
    (_, found) = ratios(results.model_copy(update={"tables": more, "records": records}))
    assert len(found.ours) == 1


def test_rows_that_are_one_model_by_two_names_are_not_called_within_noise(miniature: Finished) -> None:
    drawn = {(one.row, one.model): one.samples for one in miniature.results.records if one.table == "models"}
    records = tuple(
        one.model_copy(update={"samples": drawn[FLOW, FLOW]}) if one.row == MIXED else one
        for one in miniature.results.records
    )
    results = more_seeds(
        miniature.results.model_copy(update={"records": records}), THREE | {MIXED: THREE[FLOW]}
    )
    to_flow, to_single = (one for one in results.verdicts if one.kind == "model")
    assert to_flow.sentence == f"{MIXED} against {FLOW}: +0.00, no verdict (the same samples in every seed)"
    assert to_single.judgement == "worse"


def test_a_distance_of_zero_has_no_ratio(miniature: Finished) -> None:
    results = more_seeds(miniature.results, {FLOW: [0.0, 0.0], MIXED: [9.0, 19.0], SINGLE: [30.0, 30.0]})
    assert ratios(results)[0].ours == (f"{MIXED} against {FLOW}: 14.0 / 0.00, no ratio",)


def test_what_does_not_compare_is_said(miniature: Finished) -> None:
    results = miniature.results
    said = dict((line, fine) for fine, line in comparable(results))
    assert any("published FID: no" in line and not fine for line, fine in said.items())
    assert any("different numbers of images" in line for line in said) is False
    (dear,) = (row for row in results.tables["models"] if row.name == MIXED)
    assert dear.training_flop is not None
    doubled = dear.model_copy(update={"training_flop": figure([2 * dear.training_flop.mean])})
    tables = {"models": (*results.tables["models"][:2], doubled)}
    lines = list(comparable(results.model_copy(update={"tables": tables, "complete": False})))
    assert any(not fine and f"{MIXED} costs" in line for fine, line in lines)
    assert (False, "Not finished: 1 of 1 training seeds are in.") in lines
    assert not any("Choosing is not counted" in line for _, line in lines)
    chosen = results.settings.models[2].model_copy(update={"objectives": "by-error"})
    settings = results.settings.model_copy(update={"models": (*results.settings.models[:2], chosen)})
    lines = list(comparable(results.model_copy(update={"settings": settings})))
    assert any(not fine and f"not counted: {MIXED} took" in line for fine, line in lines)
    assert "confirmation" in about_choice(results)
    assert about_choice(results.model_copy(update={"score_on": "held-out"})).startswith("A confirmation")


def test_what_was_not_trained_here_is_not_said_to_compare(miniature: Finished) -> None:
    results = miniature.results
    plain = {line: fine for fine, line in comparable(results)}
    assert plain[
        "Rows of one table with one number of images: same training images, seeds, features and split."
    ]
    assert any(line.endswith(", and all others lie between.") for line in plain)
    single, flow, mixed = results.settings.models
    foreign = {"kind": "finished", "path": Path("elsewhere")}

    def told(*models: Any, unknown: tuple[str, ...] = ()) -> dict[str, bool]:
        settings = results.settings.model_copy(update={"models": models})
        rows = [
            row.model_copy(update={"training_flop": None}) if row.name in unknown else row
            for row in results.tables["models"]
        ]
        changed = results.model_copy(update={"settings": settings, "tables": {"models": tuple(rows)}})
        return {line: fine for fine, line in comparable(changed)}

    lines = told(single.model_copy(update=foreign), flow, mixed, unknown=(SINGLE,))
    assert lines[f"Not trained here: {SINGLE}. Their data and compute are not known."] is False
    assert not any("all others" in line for line in lines)
    assert any(line.startswith("Rows of models trained here from the start, of one table") for line in lines)
    lines = told(single, flow, mixed.model_copy(update={"init": Path("elsewhere")}))
    begun = next(line for line in lines if "(init)" in line)
    assert MIXED in begun
    assert lines[begun] is False
    (budget,) = (line for line in lines if line.startswith("Training compute"))
    assert MIXED not in budget
    assert "all others" not in budget
    lines = told(*(one.model_copy(update=foreign) for one in (single, flow, mixed)))
    assert not any("same training images" in line for line in lines)


def test_held_out_images_that_were_trained_on_are_told(miniature: Finished) -> None:
    results = miniature.results
    assert "training images too" not in about_measures(results)
    assert "A mirrored copy of a training image is not seen." in about_measures(results)
    first = results.records[0]
    scores = first.scores | {"memorisation": first.scores["memorisation"] | {"copies": 2}}
    spoilt = results.model_copy(update={"records": (first.model_copy(update={"scores": scores}),)})
    assert "2 validation images are training images too" in about_measures(spoilt)
    scores = first.scores | {"memorisation": first.scores["memorisation"] | {"mirrored": True}}
    told = about_measures(
        results.model_copy(update={"records": (first.model_copy(update={"scores": scores}),)})
    )
    assert "of a training image and its mirror image the nearer counts" in told
    assert "not seen" not in told


def test_a_distance_that_is_no_published_one_says_so(miniature: Finished) -> None:
    results = miniature.results
    inception = results.features | {"option": "inception", "is_classifier": False}
    lines = [line for _, line in comparable(results.model_copy(update={"features": inception}))]
    assert lines[0] == (
        "With published FID of 50,000 samples: no. These are of 40, and distances fall with that number."
    )
    assert lines[0] not in [line for _, line in comparable(results)]


def test_objectives_that_differ_by_seed_are_those_of_each_seed(miniature: Finished) -> None:
    results = more_seeds(miniature.results, {FLOW: [10.0, 20.0], MIXED: [9.0, 19.0], SINGLE: [30.0, 30.0]})
    models = tuple(
        one.model_copy(update={"objectives": ("flow", "flow")})
        if (one.model, one.seed) == (MIXED, 1)
        else one
        for one in results.models
    )
    results = results.model_copy(update={"models": models})
    shown = {row[0].text: row[1].text for row in models_table(results).rows}
    assert shown[MIXED] == "ddpm, flow (seed 0); flow, flow (seed 1)"
    assert shown[FLOW] == "flow, flow"
    assert ratios(results)[0].ours[0].startswith(f"{MIXED} against {FLOW}")


def test_tables_in_markdown_say_what_does_not_compare_and_which_seeds_are_in(miniature: Finished) -> None:
    text = tables_text(miniature.results.model_copy(update={"complete": False, "seeds": (5,)}))
    assert "\n1 of 1 training seeds are in: 5.\n" in text
    date, fresh = miniature.results.date, miniature.results.images["fresh"]
    assert text.startswith(f"miniature, {date}: training seeds 5, scored on {fresh} validation images.\n")
    real = miniature.results.real["to_training"]
    told = f"{number(real['value'])} ± {number(real['half_width'])}"
    assert f"Real validation images are at {told} from the training images." in text
    for compares, line in comparable(miniature.results):
        assert (f"\n- {line}" in text) is not compares


def test_what_calibration_and_router_took_of_equal_compute_is_said(miniature: Finished) -> None:
    results = miniature.results
    mixed = next(one for one in results.models if one.model == MIXED)
    assert mixed.experts_flop
    assert mixed.calibration_flop
    assert 0 < mixed.calibration_flop < mixed.experts_flop

    def told(**flop: int) -> tuple[bool, str]:
        models = (mixed.model_copy(update={"training_flop": 1000} | flop),)
        changed = results.model_copy(update={"models": models})
        return next(one for one in comparable(changed) if one[1].startswith("Of the training compute"))

    assert told(calibration_flop=30, router_flop=100) == (
        True,
        f"Of the training compute of {MIXED}, 3 % went into the calibration of its experts and 10 % into the "
        "router, not into steps of experts.",
    )
    assert told(calibration_flop=300, router_flop=10)[0] is False
