"""The report says what the results say, whatever they are called, and needs nothing but itself."""

import base64
import io
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hddm.benchmark.markdown import tables_text
from hddm.benchmark.numbers import number
from hddm.benchmark.plots import REAL, grid_path, write_grid
from hddm.benchmark.report import REPORT_FILE, write_report
from hddm.benchmark.report_comparable import comparable
from hddm.benchmark.report_words import (
    about_choice,
    about_measures,
    answers,
    ratios,
    why_no_answer,
)
from hddm.benchmark.results import Results, figure, figures_of, read_results
from hddm.benchmark.strips import read_strips
from hddm.benchmark.verdicts import judge
from tests.benchmark_files import Finished

FLOW, MIXED, SINGLE = "homogeneous flow", "mixed 1:1", "single model"


class _Page(HTMLParser):
    """Elements of a page by name, its text, and the rows of its tables."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.text = ""
        self._open: list[str] = []
        self._rows: list[list[str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        if ("class", "scroll") in attributes:
            label = dict(attributes).get("aria-label") or ""
            self._rows = self.tables.setdefault(label.removeprefix("Table: "), [])
        if tag == "tr":
            self._rows.append([])
        if tag in ("th", "td"):
            self._rows[-1].append("")
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("style", "script"):
            self.text += data
        if {"th", "td"} & set(self._open) and self._rows and self._rows[-1]:
            self._rows[-1][-1] += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def _seeds(
    results: Results,
    gaps: dict[str, list[float]],
    fixed: tuple[str, ...] = (),
    few: tuple[str, ...] = (),
    **changes: Any,
) -> Results:
    """``results`` of more seeds, models' distances being these by seed.

    ``fixed`` are not trained anew, and ``few`` have too few images.
    """
    count = len(next(iter(gaps.values())))
    records: list[Any] = []
    for one in results.records:
        for seed in range(count):
            moved = gaps.get(one.model)
            scores = json.loads(json.dumps(one.scores))
            scores["to_validation"]["few_images"] = one.model in few
            if moved is not None:
                scores["to_validation"]["value"] = moved[seed]
            records.append(one.model_copy(update={"seed": seed, "scores": scores}))
    by_row: dict[str, dict[str, list[Any]]] = {}
    for one in records:
        by_row.setdefault(one.table, {}).setdefault(one.row, []).append(one)
    tables = {
        table: tuple(
            row.model_copy(update={"figures": figures_of([one.scores for one in by_row[table][row.name]])})
            for row in rows
        )
        for table, rows in results.tables.items()
    }
    seeds = tuple(range(count))
    models = [
        one.model_copy(update={"seed": seed} | ({} if one.model in fixed else {"hash": f"{one.hash} {seed}"}))
        for seed in seeds
        for one in results.models
    ]
    new = {
        "records": tuple(records),
        "models": tuple(models),
        "tables": tables,
        "verdicts": tuple(judge(results.settings, models, by_row, "to_validation")),
        "seeds": seeds,
    }
    return results.model_copy(update=new | changes)


@pytest.fixture(scope="module")
def page(miniature: Finished) -> _Page:
    write_report(miniature.out, read_results(miniature.out))
    return _Page((miniature.out / REPORT_FILE).read_text())


def test_it_is_one_page_that_asks_for_nothing_else(page: _Page, miniature: Finished) -> None:
    text = (miniature.out / REPORT_FILE).read_text()
    assert not re.search(r"https?:|@import|url\((?!#)|src=\"(?!data:)|href=\"(?!#|data:)", text)
    models = len(miniature.settings.models)
    sources = [one["src"] or "" for one in page.all("img")]
    assert len(sources) >= 2 * models
    for source in sources:
        content = base64.b64decode(source.removeprefix("data:image/png;base64,"), validate=True)
        with Image.open(io.BytesIO(content)) as image:
            assert np.asarray(image).std() > 0
    assert all(one["alt"] for one in page.all("img"))
    assert all(one["aria-label"] for one in page.all("svg"))
    found = [one["id"] for _, one in page.elements if "id" in one]
    assert len(set(found)) == len(found)
    used = {link for link in re.findall(r'(?:href="#|url\(#)([^")]+)', text)}
    assert used <= set(found)


def test_its_tables_show_what_the_results_say(page: _Page, miniature: Finished) -> None:
    results = miniature.results
    head, *rows = page.tables["models"]
    assert [row[0] for row in rows] == [row.name for row in results.tables["models"]]
    column = head.index("to validation images")
    for row, shown in zip(results.tables["models"], rows, strict=True):
        distance = row.figures["to_validation"]
        assert distance.half_width is not None
        # The interval over samples and the spread over trainings stand apart; one training has no spread.
        assert shown[column : column + 2] == [number(distance.mean), number(distance.half_width)]
    errors = {(one.objective, one.shard): one.calibrated["mean"] for one in results.errors}
    for shard, row in enumerate(page.tables["errors"][1:]):
        assert row[1] == number(errors["flow", shard])
    (router,) = results.routers
    assert number(router.calibrated["ece"]) in page.tables["router"][1]
    assert miniature.results.hashes["training"] in page.text


def test_what_all_rows_share_is_said_once_above_the_table(page: _Page) -> None:
    assert "training FLOP" not in page.tables["strategies"][0]
    assert re.search(r"40 images a row.*training FLOP: \d\.\d\de\d+", page.text)


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
    results = _seeds(miniature.results, {FLOW: [10.0, 20.0, 15.0], MIXED: mixed, SINGLE: [30.0, 31.0, 32.0]})
    against_flow, against_single = answers(results)
    assert against_flow.sentence == (
        f"{MIXED} against {FLOW} (15.0): {judgement}, {told} over 3 paired training seeds)."
    )
    assert against_flow.judgement == judgement
    assert against_single.judgement == "better"


def test_many_candidates_are_counted_and_one_seed_judges_nothing(miniature: Finished) -> None:
    results = miniature.results
    (flow, _) = answers(_seeds(results, {FLOW: [10.0], MIXED: [8.0]}))
    assert flow.sentence.endswith("no verdict from 1 training seed (3 or more give one).")
    three = _seeds(results, {FLOW: [10.0, 10.1, 9.9], MIXED: [8.0, 8.1, 7.9], SINGLE: [9.0, 11.0, 10.0]})
    first = next(one for one in three.verdicts if one.row == MIXED)
    other = first.model_copy(update={"row": SINGLE, "judgement": "within noise"})
    (flow, *_) = answers(three.model_copy(update={"verdicts": (first, other)}))
    assert (
        flow.sentence
        == f"Against {FLOW} (10.0), over 3 paired training seeds: of 2 candidates 1 better, 1 within noise."
    )
    assert [judgement for judgement, _ in flow.lines] == ["better", "within noise"]


THREE = {FLOW: [10.0, 10.1, 9.9], MIXED: [8.0, 8.1, 7.9], SINGLE: [9.0, 9.1, 8.9]}


def test_one_set_of_weights_in_every_seed_is_judged_by_nothing(miniature: Finished, tmp_path: Path) -> None:
    results = _seeds(miniature.results, THREE, fixed=(SINGLE,))
    verdicts = [one for one in results.verdicts if one.kind == "model"]
    assert [(one.against, one.judgement) for one in verdicts] == [(FLOW, "better"), (SINGLE, "no verdict")]
    why = "is one set of weights in every seed: the spread says nothing of another training"
    assert verdicts[1].sentence == f"{MIXED} against {SINGLE}: −1.00, no verdict ({SINGLE} {why})"
    assert verdicts[1].interval is None
    flow, single = answers(results)
    assert flow.judgement == "better"
    assert single.sentence == f"Against {SINGLE} (9.00): no verdict ({SINGLE} {why})."
    both = _seeds(miniature.results, THREE, fixed=(SINGLE, MIXED)).verdicts
    assert {one.judgement for one in both} == {"no verdict"}
    assert f"{MIXED} and {SINGLE} are each one set of weights" in both[1].sentence
    (other,) = (one.sentence for one in both if (one.row, one.kind) == ("top-1", "setting"))
    assert f"no verdict ({MIXED} is one set" in other


def test_what_does_not_compare_gets_no_verdict_of_any_number_of_seeds(miniature: Finished) -> None:
    results = _seeds(miniature.results, THREE, few=(SINGLE,))
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


def test_a_spread_that_is_of_samples_alone_is_marked(miniature: Finished, tmp_path: Path) -> None:
    results = _seeds(miniature.results, THREE, fixed=(SINGLE,))
    told = "† One set of weights in every seed: single model. Spreads so marked are over other"
    write_report(tmp_path, results)
    page, text = _Page((tmp_path / REPORT_FILE).read_text()), tables_text(results)
    assert told in page.text
    assert told in text
    spreads = [row[page.tables["models"][0].index("s trainings")] for row in page.tables["models"][1:]]
    assert spreads == ["0.100†", "0.100", "0.100"]
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ")}
    assert ["(s 0.10†)" in lines[name] for name in (SINGLE, FLOW, MIXED)] == [True, False, False]
    plain = _seeds(miniature.results, THREE)
    assert "†" not in tables_text(plain)


def test_of_some_candidates_that_have_a_verdict_the_others_say_why_they_have_none(
    miniature: Finished,
) -> None:
    compare = miniature.results.settings.compare.model_copy(update={"baselines": (FLOW,)})
    settings = miniature.results.settings.model_copy(update={"compare": compare})
    given = miniature.results.model_copy(update={"settings": settings})
    (answer,) = answers(_seeds(given, THREE, fixed=(SINGLE,)))
    assert answer.sentence == (
        f"Against {FLOW} (10.0), over 3 paired training seeds: of 2 candidates 1 better, 1 no verdict."
    )
    assert [judgement for judgement, _ in answer.lines] == ["no verdict", "better"]
    assert answer.lines[0][1].startswith(f"{SINGLE}: no verdict ({SINGLE} is one set of weights")
    (answer,) = answers(_seeds(given, THREE, fixed=(SINGLE, MIXED)))
    assert answer.sentence == f"Against {FLOW} (10.0): of 2 candidates 2 no verdict."


def test_distances_to_shards_say_of_how_many_samples_they_are_and_of_too_few(
    miniature: Finished, tmp_path: Path
) -> None:
    results = _seeds(miniature.results, THREE, fixed=(SINGLE,))
    records = []
    for one in results.records:
        own = {"value": 20.0 + one.seed, "half_width": 1.0, "few_images": one.model == MIXED}
        samples = {SINGLE: 90 + one.seed, FLOW: 300, MIXED: 30}[one.model]
        shards = [
            {"shard": 0, "images": 99, "all": own, "samples": samples, "own": own},
            {"shard": 1, "images": 99, "all": own, "samples": 1, "own": None},
        ]
        records.append(one.model_copy(update={"scores": one.scores | {"shards": shards}}))
    write_report(tmp_path, results.model_copy(update={"records": tuple(records)}))
    page = _Page((tmp_path / REPORT_FILE).read_text())
    assert page.tables["shards"][1:] == [
        [SINGLE, "21.0 (s 1.00†) of 90 to 92", "–"],
        [FLOW, "21.0 (s 1.00) of 300", "–"],
        [MIXED, "21.0 (s 1.00) of 30, too few", "–"],
    ]
    assert "those of unequal numbers do not compare; too few are no more images than features" in page.text


def test_ratios_stand_beside_the_papers_where_the_same_was_asked(miniature: Finished) -> None:
    results = _seeds(miniature.results, {FLOW: [10.0, 20.0], MIXED: [9.0, 19.0], SINGLE: [30.0, 30.0]})
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


def test_a_distance_of_zero_has_no_ratio(miniature: Finished) -> None:
    results = _seeds(miniature.results, {FLOW: [0.0, 0.0], MIXED: [9.0, 19.0], SINGLE: [30.0, 30.0]})
    assert ratios(results)[0].ours == (f"{MIXED} against {FLOW}: 14.0 / 0.00, no ratio",)


def _only(results: Results, model: str, **changes: Any) -> Results:
    """``results`` of a benchmark of one model and the first table, without verdicts."""
    models = tuple(one for one in results.settings.models if one.name == model)
    new = {
        "settings": results.settings.model_copy(update={"models": models}),
        "models": tuple(one for one in results.models if one.model == model),
        "tables": {"models": tuple(row for row in results.tables["models"] if row.model == model)},
        "records": tuple(one for one in results.records if (one.table, one.model) == ("models", model)),
        "verdicts": (),
    }
    return results.model_copy(update=new | changes)


def test_a_report_without_experts_of_shards_has_the_errors_of_the_single_model(
    miniature: Finished, tmp_path: Path
) -> None:
    results = miniature.results
    single = tuple(one for one in results.errors if one.shard is None)
    write_report(tmp_path, _only(results, SINGLE, errors=single, routers=()))
    page = _Page((tmp_path / REPORT_FILE).read_text())
    assert "errors" not in page.tables
    assert any((one.get("aria-label") or "").startswith("Velocity error") for one in page.all("svg"))
    write_report(tmp_path, _only(results, SINGLE, errors=(), routers=(), losses=()))
    text = _Page((tmp_path / REPORT_FILE).read_text()).text
    assert "Not measured: it needs validation images (data.validation_share) and networks that are" in text


def test_why_there_is_no_answer_is_said(page: _Page, miniature: Finished, tmp_path: Path) -> None:
    def told(table: str, **compared: Any) -> str:
        compare = results.settings.compare.model_copy(update=compared)
        settings = results.settings.model_copy(update={"compare": compare})
        tables = {table: results.tables[table]}
        return why_no_answer(results.model_copy(update={"settings": settings, "tables": tables}))

    results = miniature.results
    assert "No verdict: the settings" not in page.text
    none = told("models", baselines=())
    assert none == "No verdict: the settings name no baseline."
    absent = "No verdict: the first table, strategies, has no row of homogeneous flow or single model."
    assert told("strategies") == absent
    assert told("models", baselines=(FLOW,), candidates=(FLOW,)) == (
        "No verdict: the first table, models, has no candidate that is sampled as a baseline is."
    )
    write_report(tmp_path, _only(results, MIXED))
    shown = _Page((tmp_path / REPORT_FILE).read_text()).text
    assert "No verdict: the first table, models, has no row of homogeneous flow or single model." in shown


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


def test_a_report_is_made_anew_from_results_and_grids_alone(miniature: Finished, tmp_path: Path) -> None:
    shutil.copy(miniature.out / "results.json", tmp_path)
    for grids in ("samples", "seed_0/samples"):
        shutil.copytree(miniature.out / grids, tmp_path / grids)
    write_report(tmp_path, read_results(tmp_path))
    write_report(miniature.out, miniature.results)
    assert (tmp_path / REPORT_FILE).read_text() == (miniature.out / REPORT_FILE).read_text()


def test_the_first_samples_are_real_images(page: _Page) -> None:
    first = next(one for one in page.all("img"))
    assert first["alt"] == "16 images in a row: real, validation"


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


def test_names_of_models_are_text_wherever_they_stand(miniature: Finished, tmp_path: Path) -> None:
    name = '<script>alert("x")</script> $\\frac{1}{2}$ & "'
    results = miniature.results.model_dump_json().replace(json.dumps(MIXED)[1:-1], json.dumps(name)[1:-1])
    write_report(tmp_path, Results.model_validate_json(results))
    text = (tmp_path / REPORT_FILE).read_text()
    assert text.count("<script") == 1
    assert name in _Page(text).text


def test_a_column_of_the_samples_is_one_image_of_every_model(miniature: Finished, tmp_path: Path) -> None:
    results = miniature.results
    levels = torch.arange(64, dtype=torch.uint8).view(64, 1, 1, 1).expand(64, 1, 4, 4)
    write_grid(levels, grid_path(tmp_path, REAL))
    write_grid(levels * 3, grid_path(tmp_path / "seed_0", MIXED))
    strips = read_strips(tmp_path, results)
    assert (strips.columns, strips.real) == (16, True)
    assert [name for name, _ in strips.rows] == ["real, validation", MIXED]
    for (_, source), factor in zip(strips.rows, (1, 3), strict=True):
        with Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))) as image:
            shown = np.asarray(image)
        assert shown.shape == (5, 16 * 5)
        assert shown[2, 2::5].tolist() == [factor * k for k in range(16)]
    with Image.open(io.BytesIO(base64.b64decode(strips.grids[1][1].partition(",")[2]))) as image:
        assert np.asarray(image)[2::5, 2::5].ravel().tolist() == [3 * k for k in range(64)]
