"""Calibrating on a shard: how much of it is held in memory, and where the network runs."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import hddm
from hddm.calibration import FILE_NAME
from hddm.data.shards import Shard, load_shard
from hddm.training.expert import calibration_rows, train_expert
from tests.artefacts import expert_settings


@dataclass(frozen=True)
class _Samples:
    """So many of a shape, that are never looked at."""

    number: int
    shape: tuple[int, int, int]

    def __len__(self) -> int:
        return self.number


@dataclass(frozen=True)
class _Tokens:
    """Of captions that are never looked at."""

    null: Tensor


@pytest.fixture(scope="module")
def shard(whole: Path) -> Shard:
    return load_shard(whole)


@pytest.mark.parametrize(
    ("number", "shape", "expected"),
    [
        (1000, (3, 32, 32), 1000),
        (10**6, (4, 64, 64), 4096),
        # 1 GiB is 682 samples of 1.5 MiB in float64.
        (10**6, (3, 256, 256), 682),
        (10**6, (3, 8192, 8192), 16),
        (10, (3, 8192, 8192), 10),
    ],
)
def test_large_samples_are_few(number: int, shape: tuple[int, int, int], expected: int, shard: Shard) -> None:
    rows = calibration_rows(replace(shard, stored=_Samples(number, shape)))
    assert len(rows) == len(rows.unique()) == expected
    assert (rows[0], rows[-1]) == (0, number - 1)


def test_tokens_count_as_well(shard: Shard) -> None:
    """4 MiB of tokens beside 128 KiB of samples."""
    large = replace(shard, stored=_Samples(10**6, (4, 64, 64)), texts=_Tokens(torch.empty(512, 2048)))
    assert len(calibration_rows(large)) == 248


@pytest.mark.gpu
def test_an_expert_is_calibrated_where_it_was_trained(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hddm.training import expert as shard_calibration

    places, calibrate = [], shard_calibration.calibrate

    def told(velocity, images, *given):  # type: ignore[no-untyped-def]
        places.append(images.device.type)
        return calibrate(velocity, images, *given)

    monkeypatch.setattr(shard_calibration, "calibrate", told)
    settings = expert_settings("flow", steps=2, class_conditional=True, device="cuda")
    train_expert(whole, tmp_path / "out", settings)
    assert places == ["cuda"]
    assert json.loads((tmp_path / "out" / "expert.json").read_text())["training"]["steps"] == 2
    assert (tmp_path / "out" / FILE_NAME).exists()
    assert hddm.sample(hddm.load(tmp_path / "out"), 2, steps=2).isfinite().all()
