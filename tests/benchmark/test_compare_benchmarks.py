"""hddm compare on folders of benchmarks: shared rows side by side, and what makes them incomparable."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hddm.benchmark.results import read_results
from tests.artefacts import Command
from tests.benchmark_files import FLOW, MIXED, SINGLE, Finished

Copy = Callable[..., Path]


@pytest.fixture
def copy(miniature: Finished, tmp_path: Path) -> Copy:
    """Write the miniature's results, of enough images, into a folder: ``change`` changes each scored row."""

    def write(
        name: str,
        change: Callable[[dict[str, Any]], object] = lambda row: None,
        whole: Callable[[dict[str, Any]], object] = lambda content: None,
    ) -> Path:
        content = json.loads((miniature.out / "results.json").read_text())
        whole(content)
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


def _steps(row: dict[str, Any]) -> None:
    row["evaluation"]["sampling"]["steps"] = 9


def _fresh(row: dict[str, Any]) -> dict[str, Any]:
    """The scores of a row against validation images."""
    found: dict[str, Any] = row["evaluation"]["splits"][1]
    return found


def test_rows_of_benchmarks_are_held_against_each_other(
    copy: Copy, miniature: Finished, hddm: Command
) -> None:
    ours = miniature.results.scored[0].evaluation.to("validation").value
    shifted = {"value": ours + 3.0, "half_width": 0.125}
    b = copy("b", lambda row: _fresh(row)["distance"].update(shifted))
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


def _confirmed(content: dict[str, Any]) -> None:
    content["split"] = "held_out"
    content["settings"]["split"] = "held_out"
    for row in content["scored"]:
        _fresh(row)["split"] = "held_out"
        data = row["evaluation"]["data"]
        data["held_out"] = data.pop("validation")


def test_benchmarks_that_differ_in_more_than_the_model_are_refused_with_the_list(
    copy: Copy, hddm: Command
) -> None:
    a, b = copy("a"), copy("b", _steps, _confirmed)
    code, out, err = hddm("compare", a, b)
    assert (code, out) == (1, "")
    files = a / "results.json", b / "results.json"
    assert f"steps: 2 in {files[0]}; 9 in {files[1]}" in err
    assert "validation.hash" in err
    assert "held_out.hash" in err
    assert hddm("compare", a, copy("c", _steps), "--varies", "steps")[0] == 0


def _another_seed(content: dict[str, Any]) -> None:
    content["models"] += [one | {"seed": 1, "hash": f"{one['hash']} 1"} for one in content["models"]]
    for one in json.loads(json.dumps(content["scored"])):
        one["evaluation"]["data"]["images"]["hash"] += " 1"
        content["scored"].append(one | {"seed": 1})


def test_a_file_of_several_seeds_is_named_once(copy: Copy, hddm: Command) -> None:
    a, b = copy("a", whole=_another_seed), copy("b", _steps, _another_seed)
    err = hddm("compare", a, b)[2]
    assert f"steps: 2 in {a / 'results.json'}; 9 in {b / 'results.json'}" in err


def test_what_does_not_compare_is_refused(
    copy: Copy, miniature: Finished, tmp_path: Path, hddm: Command
) -> None:
    a = copy("a")
    renamed = copy("b", lambda row: row.update(row=f"my {row['row']}"))
    evaluation = tmp_path / "evaluation.json"
    evaluation.write_text(json.dumps({"kind": "evaluation", "format": "2.0"}))
    for paths, message in (
        ([miniature.out, a], "not comparable: too few images: 64 features"),
        ([a, renamed], "no row of their first tables in common"),
        ([a, renamed], "my single model"),
        ([a, evaluation], f"{evaluation}: is not a benchmark"),
    ):
        code, _, err = hddm("compare", *paths)
        assert code == 1
        assert message in err
