"""The router: its accuracy against chance, and temperatures on mixtures whose posterior is known."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hddm.data.partition import partition
from hddm.data.shard_records import PIXELS, find_shards
from hddm.data.shards import Rows, Samples, Shard, open_shard
from hddm.experts.record_folders import read_router
from hddm.experts.records import ROUTER_FILE, is_at_chance
from hddm.routers import temperature_at
from hddm.training import router as router_training
from hddm.training.router import held_out, train_router
from hddm.training.router_accuracy import Evidence, accuracy_of
from hddm.training.router_temperatures import (
    calibrate_router,
    expected_calibration_error,
    fit_temperatures,
)
from hddm.utils.records import WEIGHTS
from tests.artefacts import Command, contents, pixels_of, router_settings, with_pixels, write_images
from tests.oracles import GaussianMixture, exact_router

OPTIONS = ("--steps", 100, "--batch-size", 32, "--learning-rate", 3e-3, "--seed", 7)


def _evidence(labels: Tensor, pixels: Tensor) -> Evidence:
    """Images of four pixels, all of them alike."""
    images = pixels.to(torch.uint8)[:, None, None, None].expand(-1, 1, 2, 2)
    return Evidence(Samples({PIXELS: Rows((images,))}), torch.arange(len(labels)), labels, "images")


def _by_sign(x_t: Tensor, timestep: Tensor) -> Tensor:
    """Names shard 1 where the sum of all pixels is positive."""
    total = x_t.flatten(1).sum(1)
    return torch.stack([-total, total], dim=1)


def test_accuracy_is_the_mean_over_all_noise_levels() -> None:
    """Images of -1 and +1: the sum is ±4 (1 - t) + 2 t eps, and has the right sign with Φ(2 (1 - t)/t)."""
    labels = torch.arange(64) % 2
    found = accuracy_of(_by_sign, _evidence(labels, 255 * labels), seed=0)
    t = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    expected = torch.special.ndtr(2 * (1 - t) / t).mean().item()
    assert found["accuracy"] == pytest.approx(expected, abs=0.015)
    assert (found["images"], found["of"], found["chance"]) == (64, "images", 0.5)
    assert found["deviation"] == pytest.approx(0.0625)
    assert not is_at_chance(found)


def test_naming_one_shard_always_is_chance() -> None:
    labels = torch.tensor([0] * 10 + [1] * 30)

    def constant(x_t: Tensor, timestep: Tensor) -> Tensor:
        return torch.tensor([0.0, 1.0]).expand(len(x_t), 2)

    found = accuracy_of(constant, _evidence(labels, 0 * labels), seed=0)
    assert found["accuracy"] == found["chance"] == 0.75
    assert is_at_chance(found)


def _accuracy(out: Path) -> Any:
    return json.loads((out / ROUTER_FILE).read_text())["training"]["accuracy"]


@pytest.mark.integration
def test_a_router_that_learnt_nothing_is_warned_of(
    shards: Path, whole: Path, tmp_path: Path, hddm: Command, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "router"
    train_router(whole.parent, tmp_path / "one", router_settings(steps=2))
    # One shard needs no telling apart.
    assert "chance" not in caplog.text
    train_router(shards, out, router_settings(learning_rate=1e-12))
    assert f"{out}: recognises shards no better than chance on 48 images" in caplog.text
    caplog.clear()
    code, printed, err = hddm("train", "router", shards, "--out", tmp_path / "learnt", *OPTIONS)
    assert code == 0, err
    assert "no better than chance" not in caplog.text
    found = _accuracy(tmp_path / "learnt")
    assert found["accuracy"] > 0.75 > found["chance"] + 2 * found["deviation"]
    assert f"names the shard of {found['accuracy']:.1%} of 48 training images" in printed


@pytest.mark.integration
def test_a_router_is_judged_by_images_that_it_was_not_trained_on_where_there_are_some(
    tmp_path: Path,
) -> None:
    folders = partition(write_images(tmp_path / "images", 60), tmp_path / "shards", 2, held_out=0.4)
    train_router(tmp_path / "shards", tmp_path / "router", router_settings())
    held_out = [tmp_path / "shards" / "held_out" / folder.name for folder in folders]
    number = sum(len(json.loads((one / "manifest.json").read_text())["images"]) for one in held_out)
    assert 32 <= number < 80
    found = _accuracy(tmp_path / "router")
    assert (found["of"], found["images"]) == ("held-out images", number)

    shutil.rmtree(tmp_path / "shards" / "held_out")
    train_router(tmp_path / "shards", tmp_path / "kept", router_settings(calibrate=True))
    found = _accuracy(tmp_path / "kept")
    assert (found["of"], found["images"]) == (
        "images kept from training",
        round(0.15 * (120 - number)),
    )


@pytest.mark.integration
def test_shards_of_several_partitions_are_told_apart_in_their_order(
    shards: Path, tmp_path: Path, hddm: Command
) -> None:
    other = tmp_path / "other"
    (shard,) = partition(write_images(tmp_path / "images", 20), other, 1, held_out=0.4)
    folders = [*find_shards(shards), shard]
    code, printed, err = hddm(
        "train", "router", shards, other, "--out", tmp_path / "both", *OPTIONS
    )
    assert code == 0, err
    # Only one of the two holds images out.
    assert "training images at all noise levels" in printed
    _, record = read_router(tmp_path / "both")
    assert record.shard_hashes == tuple(open_shard(folder).hash for folder in folders)
    assert record.shard_images == tuple(len(open_shard(folder)) for folder in folders)
    told = f"{shard}: holds the same images as {shard}; name each shard once"
    assert (
        told in hddm("train", "router", other, shards, other, "--out", tmp_path / "no", *OPTIONS)[2]
    )


PRIOR = (0.5, 0.3, 0.2)
SHAPE = (1, 2, 2)


@pytest.fixture(scope="module")
def mixtures() -> list[GaussianMixture]:
    return [GaussianMixture.random(k, modes=2, dim=4, spread=1.5) for k in range(3)]


@pytest.fixture(scope="module")
def data(mixtures: Sequence[GaussianMixture]) -> tuple[Tensor, Tensor]:
    """Images of all shards in the shares of the prior, and their shards."""
    counts = [round(4000 * share) for share in PRIOR]
    images = [
        shard.sample(n, 10 + k, SHAPE)
        for k, (shard, n) in enumerate(zip(mixtures, counts, strict=True))
    ]
    return torch.cat(images), torch.repeat_interleave(torch.arange(3), torch.tensor(counts))


def _network(
    shards: Sequence[GaussianMixture], sharpness: Callable[[Tensor], Tensor]
) -> Callable[[Tensor, Tensor], Tensor]:
    """Logits of the exact posterior times ``sharpness(t)``; it counts time in thousands."""
    router = exact_router(shards, PRIOR)

    def network(x_t: Tensor, timestep: Tensor) -> Tensor:
        t = timestep / 1000
        # Any constant may be added to a sample's logits.
        return router(x_t, t).log() * sharpness(t)[:, None] + 7

    return network


def test_an_exact_router_keeps_its_probabilities_and_draws_depend_on_the_seed_alone(
    mixtures: list[GaussianMixture], data: tuple[Tensor, Tensor]
) -> None:
    network = _network(mixtures, torch.ones_like)
    temperatures, record = calibrate_router(network, *data)
    assert temperatures == pytest.approx([1] * 5, abs=0.2)
    assert record["ece_before"] < 0.015
    assert record["cross_entropy_after"] == pytest.approx(record["cross_entropy_before"], abs=1e-3)
    few = tuple(one[::40] for one in data)
    first, again, other = (calibrate_router(network, *few, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first[0] != other[0]


@pytest.mark.parametrize("factor", [3.0, 0.5])
@pytest.mark.parametrize("knots", [1, 5])
def test_a_router_too_sure_or_too_shy_gets_its_temperature_back(
    factor: float, knots: int, mixtures: list[GaussianMixture], data: tuple[Tensor, Tensor]
) -> None:
    network = _network(mixtures, lambda t: torch.full_like(t, factor))
    temperatures, record = calibrate_router(network, *data, knots=knots)
    assert len(temperatures) == knots
    # At t = 1 the posterior is the prior, whatever the image: only its neighbourhood says anything there.
    assert temperatures[: max(knots - 1, 1)] == pytest.approx(
        [factor] * max(knots - 1, 1), rel=0.15
    )
    assert temperatures[-1] == pytest.approx(factor, rel=0.25)
    assert record["ece_before"] > 0.08
    assert record["ece_after"] < 0.015
    assert record["cross_entropy_after"] < record["cross_entropy_before"]


def test_a_distortion_that_changes_over_time_is_recovered_by_the_table_alone(
    mixtures: list[GaussianMixture], data: tuple[Tensor, Tensor]
) -> None:
    distortion = [3.0, 2.5, 2.0, 1.0, 0.5]
    network = _network(mixtures, lambda t: temperature_at(t, distortion))
    found, record = calibrate_router(network, *data)
    assert found[:4] == pytest.approx(distortion[:4], rel=0.15)
    assert found[4] == pytest.approx(distortion[4], rel=0.3)
    one_for_all = calibrate_router(network, *data, knots=1)[1]
    assert record["ece_after"] < 0.015
    assert record["cross_entropy_after"] < one_for_all["cross_entropy_after"] - 1e-3


def test_a_router_that_is_never_wrong_gets_a_finite_temperature() -> None:
    labels = torch.arange(60) % 3
    logits = 50.0 * torch.nn.functional.one_hot(labels, 3)
    assert fit_temperatures(logits, torch.linspace(0, 1, 60), labels) == pytest.approx(
        [1] * 5, abs=1e-3
    )
    # One that knows nothing has no scale.
    assert fit_temperatures(0 * logits, torch.linspace(0, 1, 60), labels) == pytest.approx([1] * 5)


def test_expected_calibration_error_is_that_of_paper_and_pencil() -> None:
    for largest, right, expected in (
        # One bin a sample: |1 - 0.9|/2 + |0 - 0.6|/2.
        ([0.9, 0.6], [True, False], 0.35),
        # 0.95 and 0.97 share the bin (14/15, 1]: |0.5 - 0.96|.
        ([0.95, 0.97], [True, False], 0.46),
        # Edges belong to the bin below: 0.6 = 9/15.
        ([0.6, 0.59], [True, False], abs(0.5 - 0.595)),
        ([0.6, 0.61], [True, False], 0.4 / 2 + 0.61 / 2),
    ):
        top = torch.tensor(largest, dtype=torch.float64)
        labels = (~torch.tensor(right)).long()
        found = expected_calibration_error(torch.stack([top, 1 - top], dim=1), labels)
        assert found == pytest.approx(expected, abs=1e-12)


def test_what_is_held_out_is_a_part_of_the_shard_and_depends_on_content_alone(whole: Path) -> None:
    shard = open_shard(whole)
    kept = held_out(shard)
    assert kept.sum() == round(0.15 * len(shard))
    order = torch.randperm(len(shard), generator=torch.Generator().manual_seed(0))
    assert torch.equal(held_out(with_pixels(shard, pixels_of(shard)[order])), kept[order])
    # The same image twice is on one side.
    twice = held_out(with_pixels(shard, pixels_of(shard).repeat(2, 1, 1, 1)))
    assert torch.equal(twice[: len(order)], twice[len(order) :])


@pytest.mark.integration
def test_held_out_images_are_never_trained_on_and_what_they_say_is_recorded(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hddm: Command
) -> None:
    options = [
        "--steps",
        10,
        "--batch-size",
        16,
        "--learning-rate",
        3e-3,
        "--seed",
        7,
        "--warmup",
        2,
    ]
    out = tmp_path / "router"
    code, told, err = hddm(
        "train", "router", shards, "--out", out, *options, "--ema-decay", 0.9, "--calibrate"
    )
    assert code == 0, err
    assert "8 images kept from training: expected calibration error 0." in told
    facts = read_router(out)[1]
    assert len(facts.temperatures) == 5
    assert facts.calibration["held_out_share"] == 0.15
    assert [round(0.15 * n) for n in facts.shard_images] == facts.calibration["held_out_images"]

    def without_held_out(folder: Path) -> Shard:
        shard = open_shard(folder)
        return with_pixels(shard, pixels_of(shard)[~held_out(shard)])

    monkeypatch.setattr(router_training, "open_shard", without_held_out)
    train_router(shards, tmp_path / "rest", router_settings(optimizer="muon"))
    weights = [contents(tmp_path / name)[WEIGHTS] for name in ("router", "rest")]
    assert weights[0] == weights[1]
    facts = read_router(tmp_path / "rest")[1]
    assert (facts.temperatures, facts.calibration) == ((1.0,), {})
