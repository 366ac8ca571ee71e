"""A published LoRA laid on a converted model, beside the network that diffusers or peft makes of it."""

from pathlib import Path
from typing import Any

import diffusers
import torch
from huggingface_hub import snapshot_download
from peft import PeftModel

import hddm
from benchmarks.acceptance.checkpoints import (
    SHARES,
    be_exact,
    common_time,
    conditions_of,
    converted,
    download,
    kept_expert,
    moved,
    network_part,
    sized,
    state_shape,
    stock_network,
    stock_velocity,
)
from benchmarks.acceptance.entries import Entry
from benchmarks.acceptance.stages import Kit, relative_error
from benchmarks.figures import Figure, Result, at_least, at_most, told
from hddm.checkpoints.lora import convert_lora
from hddm.utils.hub import origin_of
from hddm.utils.memory import release

SHARE = SHARES[1]
_LEAST_CHANGE = 1e-4
"""Relative change of a velocity that a LoRA makes, at least: one that changes nothing compares nothing."""


def compare_lora(entry: Entry, kit: Kit) -> Result:
    """Convert the LoRA of an entry, and compare one call with that of diffusers or peft."""
    be_exact()
    entry = sized(entry, kit)
    lora = entry.lora
    assert lora is not None
    base = converted(entry, kit)
    patterns = [lora.file] if lora.file else ["adapter_config.json", "adapter_model.safetensors"]
    folder = Path(snapshot_download(lora.repo, revision=lora.revision, allow_patterns=patterns))
    commit = (origin_of(folder) or "").partition("@")[2] or "unknown"
    out = kept_expert(kit.work / "experts" / f"lora-of-{entry.name}", commit)
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        convert_lora(folder / lora.file, base, out, text_encoder_lora=None)
    dtype = getattr(torch, entry.dtype)
    network = stock_network(entry, download(entry), dtype).to(kit.device).eval()
    given, shape = conditions_of(network), state_shape(network, entry)
    x = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    plain = stock_velocity(network, entry.convention, x, SHARE, given, kit.device)
    network = adapted(entry, network, folder).to(kit.device)
    expected = stock_velocity(network, entry.convention, x, SHARE, given, kit.device)
    del network
    release()
    field = hddm.load(out, dtype, kit.device, base=base)
    t = torch.tensor([common_time(entry.convention, SHARE)])
    ours = field.velocity(x.to(kit.device), t, **moved(given, kit.device))
    # Factors that are added to weights are rounded with them.
    most = entry.most if entry.dtype == "float32" else 4 * entry.most
    figures: list[Figure] = [
        at_most(
            f"one call, relative difference ({entry.dtype})", relative_error(ours, expected), most
        ),
        at_least("what the LoRA changes of it", relative_error(expected, plain), _LEAST_CHANGE),
        told("read for the comparison by", lora.reader),
    ]
    notes = [f"Licence of the LoRA: {lora.licence}."]
    if lora.note:
        notes.append(lora.note)
    return Result(figures, notes, not kit.is_real, commit)


def adapted(entry: Entry, network: Any, folder: Path) -> Any:
    """The network with a LoRA, as diffusers' pipeline or peft reads it."""
    lora = entry.lora
    assert lora is not None
    if lora.reader == "peft":
        return PeftModel.from_pretrained(network, str(folder)).merge_and_unload()
    source = download(entry)
    part, _ = network_part(source)
    name = diffusers.DiffusionPipeline.load_config(source)["_class_name"]
    absent = {
        key: None
        for key, kind in diffusers.DiffusionPipeline.load_config(source).items()
        if isinstance(kind, list)
    }
    pipe = getattr(diffusers, name)(**{**absent, part: network})
    pipe.load_lora_weights(str(folder), weight_name=lora.file)
    pipe.fuse_lora(components=[part])
    pipe.unload_lora_weights()
    return getattr(pipe, part)
