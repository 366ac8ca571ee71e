"""Temperatures of a router, on mixtures whose posterior is known, and what training holds out for them."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hddm.data.shards import Shard, load_shard
from hddm.ensemble import temperature_at
from hddm.experts.records import ROUTER_FILE, read_router
from hddm.networks.folders import WEIGHTS
from hddm.training import router as router_training
from hddm.training.router import (
    calibrate_router,
    expected_calibration_error,
    fit_temperatures,
    held_out,
    train_router,
)
from hddm.utils.errors import HddmError
from hddm.utils.records import MANIFEST
from tests.artefacts import Command, contents, pixels_of, router_settings, with_pixels
from tests.oracles import GaussianMixture, exact_router

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
        shard.sample(n, 10 + k, SHAPE) for k, (shard, n) in enumerate(zip(mixtures, counts, strict=True))
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


@pytest.mark.parametrize("factor", [3.0, 0.5])
@pytest.mark.parametrize("knots", [1, 5])
def test_a_router_too_sure_or_too_shy_gets_its_temperature_back(
    factor: float, knots: int, mixtures: list[GaussianMixture], data: tuple[Tensor, Tensor]
) -> None:
    network = _network(mixtures, lambda t: torch.full_like(t, factor))
    temperatures, record = calibrate_router(network, 1000, *data, knots=knots)
    assert len(temperatures) == knots
    # At t = 1 the posterior is the prior, whatever the image: only its neighbourhood says anything there.
    assert temperatures[: max(knots - 1, 1)] == pytest.approx([factor] * max(knots - 1, 1), rel=0.15)
    assert temperatures[-1] == pytest.approx(factor, rel=0.25)
    assert record["ece_before"] > 0.08
    assert record["ece_after"] < 0.015
    assert record["cross_entropy_after"] < record["cross_entropy_before"]


def test_an_exact_router_keeps_its_probabilities(
    mixtures: list[GaussianMixture], data: tuple[Tensor, Tensor]
) -> None:
    temperatures, record = calibrate_router(_network(mixtures, torch.ones_like), 1000, *data)
    assert temperatures == pytest.approx([1] * 5, abs=0.2)
    assert record["ece_before"] < 0.015
    assert record["cross_entropy_after"] == pytest.approx(record["cross_entropy_before"], abs=1e-3)


def test_a_distortion_that_changes_over_time_is_recovered_by_the_table_alone(
    mixtures: list[GaussianMixture], data: tuple[Tensor, Tensor]
) -> None:
    distortion = [3.0, 2.5, 2.0, 1.0, 0.5]
    network = _network(mixtures, lambda t: temperature_at(t, distortion))
    found, record = calibrate_router(network, 1000, *data)
    assert found[:4] == pytest.approx(distortion[:4], rel=0.15)
    assert found[4] == pytest.approx(distortion[4], rel=0.3)
    one_for_all = calibrate_router(network, 1000, *data, knots=1)[1]
    assert record["ece_after"] < 0.015
    assert record["cross_entropy_after"] < one_for_all["cross_entropy_after"] - 1e-3
    by_time = [max(one["time_bins"], key=lambda b: b["ece_after"]) for one in (record, one_for_all)]
    assert by_time[0]["ece_after"] < 0.03 < by_time[1]["ece_after"]


def test_calibration_depends_on_the_seed_alone(
    mixtures: list[GaussianMixture], data: tuple[Tensor, Tensor]
) -> None:
    network = _network(mixtures, torch.ones_like)
    few = tuple(one[::40] for one in data)
    first, again, other = (calibrate_router(network, 1000, *few, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first[0] != other[0]


def test_a_router_that_is_never_wrong_gets_a_finite_temperature() -> None:
    labels = torch.arange(60) % 3
    logits = 50.0 * torch.nn.functional.one_hot(labels, 3)
    assert fit_temperatures(logits, torch.linspace(0, 1, 60), labels) == pytest.approx([1] * 5, abs=1e-3)
    # One that knows nothing has no scale.
    assert fit_temperatures(0 * logits, torch.linspace(0, 1, 60), labels) == pytest.approx([1] * 5)


@pytest.mark.parametrize("images", [None, 20])
def test_the_temperature_of_one_knot_is_that_of_a_fine_search(images: int | None) -> None:
    noise = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(200, 3, generator=noise, dtype=torch.float64)
    labels = torch.multinomial((logits / 2).softmax(1), 1, generator=noise)[:, 0]
    grid = torch.linspace(1, 4, 3001, dtype=torch.float64)
    losses = [
        torch.nn.functional.cross_entropy(logits / one, labels) + one.log() ** 2 / (2 * (images or 200))
        for one in grid
    ]
    best = grid[torch.stack(losses).argmin()].item()
    assert fit_temperatures(logits, torch.rand(200), labels, 1, images) == pytest.approx([best], abs=3e-3)


@pytest.mark.parametrize(
    ("largest", "right", "expected"),
    [
        # One bin a sample: |1 - 0.9|/2 + |0 - 0.6|/2.
        ([0.9, 0.6], [True, False], 0.35),
        # 0.95 and 0.97 share the bin (14/15, 1]: |0.5 - 0.96|.
        ([0.95, 0.97], [True, False], 0.46),
        # Half of those at 0.5 right: calibrated. Edges belong to the bin below: 0.6 = 9/15.
        ([0.5, 0.5], [True, False], 0.0),
        ([0.6, 0.59], [True, False], abs(0.5 - 0.595)),
        ([0.6, 0.61], [True, False], 0.4 / 2 + 0.61 / 2),
        ([1.0, 1.0, 1.0, 1.0], [True, True, True, False], 0.25),
    ],
)
def test_expected_calibration_error_is_that_of_paper_and_pencil(
    largest: list[float], right: list[bool], expected: float
) -> None:
    top = torch.tensor(largest, dtype=torch.float64)
    probabilities = torch.stack([top, 1 - top], dim=1)
    labels = torch.tensor([0 if one else 1 for one in right])
    assert expected_calibration_error(probabilities, labels) == pytest.approx(expected, abs=1e-12)


def test_fewer_bins_hide_what_cancels_within_them() -> None:
    top = torch.tensor([0.9, 0.6], dtype=torch.float64)
    found = expected_calibration_error(torch.stack([top, 1 - top], 1), torch.tensor([0, 1]), bins=1)
    assert found == pytest.approx(abs(0.5 - 0.75))


def test_what_is_held_out_is_a_part_of_the_shard_and_depends_on_content_alone(whole: Path) -> None:
    shard = load_shard(whole)
    kept = held_out(shard)
    assert kept.sum() == round(0.15 * len(shard))
    order = torch.randperm(len(shard), generator=torch.Generator().manual_seed(0))
    assert torch.equal(held_out(with_pixels(shard, pixels_of(shard)[order])), kept[order])
    # The same image twice is on one side.
    twice = held_out(with_pixels(shard, pixels_of(shard).repeat(2, 1, 1, 1)))
    assert torch.equal(twice[: len(order)], twice[len(order) :])


def test_a_shard_of_one_image_over_and_over_has_nothing_to_hold_out(whole: Path) -> None:
    shard = load_shard(whole)
    with pytest.raises(HddmError, match="too much alike to keep some from training; drop --calibrate"):
        held_out(with_pixels(shard, pixels_of(shard)[:1].repeat(20, 1, 1, 1)))


def test_held_out_images_are_never_trained_on(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_router(shards, tmp_path / "router", router_settings(calibrate=True))

    def without_held_out(folder: Path) -> Shard:
        shard = load_shard(folder)
        return with_pixels(shard, pixels_of(shard)[~held_out(shard)])

    monkeypatch.setattr(router_training, "open_shard", without_held_out)
    train_router(shards, tmp_path / "rest", router_settings())
    weights = [contents(tmp_path / name)[WEIGHTS] for name in ("router", "rest")]
    assert weights[0] == weights[1]


def test_training_writes_what_calibration_found(shards: Path, tmp_path: Path, hddm: Command) -> None:
    train_router(shards, tmp_path / "router", router_settings(calibrate=True))
    facts = read_router(tmp_path / "router")[1]
    assert len(facts.temperatures) == 5
    found = facts.calibration
    assert found["held_out_share"] == 0.15
    assert [round(0.15 * n) for n in facts.shard_images] == found["held_out_images"]
    assert len(found["time_bins"]) == 5
    assert found["ece_before"] >= 0 <= found["ece_after"]
    options = ["--steps", 10, "--batch-size", 16, "--learning-rate", 3e-3, "--seed", 7]
    code, out, _ = hddm("train", "router", shards, "--out", tmp_path / "again", *options, "--calibrate")
    assert code == 0
    assert "8 images kept from training: expected calibration error 0." in out


def test_without_the_option_a_router_is_as_before(shards: Path, tmp_path: Path) -> None:
    train_router(shards, tmp_path / "router", router_settings())
    facts = read_router(tmp_path / "router")[1]
    assert facts.temperatures == (1.0,)
    assert facts.calibration == {}
    train_router(shards, tmp_path / "again", router_settings())
    first, again = contents(tmp_path / "router"), contents(tmp_path / "again")
    assert {name for name in first if first[name] != again[name]} <= {ROUTER_FILE, MANIFEST}
