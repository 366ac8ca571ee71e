"""Verbs that write a folder or file at once, killed at every change: before or after, never half of it.

Trainings, `encode`, `sample` and `calibrate` continue what they began; their kills are tested beside them.
"""

import os
import shutil
import sys
from pathlib import Path

import pytest

from hddm.utils.files import restore
from hddm_cli.app import app
from tests.artefacts import contents, killed_at_every_change
from tests.checkpoint_files import pipeline, text_unet


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "target"),
    [
        ("partition {images} --out out --shards 2", "out"),
        ("convert sd --out out", "out"),
        ("assemble {ddpm} {flow} --out out", "out"),
        ("assemble ensemble --remove 1", "ensemble"),
        ("evaluate {images} --reference {shards} --allow-few --out out.json", "out.json"),
    ],
    ids=["partition", "convert", "assemble", "change", "evaluate"],
)
def test_a_verb_killed_at_any_change_leaves_what_was_there_or_all_that_it_writes(
    command: str,
    target: str,
    images: Path,
    shards: Path,
    ddpm_expert: Path,
    flow_expert: Path,
    ensemble: Path,
    tmp_path: Path,
) -> None:
    whole, place = tmp_path / "whole", tmp_path / "place"
    line = command.format(images=images, shards=shards, ddpm=ddpm_expert, flow=flow_expert)

    def lay_out(folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        if target == "ensemble":
            shutil.copytree(ensemble, folder / target)
        if command.startswith("convert"):
            pipeline(folder / "sd", text_unet(0))

    def run(folder: Path) -> None:
        os.chdir(folder)
        sys.argv = ["hddm", *line.split()]
        try:
            app()
        except SystemExit as ended:
            os._exit(int(ended.code or 0))

    def written(folder: Path) -> dict[str, bytes]:
        return {
            name: one for name, one in contents(folder).items() if Path(name).parts[0] == target
        }

    def check() -> None:
        restore(place / target)
        found = written(place)
        assert found in (before, expected)
        if found == expected:
            lay_out(place)

    lay_out(whole)
    before = written(whole)
    assert killed_at_every_change(lambda: run(whole), lambda: None, ()) == 0
    expected = written(whole)
    assert expected != before
    lay_out(place)
    assert killed_at_every_change(lambda: run(place), check) > 2
    assert written(place) == expected
    assert not [path.name for path in place.iterdir() if path.name.startswith(f".{target}.")]
