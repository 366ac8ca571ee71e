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
from PIL import Image

from hddm.benchmark.report import REPORT_FILE, write_report
from hddm.benchmark.results import Results, read_results
from tests.benchmark_files import FLOW, MIXED, Finished


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
    assert len(sources) == models + 1
    assert page.all("img")[0]["alt"] == "Samples: real, validation"
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
        assert shown[column] == results.shown(row, "to_validation")
    assert miniature.results.hashes["training"] in page.text


def test_why_there_is_no_answer_is_said(page: _Page, miniature: Finished, tmp_path: Path) -> None:
    results = miniature.results

    def text(table: str, **compared: Any) -> str:
        compare = results.settings.compare.model_copy(update=compared)
        changes = {
            "settings": results.settings.model_copy(update={"compare": compare}),
            "scored": tuple(one for one in results.scored if one.table == table),
            "comparisons": (),
        }
        write_report(tmp_path, results.model_copy(update=changes))
        return _Page((tmp_path / REPORT_FILE).read_text()).text

    assert "No verdict: the" not in page.text
    assert "No verdict: the settings name no baseline." in text("models", baselines=())
    absent = "No verdict: the first table, strategies, has no row of homogeneous flow or single model."
    assert absent in text("strategies")
    alike = text("models", baselines=(FLOW,), candidates=(FLOW,))
    assert "first table, models, has no candidate that is sampled as a baseline is." in alike


def test_a_page_says_what_its_figures_are_to_the_choice_of_settings(
    page: _Page, miniature: Finished, tmp_path: Path
) -> None:
    assert "What counts is the confirmation on fresh seeds" in page.text
    content = miniature.results.model_copy(update={"score_on": "held-out"}).model_dump_json()
    confirmed = Results.model_validate_json(content.replace("to_validation", "to_held_out"))
    write_report(tmp_path, confirmed)
    assert "A confirmation: fresh training seeds" in _Page((tmp_path / REPORT_FILE).read_text()).text


def test_a_report_is_made_anew_from_results_and_grids_alone(miniature: Finished, tmp_path: Path) -> None:
    shutil.copy(miniature.out / "results.json", tmp_path)
    for grids in ("samples", "seed_0/samples"):
        shutil.copytree(miniature.out / grids, tmp_path / grids)
    write_report(tmp_path, read_results(tmp_path))
    write_report(miniature.out, miniature.results)
    assert (tmp_path / REPORT_FILE).read_text() == (miniature.out / REPORT_FILE).read_text()


def test_names_of_models_are_text_wherever_they_stand(miniature: Finished, tmp_path: Path) -> None:
    name = '<script>alert("x")</script> $\\frac{1}{2}$ & "'
    results = miniature.results.model_dump_json().replace(json.dumps(MIXED)[1:-1], json.dumps(name)[1:-1])
    write_report(tmp_path, Results.model_validate_json(results))
    text = (tmp_path / REPORT_FILE).read_text()
    assert text.count("<script") == 1
    assert name in _Page(text).text
