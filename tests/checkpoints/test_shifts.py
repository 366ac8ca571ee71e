"""The shift that an expert records is its pipeline's: held against diffusers' own grid of times."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift

from hddm.sampling import time_grid
from tests.artefacts import Command, copied, edit_json
from tests.checkpoint_files import converted, dit, facts_of, pipeline, plain_unet, refused
from tests.flow_models import flow_pipeline, flux, sd3

STEPS = 8
LENGTHS = ("base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len")
DYNAMIC = {"use_dynamic_shifting": True, "shift": 3.0}


def _check_grid(expert: Path, settings: dict[str, Any], num_patches: int) -> None:
    """Hold an expert's grid of times against that of a pipeline of Flux."""
    scheduler = FlowMatchEulerDiscreteScheduler(**settings)
    names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    mu = calculate_shift(num_patches, *(scheduler.config[name] for name in names))
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / STEPS, STEPS), mu=mu)
    ours = time_grid(STEPS, facts_of(expert)["shift"])
    torch.testing.assert_close(ours, scheduler.sigmas.double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "side"),
    [
        ({"shift": 3.0}, 8),
        ({"shift": 0.4}, 32),
        (DYNAMIC, 8),
        (DYNAMIC, 32),
        (DYNAMIC | dict(zip(LENGTHS, (0.2, 0.9, 16, 99), strict=True)), 8),
        (DYNAMIC | {"time_shift_type": "linear"}, 32),
    ],
    ids=str,
)
def test_the_time_grid_of_samples_is_the_pipelines(
    hddm: Command, tmp_path: Path, settings: dict[str, Any], side: int
) -> None:
    source = flow_pipeline(tmp_path / "source", flux(), **settings)
    said = converted(hddm, source, tmp_path / "expert", "--sample-size", side, "--no-verify")
    _check_grid(tmp_path / "expert", settings, side * side // 4)
    note = f"at {side}×{side}, of {side * side // 4} patches; at another size it is another"
    assert (note in said) == ("use_dynamic_shifting" in settings)


def test_flux_dev_at_1024_pixels_has_the_shift_that_is_known_of_it(hddm: Command, tmp_path: Path) -> None:
    source = flow_pipeline(tmp_path / "source", flux(), **DYNAMIC)
    converted(hddm, source, tmp_path / "expert", "--sample-size", 128, "--no-verify")
    assert facts_of(tmp_path / "expert")["shift"] == pytest.approx(math.exp(1.15))


def test_the_patches_of_sd3_are_those_of_its_config(hddm: Command, tmp_path: Path) -> None:
    converted(hddm, flow_pipeline(tmp_path / "source", sd3(), **DYNAMIC), tmp_path / "expert")
    _check_grid(tmp_path / "expert", DYNAMIC, 16)


@pytest.mark.integration
def test_a_shift_is_kept_where_scheduler_and_network_give_one(hddm: Command, tmp_path: Path) -> None:
    flow_sigmas = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 5.0}
    for source, shift, note in (
        (flow_pipeline(tmp_path / "unet", plain_unet(), **DYNAMIC), 1, "a UNet has none; no shift is kept"),
        (pipeline(tmp_path / "unipc", sd3(), UniPCMultistepScheduler(**flow_sigmas)), 5, ""),
        (pipeline(tmp_path / "ddpm", dit()), 1, ""),
    ):
        assert note in converted(hddm, source, tmp_path / f"{source.name}-expert")
        assert facts_of(tmp_path / f"{source.name}-expert")["shift"] == shift


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return flow_pipeline(tmp_path_factory.mktemp("shift") / "source", sd3())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"shift": -3}, "a shift is from 0.001 to 1000"),
        ({"shift": 10**9}, "a shift is from 0.001 to 1000"),
        ({"shift": 10**400}, "a whole number of 401 digits"),
        ({"shift": "3"}, "shift is 3, and must be a number"),
        ({"shift": None}, "shift is None"),
        ({"shift": float("nan")}, "shift is nan"),
        (DYNAMIC | {"max_shift": 10**6}, "a shift is from"),
        (DYNAMIC | {"max_shift": "a"}, "max_shift is a"),
        (DYNAMIC | {"max_image_seq_len": 256}, "no shift comes of"),
        (DYNAMIC | {"time_shift_type": "cubic"}, "'cubic'"),
        (DYNAMIC | {"time_shift_type": "linear", "base_shift": -1}, "a shift is from"),
        ({"invert_sigmas": True}, "invert_sigmas turns time around"),
    ],
    ids=str,
)
def test_a_scheduler_without_a_sound_shift_is_refused(
    hddm: Command, tmp_path: Path, source: Path, changes: dict[str, Any], said: str
) -> None:
    folder = copied(source, tmp_path)
    edit_json(folder / "scheduler" / "scheduler_config.json", **changes)
    assert said in refused(hddm, folder)


def test_inspect_tells_it_where_the_size_is_known(hddm: Command, tmp_path: Path, source: Path) -> None:
    folder = copied(source, tmp_path)
    edit_json(folder / "scheduler" / "scheduler_config.json", shift=3.0)
    assert "\nshift: 3\n" in hddm("inspect", folder)[1]
    unknown = flow_pipeline(tmp_path / "flux", flux(), **DYNAMIC)
    assert "\nshift: none\n" in hddm("inspect", unknown)[1]
