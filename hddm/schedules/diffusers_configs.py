"""Schedules from diffusers' scheduler configs, and back from our own records."""

import inspect
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch

from hddm.errors import HddmError, did_you_mean
from hddm.schedules.base import Schedule
from hddm.schedules.continuous import CosineSchedule, LinearSchedule
from hddm.schedules.discrete import DiscreteSchedule

logger = logging.getLogger(__name__)

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
MOST_STEPS = 100_000
# The keys that fix a training schedule; all others of these classes belong to sampling.
_SCHEDULE_KEYS = (
    "num_train_timesteps",
    "beta_start",
    "beta_end",
    "beta_schedule",
    "trained_betas",
    "rescale_betas_zero_snr",
)
_FROM_OLD_VERSIONS = {"tensor_format", "predict_epsilon"}


def from_diffusers(source: object) -> Schedule:
    """The training schedule that a diffusers scheduler stands for.

    A key that the config lacks has the documented default of its scheduler class; that is logged.
    A config without ``_class_name`` (a scheduler object's ``.config`` has none) tells its family by its
    keys: ``beta_…`` ones make it a `DDPMScheduler`'s, ones that only flow-match classes have a flow-match
    scheduler's. A flow-match scheduler, or one
    with ``use_flow_sigmas``, gives `LinearSchedule`: its shift belongs to the sampling grid.

    Args:
        source: a scheduler object, its config, or the path of a ``scheduler_config.json``, of the
            folder that holds it, or of a pipeline folder.

    Raises:
        HddmError: for a class outside the DDPM and flow-match families, an unknown key or a value that
            gives no schedule, continuous timesteps, or a config that tells no family.
    """
    config, origin = _read(source)
    name = config.get("_class_name") or _family(config, origin)
    if name not in DDPM_FAMILY + FLOW_MATCH_FAMILY:
        raise HddmError(
            f"{origin}: scheduler class {name!r} is neither of the DDPM nor of the flow-match family; "
            f"known are {', '.join(DDPM_FAMILY + FLOW_MATCH_FAMILY)}"
        )
    _refuse_unknown_keys(config, origin)
    if name in FLOW_MATCH_FAMILY or config.get("use_flow_sigmas"):
        return LinearSchedule()
    if config.get("timestep_type") == "continuous":
        raise HddmError(f"{origin}: timestep_type 'continuous' (EDM's time) is no DDPM schedule")
    facts = _with_defaults(config, name, origin)
    steps = facts["num_train_timesteps"]
    if not isinstance(steps, int) or not 2 <= steps <= MOST_STEPS:
        raise HddmError(f"{origin}: num_train_timesteps is {steps!r}, and must be 2 to {MOST_STEPS}")
    try:
        betas = diffusers.DDPMScheduler(**facts).betas
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        given, said = (" ".join(str(one).split())[:300] for one in (facts, error))
        raise HddmError(f"{origin}: no schedule can be built from {given}: {said}") from error
    return DiscreteSchedule(betas, {"_class_name": name, **facts})


def declared_prediction_type(source: object) -> str | None:
    """The ``prediction_type`` that a scheduler config gives, None where it gives none.

    A flow-match scheduler gives ``flow_prediction``; so do ``use_flow_sigmas``. Former versions said
    ``predict_epsilon``.

    Raises:
        HddmError: for two keys that contradict each other.
    """
    config, origin = _read(source)
    stated: dict[str, str] = {}
    if config.get("prediction_type") is not None:
        stated["prediction_type"] = str(config["prediction_type"])
    if config.get("predict_epsilon") is not None:
        stated["predict_epsilon"] = "epsilon" if config["predict_epsilon"] else "sample"
    if config.get("_class_name") in FLOW_MATCH_FAMILY or config.get("use_flow_sigmas"):
        stated["a flow-match scheduler"] = "flow_prediction"
    if len(set(stated.values())) > 1:
        said = ", ".join(f"{key}: {value}" for key, value in stated.items())
        raise HddmError(f"{origin}: contradicts itself ({said}); correct the config")
    return next(iter(stated.values()), None)


def default_prediction_type(source: object) -> str:
    """What the documented default of a scheduler config's class is, for one that gives none.

    Raises:
        HddmError: where the config names no class.
    """
    config, origin = _read(source)
    parameters = _parameters(config.get("_class_name") or _family(config, origin))
    default: str = parameters["prediction_type"].default
    return default


def from_config(config: Mapping[str, Any]) -> Schedule:
    """The schedule with this `Schedule.config`, as ``expert.json`` holds it.

    Raises:
        HddmError: for a name or key that no schedule has.
    """
    if "_class_name" in config:
        return from_diffusers(config)
    match dict(config):
        case {"name": "linear", **rest} if not rest:
            return LinearSchedule()
        case {"name": "cosine", **rest} if not rest:
            return CosineSchedule()
        case {"name": "discrete", "betas": betas, **rest} if not rest:
            try:
                return DiscreteSchedule(torch.tensor(betas, dtype=torch.float64))
            except (TypeError, RuntimeError) as error:
                raise HddmError(f"schedule: betas {str(betas)[:40]} are not numbers") from error
    raise HddmError(
        f"schedule {dict(config)} is unknown: it is {{'name': 'linear'}}, {{'name': 'cosine'}}, "
        "{'name': 'discrete', 'betas': […]} or a diffusers scheduler config with _class_name"
    )


def _family(config: Mapping[str, Any], origin: str) -> str:
    """The scheduler class of a config that does not name it."""
    if any(key.startswith("beta_") or key == "trained_betas" for key in config):
        return "DDPMScheduler"
    flow_only = set().union(*map(_parameters, FLOW_MATCH_FAMILY)).difference(*map(_parameters, DDPM_FAMILY))
    if flow_only & set(config):
        return "FlowMatchEulerDiscreteScheduler"
    _refuse_unknown_keys(config, origin)
    raise HddmError(f"{origin}: has neither _class_name nor betas; name the scheduler class")


def _read(source: object) -> tuple[dict[str, Any], str]:
    if isinstance(source, diffusers.SchedulerMixin):
        return {**source.config, "_class_name": type(source).__name__}, type(source).__name__
    if isinstance(source, Mapping):
        return dict(source), "scheduler config"
    if not isinstance(source, str | Path):
        raise HddmError(
            "a schedule comes from a diffusers scheduler, its config or a path, "
            f"not from {type(source).__name__}"
        )
    path = Path(source)
    candidates = (
        path,
        path / "scheduler_config.json",
        path / "scheduler" / "scheduler_config.json",
    )
    for candidate in candidates:
        if candidate.is_file():
            try:
                config = json.loads(candidate.read_text())
            except ValueError as error:
                raise HddmError(f"{candidate}: not valid JSON ({error})") from error
            if not isinstance(config, dict):
                raise HddmError(f"{candidate}: holds no scheduler config (a JSON object)")
            return config, str(candidate)
    raise HddmError(f"{path}: no scheduler config here; give a scheduler_config.json or its folder")


def _parameters(name: str) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(getattr(diffusers, name).__init__).parameters)


def _refuse_unknown_keys(config: Mapping[str, Any], origin: str) -> None:
    # A config may carry keys of another scheduler class: from_config keeps what it does not use.
    known = set(_FROM_OLD_VERSIONS).union(*map(_parameters, DDPM_FAMILY + FLOW_MATCH_FAMILY))
    for key in config:
        if not key.startswith("_") and key not in known:
            raise HddmError(f"{origin}: no diffusers scheduler has a key {key!r}{did_you_mean(key, known)}")


def _with_defaults(config: Mapping[str, Any], name: str, origin: str) -> dict[str, Any]:
    parameters = _parameters(name)
    facts: dict[str, Any] = {}
    for key in _SCHEDULE_KEYS:
        if key in config:
            value = config[key]
            # A live config may hold an array, which a record cannot.
            facts[key] = np.asarray(value).tolist() if key == "trained_betas" and value is not None else value
        elif key in parameters:
            facts[key] = parameters[key].default
            logger.info("%s: %s not given, %s's default %s", origin, key, name, facts[key])
    return facts
