"""What records and configs say of noise schedules, read without torch, which takes seconds to import.

Records of experts have the `Schedule.config` of `hddm.schedules`.
"""

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

from hddm.utils.errors import one_line

DDPM_FAMILY = (
    "DDPMScheduler",
    "DDPMParallelScheduler",
    "DDIMScheduler",
    "DDIMInverseScheduler",
    "DDIMParallelScheduler",
    "DEISMultistepScheduler",
    "DPMSolverMultistepScheduler",
    "DPMSolverMultistepInverseScheduler",
    "DPMSolverSinglestepScheduler",
    "EulerDiscreteScheduler",
    "EulerAncestralDiscreteScheduler",
    "HeunDiscreteScheduler",
    "KDPM2DiscreteScheduler",
    "KDPM2AncestralDiscreteScheduler",
    "LCMScheduler",
    "LMSDiscreteScheduler",
    "PNDMScheduler",
    "SASolverScheduler",
    "TCDScheduler",
    "UniPCMultistepScheduler",
)
FLOW_MATCH_FAMILY = (
    "FlowMatchEulerDiscreteScheduler",
    "FlowMatchHeunDiscreteScheduler",
    "FlowMatchLCMScheduler",
)
EDM_FAMILY = ("EDMEulerScheduler", "EDMDPMSolverMultistepScheduler")
FAMILIES = (DDPM_FAMILY, FLOW_MATCH_FAMILY, EDM_FAMILY)
MOST_STEPS = 100_000
_LARGEST_SIGMA = 1e6
EDM_KEYS = ("sigma_min", "sigma_max", "sigma_data")
# The keys that fix a training schedule; all others of these classes belong to sampling.
_BETAS = ("beta_start", "beta_end", "beta_schedule", "trained_betas")
_BARE = {"num_train_timesteps", "beta_start", "beta_end"}
_RESCALED = "rescale_betas_zero_snr"
SCHEDULE_KEYS = ("num_train_timesteps", *_BETAS, _RESCALED)


def stated_range(config: Mapping[str, Any], data_scale: float = 1.0) -> tuple[float, float] | None:
    """(t_min, t_max) on the common path that a schedule's record covers, for x_0 scaled by ``data_scale`` d.

        t = r/(r + d),   r = sigma/alpha at the schedule's first and last native time

    These are the numbers of `hddm.schedules` to five digits, since diffusers computes betas in float32. None
    for a record that only that file can read, or refuses.
    """
    given = dict(config)
    name = given.pop("name", None)
    kind = given.pop("_class_name", None)
    if name is not None and kind is not None:
        return None
    if name in ("linear", "cosine") and not given:
        return 0.0, 1.0
    if name == "edm" and given.keys() == set(EDM_KEYS) and edm_problem(given) is None:
        # r = sigma/sigma_data, and EDM's own data have the scale d/sigma_data.
        low, high = math.log(given["sigma_min"]), math.log(given["sigma_max"])
    else:
        betas = None
        if name == "discrete" and given.keys() == {"betas"}:
            betas = given["betas"]
        elif name is None and kind in DDPM_FAMILY and _BARE <= given.keys() <= set(SCHEDULE_KEYS):
            betas = _betas(given)
        if not isinstance(betas, list) or len(betas) < 2 or not _are_shares(betas):
            return None
        low = _log_ratio(math.log1p(-betas[0]))
        high = _log_ratio(math.fsum(math.log1p(-beta) for beta in betas))
    scale = math.log(data_scale)
    return 1 / (1 + math.exp(scale - low)), 1 / (1 + math.exp(scale - high))


def edm_problem(values: Mapping[str, Any]) -> str | None:
    """What is wrong with the numbers of an EDM schedule, by `EDM_KEYS`; None if nothing is."""
    for name in EDM_KEYS:
        value = values[name]
        if not _is_number(value) or not 1 / _LARGEST_SIGMA <= value <= _LARGEST_SIGMA:
            return (
                f"{name} is {one_line(value, 40)}, and must be from {1 / _LARGEST_SIGMA:g} to "
                f"{_LARGEST_SIGMA:g}"
            )
    if not values["sigma_min"] < values["sigma_max"]:
        return f"sigma_min {values['sigma_min']:g} is not below sigma_max {values['sigma_max']:g}"
    return None


def _log_ratio(log_alpha_squared: float) -> float:
    """The logarithm of sigma/alpha, where alpha² + sigma² = 1."""
    return (math.log(-math.expm1(log_alpha_squared)) - log_alpha_squared) / 2


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_shares(values: Iterable[Any]) -> bool:
    # In float32, where others are 0 or 1.
    return all(_is_number(one) and 1e-38 < one < 1 - 2**-24 for one in values)


def _betas(given: Mapping[str, Any]) -> Any:
    """The betas of a record by the names of diffusers; None for names and values that are not known here."""
    steps, start, end = given["num_train_timesteps"], given["beta_start"], given["beta_end"]
    if not isinstance(steps, int) or not 2 <= steps <= MOST_STEPS or given.get(_RESCALED):
        # Of rescaled betas the first one loses most of its digits in float32, so diffusers' rounding counts.
        return None
    if given.get("trained_betas") is not None:
        return given["trained_betas"]
    if not _are_shares((start, end)):
        return None
    parts = [k / (steps - 1) for k in range(steps)]
    match given.get("beta_schedule"):
        case "linear":
            return [start + (end - start) * part for part in parts]
        case "scaled_linear":
            low, high = math.sqrt(start), math.sqrt(end)
            return [(low + (high - low) * part) ** 2 for part in parts]
        case "squaredcos_cap_v2":
            left = [_squared_cosine(k / steps) for k in range(steps + 1)]
            return [min(1 - after / now, 0.999) for now, after in itertools.pairwise(left)]
        case "sigmoid":
            return [start + (end - start) / (1 + math.exp(6 - 12 * part)) for part in parts]
    return None


def _squared_cosine(share: float) -> float:
    return math.cos((share + 0.008) / 1.008 * math.pi / 2) ** 2
