"""Schedules out of diffusers' scheduler configs."""

import json
import logging
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch

from hddm.schedules import (
    DDPM_FAMILY,
    FLOW_MATCH_FAMILY,
    DiscreteSchedule,
    LinearSchedule,
    Schedule,
    from_config,
    from_diffusers,
)
from hddm.utils.errors import HddmError
from tests.cases import Case, case_named, each_case

SD = {
    "_class_name": "PNDMScheduler",
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "num_train_timesteps": 1000,
    "skip_prk_steps": True,
}
FLOW_MATCH = ["FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler"]


def _alphas(schedule: Schedule) -> torch.Tensor:
    return schedule.alpha(torch.arange(int(schedule.end) + 1))


@each_case
def test_a_recorded_config_gives_the_same_schedule_after_json(case: Case) -> None:
    again = from_config(json.loads(json.dumps(case.schedule.config)))
    time = torch.linspace(0, case.schedule.end, 50, dtype=torch.float64)
    assert type(again) is type(case.schedule)
    assert torch.equal(again.log_snr(time), case.schedule.log_snr(time))


def test_betas_of_our_own_are_recorded_too() -> None:
    schedule = DiscreteSchedule(torch.linspace(0.01, 0.3, 20, dtype=torch.float64))
    again = from_config(json.loads(json.dumps(schedule.config)))
    assert torch.equal(_alphas(again), _alphas(schedule))


@pytest.mark.parametrize(
    "place", ["scheduler_config.json", "", "pipeline"], ids=["file", "folder", "pipeline folder"]
)
def test_a_config_is_found_by_path(place: str, tmp_path: Path) -> None:
    folder = tmp_path / "scheduler" if place == "pipeline" else tmp_path
    folder.mkdir(exist_ok=True)
    (folder / "scheduler_config.json").write_text(json.dumps(SD))
    source = tmp_path / place if place == "scheduler_config.json" else tmp_path
    expected = _alphas(case_named("sd-scaled-linear").schedule)
    assert torch.equal(_alphas(from_diffusers(source)), expected)
    assert torch.equal(_alphas(from_diffusers(str(source))), expected)


@pytest.mark.parametrize("name", FLOW_MATCH)
def test_a_flow_match_scheduler_is_the_linear_path_whatever_its_shift(name: str) -> None:
    scheduler = getattr(diffusers, name)(shift=3.0)
    assert from_diffusers(scheduler) == LinearSchedule()
    assert from_diffusers({**scheduler.config, "_class_name": name}) == LinearSchedule()


def test_a_solver_on_flow_sigmas_is_the_linear_path() -> None:
    config = {"_class_name": "UniPCMultistepScheduler", "use_flow_sigmas": True, "flow_shift": 3.0}
    assert from_diffusers(config) == LinearSchedule()


@pytest.mark.parametrize(
    "name",
    [
        "DDPMScheduler",
        "DDIMScheduler",
        "DPMSolverMultistepScheduler",
        "EulerDiscreteScheduler",
        "LCMScheduler",
        "PNDMScheduler",
        "TCDScheduler",
    ],
)
def test_missing_keys_have_the_default_of_their_scheduler_class(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="hddm"):
        schedule = from_diffusers({"_class_name": name})
    expected = (1 - getattr(diffusers, name)().betas.double()).cumprod(0).sqrt()
    torch.testing.assert_close(_alphas(schedule).double(), expected, rtol=1e-6, atol=1e-7)
    assert "beta_start not given" in caplog.text
    assert name in caplog.text


def test_the_class_name_of_a_scheduler_object_decides_its_defaults() -> None:
    scheduler = diffusers.LCMScheduler()
    expected = _alphas(case_named("sd-scaled-linear").schedule)
    assert torch.equal(_alphas(from_diffusers(scheduler)), expected)


@pytest.mark.parametrize(
    ("key", "nearest"), [("beta_stat", "beta_start"), ("num_train_timestep", "num_train_timesteps")]
)
def test_an_unknown_key_is_refused_with_the_nearest_one(key: str, nearest: str) -> None:
    with pytest.raises(HddmError, match=f"{key}.*did you mean '{nearest}'"):
        from_diffusers({**SD, key: 1})


@pytest.mark.parametrize(
    "source",
    [
        {"_class_name": "ScoreSdeVeScheduler"},
        {"_class_name": "NoSuchScheduler"},
        {"beta_schedule": "no-such-spacing"},
        {"beta_start": "a lot"},
        {"num_train_timesteps": 1},
        {"num_train_timesteps": None},
        {"beta_end": 2.0},
        {"beta_schedule": "scaled_linear", "beta_start": -1.0},
        {"trained_betas": [0.1, -0.1]},
        "no/such/folder",
        42,
    ],
    ids=str,
)
def test_what_gives_no_schedule_is_refused(source: object) -> None:
    with pytest.raises(HddmError):
        from_diffusers(source)


@pytest.mark.parametrize("text", ["{not json", "[1, 2]"])
def test_a_broken_config_file_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "scheduler_config.json").write_text(text)
    with pytest.raises(HddmError, match=r"scheduler_config\.json"):
        from_diffusers(tmp_path)


@pytest.mark.parametrize(
    "config", [{}, {"name": "Linear"}, {"name": "linear", "shift": 3}, {"name": "discrete"}], ids=str
)
def test_an_unknown_record_is_refused(config: dict[str, object]) -> None:
    with pytest.raises(HddmError, match="unknown"):
        from_config(config)


def test_zero_terminal_snr_survives_a_scheduler_that_hides_it() -> None:
    # For its own sampling this scheduler replaces the last alpha, 0, by 2^-12.
    euler = diffusers.EulerDiscreteScheduler(rescale_betas_zero_snr=True)
    assert euler.alphas_cumprod[-1] > 0
    assert from_diffusers(euler).alpha(torch.tensor(999)).item() == 0


FAMILIES = [
    *((name, DiscreteSchedule) for name in DDPM_FAMILY),
    *((name, LinearSchedule) for name in FLOW_MATCH_FAMILY),
]


# Some schedulers mix tensors and numpy in ways that new versions of numpy warn about.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("name", "kind"), FAMILIES)
def test_a_live_config_without_class_name_tells_its_family(name: str, kind: type[Schedule]) -> None:
    scheduler = getattr(diffusers, name)()
    assert "_class_name" not in scheduler.config
    for config in (scheduler.config, dict(scheduler.config)):
        schedule = from_diffusers(config)
        assert isinstance(schedule, kind)
        if kind is DiscreteSchedule:
            torch.testing.assert_close(_alphas(schedule), _alphas(from_diffusers(scheduler)))


@pytest.mark.parametrize(
    "config", [{}, {"num_train_timesteps": 1000}, {"prediction_type": "epsilon"}], ids=str
)
def test_a_config_that_tells_no_family_is_refused(config: dict[str, object]) -> None:
    with pytest.raises(HddmError, match="name the scheduler class"):
        from_diffusers(config)


def test_continuous_timesteps_are_no_ddpm_schedule() -> None:
    with pytest.raises(HddmError, match="continuous"):
        from_diffusers(diffusers.EulerDiscreteScheduler(timestep_type="continuous"))


def test_betas_in_an_array_can_be_recorded() -> None:
    schedule = from_diffusers(diffusers.DDPMScheduler(trained_betas=np.array([0.1, 0.2, 0.3])))
    assert json.loads(json.dumps(schedule.config))["trained_betas"] == [0.1, 0.2, 0.3]
    with pytest.raises(HddmError, match="not numbers"):
        from_config({"name": "discrete", "betas": [None, "a"]})
