"""What records and configs say of noise schedules, read without torch, which takes seconds to import.

Records of experts have the `Schedule.config` of `hddm.schedules`.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

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
EDM_KEYS = ("sigma_min", "sigma_max", "sigma_data")
# The keys that fix a training schedule; all others of these classes belong to sampling.
_BETAS = ("beta_start", "beta_end", "beta_schedule", "trained_betas")
_BARE = {"num_train_timesteps", "beta_start", "beta_end"}
SCHEDULE_KEYS = ("num_train_timesteps", *_BETAS, "rescale_betas_zero_snr")


def stated_range(config: Mapping[str, Any], data_scale: float = 1.0) -> tuple[float, float] | None:
    """(t_min, t_max) on the common path that a schedule's record covers, for data of ``data_scale`` d.

        t = r/(r + d),   r = sigma/alpha at the schedule's first and last native time

    It is `Schedule.range_of` to five digits, since diffusers computes betas in float32. None for a record
    that only `hddm.schedules` can read, or refuse.
    """
    given = dict(config)
    name = given.pop("name", None)
    kind = given.pop("_class_name", None)
    if name in ("linear", "cosine") and not given:
        return 0.0, 1.0
    if name == "edm" and given.keys() == set(EDM_KEYS) and _are_numbers(given.values()):
        low, high = given["sigma_min"], given["sigma_max"]
        # r = sigma/sigma_data, and EDM's own data have the scale d/sigma_data.
        is_sound = 0 < low < high and given["sigma_data"] > 0
        return (low / (low + data_scale), high / (high + data_scale)) if is_sound else None
    betas = None
    if given.get("rescale_betas_zero_snr"):
        # Float32 loses most of the digits of the first beta there, so its value is what diffusers computes.
        return None
    if name == "discrete" and given.keys() == {"betas"}:
        betas = given["betas"]
    elif name is None and kind in DDPM_FAMILY and _BARE <= given.keys() <= set(SCHEDULE_KEYS):
        betas = _betas(given)
    if not isinstance(betas, list) or len(betas) < 2 or not _are_numbers(betas):
        return None
    if not all(0 < beta < 1 for beta in betas):
        return None
    first = math.log1p(-betas[0])
    last = math.fsum(map(math.log1p, (-beta for beta in betas)))
    low, high = _ratio(first), _ratio(last)
    return low / (low + data_scale), high / (high + data_scale)


def _ratio(log_alpha_squared: float) -> float:
    """sigma/alpha, where alpha² + sigma² = 1."""
    return math.sqrt(math.expm1(-log_alpha_squared))


def _are_numbers(values: Iterable[Any]) -> bool:
    return all(isinstance(one, int | float) and not isinstance(one, bool) for one in values)


def _betas(given: Mapping[str, Any]) -> list[float] | None:
    """The betas of a record by the names of diffusers; None for names and values that are not known here."""
    if given.get("trained_betas") is not None:
        return given["trained_betas"] if isinstance(given["trained_betas"], list) else None
    steps, start, end = given["num_train_timesteps"], given["beta_start"], given["beta_end"]
    are_sound = _are_numbers((steps, start, end)) and 0 < start < 1 and 0 < end < 1
    if not are_sound or not isinstance(steps, int) or not 2 <= steps <= MOST_STEPS:
        return None
    parts = [k / (steps - 1) for k in range(steps)]
    match given.get("beta_schedule"):
        case "linear":
            return [start + (end - start) * part for part in parts]
        case "scaled_linear":
            low, high = math.sqrt(start), math.sqrt(end)
            return [(low + (high - low) * part) ** 2 for part in parts]
        case "squaredcos_cap_v2":
            return [
                min(1 - _squared_cosine((k + 1) / steps) / _squared_cosine(k / steps), 0.999)
                for k in range(steps)
            ]
        case "sigmoid":
            return [start + (end - start) / (1 + math.exp(6 - 12 * part)) for part in parts]
    return None


def _squared_cosine(share: float) -> float:
    return math.cos((share + 0.008) / 1.008 * math.pi / 2) ** 2
