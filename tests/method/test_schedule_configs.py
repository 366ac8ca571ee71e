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
from tests.cases import BETAS, Case, case_named, each_case

SD = BETAS["sd-scaled-linear"] | {
    "_class_name": "PNDMScheduler",
    "num_train_timesteps": 1000,
    "skip_prk_steps": True,
}


def _alphas(schedule: Schedule) -> torch.Tensor:
    return schedule.alpha(torch.arange(int(schedule.end) + 1))


@each_case
def test_a_recorded_config_gives_the_same_schedule_after_json(case: Case) -> None:
    again = from_config(json.loads(json.dumps(case.schedule.config)))
    time = torch.linspace(0, case.schedule.end, 50, dtype=torch.float64)
    assert type(again) is type(case.schedule)
    assert torch.equal(again.log_snr(time), case.schedule.log_snr(time))


def test_a_config_is_found_by_its_file_its_folder_and_its_pipeline(tmp_path: Path) -> None:
    file = tmp_path / "scheduler" / "scheduler_config.json"
    file.parent.mkdir()
    file.write_text(json.dumps(SD))
    expected = _alphas(case_named("sd-scaled-linear").schedule)
    for source in (file, file.parent, tmp_path, str(tmp_path)):
        assert torch.equal(_alphas(from_diffusers(source)), expected)


def test_a_flow_match_scheduler_is_the_linear_path_whatever_its_shift() -> None:
    for name in ("FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler"):
        scheduler = getattr(diffusers, name)(shift=3.0)
        assert from_diffusers(scheduler) == LinearSchedule()
        assert from_diffusers({**scheduler.config, "_class_name": name}) == LinearSchedule()
    config = {"_class_name": "UniPCMultistepScheduler", "use_flow_sigmas": True, "flow_shift": 3.0}
    assert from_diffusers(config) == LinearSchedule()


@pytest.mark.parametrize("name", ["DDPMScheduler", "EulerDiscreteScheduler", "LCMScheduler"])
def test_missing_keys_have_their_scheduler_s_default(name: str, caplog: pytest.LogCaptureFixture) -> None:
    scheduler = getattr(diffusers, name)()
    expected = (1 - scheduler.betas.double()).cumprod(0).sqrt()
    with caplog.at_level(logging.INFO, logger="hddm"):
        schedule = from_diffusers({"_class_name": name})
    assert "beta_start is missing" in caplog.text
    assert name in caplog.text
    for found in (schedule, from_diffusers(scheduler)):
        torch.testing.assert_close(_alphas(found).double(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (SD | {"beta_stat": 1}, "beta_stat.*did you mean 'beta_start'"),
        ({}, "name the scheduler class"),
        ({"_class_name": "ScoreSdeVeScheduler"}, "is neither of the DDPM"),
        (SD | {"beta_schedule": "no-such-spacing"}, "no schedule can be built"),
        (SD | {"beta_start": "a lot"}, "no schedule can be built"),
        (SD | {"num_train_timesteps": 1}, "must be 2 to 100000"),
        (SD | {"beta_end": 2.0}, "betas must be"),
        (SD | {"trained_betas": [0.1, -0.1]}, "betas must be"),
        (SD | {"trained_betas": 0.1, "rescale_betas_zero_snr": True}, "no schedule can be built"),
        ("no/such/folder", "no scheduler config here"),
        (diffusers.EulerDiscreteScheduler(timestep_type="continuous"), "continuous"),
    ],
    ids=lambda value: str(value)[-50:],
)
def test_what_gives_no_schedule_is_refused(source: object, problem: str) -> None:
    with pytest.raises(HddmError, match=problem):
        from_diffusers(source)


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


def test_betas_can_be_recorded() -> None:
    schedule = from_diffusers(diffusers.DDPMScheduler(trained_betas=np.array([0.1, 0.2, 0.3])))
    assert json.loads(json.dumps(schedule.config))["trained_betas"] == [0.1, 0.2, 0.3]
    own = DiscreteSchedule(torch.linspace(0.01, 0.3, 20, dtype=torch.float64))
    again = from_config(json.loads(json.dumps(own.config)))
    assert torch.equal(_alphas(again), _alphas(own))
    with pytest.raises(HddmError, match="not numbers"):
        from_config({"name": "discrete", "betas": [None, "a"]})
