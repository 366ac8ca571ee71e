"""An expert folder back to the layout of other tools, in safetensors, bit for bit."""

import json
from pathlib import Path

import diffusers

from hddm.checkpoints import ldm
from hddm.checkpoints.architecture import Built
from hddm.checkpoints.convert import refuse_full_disk, write_network
from hddm.checkpoints.diffusers_models import DIFFUSERS_LAYOUTS
from hddm.checkpoints.expert_folders import EXTRAS_FILE, open_expert
from hddm.checkpoints.folders import PIPELINE, SCHEDULER
from hddm.checkpoints.keys import KeyTable, as_planned
from hddm.checkpoints.single_files import FILE_LAYOUTS, LDM
from hddm.checkpoints.sources import Reading, Source
from hddm.errors import HddmError, did_you_mean
from hddm.files import check_absent, new_folder, write_json
from hddm.weight_files import read_safetensors, write_safetensors

RECORD = "written_back.json"
FILE = "checkpoint.safetensors"
_PIPELINES = {
    "diffusers-dit": ("DiTPipeline", "transformer"),
    "diffusers-pixart": ("PixArtAlphaPipeline", "transformer"),
    "diffusers-unet2d": ("DDPMPipeline", "unet"),
    "diffusers-unet2d-condition": ("StableDiffusionPipeline", "unet"),
}


def write_back(
    folder: Path, out: Path, layout: str, dry_run: bool = False, overwrite: bool = False
) -> list[str]:
    """Write the expert in ``folder`` as ``layout``; return what to print.

    Single-file layouts become ``checkpoint.safetensors`` with the source's names, prefix included; diffusers'
    become the component of a pipeline with its scheduler.

    Raises:
        HddmError: for a layout that is unknown or cannot hold this network.
    """
    known = (*FILE_LAYOUTS, LDM, *DIFFUSERS_LAYOUTS)
    if layout not in known:
        raise HddmError(
            f"--to-layout {layout}: choose one of {', '.join(known)}{did_you_mean(layout, known)}"
        )
    check_absent(out, RECORD, overwrite)
    source = open_expert(folder, Reading())
    facts = source.facts
    assert facts is not None
    size = sum(tensor.numel() * tensor.itemsize for tensor in source.weights.values())
    refuse_full_disk(out, size)
    if dry_run:
        return [f"{out}: {layout}, {size / 1e6:,.1f} MB; nothing written (--dry-run)"]
    extras = read_safetensors(folder / EXTRAS_FILE) if (folder / EXTRAS_FILE).exists() else {}
    with new_folder(out, RECORD, overwrite) as draft:
        if layout in DIFFUSERS_LAYOUTS:
            _write_pipeline(source, layout, draft)
        else:
            planned = _table(source, layout).to_foreign(source.weights, extras, str(folder))
            prefix = facts.source.prefix if facts.source else ""
            renamed = [as_planned(prefix + one.name, one.read()) for one in planned]
            write_safetensors(draft / FILE, renamed, {"format": "pt"}, check_finite=True)
        write_json(draft / RECORD, {"format": "1.0", "layout": layout, "licence": facts.licence})
    return [f"{out}: written back as {layout}", f"licence: {facts.licence or 'not stated'}"]


def _table(source: Source, layout: str) -> KeyTable:
    file_layout = FILE_LAYOUTS.get(layout)
    kind = file_layout.network if file_layout else ldm.NETWORK
    config = dict(source.arguments)
    if source.network is not kind or (layout == "facebook-dit" and config.get("modulation") != "zero"):
        raise HddmError(f"--to-layout {layout}: cannot hold the {source.network.__name__} of {source.path}")
    named = file_layout.table if file_layout else ldm.table_of_class
    return named(config, source.weights)


def _write_pipeline(source: Source, layout: str, draft: Path) -> None:
    kind = DIFFUSERS_LAYOUTS[layout]
    if source.network is not kind:
        raise HddmError(f"--to-layout {layout}: cannot hold the {source.network.__name__} of {source.path}")
    facts = source.facts
    assert facts is not None
    pipeline, component = _PIPELINES[layout]
    (draft / component).mkdir()
    tensors = [as_planned(name, tensor) for name, tensor in source.weights.items()]
    write_network(draft / component, Built(kind, dict(source.arguments), tensors))
    index: dict[str, object] = {
        "_class_name": pipeline,
        "_diffusers_version": diffusers.__version__,
        component: ["diffusers", kind.__name__],
    }
    if "_class_name" in facts.schedule:
        name = facts.schedule["_class_name"]
        (draft / "scheduler").mkdir()
        config = {**facts.schedule, "prediction_type": facts.prediction_type.value}
        write_json(draft / "scheduler" / SCHEDULER, json.loads(json.dumps(config)))
        index["scheduler"] = ["diffusers", name]
    write_json(draft / PIPELINE, index)
