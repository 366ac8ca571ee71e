"""Adapters (LoRA) of one base that keep its weights once in memory.

Experts share where their adapters have the same base and their networks the same config; the base itself, as
an expert, shares too. An adapter that changes a layer which `hddm.networks.shared` cannot add to, or that has
nobody to share with, is merged (`hddm.experts.lora.Merged`).
"""

import functools
import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hddm.experts.expert import Expert
from hddm.experts.expert_folders import own_network, prefix_of, wrapped
from hddm.experts.lora import Merged
from hddm.networks.folders import WeightsReader
from hddm.networks.offload import Shelf
from hddm.networks.shared import AdaptedNetwork, Adapter, Factors, SharedNetwork, unshareable
from hddm.utils.errors import shown
from hddm.utils.files import identity_of

log = logging.getLogger(__name__)


def shared_networks(
    experts: Sequence[Expert], dtype: torch.dtype, device: torch.device | str, shelf: Shelf
) -> dict[int, AdaptedNetwork]:
    """Networks of the experts that share a base, by index in ``experts``, on ``shelf``.

    A base with all its adapters that does not fit on the shelf is not shared.
    """
    found = dict[int, AdaptedNetwork]()
    for group in _groups(experts):
        if len(group.adapters) + len(group.bases) + len(group.merged) < 2:
            continue
        for k, weights in group.merged.items():
            text = (
                "does not share its base: its adapter changes layers that only merged weights can"
            )
            log.warning("%s: %s: %s", experts[k].name, text, ", ".join(shown(weights)))
        if group.adapters and len(group.adapters) + len(group.bases) > 1:
            found |= _networks(experts, group, dtype, device, shelf)
    return found


@dataclass
class _Group:
    """Experts of one base, by index: adapters, experts that are this base, and adapters that stay merged."""

    adapters: list[int] = field(default_factory=list)
    bases: list[int] = field(default_factory=list)
    merged: dict[int, list[str]] = field(default_factory=dict)
    """Their weights that cannot be shared."""


def _groups(experts: Sequence[Expert]) -> list[_Group]:
    groups, files = dict[Hashable, _Group](), dict[Hashable, _Group]()
    for k, one in enumerate(experts):
        reader = one.unread.read
        if isinstance(reader, Merged):
            group = groups.setdefault((reader.adapter.base_sha256, _form(one)), _Group())
            files[identity_of(reader.base.path), _form(one)] = group
            problems = unshareable(one.network, reader.shapes)
            if problems:
                group.merged[k] = problems
            else:
                group.adapters.append(k)
    for k, one in enumerate(experts):
        reader = one.unread.read
        if isinstance(reader, WeightsReader) and reader.path.exists():
            known = files.get((identity_of(reader.path), _form(one)))
            if known is not None:
                known.bases.append(k)
    return list(groups.values())


def _form(expert: Expert) -> Hashable:
    """What networks with the same weights may still differ in."""
    config = [(name, repr(value)) for name, value in expert.network.config.items()]
    stated = sorted(pair for pair in config if not pair[0].startswith("_"))
    return type(expert.network), expert.record.negated, tuple(stated)


def _networks(
    experts: Sequence[Expert],
    group: _Group,
    dtype: torch.dtype,
    device: torch.device | str,
    shelf: Shelf,
) -> dict[int, AdaptedNetwork]:
    """Networks of a group, by index in ``experts``; none where the shelf has no room for the base."""
    first = experts[group.adapters[0]]
    merged = first.unread.read
    assert isinstance(merged, Merged)
    base, prefix = merged.base, prefix_of(first.network, first.record)

    def read(dtype: torch.dtype) -> dict[str, Tensor]:
        return {prefix + name: value for name, value in base(dtype).items()}

    adapters = [_adapter(experts[k], prefix) for k in group.adapters]
    network = wrapped(first.network, first.record)
    # Registered where it may be of any size, until it is known to fit.
    shared = SharedNetwork(network, adapters, read, str(base.path), dtype, device, Shelf())
    if not shelf.has_room_for(shared):
        log.warning(
            "%s: %d experts do not share it: `max_memory` has no room for it with all adapters",
            base.path.parent,
            len(group.adapters) + len(group.bases),
        )
        return {}
    shelf.add(shared)
    shared.move_to(shelf)
    found = {}
    numbers = [*enumerate(group.adapters), *((None, k) for k in group.bases)]
    for number, k in numbers:
        own = functools.partial(own_network, experts[k])
        found[k] = AdaptedNetwork(shared, number, own)
    return found


def _adapter(expert: Expert, prefix: str) -> Adapter:
    """The adapter of an expert, by the names of weights in its wrapped network."""
    merged = expert.unread.read
    assert isinstance(merged, Merged)
    factors: Callable[[torch.dtype], Factors] = merged.factors

    def read(dtype: torch.dtype) -> Factors:
        return {prefix + name: pair for name, pair in factors(dtype).items()}

    return Adapter(read, {prefix + name: pair for name, pair in merged.shapes.items()})
