"""hddm compare on folders of benchmarks: shared rows side by side, and what makes them incomparable."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hddm.benchmark.results import read_results
from tests.artefacts import Command
from tests.benchmark_files import Finished

Change = Callable[[dict[str, Any]], None]


def _enough_images(content: dict[str, Any]) -> None:
    for record in content["scored"]:
        record["scores"]["to_validation"]["few_images"] = False


def _copy(miniature: Finished, folder: Path, *changes: Change) -> Path:
    """The miniature's results, changed, under another seed's samples."""
    folder.mkdir()
    content = json.loads((miniature.out / "results.json").read_text())
    for change in (_enough_images, *changes):
        change(content)
    (folder / "results.json").write_text(json.dumps(content))
    read_results(folder)
    return folder


def _shift(content: dict[str, Any]) -> None:
    for record in content["scored"]:
        record["scores"]["to_validation"] |= {"value": 3.0, "half_width": 0.125}


def test_rows_of_benchmarks_are_held_against_each_other(
    miniature: Finished, tmp_path: Path, hddm: Command
) -> None:
    a = _copy(miniature, tmp_path / "a")
    b = _copy(miniature, tmp_path / "b", _shift)
    code, out, err = hddm("compare", a, b / "results.json")
    assert (code, err) == (0, "")
    assert [line for line in out.splitlines() if line.startswith("## ")] == [
        "## single model",
        "## homogeneous flow",
        "## mixed 1:1",
    ]
    first = next(line for line in out.splitlines() if "to validation images" in line)
    ours = miniature.results.scored[0].scores["to_validation"]["value"]
    assert "3.000 ± 0.12" in first
    assert f"worse (+{3.0 - ours:.1f})" in first
    assert "held-out" not in out
    assert "training, 1e12 operations" in out


def _steps(content: dict[str, Any]) -> None:
    for record in content["scored"]:
        record["point"]["steps"] = 9


def _confirmed(content: dict[str, Any]) -> None:
    content["score_on"] = "held-out"
    content["hashes"]["reference"] = "other"
    for record in content["scored"]:
        record["scores"]["to_held_out"] = record["scores"].pop("to_validation")


def test_benchmarks_that_differ_in_more_than_the_model_are_refused_with_the_list(
    miniature: Finished, tmp_path: Path, hddm: Command
) -> None:
    a = _copy(miniature, tmp_path / "a")
    b = _copy(miniature, tmp_path / "b", _steps, _confirmed)
    code, out, err = hddm("compare", a, b)
    assert (code, out) == (1, "")
    files = a / "results.json", b / "results.json"
    assert f"steps: 2 in {files[0]}; 9 in {files[1]}" in err
    assert f'split: "validation" in {files[0]}; "held-out" in {files[1]}' in err
    assert "held_out.hash" in err
    assert hddm("compare", a, _copy(miniature, tmp_path / "c", _steps), "--varies", "steps")[0] == 0


def _another_seed(content: dict[str, Any]) -> None:
    content["models"] += [one | {"seed": 1, "hash": f"{one['hash']} 1"} for one in content["models"]]
    content["scored"] += [
        one | {"seed": 1, "samples": [f"{name} 1" for name in one["samples"]]} for one in content["scored"]
    ]


def test_a_file_of_several_seeds_is_named_once(miniature: Finished, tmp_path: Path, hddm: Command) -> None:
    a = _copy(miniature, tmp_path / "a", _another_seed)
    b = _copy(miniature, tmp_path / "b", _another_seed, _steps)
    err = hddm("compare", a, b)[2]
    assert f"steps: 2 in {a / 'results.json'}; 9 in {b / 'results.json'}" in err


def _raw_on_a_gpu(content: dict[str, Any]) -> None:
    for record in content["scored"]:
        record["sampled_as"] = {"weights": "raw", "device": "cuda"}


def _older(content: dict[str, Any]) -> None:
    for record in content["scored"]:
        del record["sampled_as"]


def test_benchmarks_of_other_weights_or_devices_are_told_apart_row_by_row(
    miniature: Finished, tmp_path: Path, hddm: Command
) -> None:
    a = _copy(miniature, tmp_path / "a")
    b = _copy(miniature, tmp_path / "b", _raw_on_a_gpu)
    _, _, err = hddm("compare", a, b)
    files = a / "results.json", b / "results.json"
    assert f'weights: "ema" in {files[0]}; "raw" in {files[1]}' in err
    assert f'device: "cpu" in {files[0]}; "cuda" in {files[1]}' in err
    assert hddm("compare", a, _copy(miniature, tmp_path / "c", _older))[0] == 0


def test_benchmarks_of_too_few_images_are_not_compared(
    miniature: Finished, tmp_path: Path, hddm: Command
) -> None:
    code, _, err = hddm("compare", miniature.out, _copy(miniature, tmp_path / "a"))
    assert code == 1
    assert "not comparable: too few images: 64 features" in err


def _renamed(content: dict[str, Any]) -> None:
    for record in content["scored"]:
        record["row"] = f"my {record['row']}"


def test_benchmarks_without_a_shared_row_are_refused(
    miniature: Finished, tmp_path: Path, hddm: Command
) -> None:
    a, b = _copy(miniature, tmp_path / "a"), _copy(miniature, tmp_path / "b", _renamed)
    _, _, err = hddm("compare", a, b)
    assert "no row of their first tables in common" in err
    assert "my single model" in err
    assert "name two or more" in hddm("compare", a)[2]


def test_a_benchmark_beside_an_evaluation_is_refused(
    miniature: Finished, tmp_path: Path, hddm: Command
) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"kind": "evaluation", "format": "1.0"}))
    code, _, err = hddm("compare", miniature.out, other)
    assert code == 1
    assert f"{other}: is no benchmark" in err
