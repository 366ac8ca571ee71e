"""Ensembles of adapters: their base is there once, on disk and in what is read of it."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

import hddm
from hddm.experts.adapter_records import ADAPTER_WEIGHTS
from hddm.experts.assembly import assemble, change
from hddm.utils.errors import HddmError
from hddm.utils.files import sha256_of
from hddm.utils.records import WEIGHTS
from tests.artefacts import Command, refusal
from tests.checkpoint_files import record_of
from tests.ensemble_files import flow_expert
from tests.lora_files import states, write_adapter, write_base


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path / "base")


@pytest.fixture
def adapters(base: Path, tmp_path: Path) -> list[Path]:
    return [write_adapter(base, tmp_path / f"adapter{k}", seed=k) for k in (1, 2, 3)]


@pytest.fixture
def out(adapters: list[Path], tmp_path: Path) -> Path:
    """An ensemble of the three."""
    assemble(adapters, tmp_path / "out")
    return tmp_path / "out"


@torch.no_grad()
def _velocities(*folders: Path) -> Tensor:
    """Of every expert in each folder."""
    x, t = states()
    models = [hddm.load(folder) for folder in folders]
    return torch.stack(
        [field.velocity(x, t) for one in models for field in getattr(one, "experts", [one])]
    )


def _are_close(found: Tensor, expected: Tensor) -> bool:
    """True where they differ by rounding: adapters that share a base are not merged into it."""
    return float((found - expected).norm() / expected.norm()) <= 1e-5


def _files(folder: Path, name: str) -> list[Path]:
    return sorted(path for path in folder.rglob(name) if path.is_file())


def test_adapters_share_one_base(
    base: Path, adapters: list[Path], out: Path, tmp_path: Path
) -> None:
    (weights,) = _files(out, WEIGHTS)
    sha256 = sha256_of(base / WEIGHTS)
    assert weights == out / "bases" / sha256[:16] / WEIGHTS
    assert weights.stat().st_ino == (base / WEIGHTS).stat().st_ino
    copy = Path(shutil.copytree(out, tmp_path / "elsewhere" / "copy"))
    size = sum(path.stat().st_size for path in copy.rglob("*") if path.is_file())
    assert size < 2 * (base / WEIGHTS).stat().st_size
    expected = _velocities(*adapters)
    for folder in (base, *adapters, out):
        shutil.rmtree(folder)
    # Everything that it needs is in it.
    assert _are_close(_velocities(copy), expected)


def test_adapters_take_the_weights_of_their_base(
    base: Path, adapters: list[Path], tmp_path: Path
) -> None:
    other = write_base(tmp_path / "other", flow_expert(7))
    folders = [adapters[0], base, other, adapters[1]]
    assemble(folders, tmp_path / "out")
    assert not (tmp_path / "out" / "bases").exists()
    assert len(_files(tmp_path / "out", WEIGHTS)) == 2
    assert _are_close(_velocities(tmp_path / "out"), _velocities(*folders))
    # Taken out, it leaves its weights behind for those that need them.
    change(tmp_path / "out", remove=["experts/1"])
    assert len(_files(tmp_path / "out" / "bases", WEIGHTS)) == 1
    assert len(_files(tmp_path / "out", WEIGHTS)) == 2
    assert _are_close(_velocities(tmp_path / "out"), _velocities(adapters[0], other, adapters[1]))
    # Added again, they are taken from it.
    change(tmp_path / "out", add=[adapters[2], base], remove=[0])
    assert not (tmp_path / "out" / "bases").exists()
    assert _are_close(
        _velocities(tmp_path / "out"), _velocities(other, adapters[1], adapters[2], base)
    )
    change(tmp_path / "out", remove=[1, 2, 3])
    assert not (tmp_path / "out" / "bases").exists()
    assert len(_files(tmp_path / "out", WEIGHTS)) == 1


def test_a_saved_pipeline_has_the_same_adapters_and_base(
    base: Path, adapters: list[Path], out: Path, tmp_path: Path
) -> None:
    pipeline = hddm.HDDMPipeline.from_pretrained(out, torch_dtype=torch.bfloat16)
    x, t = states()
    # One has run and is in memory, the others are not.
    pipeline.ensemble.experts[1].velocity(x.bfloat16(), t)
    pipeline.save_pretrained(tmp_path / "saved")
    (weights,) = _files(tmp_path / "saved", WEIGHTS)
    assert weights.read_bytes() == (base / WEIGHTS).read_bytes()
    saved = _files(tmp_path / "saved", ADAPTER_WEIGHTS)
    assert [p.read_bytes() for p in saved] == [(p / ADAPTER_WEIGHTS).read_bytes() for p in adapters]
    assert _are_close(_velocities(tmp_path / "saved"), _velocities(*adapters))


def test_an_adapter_that_was_changed_in_memory_is_saved_merged(out: Path, tmp_path: Path) -> None:
    pipeline = hddm.HDDMPipeline.from_pretrained(out)
    x, t = states()
    field = pipeline.ensemble.experts[1]
    field.velocity(x, t)
    with torch.no_grad():
        next(p for p in field.network.parameters() if p.ndim == 2).mul_(2)
        expected = field.velocity(x, t)
    pipeline.save_pretrained(tmp_path / "saved")
    assert [p.parent.name for p in _files(tmp_path / "saved", ADAPTER_WEIGHTS)] == ["0", "2"]
    assert record_of(tmp_path / "saved" / "experts" / "1")["adapter"] is None
    assert torch.equal(_velocities(tmp_path / "saved")[1], expected)


def test_offloaded_adapters_give_the_same_samples(out: Path) -> None:
    here, *others = (
        hddm.sample(hddm.load(out, offload=mode), 6, steps=2, strategy="draw")
        for mode in ("none", "ram", "disk")
    )
    assert all(torch.equal(samples, here) for samples in others)


def test_an_ensemble_follows_no_path_out_of_it(base: Path, out: Path) -> None:
    (folder,) = (out / "bases").iterdir()
    folder.rename(out / "away")
    # Where it was at training it still is, but outside of the ensemble.
    with pytest.raises(
        HddmError, match=r"experts/0: is an adapter of base .* holds no diffusion_pytorch"
    ):
        hddm.load(out)
    folder.symlink_to(base)
    assert r"outside the folder; refused" in refusal(hddm.load, out)
    folder.unlink()
    (out / "away").rename(folder)
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(base / WEIGHTS)
    assert r"outside the folder" in refusal(hddm.load, out)


def test_a_spoilt_base_is_named(
    base: Path, adapters: list[Path], tmp_path: Path, hddm: Command
) -> None:
    moved = base.rename(tmp_path / "moved")
    code, _, err = hddm("assemble", *adapters, "--out", tmp_path / "out")
    assert code == 1
    assert "adapter1: is an adapter of base (SHA-256" in err
    code, out, _ = hddm("assemble", *adapters, "--out", tmp_path / "out", "--base", moved)
    assert (code, "3 experts" in out) == (0, True)
    write_base(base, flow_expert(3))
    code, _, err = hddm("assemble", *adapters, "--out", tmp_path / "other")
    assert code == 1
    assert f"{base / WEIGHTS}: has SHA-256" in err
    assert not (tmp_path / "other").exists()
