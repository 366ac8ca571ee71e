"""A calibration is a part of its expert: one that is another's, or gone, is found before it is used."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from hddm.assembly import assemble
from hddm.calibration import FILE_NAME, Calibration
from hddm.checkpoints import convert
from hddm.errors import HddmError
from hddm.expert_files import foreign_files
from hddm.experts import EXPERT_FILE, FORMAT, ExpertFacts
from hddm.facts import read_facts
from hddm.files import sha256_of
from hddm.training.continuation import continue_expert
from hddm.training.recalibrate import recalibrate
from hddm.training.verify import verify_expert
from tests.artefacts import Command, contents, copied, edit_json, expert_settings
from tests.conftest import Trio


def _bound(folder: Path) -> bool:
    stated = json.loads((folder / EXPERT_FILE).read_text())["calibration_sha256"]
    return bool(stated == hashlib.sha256((folder / FILE_NAME).read_bytes()).hexdigest())


def test_whatever_writes_a_calibration_records_its_hash(
    shards: Path, ddpm_expert: Path, tmp_path: Path
) -> None:
    """A second conversion keeps the calibration of the first expert."""
    assert _bound(ddpm_expert)
    convert.write(convert.plan(ddpm_expert, convert.Conversion()), tmp_path / "converted")
    continue_expert(ddpm_expert, shards / "shard_1", tmp_path / "on", expert_settings("flow", steps=1))
    again = copied(ddpm_expert, tmp_path)
    recalibrate(again, shards / "shard_0", seed=8)
    assert (again / FILE_NAME).read_bytes() != (ddpm_expert / FILE_NAME).read_bytes()
    for folder in (tmp_path / "converted", tmp_path / "on", again):
        assert _bound(folder)


@pytest.mark.parametrize("is_missing", [True, False])
def test_a_calibration_other_than_that_recorded_is_refused(
    is_missing: bool, trio: Trio, tmp_path: Path, hddm: Command
) -> None:
    first, second, _ = trio.experts
    spoilt = copied(second, tmp_path)
    (spoilt / FILE_NAME).unlink()
    if not is_missing:
        shutil.copyfile(first / FILE_NAME, spoilt / FILE_NAME)
    there = "is not there" if is_missing else f"has SHA-256 {sha256_of(first / FILE_NAME)[:16]}…"
    line = (
        f"its calibration {there}, and expert.json says {sha256_of(second / FILE_NAME)[:16]}…; "
        f"hddm calibrate {spoilt} --data SHARD fits its own"
    )
    verdict = verify_expert(spoilt, trio.shards / "shard_1")
    assert verdict.problems == (line,)
    assert verdict.denoising is None
    assert not any(FILE_NAME in note for note in verdict.notes)
    before = contents(tmp_path)
    code, _, err = hddm("assemble", first, spoilt, "--out", tmp_path / "out")
    assert code == 1
    assert err.splitlines() == [
        "hddm: files are not those of their records, and nothing was written:",
        f"  {spoilt}: {line}",
    ]
    assert contents(tmp_path) == before
    recalibrate(spoilt, trio.shards / "shard_1")
    assert verify_expert(spoilt).accepted
    assemble([first, spoilt], tmp_path / "out")


def test_without_a_hash_the_shard_that_the_calibration_names_must_be_the_experts(
    trio: Trio, tmp_path: Path
) -> None:
    old = copied(trio.experts[1], tmp_path)
    edit_json(old / EXPERT_FILE, calibration_sha256=None)
    verdict = verify_expert(old)
    assert verdict.accepted
    assert "holds no hash of the calibration" in verdict.notes[0]
    shutil.copyfile(trio.experts[0] / FILE_NAME, old / FILE_NAME)
    mine, other = (
        json.loads((folder / EXPERT_FILE).read_text())["shard"]["hash"] for folder in (old, trio.experts[0])
    )
    line = (
        f"its calibration is of shard {other[:16]}…, and expert.json says {mine[:16]}…; hddm calibrate {old} "
        "--data SHARD fits its own"
    )
    assert verify_expert(old).problems == (line,)
    with pytest.raises(HddmError, match="files are not those of their records") as caught:
        assemble([old], tmp_path / "out")
    assert caught.value.details == (f"{old}: {line}",)


def test_a_calibration_of_another_is_not_taken_over_by_a_conversion(
    ddpm_expert: Path, flow_expert: Path, tmp_path: Path
) -> None:
    expert = copied(ddpm_expert, tmp_path)
    shutil.copyfile(flow_expert / FILE_NAME, expert / FILE_NAME)
    with pytest.raises(HddmError, match=r"its calibration has SHA-256 .*; nothing was written"):
        convert.write(convert.plan(expert, convert.Conversion()), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == [expert.name]


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_calibrating_that_is_killed_leaves_no_record_of_another_calibration(
    count: int,
    is_done: bool,
    shards: Path,
    ddpm_expert: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed just before or after each of its three renames."""
    expert = copied(ddpm_expert, tmp_path)
    replace, left = Path.replace, [count]

    def dying(self: Path, target: Path) -> Path:
        left[0] -= 1
        if left[0] or is_done:
            replace(self, target)
        if not left[0]:
            raise KeyboardInterrupt
        return target

    monkeypatch.setattr(Path, "replace", dying)
    with pytest.raises(KeyboardInterrupt):
        recalibrate(expert, shards / "shard_0", seed=8)
    monkeypatch.undo()
    assert foreign_files(expert, read_facts(expert / EXPERT_FILE, ExpertFacts, FORMAT), sha256_of) == ()
    assert Calibration.load(expert) is not None
    recalibrate(expert, shards / "shard_0", seed=8)
    assert _bound(expert)


def test_an_expert_is_calibrated_on_images_of_its_own_shard_alone(
    shards: Path, ddpm_expert: Path, tmp_path: Path
) -> None:
    expert, kept = copied(ddpm_expert, tmp_path), copied(shards / "shard_1", tmp_path)
    before = contents(expert)
    with pytest.raises(HddmError, match=r"the expert of shard 0, \w{16}…; take images of its own"):
        recalibrate(expert, kept)
    assert contents(expert) == before
    own = json.loads((shards / "shard_0" / "manifest.json").read_text())["hash"]
    edit_json(kept / "manifest.json", held_out_of=own)
    recalibrate(expert, kept)
    assert verify_expert(expert).accepted
