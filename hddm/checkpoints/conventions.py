"""What a source's numbers mean: schedule and prediction type, never guessed.

In this order: the user (``--schedule``, ``--prediction-type``), the scheduler config beside the weights (a
key that it lacks has its class's documented default, and that is said), the one rule of a layout's code.
Where two statements contradict each other, or none is there, the conversion stops and asks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hddm.checkpoints.sources import Source
from hddm.errors import HddmError
from hddm.files import read_json
from hddm.interfaces import own_time_factor
from hddm.predictions import PredictionType
from hddm.schedules import DiscreteSchedule, LinearSchedule, Schedule, from_config, from_diffusers
from hddm.schedules.diffusers_configs import (
    MOST_STEPS,
    declared_prediction_type,
    default_prediction_type,
)

FLOW_STEPS = 1000


@dataclass(frozen=True)
class Conventions:
    """Schedule and prediction type, where they came from, and what was filled in on the way.

    ``scheduler`` is the whole config that the schedule was read from, ``shift`` that of the time grid of
    samples (`hddm.checkpoints.shifts.with_shift`).
    """

    schedule: Schedule
    prediction_type: PredictionType
    time_scale: float
    schedule_source: str
    notes: tuple[str, ...]
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    shift: float = 1.0


def resolve(source: Source, schedule_file: Path | None, prediction_type: str | None) -> Conventions:
    """The conventions of a source.

    Args:
        source: see `Source`.
        schedule_file: a diffusers scheduler config that the user vouches for; it replaces the source's.
        prediction_type: the user's word.

    Raises:
        HddmError: for a contradiction, or a source that does not say and a user who does not either.
    """
    if source.facts is not None and (schedule_file is not None or prediction_type is not None):
        raise HddmError(
            f"{source.path}: an expert folder states its own schedule and prediction type; drop --schedule "
            "and --prediction-type"
        )
    declared = source.declared
    config: Any = declared.scheduler
    origin = declared.scheduler_origin
    notes = []
    if schedule_file is not None:
        config, origin = read_json(schedule_file), str(schedule_file)
        if declared.scheduler is not None and not declared.is_layout_rule:
            notes.append(f"{schedule_file} instead of {declared.scheduler_origin}")
    if config is None:
        raise HddmError(
            f"{source.path}: says nothing about the schedule that it was trained on; pass --schedule with "
            "its scheduler_config.json"
        )
    schedule = _schedule(config, origin)
    stated = [(declared.prediction_type, str(source.path))] if declared.prediction_type else []
    if "name" not in config:
        own = _declared(config, origin)
        if own is not None and not (declared.is_layout_rule and schedule_file is None):
            stated.append((own, origin))
    asked = prediction_type and PredictionType.parse(prediction_type)
    for value, where in stated:
        if asked is not None and asked != value:
            raise HddmError(
                f"--prediction-type {asked} contradicts {where}, which says {value}; drop the option, or "
                "pass --schedule with a config that says what is true"
            )
        if value != stated[0][0]:
            raise HddmError(f"{stated[0][1]} says {stated[0][0]}, {where} says {value}: which one is it?")
    found = asked or (stated[0][0] if stated else None)
    if found is None:
        found, note = _default(config, origin, source)
        notes.append(note)
    kind = PredictionType.parse(found)
    is_flow = isinstance(schedule, LinearSchedule)
    if is_flow != (kind is PredictionType.FLOW_PREDICTION) and source.facts is None:
        raise HddmError(
            f"{origin}: a schedule of {type(schedule).__name__} contradicts prediction type {kind}"
        )
    scale = _time_scale(schedule, config, source, origin)
    return Conventions(schedule, kind, scale, origin, tuple(notes), config)


def _schedule(config: Any, origin: str) -> Schedule:
    try:
        return from_config(config) if "name" in config else from_diffusers(config)
    except HddmError as error:
        raise HddmError(f"{origin}: {error}") from error


def _declared(config: Any, origin: str) -> str | None:
    try:
        own = declared_prediction_type(config)
        return None if own is None else PredictionType.parse(own)
    except HddmError as error:
        raise HddmError(f"{origin}: {error}") from error


def _default(config: Any, origin: str, source: Source) -> tuple[str, str]:
    if "name" in config:
        raise HddmError(
            f"{source.path}: does not say what it predicts; pass --prediction-type epsilon (Stable Diffusion "
            "1, 2-base) or v_prediction (Stable Diffusion 2 at 768)"
        )
    default = default_prediction_type(config)
    if source.declared.is_layout_rule and config is source.declared.scheduler:
        return default, f"{default} by {origin}"
    return (
        default,
        f"{origin}: no prediction_type, so {config.get('_class_name', 'DDPMScheduler')}'s default {default}",
    )


def _time_scale(schedule: Schedule, config: Any, source: Source, origin: str) -> float:
    if source.facts is not None:
        return source.facts.time_scale
    if isinstance(schedule, DiscreteSchedule):
        return 1.0
    steps = config.get("num_train_timesteps", FLOW_STEPS)
    if not isinstance(steps, int) or not 1 <= steps <= MOST_STEPS:
        raise HddmError(f"{origin}: num_train_timesteps is {str(steps)[:40]}, and must be 1 to {MOST_STEPS}")
    if config.get("invert_sigmas"):
        raise HddmError(f"{origin}: invert_sigmas turns time around, which is not supported")
    return steps / own_time_factor(source.network.__name__)
