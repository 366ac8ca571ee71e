"""Schedules as records hold them, and the noise levels that they cover, without torch.

`hddm.schedules` computes with schedules; a record is described by two numbers of one, the ends of its range.
"""

import itertools
import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

_EDM = {"name", "sigma_min", "sigma_max", "sigma_data"}


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


MOST_STEPS = 100_000


# The keys that fix a training schedule; all others of these classes belong to sampling.
BETAS = ("beta_start", "beta_end", "beta_schedule", "trained_betas")


SCHEDULE_KEYS = ("num_train_timesteps", *BETAS, "rescale_betas_zero_snr")


def recorded_range(config: Mapping[str, Any], scale: float) -> tuple[float, float] | None:
    """(t_min, t_max) on the common path of the schedule with this config, for data of ``scale``.

    That is `hddm.schedules.Schedule.range_of` to six digits: betas are rounded to float32, as diffusers has
    them, but the formulas of the library may round otherwise. None for a config that is not of a common form,
    for `hddm.schedules.from_config` to read or to refuse.
    """
    ends = _ends(config)
    if ends is None:
        return None
    low, high = (_share_of_noise(log_snr, scale) for log_snr in ends)
    return low, high


def _ends(config: Mapping[str, Any]) -> tuple[float, float] | None:
    """Log-SNR at the end of least noise, and of most."""
    name = config.get("name")
    if config in ({"name": "linear"}, {"name": "cosine"}):
        return math.inf, -math.inf
    if name == "edm" and set(config) == _EDM:
        numbers = [config[key] for key in ("sigma_min", "sigma_max", "sigma_data")]
        if not all(map(_is_positive, numbers)) or not numbers[0] < numbers[1]:
            return None
        least, most, deviation = map(math.log, numbers)
        return 2 * (deviation - least), 2 * (deviation - most)
    if name == "discrete" and set(config) == {"name", "betas"}:
        return _ends_of_betas(config["betas"])
    if config.get("_class_name") in DDPM_FAMILY and set(config) <= {"_class_name", *SCHEDULE_KEYS}:
        # Rescaled to no signal at the end, the first beta depends on how the library rounds.
        betas = None if config.get("rescale_betas_zero_snr") else _betas(config)
        return None if betas is None else _ends_of_betas(betas)
    return None


def _betas(config: Mapping[str, Any]) -> Sequence[float] | None:
    """The betas of a scheduler of diffusers, by the formulas of its documentation."""
    if config.get("trained_betas") is not None:
        return _in_float32(config["trained_betas"])
    steps, kind = config.get("num_train_timesteps"), config.get("beta_schedule")
    if not isinstance(steps, int) or not 2 <= steps <= MOST_STEPS:
        return None
    if kind == "squaredcos_cap_v2":
        alphas = [_squared_cosine(step / steps) for step in range(steps + 1)]
        capped = []
        for before, after in itertools.pairwise(alphas):
            capped.append(min(1 - after / before, 0.999))
        return _in_float32(capped)
    first, last = config.get("beta_start"), config.get("beta_end")
    if kind not in ("linear", "scaled_linear") or not (_is_positive(first) and _is_positive(last)):
        return None
    power = 2 if kind == "scaled_linear" else 1
    first, last = first ** (1 / power), last ** (1 / power)
    spaced = []
    for step in range(steps):
        spaced.append((first + (last - first) * step / (steps - 1)) ** power)
    return _in_float32(spaced)


def _squared_cosine(time: float) -> float:
    return math.cos((time + 0.008) / 1.008 * math.pi / 2) ** 2


def _ends_of_betas(betas: object) -> tuple[float, float] | None:
    if not isinstance(betas, Sequence) or len(betas) < 2 or not all(map(_is_positive, betas)):
        return None
    if max(betas[:-1]) >= 1 or betas[-1] > 1:
        return None
    total = math.fsum(math.log1p(-beta) for beta in betas[:-1])
    total += -math.inf if betas[-1] == 1 else math.log1p(-betas[-1])
    return _log_snr(math.log1p(-betas[0])), _log_snr(total)


def _log_snr(log_alpha_squared: float) -> float:
    return log_alpha_squared - math.log(-math.expm1(log_alpha_squared))


def _share_of_noise(log_snr: float, scale: float) -> float:
    """The time on the common path: sigma/(alpha d + sigma) for data of the scale d."""
    ratio = -log_snr / 2 - math.log(scale)
    return 1 / (1 + math.exp(-ratio)) if ratio > -700 else 0.0


def _in_float32(values: object) -> Sequence[float] | None:
    try:
        return array("f", values)  # type: ignore[call-overload, no-any-return]
    except (TypeError, ValueError, OverflowError):
        return None


def _is_positive(value: object) -> TypeGuard[float]:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value < math.inf  # type: ignore[operator]
