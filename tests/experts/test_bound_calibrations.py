"""A calibration is a part of its expert: one that is another's, or gone, is found before it is used."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from hddm.calibration import FILE_NAME, Calibration
from hddm.checkpoints.convert import write
from hddm.checkpoints.plan import Conversion, plan
from hddm.experts.assembly import assemble
from hddm.experts.records import EXPERT_FILE, FORMAT, ExpertRecord, foreign_files
from hddm.training.calibrate import recalibrate
from hddm.training.continuation import continue_expert
from hddm.training.verify import verify_expert
from hddm.utils.errors import HddmError
from hddm.utils.files import restore, sha256_of
from hddm.utils.records import MANIFEST, read_record
from tests.artefacts import Command, aged, contents, copied, edit_json, expert_settings
from tests.conftest import Trio


def _bound(folder: Path) -> bool:
    stated = json.loads((folder / MANIFEST).read_text())["files"][FILE_NAME]
    return bool(stated == hashlib.sha256((folder / FILE_NAME).read_bytes()).hexdigest())


def test_whatever_writes_a_calibration_records_its_hash(
    shards: Path, ddpm_expert: Path, tmp_path: Path
) -> None:
    """A second conversion keeps the calibration of the first expert."""
    assert _bound(ddpm_expert)
    write(plan(ddpm_expert, Conversion()), tmp_path / "converted")
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
    """In folders of older versions; `tests.utils.test_manifest` has those of today."""
    first, second, _ = trio.experts
    spoilt = aged(copied(second, tmp_path))
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
        "hddm: files are not those that were written with them, and nothing was written:",
        f"  {spoilt}: {line}",
    ]
    assert contents(tmp_path) == before
    recalibrate(spoilt, trio.shards / "shard_1")
    assert verify_expert(spoilt).accepted
    assemble([first, spoilt], tmp_path / "out")


def test_without_a_hash_the_shard_that_the_calibration_names_must_be_the_experts(
    trio: Trio, tmp_path: Path
) -> None:
    old = aged(copied(trio.experts[1], tmp_path), calibration_sha256=None)
    verdict = verify_expert(old)
    assert verdict.accepted
    assert "holds no hash of the calibration" in verdict.notes[1]
    shutil.copyfile(trio.experts[0] / FILE_NAME, old / FILE_NAME)
    mine, other = (
        json.loads((folder / EXPERT_FILE).read_text())["shard"]["hash"] for folder in (old, trio.experts[0])
    )
    line = (
        f"its calibration is of shard {other[:16]}…, and expert.json says {mine[:16]}…; hddm calibrate {old} "
        "--data SHARD fits its own"
    )
    assert verify_expert(old).problems == (line,)
    with pytest.raises(HddmError, match="files are not those that were written with them") as caught:
        assemble([old], tmp_path / "out")
    assert caught.value.details == (f"{old}: {line}",)


def test_a_calibration_of_another_is_not_taken_over_by_a_conversion(
    ddpm_expert: Path, flow_expert: Path, tmp_path: Path
) -> None:
    expert, old = copied(ddpm_expert, tmp_path), aged(copied(ddpm_expert, tmp_path / "old"))
    for folder, message in (
        (expert, rf"is not what was written, by its manifest\.json(?s:.*){FILE_NAME}: has changed"),
        (old, r"its calibration has SHA-256 .*; nothing was written"),
    ):
        shutil.copyfile(flow_expert / FILE_NAME, folder / FILE_NAME)
        before = contents(tmp_path)
        with pytest.raises(HddmError, match=message):
            write(plan(folder, Conversion()), tmp_path / "out")
        assert contents(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([expert.name, "old"])


def _dies_at(count: int, is_done: bool, expert: Path, shard: Path) -> bool:
    """Whether calibrating is killed just before its rename number ``count``, or just after; else it ends."""
    child = os.fork()
    if child == 0:
        left, real = [count], os.rename

        def dying(source: str, target: str) -> None:
            left[0] -= 1
            if left[0] or is_done:
                real(source, target)
            if not left[0]:
                os._exit(9)

        os.rename = os.replace = dying
        try:
            recalibrate(expert, shard, seed=8)
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 9


@pytest.mark.parametrize("is_done", [False, True])
def test_a_calibrating_that_is_killed_leaves_the_old_expert_or_the_new_one(
    is_done: bool, shards: Path, ddpm_expert: Path, tmp_path: Path
) -> None:
    new = copied(ddpm_expert, tmp_path / "new")
    recalibrate(new, shards / "shard_0", seed=8)
    wholes, count = [contents(ddpm_expert), contents(new)], 1
    assert wholes[0] != wholes[1]
    found = []
    while _dies_at(count, is_done, copied(ddpm_expert, tmp_path / f"{count}"), shards / "shard_0"):
        expert = tmp_path / f"{count}" / ddpm_expert.name
        again = Path(shutil.copytree(expert.parent, tmp_path / f"{count}-again")) / expert.name
        restore(expert)
        found.append(wholes.index(contents(expert)))
        facts = read_record(expert / EXPERT_FILE, ExpertRecord, FORMAT)
        assert foreign_files(expert, facts, sha256_of) == ()
        assert Calibration.load(expert) is not None
        # Without `restore`, the next one puts it back.
        recalibrate(again, shards / "shard_0", seed=8)
        assert contents(again) == wholes[1]
        count += 1
    assert found == sorted(found)
    assert set(found) == {0, 1}
    # One file and three folders get other names.
    assert count - 1 >= 4


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
    write(plan(expert, Conversion()), tmp_path / "converted")
    continue_expert(expert, shards / "shard_0", tmp_path / "on", expert_settings("flow", steps=1))
