"""Training: losses that do not drift, and weights that depend on seed and shard alone."""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import hddm
from hddm.data.images import to_unit_range
from hddm.data.partition import partition
from hddm.training.expert import train_expert
from hddm.training.router import train_router
from hddm.training.settings import ExpertRecipe, ExpertSettings, resolve
from hddm.utils.records import WEIGHTS
from tests.artefacts import (
    CLASSES,
    contents,
    copied,
    draw,
    expert_settings,
    refusal,
    router_settings,
    shard_record,
    write_images,
)

GOLDEN = Path(__file__).parent / "golden"


def _check_golden(name: str, losses: list[float], rel: float = 1e-4) -> None:
    """Compare with ``golden/<name>.txt``; a failure shows the file as it would now be."""
    lines = "".join(f"{step} {loss:.8f}\n" for step, loss in enumerate(losses, 1))
    rows = [line.split() for line in (GOLDEN / f"{name}.txt").read_text().splitlines()]
    assert [int(step) for step, _ in rows] == list(range(1, 11)), lines
    assert losses == pytest.approx([float(loss) for _, loss in rows], rel=rel), lines


@pytest.mark.parametrize("objective", ["flow", "ddpm"])
def test_an_experts_losses_are_the_golden_ones(objective: str, whole: Path, tmp_path: Path) -> None:
    prediction = {"flow": "flow_prediction", "ddpm": "epsilon"}[objective]
    settings = expert_settings(objective, prediction=prediction, rotary=False)
    losses = train_expert(whole, tmp_path / "expert", settings)
    _check_golden(f"{objective}_tiny", losses)


@pytest.mark.parametrize(
    ("objective", "given", "name"),
    [
        ("flow", {}, "flow_sample"),
        ("ddpm", {}, "ddpm_epsilon"),
        # x_0 by the error of the velocity: flow's own draws, and losses that are near flow's.
        ("ddpm", {"prediction": "sample"}, "ddpm_sample"),
    ],
)
def test_losses_by_the_default_recipes_are_the_golden_ones(
    objective: Literal["flow", "ddpm"],
    given: dict[str, Any],
    name: str,
    whole: Path,
    tmp_path: Path,
) -> None:
    """Muon and rotary positions; ddpm predicts epsilon at uniform timesteps."""
    settings = ExpertSettings(
        objective=objective, steps=10, batch_size=16, size="tiny", seed=7, **given
    )
    # Muon makes matrices orthogonal in bfloat16.
    _check_golden(name, train_expert(whole, tmp_path / "expert", settings), rel=2e-3)


def test_a_routers_losses_are_the_golden_ones(shards: Path, tmp_path: Path) -> None:
    _check_golden("router_tiny", train_router(shards, tmp_path / "router", router_settings()))


def test_a_seed_decides_every_weight_and_another_seed_other_ones(
    shards: Path, flow_expert: Path, tmp_path: Path
) -> None:
    """On a copy of the shard that lies alone: the expert next door has no part in it."""
    shard = copied(shards / "shard_1", tmp_path)
    for name, seed in (("same", 7), ("other", 8)):
        train_expert(shard, tmp_path / name, expert_settings("flow", seed=seed))
    first, same, other = (
        contents(folder) for folder in (flow_expert, tmp_path / "same", tmp_path / "other")
    )
    assert first.keys() == same.keys()
    for file in (WEIGHTS, "config.json", "calibration.safetensors"):
        assert first[file] == same[file]
    assert first[WEIGHTS] != other[WEIGHTS]
    facts = json.loads(first["expert.json"])
    assert facts["shard"] == shard_record(shards / "shard_1")
    assert (facts["objective"], facts["prediction_type"]) == ("flow", "sample")
    used = resolve(ExpertRecipe, expert_settings("flow")).model_dump(mode="json")
    assert facts["training"].items() >= (used | {"images_seen": 160}).items()


_opened: list[Path] | None = None


def _note_open(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and _opened is not None and isinstance(arguments[0], str | Path):
        _opened.append(Path(arguments[0]).resolve())


def test_training_an_expert_opens_no_file_but_its_shards(
    root: Path, shards: Path, ensemble: Path, tmp_path: Path
) -> None:
    """Images, the other shard, experts and the router lie beside it."""
    global _opened
    sys.addaudithook(_note_open)
    _opened = []
    try:
        train_expert(shards / "shard_0", tmp_path / "expert", expert_settings("flow"))
        opened = [path for path in _opened if path.is_relative_to(root.resolve())]
    finally:
        _opened = None
    shard = (shards / "shard_0").resolve()
    assert shard / "manifest.json" in opened
    assert all(path.is_relative_to(shard) for path in opened)


def test_a_loss_that_is_not_finite_stops_and_writes_nothing(shards: Path, tmp_path: Path) -> None:
    message, wild = r"step \d+: loss .*nothing was written.*learning_rate", {"learning_rate": 1e30}
    for train, data, settings in (
        (train_expert, shards / "shard_0", expert_settings("flow", **wild)),
        (train_router, shards, router_settings(**wild)),
    ):
        assert re.search(message, refusal(train, data, tmp_path / "out", settings))
    assert not list(tmp_path.iterdir())


def test_an_expert_on_a_diffusers_schedule_is_loaded_with_it(whole: Path, tmp_path: Path) -> None:
    config = tmp_path / "scheduler_config.json"
    said = {
        "beta_schedule": "scaled_linear",
        "num_train_timesteps": 50,
        "prediction_type": "v_prediction",
    }
    config.write_text(json.dumps({"_class_name": "DDPMScheduler", **said}))
    train_expert(whole, tmp_path / "expert", expert_settings("ddpm", steps=2), config)
    schedule = hddm.schedules.from_diffusers(config)
    field = hddm.load(tmp_path / "expert")
    assert isinstance(field, hddm.VelocityField)
    times = torch.arange(50, dtype=torch.float64)
    assert torch.equal(field.schedule.log_snr(times), schedule.log_snr(times))
    assert field.time_scale == 1
    facts = json.loads((tmp_path / "expert" / "expert.json").read_text())
    assert facts["schedule_source"] == str(config)
    assert facts["prediction_type"] == "v_prediction"
    config.write_text('{"_class_name": "DDPMScheduler", "prediction_type": "noise"}')
    told = f"{config}: unknown prediction type 'noise': choose one of epsilon"
    assert told in refusal(train_expert, whole, tmp_path / "no", expert_settings("ddpm"), config)


def test_shards_that_do_not_fit_a_network_are_refused(
    images: Path, shards: Path, tmp_path: Path
) -> None:
    """Images that carry no labels, or whose shapes differ for a router."""
    labelled = expert_settings("flow", class_conditional=True)
    (flat,) = partition(images / "rows", tmp_path / "flat", 1)
    told = "no labels; drop `class_conditional=True`"
    assert told in refusal(train_expert, flat, tmp_path / "expert", labelled)
    folder = copied(shards, tmp_path)
    (other,) = partition(write_images(tmp_path / "images", side=6), tmp_path / "other", 1)
    shutil.rmtree(folder / "shard_1")
    other.rename(folder / "shard_1")
    told = "samples of different kinds"
    assert told in refusal(train_router, folder, tmp_path / "router", router_settings())
    assert not (tmp_path / "expert").exists()
    assert not (tmp_path / "router").exists()


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
