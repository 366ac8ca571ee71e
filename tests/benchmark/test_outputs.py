"""The script that freezes outputs: what it says of a change."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from benchmarks.outputs import frozen


def _run(*words: object) -> Result:
    return CliRunner().invoke(frozen.app, [*map(str, words), "--only", "schedules"])


@pytest.mark.integration
def test_changed_missing_and_new_outputs_are_listed_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "before.json"
    assert _run("write", file).exit_code == 0
    same = _run("compare", file)
    assert same.exit_code == 0
    assert same.stdout.endswith("0 of 31 outputs differ\n")
    content = json.loads(file.read_text())
    outputs = content["outputs"]["schedules"]
    outputs["linear"]["sha256"] = "0" * 64
    outputs["gone"] = outputs.pop("cosine")
    file.write_text(json.dumps(content))
    other = _run("compare", file)
    assert other.exit_code == 1
    lines = other.stdout.splitlines()
    assert lines[0].startswith("schedules: linear: other bits; norm ")
    assert lines[1:] == [
        "schedules: gone: is missing (4 tensors)",
        "schedules: cosine: is new (4 tensors)",
        "3 of 31 outputs differ",
    ]


@pytest.mark.integration
def test_an_area_that_fails_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(workshop: object) -> object:
        yield "one", b"content"
        raise ValueError("no more")

    monkeypatch.setattr("benchmarks.outputs.method.schedules", fails)
    found = _run("write", tmp_path / "before.json")
    assert found.exit_code == 1
    assert "nothing was written: schedules failed" in found.output
    assert not (tmp_path / "before.json").exists()
