"""Experts and routers of pictures in buckets of aspect ratios."""

import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import hddm
from hddm.data.shard_records import find_shards
from hddm.data.shards import JoinedStore, open_shard
from hddm.experts.assembly import assemble
from hddm.experts.records import read_expert, read_router
from hddm.training.calibrate import recalibrate
from hddm.training.continuation import _refuse_sizes, continue_expert
from hddm.training.expert import train_expert
from hddm.training.loop import Order
from hddm.training.router import Evidence, noised_logits, train_router
from hddm.training.settings import RunOptions
from hddm.training.verify import verify_expert
from tests.artefacts import (
    Command,
    Died,
    copied,
    ending_at,
    expert_settings,
    refusal,
    router_settings,
)
from tests.killed_runs import checkpoint
from tests.shard_files import encode, write_partition, write_shard

BATCH = 4
SIZES = (10, 5, 3)


def _order(batch: int = BATCH) -> Order:
    """Samples 0 … 17 in three buckets."""
    return Order(18, batch, 3, (1,), torch.arange(18).split(SIZES))


def _bucket(rows: Tensor) -> int:
    """The only bucket of a batch."""
    (found,) = torch.searchsorted(torch.tensor(SIZES).cumsum(0), rows, right=True).unique().tolist()
    return int(found)


def test_batches_are_of_one_bucket_and_every_sample_counts_alike() -> None:
    order, streams, seen = _order(), [list[int](), list[int](), list[int]()], 0
    for epoch in range(1, 9):
        # By its end each bucket has given all the batches that its samples have filled so often.
        ends = [epoch * size // BATCH for size in SIZES]
        for step in range(seen + 1, sum(ends) + 1):
            rows = order.rows(step)
            streams[_bucket(rows)] += rows.tolist()
        seen = sum(ends)
        assert [len(stream) // BATCH for stream in streams] == ends
    # Eight epochs divide by the batch: every sample came eight times, and once an epoch of its bucket.
    assert torch.tensor([row for stream in streams for row in stream]).bincount().tolist() == [8] * 18
    for stream, size in zip(streams, SIZES, strict=True):
        epochs = torch.tensor(stream).view(-1, size)
        assert (epochs.sort(1).values == epochs.min() + torch.arange(size)).all()
        assert len({tuple(epoch) for epoch in epochs.tolist()}) > 1
    assert len({_bucket(order.rows(step)) for step in range(1, 5)}) > 1


def test_a_batch_of_buckets_depends_on_the_seed_and_its_step_alone() -> None:
    whole = _order()
    rows = [whole.rows(step) for step in range(1, 40)]
    for step in (1, 17, 39):
        assert torch.equal(_order().rows(step), rows[step - 1])
    other = Order(18, BATCH, 4, (1,), torch.arange(18).split(SIZES))
    assert not torch.equal(torch.stack([other.rows(step) for step in range(1, 40)]), torch.stack(rows))


def test_one_bucket_is_in_the_order_of_none() -> None:
    plain, single = Order(10, 4, 3, (1,)), Order(10, 4, 3, (1,), [torch.arange(10)])
    for step in range(1, 20):
        assert torch.equal(plain.rows(step), single.rows(step))


def _half_bright(num: int, height: int, width: int, seed: int) -> list[np.ndarray]:
    """Gray pictures under noise, bright on the left where they are wide, on top where they are tall."""
    pictures = np.random.default_rng(seed).integers(20, 60, (num, height, width)).astype(np.uint8)
    if width > height:
        pictures[:, :, : width // 2] += 180
    else:
        pictures[:, : height // 2] += 180
    return list(pictures)


def _write(folder: Path, shard: int = 0, held_out_of: str | None = None) -> str:
    """A shard of 40 wide and 24 tall pictures: at 8 pixels and steps of 2, 6×10 and 10×6."""
    pictures = [*_half_bright(40, 6, 10, shard), *_half_bright(24, 20, 12, shard)]
    return write_shard(folder, pictures, None, None, shard, 2, held_out_of)


OPTIONS: dict[str, Any] = {"resolution": 8, "buckets": True, "bucket_step": 2}


@pytest.fixture(scope="module")
def bucketed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bucketed")
    _write(root / "source")
    return encode(root / "source", root / "out", **OPTIONS)


@pytest.fixture(scope="module")
def trained(bucketed: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A flow expert of both aspect ratios, and its losses."""
    out = tmp_path_factory.mktemp("trained") / "expert"
    settings = expert_settings("flow", steps=240, batch_size=8, ema_decay=0.95)
    return out, train_expert(bucketed, out, settings)


def test_both_ratios_are_learned_and_sampled(bucketed: Path, trained: tuple[Path, list[float]]) -> None:
    out, losses = trained
    shard = open_shard(bucketed)
    order = Order(64, 8, 7, (shard.index,), tuple(shard.buckets.values()))
    by_bucket: list[list[float]] = [[], []]
    for step, loss in enumerate(losses, 1):
        by_bucket[int(order.rows(step).min() >= 40)].append(loss)
    assert [len(one) for one in by_bucket] == [150, 90]
    for one in by_bucket:
        assert np.mean(one[-20:]) < 0.5 * np.mean(one[:20])
    expert = hddm.load(out)
    assert (expert.sample_shape, expert.calibration) == ((1, 8, 8), None)
    wide = hddm.sample(expert, 16, shape=(1, 6, 10)).mean((0, 1))
    assert wide[:, :5].mean() - wide[:, 5:].mean() > 1
    tall = hddm.sample(expert, 16, shape=(1, 10, 6)).mean((0, 1))
    assert tall[:5].mean() - tall[5:].mean() > 1


def test_pictures_of_any_size_are_sampled_by_the_command_line(
    trained: tuple[Path, list[float]], tmp_path: Path, hddm: Command
) -> None:
    assemble([trained[0]], tmp_path / "ensemble", strategy="draw")
    options = ("--num-images", 3, "--steps", 2, "--width", 10, "--height", 6, "--grid")
    for source in (trained[0], tmp_path / "ensemble"):
        out = tmp_path / f"{source.name}-samples"
        assert hddm("sample", source, "--out", out, *options)[0] == 0
        for path in sorted(out.glob("*.png")):
            with Image.open(path) as image:
                assert image.size == (10, 6)
        with Image.open(tmp_path / f"{source.name}-samples.grid.png") as sheet:
            # Cells are squares of 90 pixels, nine times the longer side.
            assert sheet.size == (2 * 92 - 2, 2 * 92 - 2)
    code, _, told = hddm("sample", trained[0], "--out", tmp_path / "odd", "--width", 9, "--num-images", 1)
    assert code == 1
    words = (
        "--height 8, --width 9: a network of images of 8×8 fails on it: (8, 9) does not divide into patches"
    )
    assert words in told.splitlines()[-1]
    assert not (tmp_path / "odd").exists()


def test_a_calibrated_expert_of_squares_says_why_it_makes_no_others(
    flow_expert: Path, tmp_path: Path, hddm: Command
) -> None:
    code, _, told = hddm("sample", flow_expert, "--out", tmp_path / "out", "--width", 8, "--num-images", 1)
    assert code == 1
    assert "--height 4, --width 8: a network of images of 4×4 fails on it: its calibration is of" in told
    # Nor others of as many numbers.
    code, _, told = hddm("sample", flow_expert, "--out", tmp_path / "out", "--width", 8, "--height", 2)
    assert (code, "its calibration is of samples (1, 4, 4), not of (1, 2, 8)" in told) == (1, True)


def test_a_training_on_buckets_that_broke_off_goes_on_to_the_same_weights(
    bucketed: Path, tmp_path: Path
) -> None:
    settings = expert_settings("flow", steps=9)
    whole = train_expert(bucketed, tmp_path / "whole", settings, run=RunOptions(sample_every=4))
    out, run = tmp_path / "out", RunOptions(checkpoint_every=2, sample_every=4)
    with pytest.raises(Died):
        train_expert(bucketed, out, settings, on_step=ending_at(5), run=run)
    again = RunOptions(checkpoint_every=2, sample_every=4, resume=True)
    assert train_expert(bucketed, out, settings, run=again) == whole
    assert checkpoint(tmp_path / "out.run") == checkpoint(tmp_path / "whole.run")
    # Pictures on the way are of the fullest bucket, four a row, enlarged sixfold, with borders.
    with Image.open(next((tmp_path / "out.run" / "samples").glob("*.png"))) as grid:
        assert grid.size[0] == 4 * (10 * 6 + 2)


def test_buckets_of_less_than_a_batch_and_of_no_whole_patches_are_told(
    bucketed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "hddm"):
        train_expert(bucketed, tmp_path / "out", expert_settings("flow", steps=1, batch_size=32))
    assert "its bucket of 6×10 has 24 pictures, less than a batch of 32" in caplog.text
    assert "bucket of 10×6 has" not in caplog.text
    told = refusal(train_expert, bucketed, tmp_path / "mini", expert_settings("flow", size="mini"))
    assert "has a bucket of 10×6, and size mini takes sides divisible by 4; encode with a larger" in told


def test_a_router_learns_from_buckets_too(tmp_path: Path) -> None:
    write_partition(tmp_path / "shards", 20)
    for k in range(2):
        shutil.rmtree(tmp_path / "shards" / f"shard_{k}")
        _write(tmp_path / "shards" / f"shard_{k}", k)
    folder = encode(tmp_path / "shards", tmp_path / "out", **OPTIONS)
    losses = train_router(folder, tmp_path / "router", router_settings(calibrate=True))
    assert len(losses) == 10
    network, record = read_router(tmp_path / "router")
    assert record.sample_shape == (1, 8, 8)
    assert len(record.temperatures) == 5
    assert network(torch.zeros(1, 1, 6, 10), torch.zeros(1)).shape == (1, 2)

    # Logits by shape alone name the bucket of every noised image, and so that its rows are its own.
    shards = [open_shard(one) for one in find_shards(folder)]
    store = JoinedStore([shard.stored for shard in shards], shards[0].shape)
    is_tall = torch.cat([torch.arange(64) >= 40] * 2).long()
    evidence = Evidence(store, torch.arange(128), is_tall, "images")

    def by_shape(x_t: Tensor, timestep: Tensor) -> Tensor:
        return torch.eye(2)[int(x_t.shape[2] > x_t.shape[3])].expand(len(x_t), 2)

    noised = noised_logits(by_shape, 1000, evidence, 0, at_least=500, batch_size=50)
    assert torch.equal(noised.logits.argmax(1), noised.labels)
    assert noised.image.bincount().tolist() == [4] * 128


def test_what_takes_one_shape_refuses_buckets(
    bucketed: Path, trained: tuple[Path, list[float]], tmp_path: Path, hddm: Command
) -> None:
    words = "holds pictures in buckets of aspect ratios, and"
    assert f"{words} a calibration takes squares" in refusal(
        recalibrate, copied(trained[0], tmp_path / "copy"), bucketed
    )
    assert f"{words} hddm verify takes squares" in refusal(verify_expert, trained[0], bucketed)
    noise = expert_settings("ddpm", steps=2, prediction="epsilon")
    train_expert(bucketed, tmp_path / "noise", noise)
    flow = expert_settings("flow", steps=2)
    told = refusal(continue_expert, tmp_path / "noise", bucketed, tmp_path / "flow", flow)
    assert "which rests on moments of one shape, takes squares; encode them without buckets" in told
    code, _, told = hddm("evaluate", bucketed, "--reference", bucketed, "--out", tmp_path / "figures.json")
    assert (code, words in told) == (1, True)


class _Squares(torch.nn.Module):
    """A network that takes squares alone."""

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        if x.shape[2] != x.shape[3]:
            raise RuntimeError("only squares")
        return x


def test_experts_of_buckets_go_on_in_buckets(
    bucketed: Path, trained: tuple[Path, list[float]], tmp_path: Path
) -> None:
    """And networks that take no other size are refused before the first step."""
    losses = continue_expert(trained[0], bucketed, tmp_path / "on", expert_settings("flow", steps=12))
    assert max(losses) < 0.5 * np.mean(trained[1][:20])
    assert read_expert(tmp_path / "on").calibration is None
    folder = tmp_path / "unet"
    field = hddm.VelocityField(_Squares(), hddm.schedules.LinearSchedule(), "sample")
    told = refusal(_refuse_sizes, folder, field, open_shard(bucketed), {})
    assert f"{folder}: its network fails on the bucket of 10×6 of {bucketed}: only squares" in told
