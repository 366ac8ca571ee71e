"""A calibration is a part of its expert: one that is another's, or gone, is found before it is used."""

import shutil
from pathlib import Path

import pytest

from hddm.calibration import FILE_NAME
from hddm.checkpoints.convert import write
from hddm.checkpoints.plan import plan_conversion
from hddm.experts.records import foreign_files
from hddm.settings import Conversion
from hddm.training.calibrate import recalibrate
from hddm.training.continuation import continue_expert
from hddm.training.verify import verify_expert
from hddm.utils.errors import HddmError
from hddm.utils.files import read_json, restore, sha256_of
from hddm.utils.records import MANIFEST
from tests.artefacts import contents, copied, edit_json, expert_settings, killed_at_every_change


def _bound(folder: Path) -> bool:
    return bool(read_json(folder / MANIFEST)["files"][FILE_NAME] == sha256_of(folder / FILE_NAME))


def test_all_that_calibrates_records_the_hash(shards: Path, ddpm_expert: Path, tmp_path: Path) -> None:
    """A second conversion keeps the calibration of the first expert."""
    assert _bound(ddpm_expert)
    write(plan_conversion(ddpm_expert, Conversion()), tmp_path / "converted")
    continue_expert(ddpm_expert, shards / "shard_1", tmp_path / "on", expert_settings("flow", steps=1))
    again = copied(ddpm_expert, tmp_path)
    recalibrate(again, shards / "shard_0", seed=8)
    assert (again / FILE_NAME).read_bytes() != (ddpm_expert / FILE_NAME).read_bytes()
    for folder in (tmp_path / "converted", tmp_path / "on", again):
        assert _bound(folder)


def test_no_conversion_takes_over_a_calibration(ddpm_expert: Path, flow_expert: Path, tmp_path: Path) -> None:
    expert = copied(ddpm_expert, tmp_path)
    shutil.copyfile(flow_expert / FILE_NAME, expert / FILE_NAME)
    before = contents(tmp_path)
    message = rf"differs from its manifest\.json(?s:.*){FILE_NAME}: has changed"
    with pytest.raises(HddmError, match=message):
        write(plan_conversion(expert, Conversion()), tmp_path / "out")
    assert contents(tmp_path) == before


@pytest.mark.slow
def test_a_calibrating_that_is_killed_leaves_the_old_expert_or_the_new_one(
    shards: Path, ddpm_expert: Path, tmp_path: Path
) -> None:
    expert, shard = copied(ddpm_expert, tmp_path), shards / "shard_0"
    recalibrate(expert, shard, seed=8)
    wholes = [contents(ddpm_expert), contents(expert)]
    assert wholes[0] != wholes[1]
    found = []

    def check() -> None:
        restore(expert)
        found.append(wholes.index(contents(expert)))
        assert foreign_files(expert, sha256_of) == ()
        shutil.rmtree(expert)
        shutil.copytree(ddpm_expert, expert)

    check()
    # One file and three folders get other names.
    assert killed_at_every_change(lambda: recalibrate(expert, shard, seed=8), check, ["os.rename"]) >= 4
    assert contents(expert) == wholes[1]
    assert found[1:] == sorted(found[1:])
    assert set(found) == {0, 1}


@pytest.mark.integration
def test_an_expert_is_calibrated_on_its_own_shard(shards: Path, ddpm_expert: Path, tmp_path: Path) -> None:
    expert, kept = copied(ddpm_expert, tmp_path), copied(shards / "shard_1", tmp_path)
    before = contents(expert)
    with pytest.raises(HddmError, match=r"the expert of shard 0, \w{16}…; use its own images"):
        recalibrate(expert, kept)
    assert contents(expert) == before
    own = read_json(shards / "shard_0" / "manifest.json")["hash"]
    edit_json(kept / "manifest.json", held_out_of=own)
    recalibrate(expert, kept)
    assert verify_expert(expert).accepted
    write(plan_conversion(expert, Conversion()), tmp_path / "converted")
    continue_expert(expert, shards / "shard_0", tmp_path / "on", expert_settings("flow", steps=1))
