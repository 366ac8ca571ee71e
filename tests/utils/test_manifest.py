"""Every file of a model's folder that has a meaning is held against the manifest that was written last."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import hddm.utils.records
from hddm import load
from hddm.calibration import FILE_NAME as CALIBRATION
from hddm.checkpoints.convert import write
from hddm.checkpoints.describe import describe
from hddm.checkpoints.plan import Conversion, plan
from hddm.experts.assembly import assemble
from hddm.experts.assembly_changes import change
from hddm.experts.records import EXPERT_FILE, ROUTER_FILE
from hddm.networks.folders import WEIGHTS
from hddm.training.calibrate import recalibrate
from hddm.training.verify import verify_expert
from hddm.utils.errors import HddmError
from hddm.utils.files import RECORD
from hddm.utils.records import MANIFEST, damage, read_folder_manifest, write_manifest
from tests.artefacts import Command, aged, contents, copied
from tests.conftest import Trio


def edit_json(path: Path, **changes: object) -> None:
    """As by hand: the manifest stays."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _edit(name: str, **changes: object) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / name, **changes)


def _weights(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = {name: change(value.clone()) for name, value in load_file(folder / WEIGHTS).items()}
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})

    return edit


def _doubled(folder: Path, name: str) -> None:
    edit_json(folder / name, time_scale=2 * json.loads((folder / name).read_text())["time_scale"])


def _permuted(folder: Path) -> None:
    hashes = json.loads((folder / ROUTER_FILE).read_text())["shard_hashes"]
    edit_json(folder / ROUTER_FILE, shard_hashes=[*hashes[1:], hashes[0]])


SPOILT_EXPERTS: dict[str, Callable[[Path], object]] = {
    "other number of heads": _edit("config.json", num_attention_heads=1, attention_head_dim=32),
    "doubled time scale": lambda folder: _doubled(folder, EXPERT_FILE),
    "another shard's record": lambda folder: edit_json(
        folder / EXPERT_FILE, shard=json.loads((folder / EXPERT_FILE).read_text())["shard"] | {"images": 3}
    ),
    "no config": lambda folder: (folder / "config.json").unlink(),
    "garbage for a config": lambda folder: (folder / "config.json").write_text("{]"),
    "garbage for a class": _edit("config.json", _class_name="Anything"),
    "zeroed weights": _weights(torch.zeros_like),
    "weights that are not finite": _weights(lambda value: value * float("nan")),
    "no calibration": lambda folder: (folder / CALIBRATION).unlink(),
    "null conditions from elsewhere": lambda folder: save_file(
        {"class_labels": torch.tensor(1)}, folder / "null_conditions.safetensors"
    ),
    "no manifest": lambda folder: (folder / MANIFEST).unlink(),
    "garbage for a manifest": lambda folder: (folder / MANIFEST).write_text("[]"),
}
SPOILT_ROUTERS: dict[str, Callable[[Path], object]] = {
    "zeroed weights": _weights(torch.zeros_like),
    "weights that are not finite": _weights(lambda value: value * float("nan")),
    "doubled time scale": lambda folder: _doubled(folder, ROUTER_FILE),
    "permuted shards": _permuted,
    "no config": lambda folder: (folder / "config.json").unlink(),
    "no manifest": lambda folder: (folder / MANIFEST).unlink(),
}


@pytest.mark.parametrize("how", SPOILT_EXPERTS)
def test_a_spoilt_expert_is_neither_assembled_nor_accepted_nor_loaded(
    how: str, trio: Trio, tmp_path: Path, hddm: Command
) -> None:
    spoilt = copied(trio.experts[1], tmp_path)
    SPOILT_EXPERTS[how](spoilt)
    before = contents(tmp_path)
    parts = (trio.experts[0], spoilt, "--router", trio.router)
    code, _, err = hddm("assemble", *parts, "--out", tmp_path / "out", "--strategy", "full")
    assert code == 1
    assert str(spoilt) in err
    assert contents(tmp_path) == before
    assert not verify_expert(spoilt).accepted
    with pytest.raises(HddmError):
        load(spoilt)


@pytest.mark.parametrize("how", SPOILT_ROUTERS)
def test_a_spoilt_router_is_neither_assembled_nor_loaded(
    how: str, trio: Trio, tmp_path: Path, hddm: Command
) -> None:
    whole = tmp_path / "whole"
    assemble(trio.experts, whole, trio.router, "full")
    spoilt = copied(trio.router, tmp_path)
    SPOILT_ROUTERS[how](spoilt)
    # Not in place: its files are those of the router that it was assembled from.
    shutil.rmtree(whole / "router")
    shutil.copytree(trio.router, whole / "router")
    SPOILT_ROUTERS[how](whole / "router")
    before = contents(tmp_path)
    code, _, err = hddm("assemble", *trio.experts, "--router", spoilt, "--out", tmp_path / "out")
    assert code == 1
    assert str(spoilt) in err
    assert contents(tmp_path) == before
    with pytest.raises(HddmError):
        load(whole)


def test_swapped_records_of_two_experts_are_seen(trio: Trio, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    assemble(trio.experts, whole, trio.router, "full")
    one, other = (whole / "experts" / name / EXPERT_FILE for name in "01")
    texts = one.read_text(), other.read_text()
    # Hard links: the folders that it was assembled from are to stay as they are.
    for path, text in zip((one, other), reversed(texts), strict=True):
        path.unlink()
        path.write_text(text)
    with pytest.raises(HddmError) as caught:
        load(whole)
    assert caught.value.details == (f"{EXPERT_FILE}: has changed",)


def test_swapped_folders_of_two_experts_are_seen(trio: Trio, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    assemble(trio.experts, whole)
    (whole / "experts" / "0").rename(tmp_path / "aside")
    (whole / "experts" / "1").rename(whole / "experts" / "0")
    (tmp_path / "aside").rename(whole / "experts" / "1")
    with pytest.raises(HddmError) as caught:
        load(whole)
    assert caught.value.details == tuple(f"experts/{k}/{MANIFEST}: has changed" for k in (0, 1))


@pytest.mark.parametrize("name", ["ensemble.json", "model_index.json", "scheduler/scheduler_config.json"])
def test_an_ensemble_whose_own_records_were_edited_is_refused(name: str, trio: Trio, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    assemble(trio.experts, whole)
    (whole / name).write_text((whole / name).read_text() + "\n")
    with pytest.raises(HddmError, match="is not what was written") as caught:
        load(whole)
    assert caught.value.details == (f"{name}: has changed",)


def test_what_has_no_meaning_may_come_change_and_go(trio: Trio, tmp_path: Path) -> None:
    expert = copied(trio.experts[0], tmp_path)
    (expert / "README.md").write_text("# Mine")
    (expert / "LICENSE").write_text("MIT")
    (expert / "pictures").mkdir()
    (expert / "pictures" / "grid.png").write_bytes(b"any")
    (expert / ".hidden").write_text("any")
    write_manifest(expert)
    listed = json.loads((expert / MANIFEST).read_text())["files"]
    assert set(listed) == {"config.json", EXPERT_FILE, WEIGHTS, CALIBRATION}
    (expert / "README.md").write_text("# Ours")
    (expert / "pictures" / "grid.png").unlink()
    assert damage(expert, EXPERT_FILE) == ()
    assert verify_expert(expert).accepted


def test_a_folder_of_an_older_format_loads_and_is_told(trio: Trio, tmp_path: Path, hddm: Command) -> None:
    old = copied(trio.experts[0], tmp_path)
    (old / MANIFEST).unlink()
    assert describe(old)["manifest"] == "missing, so the folder is refused"
    edit_json(old / EXPERT_FILE, format="1.3")
    load(old)
    verdict = verify_expert(old)
    assert verdict.accepted
    assert any(MANIFEST in note for note in verdict.notes)
    assert describe(old)["manifest"] == "none: written by an older version"
    assert describe(trio.experts[0])["manifest"] == "of 4 files"
    notes = assemble([old, trio.experts[1]], tmp_path / "out")
    assert any(str(old) in note and MANIFEST in note for note in notes)
    # What it becomes part of holds it against that day.
    edit_json(tmp_path / "out" / "experts" / "0" / EXPERT_FILE, time_scale=7.0)
    with pytest.raises(HddmError, match="is not what was written"):
        load(tmp_path / "out")


def test_calibrating_writes_the_manifest_anew_and_leaves_the_rest(trio: Trio, tmp_path: Path) -> None:
    expert = copied(trio.experts[0], tmp_path)
    ensemble = tmp_path / "ensemble"
    assemble([expert], ensemble)
    (tmp_path / MANIFEST).write_text('{"name": "a page"}')
    (expert / ".git").mkdir()
    for name in ("README.md", "notes.txt", ".gitattributes", ".git/config"):
        (expert / name).write_text("mine")
    (expert / RECORD).write_text("{}")
    before, linked = contents(expert), contents(ensemble)
    recalibrate(expert, trio.shards / "shard_0", seed=8)
    after = contents(expert)
    assert {name for name in after if after[name] != before[name]} == {CALIBRATION, MANIFEST}
    assert after.keys() == before.keys() - {RECORD}
    assert contents(ensemble) == linked
    # What a user adds does not become part of it.
    (expert / "notes.txt").unlink()
    assert verify_expert(expert).accepted


def test_a_manifest_that_is_written_anew_is_no_other_folder_s(trio: Trio, tmp_path: Path) -> None:
    """The files of an ensemble are those of its parts, by hard links."""
    expert = copied(trio.experts[0], tmp_path)
    assemble([expert], tmp_path / "whole")
    before, linked = contents(expert), tmp_path / "whole" / "experts" / "0"
    (linked / "notes.txt").write_text("mine")
    write_manifest(linked)
    assert "notes.txt" in read_folder_manifest(linked).files
    assert contents(expert) == before


@pytest.mark.parametrize("is_whole", [True, False])
def test_an_expert_in_a_hub_cache_is_verified(is_whole: bool, trio: Trio, tmp_path: Path) -> None:
    """Its files are links to blobs that are named by hashes."""
    root = tmp_path / "models--me--expert"
    blobs, revision = root / "blobs", root / "snapshots" / "main"
    blobs.mkdir(parents=True)
    revision.mkdir(parents=True)
    for number, path in enumerate(sorted(trio.experts[0].iterdir())):
        shutil.copyfile(path, blobs / f"{number}")
        (revision / path.name).symlink_to(Path("..", "..", "blobs", f"{number}"))
    if not is_whole:
        _weights(torch.zeros_like)(revision)
    verdict = verify_expert(revision)
    assert verdict.accepted == is_whole, verdict.problems
    assert (f"{WEIGHTS}: has changed" in verdict.problems) != is_whole


@pytest.mark.parametrize("verb", ["partition", "encode", "data check", "evaluate", "train expert"])
def test_a_model_is_not_taken_for_a_shard_whose_manifest_has_the_same_name(
    verb: str, trio: Trio, router: Path, tmp_path: Path, hddm: Command
) -> None:
    options: dict[str, tuple[object, ...]] = {
        "partition": ("--out", tmp_path / "out", "--shards", 2),
        "encode": ("--out", tmp_path / "out"),
        "evaluate": ("--reference", trio.shards / "shard_0"),
        "train expert": ("--out", tmp_path / "out", "--objective", "flow", "--steps", 1),
    }
    for folder in (trio.experts[0], router):
        code, out, err = hddm(*verb.split(), folder, *options.get(verb, ()))
        assert code in (1, 2)
        assert (out, err.count("\n")) == ("", 1)
        assert str(folder) in err
        assert not any(wrong in err for wrong in ("is a shard", "key '", "unexpected"))
    assert not any(tmp_path.iterdir())


def test_calibrating_mends_a_spoilt_calibration_alone(trio: Trio, tmp_path: Path) -> None:
    expert = copied(trio.experts[0], tmp_path)
    (expert / CALIBRATION).write_bytes(b"spoilt")
    with pytest.raises(HddmError):
        load(expert)
    recalibrate(expert, trio.shards / "shard_0")
    assert verify_expert(expert).accepted
    _weights(torch.zeros_like)(expert)
    with pytest.raises(HddmError, match="is not what was written"):
        recalibrate(expert, trio.shards / "shard_0")


def test_large_files_are_hashed_once_until_they_change(
    trio: Trio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hddm.utils.records, "SMALL", 2**13)
    expert = copied(trio.experts[0], tmp_path)
    hashed: list[str] = []
    real = hddm.utils.files.sha256_of
    monkeypatch.setattr("hddm.utils.files.sha256_of", lambda path: hashed.append(path.name) or real(path))
    # Long ago: what was changed just now may change again within one tick of the clock.
    monkeypatch.setattr("hddm.utils.files.SETTLED", -1)
    load(expert)
    assert WEIGHTS in hashed
    assert (expert / RECORD).exists()
    hashed.clear()
    load(expert)
    assert WEIGHTS not in hashed
    assert "config.json" in hashed
    weights = (expert / WEIGHTS).read_bytes()
    (expert / WEIGHTS).write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    with pytest.raises(HddmError) as caught:
        load(expert)
    assert caught.value.details == (f"{WEIGHTS}: has changed",)


def test_a_chosen_expert_is_loaded_though_another_is_spoilt(trio: Trio, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    assemble([copied(one, tmp_path / "copies") for one in trio.experts], whole)
    spoilt = whole / "experts" / "1"
    (spoilt / WEIGHTS).unlink()
    load(whole, experts=[0, 2])
    with pytest.raises(HddmError):
        load(whole)
    change(whole, remove=["1"])
    load(whole)


def test_names_that_lead_out_of_the_folder_are_refused(trio: Trio, tmp_path: Path) -> None:
    expert = copied(trio.experts[0], tmp_path)
    files = json.loads((expert / MANIFEST).read_text())["files"]
    edit_json(expert / MANIFEST, files=files | {"../secret": "0" * 64})
    with pytest.raises(HddmError, match="does not stay inside"):
        load(expert)


def test_a_null_condition_that_is_not_finite_is_refused(trio: Trio, tmp_path: Path) -> None:
    expert = copied(trio.experts[0], tmp_path)
    save_file({"class_labels": torch.tensor(float("nan"))}, expert / "null_conditions.safetensors")
    write_manifest(expert)
    with pytest.raises(HddmError, match="holds NaN or Inf"):
        load(expert)


def test_a_finished_training_that_was_spoilt_is_not_taken_for_finished(
    shards: Path, tmp_path: Path, hddm: Command
) -> None:
    out = tmp_path / "expert"
    train = (
        "train",
        "expert",
        shards / "shard_0",
        "--out",
        out,
        "--objective",
        "flow",
        "--steps",
        2,
        "--size",
        "tiny",
    )
    assert hddm(*train)[0] == 0
    assert hddm(*train, "--resume")[0] == 0
    (out / "config.json").write_bytes(b"")
    for _ in range(2):
        code, _, err = hddm(*train, "--resume")
        assert code == 1
        assert "config.json: has changed" in err
        assert "--overwrite trains it anew" in err
        # Without the run that it came from, the folder is told by itself.
        shutil.rmtree(tmp_path / "expert.run", ignore_errors=True)


def test_calibrating_an_expert_of_an_ensemble_leaves_the_ensemble_readable(
    trio: Trio, tmp_path: Path
) -> None:
    ensemble = tmp_path / "ensemble"
    assemble([copied(one, tmp_path / "parts") for one in trio.experts], ensemble)
    recalibrate(ensemble / "experts" / "1", trio.shards / "shard_1", seed=8)
    load(ensemble)
    change(ensemble, remove=["0"])
    load(ensemble)


def test_a_calibration_that_is_not_finite_is_not_converted(trio: Trio, tmp_path: Path) -> None:
    old = aged(copied(trio.experts[0], tmp_path))
    tensors = load_file(old / CALIBRATION)
    tensors["mean"][0] = float("nan")
    save_file(tensors, old / CALIBRATION)
    edit_json(old / EXPERT_FILE, calibration_sha256=None)
    with pytest.raises(HddmError, match="holds NaN or Inf"):
        write(plan(old, Conversion()), tmp_path / "out")


def test_calibrating_takes_no_notice_of_other_manifests_above(trio: Trio, tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text('{"name": "a page"}')
    expert = copied(trio.experts[0], tmp_path)
    recalibrate(expert, trio.shards / "shard_0", seed=8)
    load(expert)
