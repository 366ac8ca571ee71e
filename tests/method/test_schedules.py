"""Schedules against their definitions and diffusers' own tables, also out of its configs."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from hddm.schedule_records import DDPM_FAMILY, FLOW_MATCH_FAMILY, stated_range
from hddm.schedules import (
    CosineSchedule,
    DiscreteSchedule,
    EDMSchedule,
    LinearSchedule,
    Schedule,
    from_config,
    from_diffusers,
)
from hddm.utils.errors import HddmError
from tests.artefacts import refusal
from tests.cases import BETAS, Case, case_named, each_case, each_discrete
from tests.oracles import slopes


def _native(schedule: Schedule, num: int = 257) -> torch.Tensor:
    return torch.linspace(0, schedule.end, num, dtype=torch.float64)


@each_case
def test_alpha_and_sigma_equal_the_definition_between_indices_too(case: Case) -> None:
    time = _native(case.schedule)
    a, s = case.alpha_sigma(time)
    torch.testing.assert_close(case.schedule.alpha(time), a, rtol=1e-10, atol=1e-15)
    torch.testing.assert_close(case.schedule.sigma(time), s, rtol=1e-10, atol=1e-15)


@each_discrete
def test_squares_equal_diffusers_table_within_its_float32_rounding(case: Case) -> None:
    table = case.scheduler.alphas_cumprod
    index = torch.arange(len(table))
    # The table is a float32 product of i + 1 factors, each of them rounded once itself.
    rounding = 2 * (index.double() + 1) * 2.0**-24
    alpha_squared = case.schedule.alpha(index.double()) ** 2
    sigma_squared = case.schedule.sigma(index.double()) ** 2
    assert ((alpha_squared - table).abs() <= rounding * alpha_squared).all()
    assert ((sigma_squared - (1 - table.double())).abs() <= rounding).all()


@pytest.mark.parametrize(
    ("name", "t_min", "t_max", "alpha_end"),
    [
        ("ddpm-linear", 0.00990, 0.99369, 0.006353),
        ("sd-scaled-linear", 0.02834, 0.93596, 0.068265),
        ("squaredcos-cap-v2", 0.00638, 0.99995, 4.9e-5),
    ],
)
def test_noise_range_of_well_known_schedules(
    name: str, t_min: float, t_max: float, alpha_end: float
) -> None:
    schedule = case_named(name).schedule
    assert schedule.range == pytest.approx((t_min, t_max), abs=5e-6)
    assert schedule.alpha(torch.tensor(999)).item() == pytest.approx(alpha_end, rel=0.01)


@each_case
def test_time_inverts_log_snr_at_and_between_indices(case: Case) -> None:
    time = _native(case.schedule, 1001)
    found = case.schedule.time(case.schedule.log_snr(time))
    # Near the end of the cosine the log-SNR itself is steep; times are exact to 1e-12 of the range.
    torch.testing.assert_close(found, time, rtol=1e-11, atol=1e-11)


@each_case
def test_match_finds_the_native_time_of_each_noise_level_in_the_range(case: Case) -> None:
    low, high = case.schedule.range
    ends = (case.common_time(0.0), case.common_time(case.schedule.end))
    assert (low, high) == pytest.approx(ends, rel=1e-10, abs=1e-15)
    t = torch.linspace(low, high, 301, dtype=torch.float64)
    a, s = case.alpha_sigma(case.schedule.match(t))
    torch.testing.assert_close(s / (a + s), t, rtol=1e-10, atol=1e-12)


@each_case
def test_log_snr_falls_strictly_and_beyond_the_schedule_stands_for_the_nearer_end(
    case: Case,
) -> None:
    assert (case.schedule.log_snr(_native(case.schedule, 5000)).diff() < 0).all()
    for far in (200.0, math.inf):
        ends = case.schedule.time(torch.tensor([far, -far], dtype=torch.float64))
        torch.testing.assert_close(ends, torch.tensor([0.0, case.schedule.end]).double())
    assert ends.tolist() == [0.0, case.schedule.end]


@each_case
def test_integer_times_give_float32_and_floats_keep_their_dtype(case: Case) -> None:
    for method in (case.schedule.alpha, case.schedule.sigma, case.schedule.log_snr):
        assert method(torch.tensor([0, 1])).dtype == torch.float32
        assert method(torch.tensor([0.25, 1.0])).dtype == torch.float32
        assert method(torch.tensor([0.25, 1.0], dtype=torch.float64)).dtype == torch.float64
        assert method(torch.rand(2, 3, 1)).shape == (2, 3, 1)


@each_case
def test_signal_is_exactly_zero_only_where_the_definition_says(case: Case) -> None:
    without_signal = case.name in ("linear", "cosine") or case.name.endswith("ztsnr")
    end = torch.tensor(case.schedule.end, dtype=torch.float64)
    assert (case.schedule.alpha(end).item() == 0) == without_signal
    assert (case.schedule.range[1] == 1.0) == without_signal
    assert case.schedule.alpha(end * (1 - 1e-9)) > 0


@each_case
def test_derivatives_are_those_of_the_path_and_discrete_schedules_have_none(case: Case) -> None:
    time = _native(case.schedule)
    if isinstance(case.schedule, DiscreteSchedule):
        assert "no time derivative" in refusal(case.schedule.derivatives, time)
    else:
        torch.testing.assert_close(case.schedule.derivatives(time), slopes(case.alpha_sigma, time))


@each_case
@pytest.mark.parametrize("beyond", [-0.001, 0.001, math.nan], ids=["below", "above", "nan"])
def test_times_outside_the_schedule_are_refused(case: Case, beyond: float) -> None:
    time = beyond if beyond < 0 else case.schedule.end + beyond
    for method in (case.schedule.alpha, case.schedule.sigma, case.schedule.log_snr):
        assert "native times" in refusal(method, torch.tensor([0.5, time], dtype=torch.float64))


@pytest.mark.parametrize(
    "betas",
    [
        [0.1],
        [],
        [0.1, -0.1],
        [0.0, 0.1],
        [0.1, 1.0, 0.1],
        [0.1, 1.1],
        [0.1, math.nan],
        [[0.1, 0.2]],
    ],
    ids=str,
)
def test_bad_betas_are_refused(betas: list[float]) -> None:
    assert "betas must be" in refusal(DiscreteSchedule, torch.tensor(betas))


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
def test_missing_keys_have_their_scheduler_s_default(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
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
        (
            {"_class_name": "ScoreSdeVeScheduler"},
            "is neither of the DDPM, the flow-match nor the EDM family",
        ),
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
    assert "not numbers" in refusal(from_config, {"name": "discrete", "betas": [None, "a"]})


HUGE = (math.inf, math.nan, 1e9, 10**400)
STATED = {"num_train_timesteps": 1000, "beta_start": 0.00085, "beta_end": 0.012}
STATED = {**STATED, "beta_schedule": "scaled_linear", "_class_name": "PNDMScheduler"}


@pytest.mark.parametrize("name", [*BETAS, "two steps"])
def test_a_record_tells_the_range_that_its_schedule_has(name: str) -> None:
    betas = BETAS.get(name, {"num_train_timesteps": 2})
    schedule = from_diffusers(diffusers.DDPMScheduler(**betas))
    config = json.loads(json.dumps(schedule.config))
    for scale in (0.1, 1.0, 7.0):
        found = stated_range(config, scale)
        assert found == pytest.approx(schedule.range_of(scale), rel=1e-5)


@pytest.mark.parametrize(
    "schedule",
    [
        *(LinearSchedule(), CosineSchedule(), EDMSchedule(), EDMSchedule(0.01, 5.0, 1.2)),
        DiscreteSchedule(torch.linspace(0.01, 0.3, 20, dtype=torch.float64)),
        # Whose last alpha² is below the smallest number.
        DiscreteSchedule(torch.linspace(0.01, 0.9, 1000, dtype=torch.float64)),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_record_of_our_own_tells_the_range_that_its_schedule_has(schedule: Schedule) -> None:
    for scale in (0.1, 1.0, 7.0):
        found = stated_range(schedule.config, scale)
        assert found == pytest.approx(schedule.range_of(scale * schedule.data_scale), rel=1e-9)


@pytest.mark.parametrize(
    "config",
    [
        *({"name": "odd"}, {}, {"name": "linear", "more": 1}, {"name": "discrete", "betas": [0.1]}),
        *({"name": "discrete", "betas": ["a", None]}, {"name": "discrete", "betas": [0.1, 1.5]}),
        {"name": "edm", "sigma_min": "small", "sigma_max": 80.0, "sigma_data": 0.5},
        {"name": "edm", "sigma_min": 2.0, "sigma_max": 1.0, "sigma_data": 0.5},
        *({"name": "edm", "sigma_min": 1.0, "sigma_max": one, "sigma_data": 0.5} for one in HUGE),
        {**STATED, "trained_betas": [0.1, 0.2], "num_train_timesteps": 1},
        {**STATED, "trained_betas": [0.1, 1e-50, 0.2]},
        {"name": "linear", "_class_name": "DDPMScheduler"},
        *(
            {**STATED, "_class_name": "Other"},
            {**STATED, "more": 1},
            {**STATED, "beta_schedule": "laplace"},
        ),
        *(
            {**STATED, "beta_end": 2.0},
            {**STATED, "beta_start": None},
            {**STATED, "num_train_timesteps": 1},
        ),
        *({**STATED, "trained_betas": "none"}, {**STATED, "rescale_betas_zero_snr": True}),
    ],
)
def test_a_record_that_is_not_known_tells_no_range(config: dict[str, Any]) -> None:
    assert stated_range(config) is None
    assert stated_range(STATED) is not None
