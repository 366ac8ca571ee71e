"""What training is for: experts that draw their data, routers that tell shards apart, calibrations."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import hddm
from hddm.data.images import to_unit_range
from hddm.data.partition import partition
from hddm.data.shard_records import find_shards
from hddm.data.shards import load_shard
from hddm.ensemble import Router
from hddm.experts.records import read_router
from hddm.training.calibrate import recalibrate
from hddm.training.router import train_router
from hddm.utils.errors import HddmError
from tests.artefacts import CLASSES, contents, copied, draw, largest_file, router_settings, write_images


@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_a_class_conditional_expert_draws_the_class_that_it_is_asked_for(
    guidance: float, class_expert: Path
) -> None:
    field = hddm.load(class_expert)
    assert field.classes == CLASSES
    labels = torch.tensor([0, 1]).repeat(16)
    samples = hddm.sample(field, 32, steps=20, guidance_scale=guidance, class_labels=labels)
    means = torch.stack([to_unit_range(draw(name, 200, seed=9)).mean(0) for name in CLASSES])
    distances = (samples[:, None] - means).square().flatten(2).sum(2)
    assert (distances.argmin(1) == labels).float().mean() >= 0.9
    unconditional = hddm.sample(field, 32, steps=20)
    assert (samples - unconditional).abs().max() > 0.1


def test_a_router_tells_shards_apart_until_noise_hides_them(shards: Path, tmp_path: Path) -> None:
    train_router(shards, tmp_path / "router", router_settings(steps=200, batch_size=64, warmup=10))
    network, facts = read_router(tmp_path / "router")
    loaded = [load_shard(folder) for folder in find_shards(shards)]
    assert facts.shard_hashes == tuple(shard.hash for shard in loaded)
    router, noise = Router(network, facts.time_scale), torch.Generator().manual_seed(0)
    for k, shard in enumerate(loaded):
        eps = torch.randn(shard.images.shape, generator=noise)
        clear = router(0.9 * shard.images + 0.1 * eps, torch.full((len(shard),), 0.1))
        assert (clear.argmax(1) == k).float().mean() >= 0.9
        hidden = router(eps, torch.ones(len(shard)))
        assert (hidden.mean(0) - 0.5).abs().max() < 0.1


def test_recalibrating_repeats_itself_and_leaves_linked_copies_alone(
    shards: Path, ddpm_expert: Path, tmp_path: Path
) -> None:
    expert = copied(ddpm_expert, tmp_path)
    file = expert / "calibration.safetensors"
    linked = tmp_path / "linked"
    linked.hardlink_to(file)
    first = file.read_bytes()
    recalibrate(expert, shards / "shard_0", seed=7)
    assert file.read_bytes() == first
    recalibrate(expert, shards / "shard_0", seed=8)
    assert load_file(file)["weights"].ne(load_file(linked)["weights"]).any()
    assert linked.read_bytes() == first
    assert contents(expert).keys() == contents(ddpm_expert).keys()


def test_a_calibration_that_cannot_be_written_leaves_the_expert_as_it_was(
    shards: Path, ddpm_expert: Path, tmp_path: Path
) -> None:
    expert = copied(ddpm_expert, tmp_path)
    with largest_file(1000), pytest.raises(HddmError, match=r"cannot be written.*File too large"):
        recalibrate(expert, shards / "shard_0", seed=8)
    assert contents(expert) == contents(ddpm_expert)
    assert len(list(expert.iterdir())) == len(list(ddpm_expert.iterdir()))


def test_an_ensemble_cannot_be_calibrated(ensemble: Path, shards: Path) -> None:
    with pytest.raises(HddmError, match="an ensemble; calibrate its experts one by one"):
        recalibrate(ensemble, shards / "shard_0")


def test_images_of_another_shape_do_not_calibrate(ddpm_expert: Path, tmp_path: Path) -> None:
    (large,) = partition(write_images(tmp_path / "images", side=6), tmp_path / "shards", 1)
    with pytest.raises(HddmError, match=r"images are \(1, 6, 6\), the expert's samples \(1, 4, 4\)"):
        recalibrate(ddpm_expert, large)
