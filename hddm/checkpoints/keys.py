"""Tables between the tensor names of a layout and those of a network class, both ways.

A table is used by popping. A name that remains on the left is left over, one that was never filled on the
right is missing, and either one ends the conversion: there is no lenient mode.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hddm.utils.errors import HddmError
from hddm.utils.tensors import Planned

Part = tuple[str, int]
"""A tensor's name and its share of the joined rows."""


@dataclass(frozen=True)
class Pair:
    """Tensors of both sides whose rows, joined, are the same.

    ``foreign`` and ``ours`` name the parts with their shares of the rows: a fused query-key-value matrix
    is one part of share 3 against three of share 1. With ``copies`` every foreign part is a copy of the
    one on our side instead.
    """

    foreign: tuple[Part, ...]
    ours: tuple[Part, ...]
    copies: bool = False


def same(foreign: str, ours: str) -> Pair:
    """One tensor under two names."""
    return Pair(((foreign, 1),), ((ours, 1),))


def module(foreign: str, ours: str) -> list[Pair]:
    """The weight and the bias of one module under two names."""
    return [same(f"{foreign}.{leaf}", f"{ours}.{leaf}") for leaf in ("weight", "bias")]


def split(foreign: str, ours: Sequence[str]) -> list[Pair]:
    """Weight and bias of one fused module against equal parts."""
    return [
        Pair(((f"{foreign}.{leaf}", len(ours)),), tuple((f"{name}.{leaf}", 1) for name in ours))
        for leaf in ("weight", "bias")
    ]


@dataclass(frozen=True)
class KeyTable:
    """Pairs, and the foreign names that the network computes or does not read, each with the reason."""

    pairs: Sequence[Pair]
    benign: Mapping[str, str] = field(default_factory=dict)

    def to_ours(self, weights: Mapping[str, Tensor], origin: str) -> tuple[list[Planned], dict[str, Tensor]]:
        """The network's tensors, read when they are written, and the benign ones by their foreign names.

        Raises:
            HddmError: with every name left over or missing.
        """
        left = dict(weights)
        extras = {name: left.pop(name) for name in self.benign if name in left}
        planned = _mapped([(p.foreign, p.ours, p.copies) for p in self.pairs], left, origin)
        return planned, extras

    def renamed(self, weights: Mapping[str, Tensor], origin: str) -> dict[str, Tensor]:
        """The network's tensors, at once; mapped ones stay mapped where they only change their name."""
        return {planned.name: planned.read() for planned in self.to_ours(weights, origin)[0]}

    def to_foreign(
        self, weights: Mapping[str, Tensor], extras: Mapping[str, Tensor], origin: str
    ) -> list[Planned]:
        """The way back; ``extras`` are benign tensors that were kept."""
        planned = _mapped([(p.ours, p.foreign, p.copies) for p in self.pairs], dict(weights), origin)
        return planned + [as_planned(name, tensor) for name, tensor in extras.items()]


def as_planned(name: str, tensor: Tensor) -> Planned:
    """``tensor`` as it is."""
    return Planned(name, tuple(tensor.shape), tensor.dtype, lambda: tensor)


def _mapped(
    pairs: Sequence[tuple[tuple[Part, ...], tuple[Part, ...], bool]], left: dict[str, Tensor], origin: str
) -> list[Planned]:
    planned: list[Planned] = []
    missing: list[str] = []
    for sources, targets, copies in pairs:
        found = {name: left.pop(name) for name, _ in sources if name in left}
        absent = [name for name, _ in sources if name not in found]
        if absent:
            missing += absent
            continue
        tensors = [found[name] for name, _ in sources]
        if copies:
            planned += _copied(sources, targets, tensors, origin)
        else:
            planned += _joined(targets, tensors, origin)
    problems = [f"missing {name}" for name in missing]
    problems += [f"left over {name} {tuple(tensor.shape)}" for name, tensor in left.items()]
    if problems:
        raise HddmError(f"{origin}: its tensors are not those of the layout: {'; '.join(problems)}")
    return planned


def _copied(
    sources: tuple[Part, ...], targets: tuple[Part, ...], tensors: Sequence[Tensor], origin: str
) -> list[Planned]:
    first = tensors[0]
    for (name, _), tensor in zip(sources, tensors, strict=True):
        if not torch.equal(tensor, first):
            raise HddmError(
                f"{origin}: {name} differs from {sources[0][0]}, and embedders that differ by block cannot "
                "become one; convert without --architecture and --text-dim"
            )
    return [as_planned(name, first) for name, _ in targets]


def _joined(targets: tuple[Part, ...], tensors: Sequence[Tensor], origin: str) -> list[Planned]:
    if len(tensors) == len(targets) == 1:
        return [as_planned(targets[0][0], tensors[0])]
    rows = sum(len(tensor) for tensor in tensors)
    shares = sum(share for _, share in targets)
    tails = {(tuple(tensor.shape[1:]), tensor.dtype) for tensor in tensors}
    if len(tails) > 1 or rows % shares:
        names = ", ".join(name for name, _ in targets)
        raise HddmError(f"{origin}: tensors of {[tuple(t.shape) for t in tensors]} do not make up {names}")
    planned, start = [], 0
    for name, share in targets:
        stop = start + rows // shares * share
        shape = (stop - start, *tensors[0].shape[1:])
        planned.append(Planned(name, shape, tensors[0].dtype, _slice(tensors, start, stop)))
        start = stop
    return planned


class _slice:
    """Rows ``start`` … ``stop`` - 1 of tensors joined along dimension 0, read when called."""

    def __init__(self, tensors: Sequence[Tensor], start: int, stop: int) -> None:
        self._tensors, self._start, self._stop = tensors, start, stop

    def __call__(self) -> Tensor:
        if len(self._tensors) == 1:
            return self._tensors[0][self._start : self._stop]
        pieces, offset = [], 0
        for tensor in self._tensors:
            low, high = max(self._start - offset, 0), min(self._stop - offset, len(tensor))
            if low < high:
                pieces.append(tensor[low:high])
            offset += len(tensor)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
