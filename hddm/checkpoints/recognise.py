"""Any source by its content: an expert folder, a diffusers folder, or a single file.

What a foreign checkpoint is, without converting it.
"""

from pathlib import Path
from typing import Any

from hddm.checkpoints.diffusers_models import DIFFUSERS_LAYOUTS, open_expert
from hddm.checkpoints.diffusers_models import LAYOUT as HDDM
from hddm.checkpoints.folders import PIPELINE, STEM, open_model, open_pipeline
from hddm.checkpoints.layouts import Hints, UnstatedHeads
from hddm.checkpoints.single_files import FILE_LAYOUTS, LDM, open_file
from hddm.checkpoints.sources import Reading, Source, resolve, with_shift
from hddm.experts.records import EXPERT_FILE
from hddm.networks.folders import empty_network
from hddm.networks.wrappers import interface_of
from hddm.utils.errors import HddmError, UsageError, choose

LAYOUTS = (*FILE_LAYOUTS, LDM, *DIFFUSERS_LAYOUTS, HDDM)
_ENDINGS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")


def open_source(path: Path, reading: Reading) -> Source:
    """What lies at ``path``, recognised by its content.

    A folder without any config may hold one file of weights; a file that lies beside the ``config.json`` of
    its diffusers model is that model with exactly that file.

    Raises:
        HddmError: for content of no known layout, or another than asked for.
    """
    if reading.layout is not None and reading.layout not in LAYOUTS:
        raise UsageError(f"--layout {reading.layout}: {choose(reading.layout, list(LAYOUTS))}")
    if not path.exists():
        raise HddmError(f"{path}: no such file or folder")
    if not path.is_dir():
        if path.name.startswith(STEM) and (path.parent / "config.json").exists():
            return open_model(path.parent, reading, file=path.name)
        return open_file(path, reading)
    if (path / EXPERT_FILE).exists():
        return open_expert(path, reading)
    if (path / PIPELINE).exists():
        return open_pipeline(path, reading)
    if (path / "config.json").exists():
        return open_model(path, reading)
    files = sorted(one for one in path.iterdir() if one.suffix in _ENDINGS)
    sources, refusals = [], []
    for file in files:
        try:
            sources.append(open_file(file, reading))
        except UnstatedHeads:
            raise
        except HddmError as error:
            refusals.append(error)
    if len(sources) == 1:
        return sources[0]
    if len(files) == 1:
        raise refusals[0]
    if (path / "snapshots").is_dir():
        raise HddmError(f"{path}: a hub cache; give the folder of one revision in its snapshots/")
    found = ", ".join(file.name for file in files) or "none"
    reasons = "".join(f"; {error}" for error in refusals)
    raise HddmError(
        f"{path}: holds none of {EXPERT_FILE}, {PIPELINE} and config.json, and not one checkpoint file "
        f"(found: {found}){reasons}"
    )


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
