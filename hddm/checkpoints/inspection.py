"""What a foreign checkpoint is, without converting it."""

from pathlib import Path
from typing import Any

from hddm.checkpoints.conventions import resolve
from hddm.checkpoints.layouts import Hints, UnstatedHeads
from hddm.checkpoints.recognise import open_source
from hddm.checkpoints.shifts import with_shift
from hddm.checkpoints.sources import Reading
from hddm.errors import HddmError
from hddm.network_configs import empty_network
from hddm.networks import interface_of


def describe_source(path: Path, allow_pickle: bool = False, variant: str | None = None) -> dict[str, Any]:
    """Facts of a checkpoint in plain values; what it does not state is said to be so.

    Args:
        path: as `hddm.checkpoints.recognise.open_source` takes it.
        allow_pickle: whether pickle files are read.
        variant: of the weights file.

    Raises:
        HddmError: for content that is no checkpoint of a known layout.
    """
    reading = Reading(allow_pickle=allow_pickle, variant=variant)
    unstated = []
    try:
        source = open_source(path, reading)
    except UnstatedHeads as missing:
        # Any number serves here: no shape depends on it.
        source = open_source(
            path, Reading(allow_pickle=allow_pickle, variant=variant, hints=Hints(num_heads=1))
        )
        unstated.append(str(missing))
    network = source.network.__name__
    arguments = {k: v for k, v in source.arguments.items() if not (unstated and k in _HEADS)}
    empty = empty_network(source.network, source.arguments, len(source.weights), str(path))
    shape: list[int] | None = None
    try:
        interface = interface_of(network, empty.config)
        shape = list(interface.sample_shape)
    except HddmError as missing:
        # Any sides serve here: they are not told.
        interface = interface_of(network, empty.config, (64, 64))
        unstated.append(str(missing))
    facts: dict[str, Any] = {
        "kind": "checkpoint",
        "layout": source.layout,
        "files": [file.name for file in source.files],
        "weights": list(source.sets),
        "prediction_type": None,
        "schedule": None,
        "schedule_source": None,
        "noise_range": None,
        "shift": None,
    }
    try:
        found = resolve(source, None, None)
        if shape or not found.scheduler.get("use_dynamic_shifting"):
            found = with_shift(found, source, interface)
            facts["shift"] = found.shift
        facts |= {
            "prediction_type": found.prediction_type.value,
            "schedule": found.schedule.config,
            "schedule_source": found.schedule_source,
            "noise_range": list(found.schedule.range),
        }
        notes = [*source.notes, *found.notes]
    except HddmError as error:
        unstated.append(str(error))
        notes = list(source.notes)
    return facts | {
        "sample_shape": shape,
        "space": "latents" if source.is_latent else "pixels",
        "latent_scale": source.latent_scale,
        "variance_head": interface.variance_head,
        "conditions": list(interface.conditions),
        "null_class": interface.null_class,
        "licence": source.licence,
        "parameters": sum(tensor.numel() for tensor in source.weights.values()),
        "dtypes": sorted({str(tensor.dtype).removeprefix("torch.") for tensor in source.weights.values()}),
        "network": network,
        "architecture": arguments,
        "notes": notes,
        "unstated": unstated,
    }


_HEADS = ("num_heads", "num_attention_heads", "attention_head_dim")
