"""Single files of the families that say how their authors' code stores a network (`SingleFile`).

    NAME                    the network alone, as its authors publish it
    model.diffusion_model.  before the network's names, in whole files and in those of ComfyUI
    first_stage_model.      the VAE, under the names of latent diffusion; in ComfyUI's files also vae.
    text_encoders.          text encoders, in ComfyUI's names, which hddm does not read; some files have a
                            vocabulary there too (spiece_model)

Names and layers are those of the family, which LoRA files of other tools use too. The class of diffusers is
the only network here; that the names lead to what diffusers' own function makes of them is tested. Trainers
also write one file in the names of that class; the shapes in it say under its authors' names what it is.
"""

import functools
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hddm.checkpoints.headers import read_headers
from hddm.checkpoints.layouts import FileLayout
from hddm.checkpoints.ldm_parts import VAE, vae_part
from hddm.checkpoints.source_names import SourceNames, kept_metadata
from hddm.checkpoints.sources import Checkpoint, Declared, KeyTable, Pair, Weights, same
from hddm.networks.families import families
from hddm.networks.families.family import Family, ForeignLayer, SingleFile
from hddm.networks.file_text import FileText
from hddm.networks.folders import empty_network, refuse_quantised
from hddm.networks.identity import UnreadTextEncoder
from hddm.networks.vae import vae_record_of
from hddm.settings import Reading
from hddm.utils.errors import HddmError, UsageError, shown

_ROOTS = ("model.diffusion_model.", "diffusion_model.", "model.", "")
_VAES = ("first_stage_model.", "vae.")
_TEXTS = "text_encoders."
_VOCABULARY = "spiece_model"
_LEAVES = ("weight", "bias")


def author_layouts() -> dict[str, FileLayout]:
    """Layouts of single files by name, of all families that have one."""
    found = {}
    for family in families().values():
        if family.single_file is not None:
            found[family.single_file.layout] = _layout_of(family, family.single_file)
    return found


def _layout_of(family: Family, file: SingleFile) -> FileLayout:
    return FileLayout(
        name=file.layout,
        markers=file.markers,
        family=family,
        arguments=lambda weights, reading, origin: family.file_arguments(weights, origin),
        table=functools.partial(_table, family),
        forward=None,
        declared=lambda weights, arguments, reading, origin: _declared(family, file, arguments),
        scheduler=family.file_scheduler,
    )


def _named_as_here(layout: FileLayout) -> FileLayout | None:
    """``layout`` in files with the names of the network itself; None where its markers have none."""
    family, markers = layout.family, list[str]()
    config = _of_depth(family, 1)
    layers, tensors = family.foreign_layers(config), family.foreign_tensors(config)
    for marker in layout.markers:
        layer, _, leaf = marker.rpartition(".")
        if marker in tensors:
            markers.append(tensors[marker])
        elif layer in layers:
            markers += [f"{own}.{leaf}" for own in layers[layer].layers]
        else:
            return None
    note = (
        f"its tensors have diffusers' names; `to_layout` {layout.name} writes those of its authors"
    )

    def declared(
        weights: Weights, arguments: Mapping[str, Any], reading: Reading, origin: str
    ) -> Declared:
        found = layout.declared(weights, arguments, reading, origin)
        return replace(found, notes=(*found.notes, note))

    return replace(
        layout,
        markers=tuple(markers),
        arguments=lambda weights, reading, origin: layout.arguments(
            _as_authors_have(weights, family), reading, origin
        ),
        table=lambda network, arguments, origin: KeyTable([same(name, name) for name in network]),
        declared=declared,
    )


def _of_depth(family: Family, depth: int) -> dict[str, int]:
    """What `Family.foreign_layers` reads of a config, for ``depth`` blocks of each kind."""
    config = dict[str, int]()
    for keys in family.depths:
        config |= dict.fromkeys(keys, depth)
    return config


def _as_authors_have(weights: Weights, family: Family) -> dict[str, Tensor]:
    """The network's own ``weights`` under its authors' names: their shapes, without content."""
    depth = 0
    for name in weights:
        numbers = [int(part) for part in name.split(".") if part.isdecimal()]
        depth = max([depth, *(number + 1 for number in numbers)])
    # A file has a tensor for each block; one with a larger number is left over in the end.
    config = _of_depth(family, min(depth, len(weights)))
    found = dict[str, Tensor]()
    for foreign, layer in family.foreign_layers(config).items():
        for leaf in _LEAVES:
            own = [weights.get(f"{name}.{leaf}") for name in layer.layers]
            parts = [tensor for tensor in own if tensor is not None and tensor.ndim]
            if len(parts) == len(own):
                rows = sum(tensor.shape[0] for tensor in parts)
                found[f"{foreign}.{leaf}"] = torch.empty(rows, *parts[0].shape[1:], device="meta")
    for foreign, name in family.foreign_tensors(config).items():
        if name in weights:
            found[foreign] = torch.empty_like(weights[name], device="meta")
    return found


@functools.cache
def _known_layouts() -> tuple[FileLayout, ...]:
    """Layouts in the names of authors, then the same in the networks' own names."""
    layouts = list(author_layouts().values())
    for layout in author_layouts().values():
        own = _named_as_here(layout)
        if own is not None:
            layouts.append(own)
    return tuple(layouts)


def recognised(names: Collection[str]) -> tuple[FileLayout, str] | None:
    """The layout of a file with tensors of these ``names``, and its network's root; None for others."""
    for layout in _known_layouts():
        for root in _ROOTS:
            if all(f"{root}{marker}" in names for marker in layout.markers):
                return layout, root
    return None


def unread_in(names: Collection[str]) -> list[str]:
    """Those of a file's ``names`` that belong to text encoders which are left out."""
    if recognised(names) is None:
        return []
    return [name for name in names if name.startswith(_TEXTS)]


def open_author_file(
    content: Mapping[str, Tensor], layout: FileLayout, root: str, path: Path, reading: Reading
) -> Checkpoint:
    """Open a file of ``layout``, whose network's names begin with ``root``; refuses tensors of no part."""
    origin, header, file = str(path), read_headers([path]), layout.family.single_file
    assert file is not None
    for option in ("preset", "tokenizer"):
        if getattr(reading, option) is not None:
            raise UsageError(f"`{option}`: {path} is a file of {layout.name}; drop it")
    weights, vae, prefix, texts = dict[str, Tensor](), dict[str, Tensor](), "", dict[str, Tensor]()
    for name, tensor in content.items():
        part = next((one for one in _VAES if name.startswith(one)), None)
        if part is not None:
            prefix = part
            vae[name.removeprefix(part)] = tensor
        elif name.startswith(_TEXTS):
            texts[name.removeprefix(_TEXTS)] = tensor
        elif name.startswith(root):
            weights[name.removeprefix(root)] = tensor
        else:
            raise HddmError(f"{path}: its tensor {name!r} is no part of layout {layout.name}")
    refuse_quantised(weights, path)
    arguments = layout.arguments(weights, reading, origin)
    if layout.family.states_size:
        arguments["sample_size"] = reading.sample_size or file.sample_size
    network = empty_network(layout.family.network, arguments, len(weights), origin)
    latents = {"scaling_factor": file.scale, "shift_factor": file.shift}
    parts = {VAE: vae_part(vae, prefix, latents, path)} if vae else {}
    notes = list(header.notes)
    if reading.sample_size is None:
        side = file.sample_size
        notes.append(f"samples of side {side} are assumed; `sample_size` changes that")
    unread = _left_out(texts, layout)
    if unread is not None:
        left = f"text encoders ({unread.kind}) are left out, as {unread.reason}"
        notes.append(f"its {left}; assemble the expert with those of a folder")
    metadata, too_large = kept_metadata(header.metadata, origin)
    notes += too_large
    declared = layout.declared(weights, arguments, reading, origin)
    return Checkpoint(
        path=path,
        layout=layout.name,
        files=(path,),
        weights=weights,
        network=network,
        arguments=arguments,
        table=layout.table(network.state_dict(), arguments, origin),
        declared=replace(declared, notes=(*declared.notes, *notes)),
        prefix=root,
        header=header,
        licence=header.licence,
        vae=vae_record_of(parts[VAE].held) if parts else None,
        text=FileText(path, left_out=unread),
        components={name: part.held for name, part in parts.items()},
        names=SourceNames(
            parts={name: part.table.name_pairs for name, part in parts.items()},
            metadata=metadata,
        ),
        sample_size=reading.sample_size or file.sample_size,
    )


def _declared(family: Family, file: SingleFile, arguments: Mapping[str, Any]) -> Declared:
    return Declared(
        scheduler=family.file_scheduler(arguments),
        scheduler_origin=f"the code of layout {file.layout}",
        is_layout_rule=True,
        latent_scale=file.scale,
    )


def _left_out(texts: Mapping[str, Tensor], layout: FileLayout) -> UnreadTextEncoder | None:
    """What is recorded of the text encoders in a file; None without any."""
    if not texts:
        return None
    kinds = {name.partition(".")[0] for name in texts if "." in name}
    reason = f"hddm does not read those in single files of {layout.name}"
    if any(name.rpartition(".")[2] == _VOCABULARY for name in texts):
        reason += f", nor the vocabulary beside them ({_VOCABULARY})"
    return UnreadTextEncoder(kind=", ".join(sorted(kinds)) or "unnamed", reason=reason)


def _table(
    family: Family, network: Mapping[str, Tensor], arguments: Mapping[str, Any], origin: str
) -> KeyTable:
    """Names of the authors' code, and of the tensors of the class ``network``."""
    pairs, seen = list[Pair](), set[str]()
    for foreign, layer in family.foreign_layers(arguments).items():
        for leaf in _LEAVES:
            ours = tuple(f"{name}.{leaf}" for name in layer.layers)
            if all(name in network for name in ours):
                pairs.append(_pair(f"{foreign}.{leaf}", ours, layer, network))
                seen |= set(ours)
    for foreign, own in family.foreign_tensors(arguments).items():
        if own in network:
            pairs.append(same(foreign, own))
            seen.add(own)
    lost = [name for name in network if name not in seen]
    if lost:
        raise HddmError(f"{origin}: has no name for {', '.join(shown(lost))} of the {family.name}")
    return KeyTable(pairs, dict.fromkeys(family.unread, "not read by the network"))


def _pair(
    foreign: str, ours: tuple[str, ...], layer: ForeignLayer, network: Mapping[str, Tensor]
) -> Pair:
    """A tensor that holds the rows of ``ours``."""
    rows = tuple(network[name].shape[0] for name in ours)
    return Pair(
        (foreign,), ours, rows=rows if len(rows) > 1 else (), swaps_halves=layer.swaps_halves
    )
