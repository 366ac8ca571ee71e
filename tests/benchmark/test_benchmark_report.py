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
from hddm.benchmark.report import REPORT_FILE, write_report
from hddm.benchmark.report_words import (
    why_no_answer,
)
from hddm.benchmark.results import Results, read_results
from hddm.benchmark.samples import REAL, grid_path, write_grid
from hddm.benchmark.strips import read_strips
from tests.benchmark_files import FLOW, MIXED, SINGLE, THREE, Finished, more_seeds


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


def test_a_spread_that_is_of_samples_alone_is_marked(miniature: Finished, tmp_path: Path) -> None:
    results = more_seeds(miniature.results, THREE, fixed=(SINGLE,))
    told = "† One set of weights in every seed: single model. Spreads so marked are over other"
    write_report(tmp_path, results)
    page, text = _Page((tmp_path / REPORT_FILE).read_text()), tables_text(results)
    assert told in page.text
    assert told in text
    spreads = [row[page.tables["models"][0].index("s trainings")] for row in page.tables["models"][1:]]
    assert spreads == ["0.100†", "0.100", "0.100"]
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ")}
    assert ["(s 0.10†)" in lines[name] for name in (SINGLE, FLOW, MIXED)] == [True, False, False]
    plain = more_seeds(miniature.results, THREE)
    assert "†" not in tables_text(plain)


def test_distances_to_shards_say_of_how_many_samples_they_are_and_of_too_few(
    miniature: Finished, tmp_path: Path
) -> None:
    results = more_seeds(miniature.results, THREE, fixed=(SINGLE,))
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
