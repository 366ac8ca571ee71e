"""Every file of a model's folder that has a meaning is held against the manifest that was written last."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hddm import load
from hddm.calibration_records import FILE_NAME as CALIBRATION
from hddm.experts.assembly import assemble, change
from hddm.experts.record_folders import read_router
from hddm.experts.records import EXPERT_FILE, ROUTER_FILE
from hddm.experts.verify import verify_expert
from hddm.training.calibrate import recalibrate
from hddm.utils.errors import HddmError
from hddm.utils.records import HASHES, MANIFEST, WEIGHTS, damage, write_manifest
from tests.artefacts import Command, contents, copied, refusal
from tests.conftest import Trio

Spoil = Callable[[Path], object]


def _change(path: Path, changes: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """As by hand: the manifest stays."""
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | changes(record)))


def _weights(change: Callable[[torch.Tensor], torch.Tensor]) -> Spoil:
    def edit(folder: Path) -> None:
        tensors = {
            name: change(value.clone()) for name, value in load_file(folder / WEIGHTS).items()
        }
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})

    return edit


def _without(name: str) -> Spoil:
    return lambda folder: (folder / name).unlink()


SPOILT = {
    "zeroed weights": _weights(torch.zeros_like),
    "no config": _without("config.json"),
    "no manifest": _without(MANIFEST),
}
SPOILT_EXPERTS: dict[str, Spoil] = SPOILT | {
    "doubled time scale": lambda folder: _change(
        folder / EXPERT_FILE, lambda record: {"time_scale": 2 * record["time_scale"]}
    ),
    "null conditions from elsewhere": lambda folder: save_file(
        {"class_labels": torch.tensor(1)}, folder / "null_conditions.safetensors"
    ),
    "garbage for a manifest": lambda folder: (folder / MANIFEST).write_text("[]"),
}
SPOILT_ROUTERS: dict[str, Spoil] = SPOILT | {
    "permuted shards": lambda folder: _change(
        folder / ROUTER_FILE, lambda record: {"shard_hashes": record["shard_hashes"][::-1]}
    ),
}


@pytest.fixture
def ensemble(trio: Trio, tmp_path: Path) -> Path:
    assemble(trio.experts, tmp_path / "whole", trio.router, strategy="full")
    return tmp_path / "whole"


@pytest.fixture
def expert(trio: Trio, tmp_path: Path) -> Path:
    """A copy of its own."""
    return copied(trio.experts[0], tmp_path)


@pytest.mark.parametrize("how", SPOILT_EXPERTS)
def test_a_spoilt_expert_is_refused(how: str, trio: Trio, tmp_path: Path) -> None:
    spoilt = copied(trio.experts[1], tmp_path)
    SPOILT_EXPERTS[how](spoilt)
    assert str(spoilt) in refusal(load, spoilt)
    assert not verify_expert(spoilt).accepted


@pytest.mark.parametrize("how", SPOILT_ROUTERS)
def test_a_spoilt_router_is_refused(how: str, trio: Trio, ensemble: Path, tmp_path: Path) -> None:
    spoilt = copied(trio.router, tmp_path)
    SPOILT_ROUTERS[how](spoilt)
    # Not in place: its files are those of the router that it was assembled from.
    shutil.rmtree(ensemble / "router")
    shutil.copytree(spoilt, ensemble / "router")
    with pytest.raises(HddmError):
        load(ensemble)


def _swap_records(ensemble: Path) -> None:
    one, other = (ensemble / "experts" / name / EXPERT_FILE for name in "01")
    texts = one.read_text(), other.read_text()
    # Hard links: the folders that it was assembled from are to stay as they are.
    for path, text in zip((one, other), reversed(texts), strict=True):
        path.unlink()
        path.write_text(text)


def _swap_folders(ensemble: Path) -> None:
    for name, other in (("0", "aside"), ("1", "0"), ("aside", "1")):
        (ensemble / "experts" / name).rename(ensemble / "experts" / other)


OWN_RECORDS = ("ensemble.json", "model_index.json", "scheduler/scheduler_config.json")


@pytest.mark.parametrize(
    ("spoil", "changed"),
    [
        (_swap_records, [EXPERT_FILE]),
        (_swap_folders, [f"experts/{k}/{MANIFEST}" for k in (0, 1)]),
        *(
            (lambda folder, name=name: (folder / name).open("a").write("\n"), [name])
            for name in OWN_RECORDS
        ),
    ],
    ids=["swapped records", "swapped folders", *OWN_RECORDS],
)
def test_an_ensemble_changed_by_hand_is_refused(
    spoil: Spoil, changed: list[str], ensemble: Path
) -> None:
    spoil(ensemble)
    with pytest.raises(HddmError, match="differs from its") as caught:
        load(ensemble)
    assert caught.value.details == tuple(f"{name}: has changed" for name in changed)


def test_what_has_no_meaning_may_come_change_and_go(expert: Path) -> None:
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


@pytest.mark.parametrize(
    ("kind", "remedy"), [("expert", "convert or train"), ("router", "train the router")]
)
def test_formats_before_1_5_are_refused_in_one_line(
    kind: str, remedy: str, trio: Trio, tmp_path: Path
) -> None:
    old = copied(trio.experts[0] if kind == "expert" else trio.router, tmp_path)
    _change(old / f"{kind}.json", lambda record: {"format": "1.4"})
    message = refusal(load if kind == "expert" else read_router, old)
    assert message.startswith(f"{old / kind}.json: format 1.4 is no longer read; {remedy}")


def test_calibrating_writes_the_manifest_anew_alone(
    trio: Trio, expert: Path, tmp_path: Path
) -> None:
    ensemble = tmp_path / "ensemble"
    assemble([expert], ensemble)
    (tmp_path / MANIFEST).write_text('{"name": "a page"}')
    (expert / ".git").mkdir()
    for name in ("README.md", "notes.txt", ".gitattributes", ".git/config"):
        (expert / name).write_text("mine")
    (expert / HASHES).write_text("{}")
    before, linked = contents(expert), contents(ensemble)
    recalibrate(expert, trio.shards / "shard_0", seed=8)
    after = contents(expert)
    assert {name for name in after if after[name] != before[name]} == {CALIBRATION, MANIFEST}
    assert after.keys() == before.keys() - {HASHES}
    assert contents(ensemble) == linked
    # What a user adds does not become part of it.
    (expert / "notes.txt").unlink()
    assert verify_expert(expert).accepted


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


def test_names_that_lead_out_of_the_folder_are_refused(expert: Path) -> None:
    _change(expert / MANIFEST, lambda record: {"files": record["files"] | {"../secret": "0" * 64}})
    assert "points outside" in refusal(load, expert)


def test_a_spoilt_training_is_not_taken_for_finished(
    shards: Path, tmp_path: Path, hddm: Command
) -> None:
    out = tmp_path / "expert"
    options = ["--objective", "flow", "--steps", "2", "--size", "tiny"]
    train = ("train", "expert", shards / "shard_0", "--out", out, *options)
    assert hddm(*train)[0] == 0
    assert hddm(*train, "--resume")[0] == 0
    (out / "config.json").write_bytes(b"")
    for _ in range(2):
        code, _, err = hddm(*train, "--resume")
        assert code == 1
        assert "config.json: has changed" in err
        assert "--overwrite trains it again" in err
        # Without the run that it came from, the folder itself says so.
        shutil.rmtree(tmp_path / "expert.run", ignore_errors=True)
