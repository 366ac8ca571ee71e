"""The conventions of a checkpoint, which are never guessed: schedule, prediction, shift and units.

Schedule and prediction type come from the first of: the user (``--schedule``, ``--prediction-type``, or a
preset); a preset that the file means; the scheduler config beside the weights (a missing key has its class's
documented default, which is printed); what the file's own tensors and header say; the one rule of a layout's
code. Where statements contradict each other, or there is none, the conversion stops and asks. The shift in a
flow-match scheduler's config is applied once, by `hddm.times.time_grid`; no training schedule depends on it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hddm.checkpoints.presets import Preset, is_edm, is_near
from hddm.checkpoints.sources import Checkpoint
from hddm.networks.families.family import IN_LATENTS, Interface
from hddm.predictions import PredictionType
from hddm.schedule_records import FLOW_MATCH_FAMILY
from hddm.schedules import (
    DiscreteSchedule,
    EDMSchedule,
    LinearSchedule,
    Schedule,
    declared_prediction_type,
    default_prediction_type,
    flow_steps,
    from_config,
    from_diffusers,
    read_prediction,
)
from hddm.units import Units
from hddm.utils.errors import HddmError, Unstated, UsageError, errors_as
from hddm.utils.files import read_json

LARGEST_SHIFT = 1e3
# Of diffusers' flow-match schedulers, and of its pipelines of Flux and SD3.
_DEFAULTS = {
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
    "base_shift": 0.5,
    "max_shift": 1.15,
}
_OTHER_GRIDS = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "shift_terminal")


@dataclass(frozen=True)
class Conventions:
    """Schedule and prediction type, the origin of each, and what was filled in.

    ``scheduler`` is the config that the schedule was read from, ``shift`` that of the sampling time grid
    (`with_shift`). The network gives the negative of its prediction if it is ``negated``. ``units`` are those
    of its own data.
    """

    schedule: Schedule
    prediction_type: PredictionType
    time_scale: float
    schedule_source: str
    prediction_source: str
    notes: tuple[str, ...]
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    shift: float = 1.0
    negated: bool = False
    units: Units = field(default_factory=Units)

    @property
    def path_units(self) -> Units:
        """Units of the data that are noised, on the schedule's own scale."""
        return self.units.times(self.schedule.data_scale)

    @property
    def range(self) -> tuple[float, float]:
        """(t_min, t_max) on the common path: the noise levels that the schedule covers."""
        return self.schedule.range_of(self.path_units.scale)


class Stated(NamedTuple):
    """What a network predicts, None where unstated, and the place that says so."""

    value: str | None
    place: str


def resolve_conventions(
    source: Checkpoint, schedule_file: Path | None, prediction_type: str | None
) -> Conventions:
    """Determine the conventions of a source.

    ``schedule_file`` is a diffusers scheduler config that the user vouches for in place of the source's;
    ``prediction_type`` is the user's. Raises `HddmError` for a contradiction, or where nothing states one.
    """
    if source.record is not None and (schedule_file is not None or prediction_type is not None):
        raise HddmError(
            f"{source.path}: an expert folder states its own schedule and prediction type; drop `schedule` "
            "and `prediction_type`"
        )
    notes: list[str] = []
    config, origin, is_rule = _scheduler_of(source, schedule_file, notes)
    is_own_record = "name" in config
    try:
        schedule = from_config(config) if is_own_record else from_diffusers(config)
        in_config = None if is_own_record or is_rule else declared_prediction_type(config)
        if in_config:
            in_config = PredictionType.parse(in_config)
    except HddmError as error:
        place = origin if origin.endswith(".json") else f"{source.path}: {origin}"
        raise HddmError(f"{place}: {error}") from error
    _refuse_signal(source, schedule, origin)
    if prediction_type is not None and in_config is not None and _is_by_class(config):
        # The class of a scheduler means a prediction as a default does; the user may know better.
        if prediction_type != in_config:
            notes.append(
                f"{prediction_type} as stated, where the class of {origin} means {in_config}"
            )
        in_config = None
    preset = source.declared.preset
    stated = [
        Stated(prediction_type, "`prediction_type`"),
        Stated(source.declared.prediction_type, source.declared.prediction_origin),
        Stated(in_config, origin),
    ]
    if preset is not None:
        is_free = not source.declared.is_preset_stated and not is_edm(preset)
        if schedule_file is None or not is_free:
            _refuse_other_schedule(source, preset, schedule, origin)
        if origin != preset.place:
            stated.append(Stated(preset.prediction_type.value, preset.place))
    by_user = prediction_type
    if by_user is None and schedule_file is not None:
        by_user = in_config
    for place, value in source.header.predictions.items():
        stated.append(Stated(value, place))
    if is_rule and by_user is None:
        by_rule = declared_prediction_type(config) or default_prediction_type(config)
        stated.append(Stated(by_rule, origin))
    found, place = _agreed(source, stated, by_user is not None)
    if found is None:
        found, place = _default_of(source, config, origin, notes)
    elif place in source.header.predictions or (is_rule and place == origin):
        notes.append(f"{found} by {place}")
    if source.record is not None:
        kind, negated, units = (
            PredictionType.parse(found),
            source.record.negated,
            source.record.units,
        )
    else:
        with errors_as(HddmError, origin):
            kind, negated = read_prediction(schedule, found)
        units = Units()
    if negated:
        notes.append(
            f"EDM's own network gives the negative of v, and {kind} is what is read from it"
        )
    is_flow = isinstance(schedule, LinearSchedule)
    is_odd = is_flow != kind.prediction.is_velocity
    if is_odd and not (is_flow and prediction_type is not None) and source.record is None:
        raise HddmError(
            f"{origin}: a schedule of {type(schedule).__name__} contradicts prediction type {kind}"
        )
    scale = _time_scale(schedule, config, source, origin)
    return Conventions(
        schedule,
        kind,
        scale,
        origin,
        place,
        tuple(notes),
        config,
        negated=negated,
        units=units,
    )


def _scheduler_of(
    source: Checkpoint, schedule_file: Path | None, notes: list[str]
) -> tuple[Mapping[str, Any], str, bool]:
    """The scheduler config, the place that states it, and whether that is the rule of a layout's code."""
    declared = source.declared
    if schedule_file is not None:
        if declared.scheduler is not None and not declared.is_layout_rule:
            notes.append(f"{schedule_file} instead of {declared.scheduler_origin}")
        elif declared.preset is not None and not declared.is_preset_stated:
            notes.append(f"{schedule_file} instead of the schedule of {declared.preset.place}")
        return read_json(schedule_file), str(schedule_file), False
    if declared.scheduler is None and declared.preset is not None:
        return declared.preset.scheduler, declared.preset.place, False
    if declared.scheduler is None:
        text = "says nothing about the schedule that it was trained on; pass"
        if declared.presets:
            text += f" `preset` {declared.presets}, or"
        key = ", which says rescale_betas_zero_snr" if declared.zero_snr else ""
        raise Unstated(
            source.path, f"{text} `schedule` with its scheduler_config.json{key}", "schedule"
        )
    return declared.scheduler, declared.scheduler_origin, declared.is_layout_rule


def _is_by_class(config: Mapping[str, Any]) -> bool:
    """True for a flow-match scheduler whose config has no key for what is predicted."""
    keys = ("prediction_type", "predict_epsilon", "use_flow_sigmas")
    is_stated = any(config.get(key) is not None for key in keys)
    return config.get("_class_name") in FLOW_MATCH_FAMILY and not is_stated


def _default_of(
    source: Checkpoint, config: Mapping[str, Any], origin: str, notes: list[str]
) -> tuple[str, str]:
    """What the class of a scheduler config predicts by default, and the place that says so."""
    if "name" in config:
        epsilon, v = PredictionType.EPSILON, PredictionType.V_PREDICTION
        kinds = f"{epsilon} (Stable Diffusion 1, 2-base) or {v} (Stable Diffusion 2 at 768)"
        text = f"does not say what it predicts; pass `prediction_type` {kinds}"
        if source.declared.presets:
            text += f", or `preset` {source.declared.presets}"
        raise Unstated(source.path, text, "prediction_type")
    found, name = default_prediction_type(config), config.get("_class_name", "DDPMScheduler")
    notes.append(f"{origin}: no prediction_type, so {name}'s default {found}")
    return found, f"the default of {name}"


def _agreed(source: Checkpoint, stated: Sequence[Stated], by_user: bool) -> Stated:
    """The first of what is stated, with which all others must agree; no value where nothing is stated.

    ``by_user`` is true where the user states one of them.
    """
    known = [one for one in stated if one.value is not None]
    if not known:
        return Stated(None, "")
    first = known[0]
    for other in known[1:]:
        if other.value != first.value:
            text = (
                f"{first.place} says {first.value}, which contradicts {other.place}, which says "
                f"{other.value}"
            )
            remedy = "pass `prediction_type` with what is true"
            if by_user:
                remedy = "drop the option, or pass `schedule` with a config that says what is true"
            preset = source.declared.preset
            if preset is not None and preset.place in (first.place, other.place):
                remedy = "pass another `preset`, or none"
            if other.place in source.header.predictions:
                remedy = "correct the header, or what contradicts it"
            raise HddmError(f"{source.path}: {text}; {remedy}")
    if first.value not in list(PredictionType):
        text = f"{first.place} says {first.value!r}, which hddm does not know"
        raise HddmError(f"{source.path}: {text}; pass `prediction_type` with what it means")
    return first


def _refuse_signal(source: Checkpoint, schedule: Schedule, origin: str) -> None:
    """Refuse a schedule that keeps signal to its end for a network that was trained down to none."""
    has_none = isinstance(schedule, DiscreteSchedule) and schedule.betas[-1] == 1
    place = source.declared.zero_snr
    if place is not None and not has_none:
        text = f"{place} says that it was trained down to zero signal, which contradicts the schedule of"
        remedy = "pass `schedule` with a config of DDPM's family that has rescale_betas_zero_snr"
        raise HddmError(f"{source.path}: {text} {origin}; {remedy}")


def _refuse_other_schedule(
    source: Checkpoint, preset: Preset, schedule: Schedule, origin: str
) -> None:
    """Refuse a schedule that is not the preset's, up to the rounding of betas and of EDM's sigmas."""
    own = from_diffusers(preset.scheduler)
    is_same = own.config == schedule.config
    if isinstance(own, EDMSchedule) and isinstance(schedule, EDMSchedule):
        ours, theirs = ((one.sigma_min, one.sigma_max, one.sigma_data) for one in (own, schedule))
        is_same = all(map(is_near, ours, theirs))
    if isinstance(own, DiscreteSchedule) and isinstance(schedule, DiscreteSchedule):
        times = torch.linspace(0, own.end, 50, dtype=torch.float64)
        # Near zero signal, rounding moves the ratio far.
        alphas, others = own.alpha(times), schedule.alpha(times.clamp_max(schedule.end))
        is_same = own.end == schedule.end and torch.allclose(alphas, others, rtol=1e-3, atol=1e-3)
    if is_same:
        return
    remedy = "drop one of them"
    if not source.declared.is_preset_stated:
        remedy = "pass `schedule` with what is true"
        if is_edm(preset):
            remedy = f"drop `schedule`, or remove its {preset.marker}"
    raise HddmError(f"{source.path}: the schedule of {origin} contradicts {preset.place}; {remedy}")


def _time_scale(
    schedule: Schedule, config: Mapping[str, Any], source: Checkpoint, origin: str
) -> float:
    if source.record is not None:
        return source.record.time_scale
    if not isinstance(schedule, LinearSchedule):
        return 1.0
    return flow_steps(config, origin) / source.family.time_factor


def with_shift(conventions: Conventions, source: Checkpoint, interface: Interface) -> Conventions:
    """Add the shift that the scheduler config states, or implies at the size of a sample.

    With ``use_dynamic_shifting`` it grows with the number n of patches, as in diffusers' pipelines:

        mu = base_shift + (max_shift - base_shift) (n - n_base)/(n_max - n_base),   shift = exp(mu)

    (mu itself where ``time_shift_type`` is ``linear``), which a note reports. An expert keeps its own shift.
    Raises `HddmError` where no shift of a sound size results.
    """
    if source.record is not None:
        return replace(conventions, shift=source.record.shift)
    if not isinstance(conventions.schedule, LinearSchedule):
        return conventions
    config, origin = conventions.scheduler, conventions.schedule_source
    size = "×".join(map(str, interface.sample_shape[1:]))
    notes = []
    for key in _OTHER_GRIDS:
        if config.get(key):
            text = "the sampler's time grid is kept without it"
            notes.append(f"{origin}: {key} is {str(config[key])[:40]}; {text}")
    if not config.get("use_dynamic_shifting"):
        shift = config.get("flow_shift" if config.get("use_flow_sigmas") else "shift", 1.0)
    elif interface.num_patches is None:
        shift = 1.0
        notes.append(
            f"{origin}: use_dynamic_shifting counts patches, and a UNet has none; no shift is kept"
        )
    else:
        try:
            shift = _dynamic(config, interface.num_patches)
        except (TypeError, ArithmeticError):
            shift = math.nan
        notes.append(
            f"{origin}: use_dynamic_shifting, so the shift is {shift:.4g} at {size}, of "
            f"{interface.num_patches} patches; at another size it is another"
        )
    if not isinstance(shift, int | float) or not 1 / LARGEST_SHIFT <= shift <= LARGEST_SHIFT:
        remedy = "correct the config"
        if source.arguments.get("sample_size") is None:
            remedy = f"pass another `sample_size` {IN_LATENTS}, or {remedy}"
        raise HddmError(
            f"{origin}: shifts times by {str(shift)[:40]} at {size}; a shift is from "
            f"{1 / LARGEST_SHIFT:g} to {LARGEST_SHIFT:g}: {remedy}"
        )
    return replace(conventions, shift=float(shift), notes=(*conventions.notes, *notes))


def with_data_range(
    conventions: Conventions, source: Checkpoint, data_range: tuple[float, float] | None
) -> Conventions:
    """Add the units of the pixels that the user states; without, they are common, or an expert's own.

    Raises `UsageError` for latents, whose scale is their VAE's, and for an expert folder.
    """
    if data_range is None:
        return conventions
    if source.record is not None:
        raise UsageError(
            f"{source.path}: an expert folder states the range of its own data; drop `data_range`"
        )
    if source.declared.is_latent:
        raise UsageError(
            f"`data_range`: is of pixels, and {source.path} is of latents, whose scale is its VAE's; drop it"
        )
    return replace(conventions, units=Units.of_range(*data_range))


def _dynamic(config: Mapping[str, Any], num_patches: int) -> float:
    values: dict[str, Any] = {**_DEFAULTS, **config}
    base, most = values["base_image_seq_len"], values["max_image_seq_len"]
    base_shift, max_shift = values["base_shift"], values["max_shift"]
    mu = float(base_shift + (max_shift - base_shift) * (num_patches - base) / (most - base))
    return mu if config.get("time_shift_type") == "linear" else math.exp(mu)
