"""Whether a router has learnt anything: its accuracy against chance, and on which images."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hddm.data.partition import partition
from hddm.data.shards import PixelStore, Rows
from hddm.experts.records import ROUTER_FILE
from hddm.training.router import Evidence, accuracy_of, is_better_than_chance, train_router
from hddm.utils.errors import HddmError
from tests.artefacts import Command, router_settings, write_images

OPTIONS = ("--steps", 100, "--batch-size", 32, "--learning-rate", 3e-3, "--seed", 7)


def _evidence(labels: Tensor, pixels: Tensor) -> Evidence:
    """Images of four pixels, all of them alike."""
    images = pixels.to(torch.uint8)[:, None, None, None].expand(-1, 1, 2, 2)
    return Evidence(PixelStore(Rows((images,))), torch.arange(len(labels)), labels, "images")


def _by_sign(x_t: Tensor, timestep: Tensor) -> Tensor:
    """Names shard 1 where the sum of all pixels is positive."""
    total = x_t.flatten(1).sum(1)
    return torch.stack([-total, total], dim=1)


def test_accuracy_is_the_mean_over_all_noise_levels() -> None:
    """Images of -1 and +1: the sum is ±4 (1 - t) + 2 t eps, and has the right sign with Φ(2 (1 - t)/t)."""
    labels = torch.arange(64) % 2
    found = accuracy_of(_by_sign, 1000, _evidence(labels, 255 * labels), seed=0)
    t = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    expected = torch.special.ndtr(2 * (1 - t) / t).mean().item()
    assert found["accuracy"] == pytest.approx(expected, abs=0.015)
    assert (found["images"], found["of"], found["chance"]) == (64, "images", 0.5)
    assert found["deviation"] == pytest.approx(0.0625)
    assert is_better_than_chance(found)


def test_naming_one_shard_always_is_chance_and_not_better() -> None:
    labels = torch.tensor([0] * 10 + [1] * 30)

    def constant(x_t: Tensor, timestep: Tensor) -> Tensor:
        return torch.tensor([0.0, 1.0]).expand(len(x_t), 2)

    found = accuracy_of(constant, 1000, _evidence(labels, 0 * labels), seed=0)
    assert found["accuracy"] == found["chance"] == 0.75
    assert not is_better_than_chance(found)


def test_luck_is_seldom_taken_for_knowledge() -> None:
    """Images say nothing of their shards, which the router names by the images all the same."""
    noise = torch.Generator().manual_seed(0)
    lucky = 0
    for seed in range(100):
        labels, pixels = torch.randint(2, (2, 40), generator=noise)
        lucky += is_better_than_chance(accuracy_of(_by_sign, 1000, _evidence(labels, 255 * pixels), seed))
    assert lucky <= 5


def _accuracy(out: Path) -> Any:
    return json.loads((out / ROUTER_FILE).read_text())["training"]["accuracy"]


def test_a_router_that_learnt_nothing_is_warned_of(
    shards: Path, tmp_path: Path, hddm: Command, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "router"
    code, printed, err = hddm("train", "router", shards, "--out", out, *OPTIONS, "--learning-rate", 1e-12)
    assert code == 0, err
    assert f"{out}: tells shards apart no better than chance, as far as 48 images show" in caplog.text
    caplog.clear()
    assert "48 training images at all noise levels; always naming the largest would be right" in printed
    code, printed, err = hddm("train", "router", shards, "--out", tmp_path / "learnt", *OPTIONS)
    assert code == 0, err
    assert "no better than chance" not in caplog.text
    found = _accuracy(tmp_path / "learnt")
    assert found["accuracy"] > 0.75 > found["chance"] + 2 * found["deviation"]
    assert f"names the shard of {found['accuracy']:.1%} of 48 training images" in printed


def test_a_router_is_judged_by_images_that_it_was_not_trained_on_where_there_are_some(tmp_path: Path) -> None:
    folders = partition(write_images(tmp_path / "images", 60), tmp_path / "shards", 2, held_out=0.4)
    train_router(tmp_path / "shards", tmp_path / "router", router_settings())
    held_out = [tmp_path / "shards" / "held_out" / folder.name for folder in folders]
    number = sum(len(json.loads((one / "manifest.json").read_text())["images"]) for one in held_out)
    assert 32 <= number < 80
    found = _accuracy(tmp_path / "router")
    assert (found["of"], found["images"]) == ("held-out images", number)

    # Shards change places, and what was kept from them does not.
    held_out[0].rename(tmp_path / "aside")
    held_out[1].rename(held_out[0])
    (tmp_path / "aside").rename(held_out[1])
    with pytest.raises(HddmError, match=r"held_out/shard_0: its images were not kept from .*shard_0"):
        train_router(tmp_path / "shards", tmp_path / "again", router_settings())
    assert not (tmp_path / "again").exists()

    shutil.rmtree(tmp_path / "shards" / "held_out")
    train_router(tmp_path / "shards", tmp_path / "kept", router_settings(calibrate=True))
    found = _accuracy(tmp_path / "kept")
    assert (found["of"], found["images"]) == ("images kept from training", round(0.15 * (120 - number)))


def test_one_shard_needs_no_telling_apart(
    whole: Path, tmp_path: Path, hddm: Command, caplog: pytest.LogCaptureFixture
) -> None:
    code, printed, err = hddm(
        "train", "router", whole.parent, "--out", tmp_path / "router", *OPTIONS[2:], "--steps", 2
    )
    assert code == 0, err
    assert "chance" not in caplog.text
    assert "names the shard" not in printed
