"""Experts written back to the layouts of other tools, as safetensors; the network's weights keep all bits."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import torch

from hddm.calibration_records import FILE_NAME as CALIBRATION
from hddm.checkpoints.convert import write_network
from hddm.checkpoints.folders import LAYOUT as FOLDER_LAYOUT
from hddm.checkpoints.folders import SCHEDULER_FILE, folder_layouts, open_expert_checkpoint
from hddm.checkpoints.headers import with_licence, without_names
from hddm.checkpoints.ldm import LDM, to_root
from hddm.checkpoints.ldm_parts import VAE
from hddm.checkpoints.plan import Built
from hddm.checkpoints.single_files import file_layouts
from hddm.checkpoints.source_names import NamePair
from hddm.checkpoints.sources import Checkpoint, KeyTable, Pair, as_planned
from hddm.experts.components import components_of
from hddm.experts.kept import put_component, put_prompts
from hddm.experts.records import EXPERT_FILE, WEAK_FILE, ExpertRecord
from hddm.networks.components import STEM as VAE_STEM
from hddm.networks.components import read_weights
from hddm.networks.families import Family
from hddm.networks.families.family import Pipeline
from hddm.networks.families.installed import may_be_added
from hddm.networks.identity import TextEncoderRecord
from hddm.networks.prompts import (
    index_content,
    several_in,
    texts_record_of,
    zeros_in,
)
from hddm.networks.text_encoder import STEM as TEXT_STEM
from hddm.predictions import PredictionType, to_edm
from hddm.schedule_records import EDM_FAMILY, FLOW_MATCH_FAMILY
from hddm.schedules import (
    DiscreteSchedule,
    EDMSchedule,
    LinearSchedule,
    Schedule,
    flow_steps,
    from_config,
    from_diffusers,
)
from hddm.settings import Reading
from hddm.topic_records import TOPIC
from hddm.utils.errors import HddmError, UsageError, choose, errors_as
from hddm.utils.files import check_absent, new_folder, refuse_full_disk, write_json
from hddm.utils.records import MODEL_INDEX
from hddm.utils.tensors import write_safetensors

RECORD = "written_back.json"
CHECKPOINT_FILE = "checkpoint.safetensors"
_OWN = (CALIBRATION, TOPIC, WEAK_FILE)
"""Files of an expert that only hddm has."""


def write_back(
    folder: Path, out: Path, layout: str, dry_run: bool = False, overwrite: bool = False
) -> list[str]:
    """Write the expert in ``folder`` as ``layout``; return lines to print.

    A layout of single files becomes ``checkpoint.safetensors``, with the source's names and prefix. A layout
    of diffusers becomes a pipeline: the network, its scheduler, and the VAE, text encoder and tokenizer that
    the expert or its ensemble keeps.

    Raises `HddmError` for a layout that is unknown, that cannot hold this network, or in which its weights
    would mean something else.
    """
    known = [*file_layouts(), *folder_layouts()]
    if layout not in known:
        raise UsageError(f"`to_layout` {layout}: {choose(layout, known)}; {may_be_added()}")
    if not (folder / EXPERT_FILE).is_file():
        raise UsageError(
            f"{folder}: not an expert folder; name one of an ensemble, or convert it first"
        )
    source = open_expert_checkpoint(folder, Reading())
    record = source.record
    assert record is not None
    family = _family_of(layout)
    _refuse_misfit(source, record, layout, family)
    pipeline = None
    if layout not in file_layouts():
        with errors_as(HddmError, f"`to_layout` {layout}"):
            pipeline = family.pipeline(source.arguments, _text_encoder_of(folder, record))
    check_absent(out, RECORD, overwrite)
    size = sum(tensor.numel() * tensor.itemsize for tensor in source.weights.values())
    refuse_full_disk(out, size)
    lines = _notes(source, record, layout)
    if dry_run:
        return [*lines, f"{out}: {layout}, {size / 1e6:,.1f} MB; nothing written (`dry_run`)"]
    with new_folder(out, RECORD, overwrite) as draft:
        if pipeline is None:
            lines += _write_file(source, record, layout, draft / CHECKPOINT_FILE)
        else:
            lines += _write_pipeline(source, record, family, pipeline, draft)
        write_json(draft / RECORD, {"format": "1.0", "layout": layout, "licence": record.licence})
    return [
        *lines,
        f"{out}: written back as {layout}",
        f"licence: {record.licence or 'not stated'}",
    ]


def _notes(source: Checkpoint, record: ExpertRecord, layout: str) -> list[str]:
    """Lines on what the expert has and a file of this layout has no place for."""
    lines = []
    own = [name for name in _OWN if (source.path / name).is_file()]
    if own:
        lines.append(f"note: layout {layout} has no place for {', '.join(own)} of the expert")
    if not record.units.is_common:
        units = f"{record.data_scale:g} times its samples, plus {record.data_shift or 0}"
        lines.append(f"note: layout {layout} does not say that the expert's own data are {units}")
    file = file_layouts().get(layout)
    if file is not None and file.scheduler is not None:
        fixed = file.scheduler(source.arguments)
        shift = fixed.get("shift", 1.0)
        if not fixed.get("use_dynamic_shifting") and shift != record.shift:
            lines.append(
                f"note: layout {layout} means steps with a shift of {shift:g}, and the expert wants "
                f"{record.shift:g}; state it where the file is used"
            )
    return lines


def _family_of(layout: str) -> Family:
    """The family of networks that a layout holds."""
    return file_layouts()[layout].family if layout in file_layouts() else folder_layouts()[layout]


def _text_encoder_of(folder: Path, record: ExpertRecord) -> TextEncoderRecord | None:
    """The text encoder that an expert was trained with; where that is not recorded, the one that it has."""
    parts = components_of(folder)
    if record.text_encoder is None and "text_encoder" in parts:
        return texts_record_of(parts["text_encoder"], parts.get("tokenizer"))
    return record.text_encoder


def _refuse_misfit(source: Checkpoint, record: ExpertRecord, layout: str, family: Family) -> None:
    """Refuse a layout that cannot hold the network, or in which its weights would mean something else."""
    if record.training_calibration:
        text = f"was trained together with its calibration, which layout {layout} cannot hold"
        raise HddmError(f"{source.path}: {text}")
    is_other = source.family is not family
    if is_other or (layout == "facebook-dit" and source.arguments.get("modulation") != "zero"):
        raise HddmError(
            f"`to_layout` {layout}: cannot hold the {source.class_name} of {source.path}"
        )
    chain = record.source
    if layout not in file_layouts() or (chain is not None and chain.first.layout == layout):
        return
    own = _meaning(record.prediction_type.value, from_config(record.schedule), record.time_scale)
    scheduler = file_layouts()[layout].scheduler
    if scheduler is None:
        raise HddmError(
            f"`to_layout` {layout}: each of its files has a convention of its own, and {source.path} comes "
            f"from none; it has {own}"
        )
    if differences := _differences(record, family, scheduler(source.arguments)):
        theirs = ", ".join(differences)
        ours = ", ".join(differences.values())
        raise HddmError(
            f"`to_layout` {layout}: means {theirs}, and {source.path}, which does not come from it, has "
            f"{ours}"
        )


def _differences(
    record: ExpertRecord, family: Family, scheduler: Mapping[str, Any]
) -> dict[str, str]:
    """What a layout means that fixes ``scheduler``, and what the expert has in its place, in words."""
    rule, own = from_diffusers(scheduler), from_config(record.schedule)
    kind, scale = scheduler.get("prediction_type"), 1.0
    if isinstance(rule, LinearSchedule):
        kind, scale = (
            PredictionType.FLOW_PREDICTION.value,
            flow_steps(scheduler, "") / family.time_factor,
        )
    times = torch.linspace(rule.start, rule.end, 5, dtype=torch.float64)
    is_same = (own.start, own.end) == (rule.start, rule.end) and torch.equal(
        own.log_snr(times), rule.log_snr(times)
    )
    found = {}
    if not is_same or (record.prediction_type.value, record.time_scale) != (kind, scale):
        theirs = _meaning(str(kind), rule, scale)
        found[theirs] = _meaning(record.prediction_type.value, own, record.time_scale)
    file = family.single_file
    if file is None:
        return found
    if record.latent_scale not in (None, file.scale):
        found[f"latents times {file.scale:g}"] = f"latents times {record.latent_scale:g}"
    if record.vae is not None and record.vae.shift != file.shift:
        found[f"latents shifted by {file.shift:g}"] = f"latents shifted by {record.vae.shift:g}"
    return found


def _meaning(prediction: str, schedule: Schedule, time_scale: float) -> str:
    """What a network predicts, and on which schedule, in words."""
    words = type(schedule).__name__
    if isinstance(schedule, LinearSchedule):
        words = f"the straight path, with times up to {time_scale:g}"
    elif isinstance(schedule, DiscreteSchedule):
        words = repr(schedule).strip("<>")
    return f"{prediction} on {words}"


def _write_file(source: Checkpoint, record: ExpertRecord, layout: str, path: Path) -> list[str]:
    """Write the file with all that the expert has of the one that it comes from; lines on what it lacks."""
    table = file_layouts()[layout].table(source.weights, source.arguments, f"`to_layout` {layout}")
    prefix = record.source.first.prefix if record.source else ""
    planned = table.to_foreign(source.weights, source.declared.kept, str(source.path))
    planned = [replace(one, name=prefix + one.name) for one in planned]
    names, written = source.names, list[str]()
    metadata: Mapping[str, str] = {"format": "pt"}
    if layout == LDM.name and names is not None:
        planned = [replace(one, name=to_root(one.name, names.root)) for one in planned]
    if names is not None:
        metadata = without_names(names.metadata) if _has_changed(record) else names.metadata
        for part, pairs in names.parts.items():
            place = _folder_of(source.path, part)
            if place is None:
                continue
            _, weights = read_weights(place, VAE_STEM if part == VAE else TEXT_STEM)
            table = KeyTable([_pair(one) for one in pairs])
            planned += table.to_foreign(weights, {}, str(place))
            written.append(part)
    # Buffers of a file, such as the logarithm of no signal, may be infinite.
    metadata = with_licence(metadata, record.licence)
    write_safetensors(path, planned, metadata, check_finite=not source.declared.kept)
    lost = [name for name in components_of(source.path) if name not in (*written, "tokenizer")]
    if lost:
        text = f"the file has no place for the expert's {', '.join(lost)}"
        return [f"note: {text}; a layout of diffusers (`to_layout`) takes them too"]
    if layout == LDM.name and not written:
        return [
            "note: the file holds the network alone, without a whole file's VAE and text encoder"
        ]
    return []


def _has_changed(record: ExpertRecord) -> bool:
    """True if the weights are others than those in the file that they come from."""
    chain = record.source.chain if record.source is not None else ()
    is_converted = all(one.layout in (*file_layouts(), FOLDER_LAYOUT) for one in chain)
    return not is_converted or bool(record.training)


def _pair(one: NamePair) -> Pair:
    return Pair((one.foreign,), one.ours, one.is_transposed, one.ones)


def _folder_of(expert: Path, part: str) -> Path | None:
    """The folder of the component that a file holds as ``part``; None where the expert has it no more."""
    kind = VAE if part == VAE else "text_encoder"
    folder = components_of(expert).get(kind)
    if folder is None or part == VAE or several_in(folder) is None:
        return folder
    return folder / part


def _write_pipeline(
    source: Checkpoint, record: ExpertRecord, family: Family, pipeline: Pipeline, draft: Path
) -> list[str]:
    component = pipeline.network
    (draft / component).mkdir()
    tensors = [as_planned(name, tensor) for name, tensor in source.weights.items()]
    write_network(draft / component, Built(source.network, tensors))
    index: dict[str, object] = {
        "_class_name": pipeline.name,
        "_diffusers_version": diffusers.__version__,
        component: [family.library, family.name],
    }
    for name, folder in components_of(source.path).items():
        inner = several_in(folder)
        if inner is None:
            index[name] = put_component(draft, name, folder)
            continue
        put_prompts(draft, folder, inner)
        index |= index_content(inner, zeros_in(folder))
    scheduler, notes = _scheduler(record, family.time_factor), []
    if scheduler is None:
        lacks = f"has the schedule {record.schedule}"
        if not record.prediction_type.prediction.is_in_diffusers:
            lacks = f"takes {record.prediction_type.prediction.words}"
        notes.append(f"note: no scheduler of diffusers {lacks}; none written")
    else:
        (draft / "scheduler").mkdir()
        write_json(draft / "scheduler" / SCHEDULER_FILE, json.loads(json.dumps(scheduler)))
        index["scheduler"] = ["diffusers", scheduler["_class_name"]]
    write_json(draft / MODEL_INDEX, index)
    return notes


def _scheduler(record: ExpertRecord, time_factor: float) -> Mapping[str, Any] | None:
    """The source's own scheduler config where still valid, else the nearest equivalent.

    None where diffusers has none for the schedule, or for what the network predicts.
    """
    if not record.prediction_type.prediction.is_in_diffusers:
        return None
    found, schedule = record.source.first.scheduler if record.source else None, record.schedule
    kind = {"prediction_type": record.prediction_type.value}
    if found is not None and from_diffusers(found).config == schedule:
        own_words = FLOW_MATCH_FAMILY + EDM_FAMILY
        return found if found.get("_class_name") in own_words else {**found, **kind}
    if "_class_name" in schedule:
        return {**schedule, **kind}
    if schedule.get("name") == "discrete":
        name = {"_class_name": "DDIMScheduler", "num_train_timesteps": len(schedule["betas"])}
        return {**name, "trained_betas": schedule["betas"], **kind, "clip_sample": False}
    path = from_config(schedule)
    if isinstance(path, EDMSchedule):
        word = to_edm(record.prediction_type, record.negated)
        if word is None:
            return None
        values = {key: value for key, value in path.config.items() if key != "name"}
        return {"_class_name": EDM_FAMILY[0], **values, "prediction_type": word.value}
    if isinstance(path, LinearSchedule):
        return {
            "_class_name": "FlowMatchEulerDiscreteScheduler",
            "num_train_timesteps": round(record.time_scale * time_factor),
            "shift": record.shift,
        }
    return None
