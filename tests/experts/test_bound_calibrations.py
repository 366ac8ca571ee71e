"""A calibration is a part of its expert: one that is another's, or gone, is found before it is used."""

import shutil
from pathlib import Path

import pytest

from hddm.calibration_records import FILE_NAME
from hddm.checkpoints.convert import write
from hddm.checkpoints.plan import plan_conversion
from hddm.experts.verify import verify_expert
from hddm.settings import Conversion
from hddm.training.calibrate import recalibrate
from hddm.training.continuation import continue_expert
from hddm.utils.errors import HddmError
from hddm.utils.files import read_json, sha256_of
from hddm.utils.records import MANIFEST
from tests.artefacts import contents, copied, edit_json, expert_settings


def _bound(folder: Path) -> bool:
    return bool(read_json(folder / MANIFEST)["files"][FILE_NAME] == sha256_of(folder / FILE_NAME))


def test_all_that_calibrates_records_the_hash(
    shards: Path, ddpm_expert: Path, tmp_path: Path
) -> None:
    """A second conversion keeps the calibration of the first expert."""
    assert _bound(ddpm_expert)
    write(plan_conversion(ddpm_expert, Conversion()), tmp_path / "converted")
    continue_expert(
        ddpm_expert, shards / "shard_1", tmp_path / "on", expert_settings("flow", steps=1)
    )
    again = copied(ddpm_expert, tmp_path)
    recalibrate(again, shards / "shard_0", seed=8)
    assert (again / FILE_NAME).read_bytes() != (ddpm_expert / FILE_NAME).read_bytes()
    for folder in (tmp_path / "converted", tmp_path / "on", again):
        assert _bound(folder)


def test_no_conversion_takes_over_a_calibration(
    ddpm_expert: Path, flow_expert: Path, tmp_path: Path
) -> None:
    expert = copied(ddpm_expert, tmp_path)
    shutil.copyfile(flow_expert / FILE_NAME, expert / FILE_NAME)
    before = contents(tmp_path)
    message = rf"differs from its manifest\.json(?s:.*){FILE_NAME}: has changed"
    with pytest.raises(HddmError, match=message):
        write(plan_conversion(expert, Conversion()), tmp_path / "out")
    assert contents(tmp_path) == before


@pytest.mark.integration
def test_an_expert_is_calibrated_on_its_own_shard(
    shards: Path, ddpm_expert: Path, tmp_path: Path
) -> None:
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
