"""Changes of a LoRA file to text encoders, and tokens that it learned.

An expert whose text encoder was changed keeps one of its own, with the changes merged into its weights. Its
config then has the key `ADAPTED`, a hash of the changes, and its fingerprint covers that: other fingerprints
cover the small tensors of an encoder alone, which a LoRA leaves as they are.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from hddm.checkpoints.lora_changes import BIAS, Change
from hddm.checkpoints.lora_files import Layers, LoraFile
from hddm.checkpoints.lora_names import candidates, counted_text_layers
from hddm.checkpoints.lora_scales import Scales
from hddm.condition_names import TEXT
from hddm.experts.ensemble_records import kept_components
from hddm.experts.records import ExpertRecord
from hddm.networks.components import read_weights
from hddm.networks.encoders import ADAPTED, T5
from hddm.networks.prompts import PipelineText, encoders_in, several_in, texts_record_of
from hddm.networks.text_encoder import STEM
from hddm.utils.errors import HddmError, UsageError, counted, shown
from hddm.utils.files import read_json, write_json
from hddm.utils.records import write_manifest
from hddm.utils.tensors import refuse_non_finite

_PREFIX = "text_model."
_OF_PROCESSORS = {
    "to_q": "q_proj",
    "to_k": "k_proj",
    "to_v": "v_proj",
    "to_out.0": "out_proj",
}
"""Names that diffusers' processors of 2023 had for layers of CLIP's attention."""


def check_texts(lora: LoraFile, base: Path, decision: str | None, scales: Scales) -> list[str]:
    """Check what is decided on the text encoders in a file, and return lines that say what happens.

    Raises `UsageError` for a decision on a file without any. Raises `HddmError` where none is made, and where
    changes cannot be applied to the encoders that ``base`` keeps; ``scales`` are then known.
    """
    changed = lora.text_tensors
    if not changed and not lora.tokens:
        if decision is not None:
            raise UsageError(
                f"`text_encoder_lora` {decision}: {lora.path} changes no text encoder; drop the option"
            )
        return []
    held = []
    if changed:
        more = ", …" if len(changed) > 1 else ""
        text = f"{counted(len(changed), 'tensor')} in it change a text encoder"
        held.append(f"{text} ({changed[0]!r}{more})")
    tokens = ", ".join(shown(sorted(lora.tokens), 5))
    if tokens:
        held.append(
            f"it has learned {'the token' if len(lora.tokens) == 1 else 'the tokens'} {tokens}"
        )
    said = " and ".join(held)
    if decision is None:
        remedy = (
            "pass `text_encoder_lora` apply, for an expert with a text encoder of its own, or drop, to leave "
            "the base's as it is"
        )
        if tokens:
            remedy = "pass `text_encoder_lora` drop, to leave the base's text encoder as it is"
        raise HddmError(f"{lora.path}: {said}; {remedy}")
    if decision == "drop":
        return [f"note: {said}; dropped, so prompts are read as by the base"]
    if tokens:
        raise HddmError(
            f"{lora.path}: {said}, and hddm adds no tokens to a tokenizer; pass `text_encoder_lora` drop"
        )
    encoders = _encoders(base)
    lines = []
    for number, layers in sorted(lora.texts.items()):
        name, folder = _encoder(lora, encoders, number, base)
        _refuse_scales(lora, number, _targets(lora, number, folder), scales)
        lines.append(f"{name}: {counted(len(layers), 'layer')} merged, so the expert has its own")
    return lines


def _refuse_scales(lora: LoraFile, number: int, targets: Mapping[str, str], scales: Scales) -> None:
    """Raise an `HddmError` for scales of the encoder ``number`` that are no numbers, or of no layer."""
    known: list[str] = []
    for name, parts in lora.texts[number].items():
        names = _names(name, targets[name])
        scales.of(parts, names, number)
        known += names
    scales.refuse_unused(known, number)


def _names(name: str, layer: str) -> tuple[str, ...]:
    """Names of a layer in configs: that of the LoRA file, and its own with and without what is before it."""
    inner = layer.removeprefix(_PREFIX)
    return name, layer, inner, f"{_PREFIX}{inner}"


def change_texts(
    draft: Path,
    lora: LoraFile,
    record: ExpertRecord,
    nulls: Mapping[str, Tensor],
    scales: Scales,
) -> tuple[ExpertRecord, Mapping[str, Tensor]]:
    """Merge the changes of a file into the text encoders that the expert in ``draft`` keeps.

    Returns its record and null conditions with the new encoder.
    """
    encoders = _encoders(draft)
    for number in lora.texts:
        _, folder = _encoder(lora, encoders, number, draft)
        _merge(lora, number, folder, scales)
    place = draft / "text_encoder"
    write_manifest(place)
    tokenizer = draft / "tokenizer"
    known = texts_record_of(place, tokenizer if tokenizer.is_dir() else None)
    record = record.model_copy(update={"text_encoder": known})
    if TEXT in nulls and several_in(place) is None:
        empty = PipelineText(draft).empty_prompt()
        if empty is not None:
            nulls = {**nulls, TEXT: empty}
    return record, nulls


def _encoders(expert: Path) -> dict[str, Path]:
    """Folders of the text encoders that an expert keeps, by name in their order."""
    place = kept_components(expert).get("text_encoder")
    if place is None:
        return {}
    pipeline = several_in(place)
    if pipeline is None:
        return {"text_encoder": place}
    return {name: place / name for name in encoders_in(pipeline)}


def _encoder(
    lora: LoraFile, encoders: Mapping[str, Path], number: int, base: Path
) -> tuple[str, Path]:
    """The text encoder that a file means by its number; `HddmError` where there is none."""
    names = list(encoders)
    # kohya calls T5 the third one, which Flux has as its second.
    if number == len(names) == 2:
        config = read_json(encoders[names[-1]] / "config.json")
        if config.get("architectures") == [T5.name]:
            number -= 1
    if number >= len(names):
        has = f"keeps {', '.join(names)}" if names else "keeps no text encoder"
        raise HddmError(
            f"{lora.path}: changes text encoder {number + 1}, and {base} {has}; pass `text_encoder_lora` "
            "drop, or convert the base with its text encoders"
        )
    return names[number], encoders[names[number]]


def _targets(lora: LoraFile, number: int, folder: Path) -> dict[str, str]:
    """Layers of the encoder ``number`` in ``folder``, as its file has them, by layer of the LoRA file.

    Raises `HddmError` for a layer that is not found and for a change of another shape.
    """
    path, stored = read_weights(folder, STEM)
    known = {}
    for name in stored:
        layer = name.removesuffix(".weight")
        if layer != name:
            known[layer.removeprefix(_PREFIX).replace(".", "_")] = layer
    layers, is_counted = lora.texts[number], lora.counts_text(number)
    found = _counted(lora, layers, known, path) if is_counted else {}
    problems, owners = [], dict[str, str]()
    for name, parts in layers.items():
        if not is_counted:
            spelled = [one for one in _spellings(name) if one in known]
            if not spelled:
                problems.append(f"{name!r} is no layer of it")
                continue
            found[name] = known[spelled[0]]
        other = owners.setdefault(found[name], name)
        if other != name:
            raise HddmError(
                f"{lora.path}: is not whole: {name!r} is {other!r} of a text encoder once more; remove one"
            )
        change = lora.change(parts)
        if not _fits(change, stored, found[name]):
            given = [f"{part} {tuple(one.shape)}" for part, one in change.parts.items()]
            shape = tuple(stored[f"{found[name]}.weight"].shape)
            problems.append(f"{name!r} has {' and '.join(shown(given, 4))} for a weight {shape}")
    if problems:
        raise HddmError(
            f"{lora.path}: does not fit the text encoder {path}: {'; '.join(shown(problems, 5))}; pass "
            "`text_encoder_lora` drop to do without"
        )
    return found


def _fits(change: Change, stored: Mapping[str, Tensor], layer: str) -> bool:
    """True if the change is one of this layer's weight, and bias."""
    parts = {part: tensor.to("meta") for part, tensor in change.parts.items()}
    if not all(tensor.dtype.is_floating_point for tensor in parts.values()):
        return False
    try:
        Change(parts).merged(stored[f"{layer}.weight"].to("meta"))
        if BIAS in parts:
            Change(parts).merged_bias(stored[f"{layer}.bias"].to("meta"))
    except (ValueError, RuntimeError, IndexError, KeyError, TypeError):
        # torch raises any of these for shapes that do not belong together.
        return False
    return True


def _spellings(name: str) -> list[str]:
    """Names of a layer, with _ for dots, that a file may mean by ``name``."""
    found = []
    for one in candidates(name):
        one = one.removeprefix(_PREFIX).removeprefix(_PREFIX.replace(".", "_"))
        found.append(one.replace(".", "_"))
        for theirs, ours in _OF_PROCESSORS.items():
            if one.endswith(f".{theirs}"):
                found.append(one.removesuffix(theirs).replace(".", "_") + ours)
    return found


def _counted(
    lora: LoraFile, layers: Layers, known: Mapping[str, str], path: Path
) -> dict[str, str]:
    """Layers by their numbers in a file of cloneofsimo's tool."""
    lora.modules("text_encoder")
    order = counted_text_layers(known.values())
    if sorted(map(int, layers)) != list(range(len(order))):
        raise HddmError(
            f"{lora.path}: counts {counted(len(layers), 'layer')} of a text encoder in place of names, and "
            f"{path} has {len(order)} in its attention; it is a LoRA of another base"
        )
    return {str(number): name for number, name in enumerate(order)}


def _merge(lora: LoraFile, number: int, folder: Path, scales: Scales) -> None:
    """Write the weights of the encoder in ``folder`` anew, with the changes."""
    targets = _targets(lora, number, folder)
    stored = read_weights(folder, STEM)[1]
    weights = dict(stored)
    digest = hashlib.sha256()
    for name, parts in sorted(lora.texts[number].items()):
        layer = targets[name]
        change = lora.change(parts, scales.of(parts, _names(name, layer), number))
        refuse_non_finite(lora.path, {parts[part]: one for part, one in change.parts.items()})
        merged = {f"{layer}.weight": change.merged(stored[f"{layer}.weight"])}
        if BIAS in change.parts:
            merged[f"{layer}.bias"] = change.merged_bias(stored[f"{layer}.bias"])
        for key, tensor in merged.items():
            weights[key] = tensor.to(stored[key].dtype).contiguous()
            digest.update(f"{key} {tuple(tensor.shape)}".encode())
            digest.update(weights[key].view(torch.uint8).numpy().tobytes())
        refuse_non_finite(lora.path, {key: weights[key] for key in merged})
    for old in sorted(folder.glob(f"{STEM}*.safetensors*")):
        # These are links to the base's files: they are replaced, and never written to.
        old.unlink()
    save_file(
        {key: one.contiguous() for key, one in weights.items()}, folder / f"{STEM}.safetensors"
    )
    config = read_json(folder / "config.json")
    before = str(config.get(ADAPTED, ""))
    config[ADAPTED] = hashlib.sha256((before + digest.hexdigest()).encode()).hexdigest()[:16]
    (folder / "config.json").unlink()
    write_json(folder / "config.json", config)
