"""Single weights files: unwrap weight sets and name prefixes, and recognise the layout."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from hddm.checkpoints import ldm, ldm_conventions
from hddm.checkpoints.author_files import (
    author_layouts,
    open_author_file,
    recognised,
    unread_in,
)
from hddm.checkpoints.headers import read_headers, without_hashes
from hddm.checkpoints.layouts import (
    FACEBOOK_DIT,
    PIXART_ORIGINAL,
    FileLayout,
)
from hddm.checkpoints.ldm import LDM
from hddm.checkpoints.ldm_parts import VAE, FilePart, parts_of, zero_padded
from hddm.checkpoints.lora_files import is_lora
from hddm.checkpoints.quantised import read_dequantised
from hddm.checkpoints.source_names import SourceNames, kept_metadata
from hddm.checkpoints.sources import Checkpoint, WeightSet, choose_set, with_notes
from hddm.networks.families.dit import licence_of_dit
from hddm.networks.file_text import FileText
from hddm.networks.folders import empty_network, refuse_quantised
from hddm.networks.vae import vae_record_of
from hddm.settings import Reading
from hddm.utils.errors import HddmError, UsageError

_WITHOUT_PREFIX = (FACEBOOK_DIT, PIXART_ORIGINAL)
"""Layouts that are recognised after removing prefixes which wrappers put before all names, as ``module.``."""
_RAW, _EMA = (
    ("model", "state_dict"),
    ("ema", "state_dict_ema", "model_ema", "ema_model", "ema_state_dict"),
)
_SETS: dict[str, WeightSet] = {**dict.fromkeys(_RAW, "raw"), **dict.fromkeys(_EMA, "ema")}
# Keys and prefixes that wrappers for averaging or distributing weights put around a set.
_TOP = ""
_INNER = ("shadow", "shadow_params", "module", "model", "state_dict")
_PREFIXES = ("module.", "_orig_mod.", "model.")


def file_layouts() -> dict[str, FileLayout]:
    """All layouts of single files by name."""
    own = {one.name: one for one in (*_WITHOUT_PREFIX, LDM)}
    return {**own, **author_layouts()}


def open_file(path: Path, reading: Reading) -> Checkpoint:
    """Open the checkpoint in one file; refuses an unknown layout."""
    stored = read_dequantised(path, reading.allow_pickle, unread_in)
    content = stored.content
    if is_lora(content):
        text = "is a LoRA, which changes another network; pass that network's expert as `base`"
        raise HddmError(f"{path}: {text}")
    networks = _sources(content, lambda one: ldm.root_of(one) is not None, reading, path)
    # A file of latent diffusion has averaged copies beside the weights, in one set.
    _refuse_several(networks, len(networks) > 1, path)
    if networks:
        opened = _open_ldm(next(iter(networks.values())), path, reading)
        return _as_dequantised(opened, stored.notes)
    tensors = _tensors(content)
    if (found := recognised(tensors)) is not None:
        return _as_dequantised(open_author_file(tensors, *found, path, reading), stored.notes)
    for option in ("preset", "tokenizer"):
        if getattr(reading, option) is not None:
            raise UsageError(f"`{option}`: {path} is no single file of Stable Diffusion; drop it")
    sets = {name: _strip(one) for name, one in _weight_sets(content, reading, path).items()}
    layout = _layout(sets, path)
    sets = {name: one for name, one in sets.items() if set(layout.markers) <= set(one[0])}
    chosen = choose_set(sets, reading.weights, str(path))
    weights, prefix = sets[chosen]
    refuse_quantised(weights, path)
    arguments = layout.arguments(weights, reading, str(path))
    network = empty_network(layout.family.network, arguments, len(weights), str(path))
    declared = layout.declared(weights, arguments, reading, str(path))
    header = read_headers([path])
    declared = replace(declared, notes=(*declared.notes, *header.notes, *stored.notes))
    if layout.scheduler is not None:
        origin = f"the code of layout {layout.name}"
        declared = replace(
            declared,
            scheduler=layout.scheduler(arguments),
            scheduler_origin=origin,
            is_layout_rule=True,
        )
    return Checkpoint(
        path=path,
        layout=layout.name,
        files=(path,),
        weights=weights,
        network=network,
        arguments=arguments,
        table=layout.table(network.state_dict(), arguments, str(path)),
        forward=layout.forward_over(weights, arguments),
        declared=declared,
        sets=tuple(sets),
        chosen=chosen,
        prefix=prefix,
        nulls={name: weights[key] for name, key in layout.nulls.items() if key in weights},
        header=header,
        licence=header.licence or licence_of_dit(arguments.get("num_classes")),
    )


def _as_dequantised(opened: Checkpoint, notes: Sequence[str]) -> Checkpoint:
    """The checkpoint with ``notes`` on how its file was read, none where its tensors are as they are."""
    names = opened.names
    if notes and names is not None:
        # Written back, its tensors are those in float32.
        names = names.model_copy(update={"metadata": without_hashes(names.metadata)})
    return replace(with_notes(opened, notes), names=names)


def _open_ldm(content: Mapping[str, Tensor], path: Path, reading: Reading) -> Checkpoint:
    """Open a file of latent diffusion: its network, and the VAE and text encoders beside it."""
    origin, header, root = str(path), read_headers([path]), ldm.root_of(content)
    assert root is not None
    content = ldm.from_root(content, root)
    statement = ldm_conventions.statement_of(content, header, reading, origin)
    sets = ldm.weight_sets(content)
    chosen = choose_set(sets, reading.weights, origin)
    weights, others = sets[chosen], ldm.others_in(content)
    refuse_quantised(content, path)
    arguments = LDM.arguments({**others, **weights}, statement.reading, origin)
    network = empty_network(LDM.family.network, arguments, len(weights), origin)
    scale, scale_place = ldm_conventions.latent_scale_of(content, statement, origin)
    declared = ldm_conventions.declared(content, statement, scale, origin)
    parts = parts_of(others, ldm_conventions.latents_of(statement, scale), path)
    notes = [*declared.notes, *header.notes]
    if statement.reading.sample_size is None:
        side = arguments["sample_size"]
        notes.append(f"samples of side {side} are assumed; `sample_size` changes that")
    if VAE in parts and scale is not None:
        notes.append(f"latent scale {scale:g} by {scale_place}")
    metadata, too_large = kept_metadata(header.metadata, origin)
    notes += too_large
    if len(sets) > 1:
        notes.append("its other set of weights is left out, and is not written back")
        metadata = without_hashes(metadata)
    text = _text_of(parts, others, arguments, path, reading.tokenizer)
    vae = None
    if VAE in parts and scale is not None:
        vae = vae_record_of(parts[VAE].held)
    kept = dict(declared.kept)
    for part in parts.values():
        kept |= part.kept
    return Checkpoint(
        path=path,
        layout=LDM.name,
        files=(path,),
        weights=weights,
        network=network,
        arguments=arguments,
        table=LDM.table(network.state_dict(), arguments, origin),
        forward=LDM.forward_over(weights, arguments),
        declared=replace(declared, notes=tuple(notes), kept=kept),
        sets=tuple(sets),
        chosen=chosen,
        header=header,
        licence=header.licence,
        vae=vae,
        text=text,
        components={VAE: parts[VAE].held} if VAE in parts else {},
        names=_names_of(parts, root, metadata),
    )


def _text_of(
    parts: Mapping[str, FilePart],
    others: Mapping[str, Tensor],
    arguments: Mapping[str, Any],
    path: Path,
    vocabulary: Path | None,
) -> FileText:
    """The text encoders of a file; refuses those of another network."""
    encoders = {name: part.held for name, part in parts.items() if name != VAE}
    width = sum(one.config["hidden_size"] for one in encoders.values())
    if encoders and width != arguments["cross_attention_dim"]:
        raise HddmError(
            f"{path}: its text encoders make tokens of width {width}, and its network takes "
            f"{arguments['cross_attention_dim']}: they do not belong together"
        )
    pipeline = LDM.family.pipeline(arguments)
    several = pipeline.name if pipeline.prompts is not None else None
    if not encoders and vocabulary is not None:
        raise UsageError(f"`tokenizer`: {path} holds no text encoder; drop it")
    return FileText(path, encoders, zero_padded(others), several, vocabulary)


def _names_of(parts: Mapping[str, FilePart], root: str, metadata: Mapping[str, str]) -> SourceNames:
    """What is kept of the names in a file."""
    named = {name: part.table.name_pairs for name, part in parts.items()}
    return SourceNames(root=root, parts=named, metadata=dict(metadata))


def _weight_sets(
    content: Mapping[str, Any], reading: Reading, path: Path
) -> dict[WeightSet, dict[str, Tensor]]:
    """Weight sets by kind: nested ones, or all tensors as one set.

    If ``state_dict`` is the only set, its kind is unstated: published files use that name for averaged
    weights too.
    """
    sources = _sources(content, lambda one: bool(_known(_strip(one)[0])), reading, path)
    found = {_SETS.get(name, "unstated"): tensors for name, tensors in sources.items()}
    _refuse_several(sources, len(found) < len(sources) or sources.keys() > {_TOP}, path)
    if list(sources) == ["state_dict"]:
        return {"unstated": sources["state_dict"]}
    if found:
        return found
    named: dict[WeightSet, dict[str, Tensor]] = {}
    for name, value in content.items():
        if name in _SETS and isinstance(value, dict):
            named[_SETS[name]] = _tensors(value)
    return named or {"unstated": _tensors(content)}


def _sources(
    content: Mapping[str, Any],
    holds: Callable[[dict[str, Tensor]], bool],
    reading: Reading,
    path: Path,
) -> dict[str, dict[str, Tensor]]:
    """Weight sets of a file for which ``holds`` is true, by their name in the file."""
    top = _tensors(content)
    found = {_TOP: top} if holds(top) else {}
    for name, value in content.items():
        if not isinstance(value, dict):
            continue
        inner = []
        for one in (value, *map(value.get, _INNER)):
            if not isinstance(one, dict):
                continue
            tensors = _tensors(one)
            if holds(tensors):
                inner.append(tensors)
        _refuse_several([name], len(inner) > 1 or bool(inner and name not in _SETS), path)
        if inner:
            found[name] = inner[0]
    lost = [name for name in _EMA if name not in found and _has_tensors(content.get(name))]
    if found and lost and reading.weights != "raw":
        raise HddmError(
            f"{path}: the averaged weights in {lost[0]!r} are not under the names of their network; pass "
            "`weights` raw to take the others"
        )
    return found


def _known(tensors: Collection[str]) -> list[FileLayout]:
    return [layout for layout in _WITHOUT_PREFIX if set(layout.markers) <= set(tensors)]


def _has_tensors(value: object) -> bool:
    """True for a tensor, and for a dictionary or list that holds one at any depth."""
    if isinstance(value, dict):
        return any(map(_has_tensors, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_tensors, value))
    return isinstance(value, Tensor)


def _refuse_several(names: Iterable[str], is_unclear: bool, path: Path) -> None:
    if is_unclear:
        listed = " and ".join(repr(name) if name != _TOP else "its top level" for name in names)
        text = f"holds weights under {listed}, and does not say which; save one set in a file"
        raise HddmError(f"{path}: {text}")


def _tensors(content: Mapping[str, Any]) -> dict[str, Tensor]:
    return {str(name): value for name, value in content.items() if isinstance(value, Tensor)}


def _strip(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    """Tensors without the prefix that wrappers put before every name, and that prefix."""
    prefix = ""
    while tensors:
        found = _common_prefix(tensors)
        if found is None:
            break
        prefix += found
        tensors = {name.removeprefix(found): tensor for name, tensor in tensors.items()}
    return tensors, prefix


def _common_prefix(names: Collection[str]) -> str | None:
    """The prefix of a wrapper that all ``names`` begin with."""
    for prefix in _PREFIXES:
        if all(name.startswith(prefix) for name in names):
            return prefix
    return None


def _layout(sets: Mapping[WeightSet, tuple[dict[str, Tensor], str]], path: Path) -> FileLayout:
    """The only layout that a file's weight sets fit."""
    candidates = {}
    for tensors, _ in sets.values():
        for layout in _known(tensors):
            candidates[layout.name] = layout
    if len(candidates) != 1:
        names: list[str] = []
        for tensors, _ in sets.values():
            refuse_quantised(tensors, path)
            names += tensors
        some = ", ".join(sorted(names)[:5]) or "no tensors at all"
        raise HddmError(
            f"{path}: of no known layout ({some}, …): known are {', '.join(file_layouts())}; a "
            "diffusers model is a folder with its config.json"
        )
    return next(iter(candidates.values()))
