"""Velocity fields in memory as an ensemble's experts, and the records of the folders that would hold them."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import diffusers
import torch
from torch import Tensor, nn

from hddm.conditions import LABELS
from hddm.ensemble import Ensemble
from hddm.experts.ensemble_folders import MOMENTS, MOMENTS_EVIDENCE, EnsembleRecord, Member
from hddm.experts.model_index import ROUTER
from hddm.experts.parts import with_parts
from hddm.experts.records import Expert, ExpertRecord, RouterRecord, without_adapter
from hddm.networks.folders import Unread, cast, fitting
from hddm.networks.identity import TextEncoderRecord
from hddm.networks.offload import StoredNetwork
from hddm.networks.transformers import RouterTransformer
from hddm.networks.wrappers import EXPERT_NETWORKS, NetworkWrapper, described, interface_of
from hddm.routers import MomentsRouter, Router
from hddm.schedules import DiscreteSchedule, LinearSchedule, Schedule, from_config
from hddm.utils.errors import HddmError
from hddm.utils.records import Record
from hddm.utils.tensors import refuse_non_finite, to_float64
from hddm.velocity import PredictionType, VelocityField

_FLOW = PredictionType.FLOW_PREDICTION
_BY_HAND = "set in Python"
_IMAGES = (1, 3)
"""Channels of pixels; samples of any others are taken for latents."""


Module = TypeVar("Module", bound=nn.Module)


def carrying(part: Module, record: Record | None) -> Module:
    """``part`` if it carries this ``record``, else a copy that does and shares its weights."""
    if part.record != record:
        part = copy.copy(part)
        part.record = record  # type: ignore[assignment]
    return part


def unpacked(
    model: Ensemble | VelocityField,
) -> tuple[list[VelocityField], Callable[..., Tensor] | None, EnsembleRecord]:
    """The experts of an ensemble, or of one field, its router, and its record.

    The router is hddm's own network where there is one, with its record, else the function itself. Raises
    `HddmError` for another object, and for samples of unknown shape.
    """
    if isinstance(model, VelocityField):
        model = Ensemble([model], strategy="draw", shift=model.shift)
    if not isinstance(model, Ensemble) or not all(isinstance(one, VelocityField) for one in model.experts):
        raise HddmError(
            f"a pipeline is made of an Ensemble or a VelocityField, not of a {type(model).__name__}"
        )
    if len(model.kinds) > 1:
        raise HddmError(
            "these experts make samples of several kinds; assemble them, and take from_pretrained"
        )
    fields, shape, router = [copy.copy(one) for one in model.experts], model.sample_shape, model.router
    if shape is None or len(shape) != 3:
        shapes = ", ".join(str(one.sample_shape) for one in fields)
        raise HddmError(
            f"a pipeline needs the one shape of all samples, and the experts state {shapes}: pass "
            "sample_shape=(C, H, W) to VelocityField"
        )
    for field in fields:
        field.sample_shape = shape
    named = [(f"expert {k}", in_memory(field).facts) for k, field in enumerate(fields)]
    outputs: list[int | None] = [None] * len(fields)
    kind, evidence = None if router is None else ROUTER, MOMENTS_EVIDENCE
    own = [field.calibration and field.calibration.moments for field in fields]
    if type(router) is MomentsRouter and all(a is b for a, b in zip(router.moments, own, strict=True)):
        # As many as there are is all of them.
        kind, evidence = MOMENTS, router.evidence or float(math.prod(shape))
        router = None
    if type(router) is Router and isinstance(router.network, RouterTransformer):
        known = router.network.record
        if not isinstance(known, RouterRecord):
            known = RouterRecord(
                time_scale=router.time_scale, sample_shape=shape, shard_hashes=(), shard_images=()
            )
        for k, output in enumerate(router.outputs or range(len(fields))):
            shard = named[k][1].shard
            is_found = shard is not None and known.shard_hashes[output : output + 1] == (shard.hash,)
            outputs[k] = None if is_found else output
        stated = {"time_scale": router.time_scale, "temperatures": router.temperatures}
        router = carrying(router.network, known.model_copy(update=stated))
    members = [Member(folder=f"experts/{k}", output=output) for k, output in enumerate(outputs)]
    # The prior may have been set after the ensemble was made.
    weights = model.prior.tolist()
    parts = [replace(part, weight=one) for part, one in zip(model.parts, weights, strict=True)]
    known = {part.text_encoder for part in parts} - {None}
    if len(known) > 1 and not all(isinstance(one, TextEncoderRecord) for one in known):
        raise HddmError("text_encoder= of these parts differs; a folder records it by a TextEncoderRecord")
    record = EnsembleRecord(
        experts=tuple(with_parts(members, named, parts)),
        router=kind,
        evidence=evidence,
        strategy=model.strategy,
        shift=model.shift,
    )
    return fields, router, record


def in_memory(field: VelocityField) -> Expert:
    """What is known of a field, whose samples have a shape: what it was read from, and what is set on it.

    Of a field whose network was replaced after it was read nothing else is taken over.
    """
    source = field.source if isinstance(field.source, Expert) else None
    if source is not None and _bare(field.network) is not source.network:
        source = None
    nulls = {name: value for name, value in field.null_conditions.items() if name != LABELS}
    facts = _record(field, None if source is None else source.facts)
    weak = None
    if field.weak is not None:
        weak = None if source is None else source.weak
        if weak is None or _bare(field.weak.network) is not weak.network:
            weak = _unread(field.weak.network)
    if source is not None and isinstance(field.network, StoredNetwork):
        return replace(source, facts=facts, calibration=field.calibration, nulls=nulls, weak=weak)
    unread, facts = _unread(field.network), without_adapter(facts)
    return Expert(unread.network, facts, field.calibration, nulls, weak, unread.read)


def _unread(network: Any) -> Unread[Any]:
    """A network whose weights are read from where they are."""
    inner = network.network if isinstance(network, StoredNetwork) else network
    prefix = "model." if isinstance(inner, NetworkWrapper) else ""

    def read(dtype: torch.dtype) -> dict[str, Tensor]:
        held = network.tensors() if isinstance(network, StoredNetwork) else inner.state_dict()
        return cast({name.removeprefix(prefix): value.cpu() for name, value in held.items()}, dtype)

    return Unread(_bare(network), read)


def _bare(network: Any) -> Any:
    """A network without what hddm wraps it in."""
    inner = network.network if isinstance(network, StoredNetwork) else network
    return inner.model if isinstance(inner, NetworkWrapper) else inner


def _record(field: VelocityField, known: ExpertRecord | None) -> ExpertRecord:
    """The record of a field whose samples have a shape, on top of the one that it was read with."""
    shape, null = field.sample_shape or (), field.null_conditions.get(LABELS)
    inner = field.network.network if isinstance(field.network, StoredNetwork) else field.network
    schedule = field.schedule.config
    stated = {
        "prediction_type": field.prediction_type,
        "schedule": schedule,
        "time_scale": float(field.time_scale),
        "sample_shape": tuple(shape),
        "conditions": field.conditions or (),
        "classes": field.classes,
        "null_class": int(null) if null is not None and null.ndim == 0 else None,
        "shift": field.shift,
        "noise_range": field.noise_range,
        "round_time": isinstance(inner, NetworkWrapper) and inner.round_time,
    }
    if known is not None:
        source = known.schedule_source if known.schedule == schedule else _BY_HAND
        return known.model_copy(update={**stated, "schedule_source": source})
    is_flow = isinstance(field.schedule, LinearSchedule) or field.prediction_type is _FLOW
    is_pixels = shape[0] in _IMAGES
    unstated = {
        "objective": "flow" if is_flow else "ddpm",
        "schedule_source": _BY_HAND,
        "space": "pixels" if is_pixels else "latents",
        "latent_scale": 1.0 if is_pixels else None,
        "weights": "unstated",
    }
    return ExpertRecord.model_validate(unstated | stated)


def storable(expert: Expert, field: VelocityField) -> Expert:
    """The expert of a field as its folder records it.

    Raises `HddmError` for a network of another class than `EXPERT_NETWORKS`, or one that was changed; for a
    schedule, conditions, null values, a calibration or a weak model that a folder cannot hold.
    """
    if type(field) is not VelocityField:
        raise HddmError(f"is a {type(field).__name__}, and a folder holds a VelocityField")
    network, facts = expert.network, expert.facts
    _refuse_network(network)
    name, config = type(network).__name__, network.config
    interface = interface_of(name, config, facts.sample_shape[1:])
    if interface.sample_shape != facts.sample_shape:
        raise HddmError(
            f"its samples are {facts.sample_shape}, and its {name} makes {interface.sample_shape}"
        )
    if field.conditions is not None and set(field.conditions) != set(interface.conditions):
        raise HddmError(
            f"declares the conditions {field.conditions}, and a folder of its {name} {interface.conditions}"
        )
    _refuse_schedule(field.schedule)
    null = field.null_conditions.get(LABELS)
    if null is not None and (null.ndim or null.is_floating_point()):
        raise HddmError(f"its null value of {LABELS} is {null.tolist()}, and a folder holds one whole number")
    if left := set(field.null_conditions) - set(interface.conditions):
        raise HddmError(f"has null values of {sorted(left)}, which are no conditions of its {name}")
    calibration = expert.calibration
    if calibration is not None and len(calibration.moments.mean) != math.prod(facts.sample_shape):
        raise HddmError(f"its calibration is of other samples than {facts.sample_shape}")
    if field.weak is not None:
        _refuse_weak(field, field.weak)
    changes = {"conditions": interface.conditions, "variance_head": interface.variance_head}
    return replace(expert, facts=facts.model_copy(update=changes))


def _refuse_network(network: Any) -> None:
    known = {one if isinstance(one, str) else one.__name__: one for one in EXPERT_NETWORKS}
    kind = known.get(type(network).__name__)
    if kind is None or type(network) is not (getattr(diffusers, kind) if isinstance(kind, str) else kind):
        what = f"a {type(network).__name__}" if isinstance(network, nn.Module) else described(network)
        raise HddmError(f"its network is {what}, and a folder holds one of {', '.join(known)}")
    arguments = {key: value for key, value in network.config.items() if not key.startswith("_")}
    weights, name = network.state_dict(), Path(type(network).__name__)
    try:
        fitting(type(network), arguments, weights, name, "config")
    except HddmError as error:
        raise HddmError(f"its network was changed after it was built: {error}") from error
    refuse_non_finite(name, {key: value for key, value in weights.items() if not value.is_meta})


def _refuse_schedule(schedule: Schedule) -> None:
    rebuilt = from_config(schedule.config)
    is_same = type(rebuilt) is type(schedule)
    if isinstance(schedule, DiscreteSchedule) and isinstance(rebuilt, DiscreteSchedule):
        is_same = is_same and torch.equal(to_float64(schedule.betas).cpu(), to_float64(rebuilt.betas).cpu())
    if not is_same:
        raise HddmError(f"its schedule is a {type(schedule).__name__} that its config does not describe")


def _refuse_weak(field: VelocityField, weak: VelocityField) -> None:
    _refuse_network(_bare(weak.network))
    for name in ("prediction_type", "time_scale", "calibration"):
        if getattr(field, name) is not getattr(weak, name) and getattr(field, name) != getattr(weak, name):
            raise HddmError(f"its weak model has another {name}, and a folder holds other weights alone")
    same = [(type(one), dict(one.config)) for one in (_bare(field.network), _bare(weak.network))]
    if field.schedule.config != weak.schedule.config or same[0] != same[1]:
        raise HddmError(
            "its weak model has another schedule or network, and a folder holds other weights alone"
        )
