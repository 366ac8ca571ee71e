"""Pretrained checkpoints, read but not converted: what they hold and declare, and under which names."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import ModelMixin
from torch import Tensor

from hddm.checkpoints.headers import Header
from hddm.checkpoints.presets import Preset
from hddm.checkpoints.source_names import NamePair, SourceNames
from hddm.experts.records import ExpertRecord
from hddm.networks.components import Held
from hddm.networks.families import Family, known_family
from hddm.networks.file_text import FileText, HeldPrompts, HeldTokenizer
from hddm.networks.identity import UnreadVae, VaeRecord
from hddm.networks.prompts import PipelineText
from hddm.utils.errors import HddmError, Unstated, shown
from hddm.utils.tensors import Planned

REMEDY = "fetch it again, or save it without what is left over"
"""Of a file whose tensors are not those of its layout."""
Component = Path | Held | HeldTokenizer | HeldPrompts
"""A component of a source: a folder, or part of a file."""
WeightSet = Literal["ema", "raw", "unstated"]
Weights = Mapping[str, Tensor]
Forward = Callable[[Tensor, Tensor, Weights], Tensor]
"""A source's own network: (x, timestep, conditions) to its raw output."""


@dataclass(frozen=True)
class Pair:
    """Foreign and own tensors that hold the same rows when joined.

    Where one foreign tensor is several here, these have ``rows`` of it each, by default equal parts. One
    tensor may have another shape on our side: with ``is_transposed``, and without the foreign one's last
    ``ones`` dimensions of size 1, where that is a convolution over single pixels. With ``swaps_halves``, the
    first half of its rows is our second one.
    """

    foreign: tuple[str, ...]
    ours: tuple[str, ...]
    is_transposed: bool = False
    ones: int = 0
    rows: tuple[int, ...] = ()
    swaps_halves: bool = False

    @property
    def back(self) -> "Pair":
        """The pair that leads from our side to the foreign one."""
        return replace(self, foreign=self.ours, ours=self.foreign, ones=-self.ones, rows=())


def same(foreign: str, ours: str) -> Pair:
    """One tensor under two names."""
    return Pair((foreign,), (ours,))


def module(foreign: str | Sequence[str], ours: str | Sequence[str]) -> list[Pair]:
    """Weight and bias of a module under two names, or of a fused module and its equal parts."""
    theirs = (foreign,) if isinstance(foreign, str) else foreign
    own = (ours,) if isinstance(ours, str) else ours
    pairs = []
    for leaf in ("weight", "bias"):
        foreign_names = tuple(f"{name}.{leaf}" for name in theirs)
        own_names = tuple(f"{name}.{leaf}" for name in own)
        pairs.append(Pair(foreign_names, own_names))
    return pairs


@dataclass(frozen=True)
class KeyTable:
    """Tensor names of a layout and of a network class, mapped both ways, always strictly.

    ``benign`` lists foreign names that the network computes or does not read, each with the reason.
    """

    pairs: Sequence[Pair]
    benign: Mapping[str, str] = field(default_factory=dict)

    @property
    def name_pairs(self) -> tuple[NamePair, ...]:
        """What an expert keeps of a table whose foreign tensors are one each."""
        kept = []
        for pair in self.pairs:
            (foreign,) = pair.foreign
            one = NamePair(
                foreign=foreign, ours=pair.ours, is_transposed=pair.is_transposed, ones=pair.ones
            )
            kept.append(one)
        return tuple(kept)

    def to_ours(self, weights: Weights, origin: str) -> tuple[list[Planned], dict[str, Tensor]]:
        """The network's tensors, read when written, and benign ones by their foreign names.

        Names that are left over or missing are refused.
        """
        extras = {name: weights[name] for name in self.benign if name in weights}
        rest = {name: tensor for name, tensor in weights.items() if name not in extras}
        return _mapped(self.pairs, rest, origin), extras

    def renamed(self, weights: Weights, origin: str) -> dict[str, Tensor]:
        """The network's tensors, read now; tensors that are only renamed stay mapped."""
        return {planned.name: planned.read() for planned in self.to_ours(weights, origin)[0]}

    def to_foreign(self, weights: Weights, extras: Weights, origin: str) -> list[Planned]:
        """Map back to the layout; ``extras`` are the benign tensors that were kept."""
        back = [pair.back for pair in self.pairs]
        kept = [as_planned(name, tensor) for name, tensor in extras.items()]
        return [*_mapped(back, weights, origin), *kept]


def as_planned(name: str, tensor: Tensor) -> Planned:
    """``tensor`` unchanged."""
    return Planned(name, tuple(tensor.shape), tensor.dtype, lambda: tensor)


def _mapped(pairs: Sequence[Pair], weights: Weights, origin: str) -> list[Planned]:
    """The tensors ``ours`` of ``pairs``, from those called ``foreign``."""
    # In their order: a dictionary, not a set.
    known: dict[str, None] = {}
    for pair in pairs:
        known |= dict.fromkeys(pair.foreign)
    problems = [f"missing {name}" for name in known if name not in weights]
    for name, tensor in weights.items():
        if name not in known:
            problems.append(f"left over {name} {tuple(tensor.shape)}")
    if problems:
        raise HddmError(
            f"{origin}: its tensors are not those of the layout: {'; '.join(shown(problems))}; {REMEDY}"
        )
    planned: list[Planned] = []
    for pair in pairs:
        tensors = [_reshaped(weights[name], name, pair, origin) for name in pair.foreign]
        planned += _divided(tensors, pair, origin)
    return planned


def _reshaped(tensor: Tensor, name: str, pair: Pair, origin: str) -> Tensor:
    """The tensor in the shape that it has on the other side."""
    if pair.ones > 0:
        if any(size != 1 for size in tensor.shape[-pair.ones :]):
            raise HddmError(f"{origin}: {name} {tuple(tensor.shape)} is no layer of single pixels")
        tensor = tensor.reshape(tensor.shape[: -pair.ones])
    elif pair.ones < 0:
        tensor = tensor.reshape(*tensor.shape, *(1,) * -pair.ones)
    if pair.swaps_halves:
        tensor = tensor.roll(tensor.shape[0] // 2, 0)
    return tensor.mT if pair.is_transposed else tensor


def _divided(tensors: Sequence[Tensor], pair: Pair, origin: str) -> list[Planned]:
    """Rows of several tensors joined into one, or of one tensor divided."""
    targets, first, rows = pair.ours, tensors[0], 0
    for tensor in tensors:
        rows += tensor.shape[0] if tensor.ndim else 1
    if len(tensors) == 1 and len(targets) == 1:
        return [as_planned(targets[0], first)]
    alike = {(tensor.ndim, tensor.shape[1:], tensor.dtype) for tensor in tensors}
    fits = rows == sum(pair.rows) if pair.rows else rows % len(targets) == 0
    if len(alike) > 1 or not fits:
        names = ", ".join(targets)
        raise HddmError(
            f"{origin}: tensors of {[tuple(t.shape) for t in tensors]} do not make up {names}"
        )
    if len(targets) > 1:
        parts = first.split(pair.rows) if pair.rows else first.chunk(len(targets))
        return [as_planned(name, part) for name, part in zip(targets, parts, strict=True)]
    joined = functools.partial(torch.cat, list(tensors))
    return [Planned(targets[0], (rows, *first.shape[1:]), first.dtype, joined)]


@dataclass(frozen=True)
class Declared:
    """What a checkpoint's files, or their layout's code, say besides the network; None where unstated.

    ``scheduler`` is a diffusers scheduler config, or hddm's own record of a schedule; ``zero_snr`` is what
    says that the network was trained down to zero signal. ``preset`` is a published convention that the user
    (``is_preset_stated``) or the file states, and ``presets`` are those that fit its tensors, in words.
    ``unstated`` is what a conversion needs besides. ``kept`` are tensors that no network needs, for the way
    back.
    """

    scheduler: Mapping[str, Any] | None = None
    scheduler_origin: str = ""
    is_layout_rule: bool = False
    prediction_type: str | None = None
    prediction_origin: str = ""
    zero_snr: str | None = None
    preset: Preset | None = None
    is_preset_stated: bool = False
    presets: str = ""
    unstated: tuple[Unstated, ...] = ()
    is_latent: bool = True
    latent_scale: float | None = None
    notes: tuple[str, ...] = ()
    kept: Weights = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """A pretrained checkpoint before conversion: tensors under the layout's names, mapped from disk.

    ``network`` computes the same function. It was built from ``arguments`` when the checkpoint was opened,
    and is empty (on the meta device) until the check of a conversion fills it. ``table`` maps names to it,
    and ``forward`` builds the layout's own network, None where that is the class itself.
    """

    path: Path
    layout: str
    files: tuple[Path, ...]
    weights: dict[str, Tensor]
    network: ModelMixin
    arguments: Mapping[str, Any]
    table: KeyTable
    declared: Declared
    forward: Callable[[], Forward] | None = None
    sets: tuple[str, ...] = ("unstated",)
    chosen: WeightSet = "unstated"
    prefix: str = ""
    nulls: Weights = field(default_factory=dict)
    """Tensors that stand for no condition, by condition."""
    header: Header = field(default_factory=Header)
    licence: str | None = None
    vae: VaeRecord | UnreadVae | None = None
    text: PipelineText | FileText = field(default_factory=PipelineText)
    components: Mapping[str, Component] = field(default_factory=dict)
    """VAE, text encoder and tokenizer that its expert keeps, by name."""
    sample_size: int | None = None
    """Side of its samples, for a network whose config does not state it."""
    names: SourceNames | None = None
    """The names that its tensors have in a single file, for the way back."""
    variant: str | None = None
    """Of the components' weights files."""
    record: ExpertRecord | None = None
    """Of an expert folder."""

    @property
    def family(self) -> Family:
        """The family of its network."""
        return known_family(self.network)

    @property
    def class_name(self) -> str:
        """The class of its network."""
        return type(self.network).__name__


def with_notes(checkpoint: Checkpoint, notes: Sequence[str]) -> Checkpoint:
    """The checkpoint with more notes for the user."""
    declared = checkpoint.declared
    return replace(checkpoint, declared=replace(declared, notes=(*declared.notes, *notes)))


def choose_set(sets: Mapping[WeightSet, Any], chosen: WeightSet | None, origin: str) -> WeightSet:
    """Choose the set of weights: as requested, else the averaged one, else the only one."""
    order: tuple[WeightSet, ...] = ("ema", "unstated", "raw")
    if chosen is None:
        return next(name for name in order if name in sets)
    if chosen not in sets:
        raise HddmError(
            f"`weights` {chosen}: {origin} holds {', '.join(sets)}; drop the option or name one of these"
        )
    return chosen
