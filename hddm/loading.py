"""Any folder that hddm wrote, or the Paris release, to a velocity field."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from hddm.adapters import bases_in
from hddm.ensemble import Ensemble
from hddm.ensemble_folders import ENSEMBLE_FILE, EnsembleFacts
from hddm.errors import HddmError
from hddm.expert_set import ExpertSet, as_field
from hddm.experts import EXPERT_FILE, Expert, RouterFacts, open_expert, refuse_base
from hddm.models.router import RouterTransformer
from hddm.networks import adapted
from hddm.offload import Offload, Shelf
from hddm.parts import Parts, open_parts
from hddm.routing import Router
from hddm.velocity import VelocityField


def load(
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    experts: Sequence[int] | None = None,
    offload: Offload = "none",
    max_memory: int | None = None,
    base: str | Path | None = None,
) -> VelocityField | Ensemble:
    """An expert folder as a `VelocityField`, an ensemble folder or the Paris release as an `Ensemble`.

    An ensemble's experts are read when they are first needed; what their folders say is checked here.

    Args:
        path: the folder.
        dtype: that networks run in; weights stored in another one are cast.
        device: that networks run on.
        experts: indices of an ensemble's experts to take, in this order; by default all.
        offload: what experts that are not running do; see `hddm.offload`.
        max_memory: bytes that the weights of an ensemble may take on the device, the router's included.
        base: the folder of the weights that an adapter changes; by default that is looked for where it was
            when the adapter was trained. An ensemble holds those of its adapters.

    Raises:
        HddmError: for anything else, a folder whose parts contradict each other, or a base for what is no
            adapter.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise HddmError(f"{folder}: no such folder")
    if (folder / EXPERT_FILE).exists():
        if experts is not None or offload != "none" or max_memory is not None:
            raise HddmError(f"{folder}: is one expert; choosing and offloading experts needs an ensemble")
        return _field(folder, dtype, device, [] if base is None else [Path(base)])
    if base is not None:
        raise HddmError(f"{folder}: is no expert folder; a base goes with one adapter")
    parts = open_parts(folder, dtype, experts)
    if parts.router is not None:
        parts.router.to(device)
    held = expert_set(parts, dtype, device, offload, max_memory)
    return ensemble_of(held, parts.router, parts.router_facts, parts.facts)


def expert_set(
    parts: Parts,
    dtype: torch.dtype,
    device: torch.device | str,
    offload: Offload = "none",
    max_memory: int | None = None,
    others: Sequence[nn.Module] = (),
) -> ExpertSet:
    """The experts of an ensemble, on a shelf of their own.

    ``others`` and the router take their part of ``max_memory`` first.

    Raises:
        HddmError: for a limit that leaves no room for an expert.
    """
    budget = None
    if max_memory is not None:
        beside = [part for part in (parts.router, *others) if part is not None]
        budget = room_beside(beside, max_memory)
    return ExpertSet(parts.experts, dtype, device, Shelf(offload, budget))


def bytes_of(parts: Sequence[nn.Module]) -> int:
    """Bytes of all weights of ``parts``."""
    return sum(p.numel() * p.element_size() for part in parts for p in part.parameters())


def room_beside(parts: Sequence[nn.Module], max_memory: int) -> int:
    """Bytes of ``max_memory`` that ``parts`` leave for experts.

    Raises:
        HddmError: where they leave none.
    """
    taken = bytes_of(parts)
    if taken >= max_memory:
        raise HddmError(
            f"--max-memory of {max_memory / 1e6:.1f} MB: router, VAE and text encoder alone take "
            f"{taken / 1e6:.1f} MB; allow more"
        )
    return max_memory - taken


def ensemble_of(
    experts: ExpertSet,
    router: RouterTransformer | None,
    router_facts: RouterFacts | None,
    facts: EnsembleFacts,
) -> Ensemble:
    """The velocity field of an ensemble's parts.

    Raises:
        HddmError: for parts that contradict each other.
    """
    route = None
    if router is not None:
        if router_facts is None:
            raise HddmError("a router needs its router_facts, which say how it counts time")
        outputs = facts.router_outputs or None
        route = Router(router, router_facts.time_scale, router_facts.temperatures, outputs)
    try:
        return Ensemble(
            experts.fields(), route, facts.strategy, facts.prior, facts.class_prior or None, facts.shift
        )
    except HddmError as error:
        raise HddmError(f"{ENSEMBLE_FILE}: {error}") from error


def field_of(expert: Expert, device: torch.device | str = "cpu") -> VelocityField:
    """An expert as a velocity field that shares its network.

    Raises:
        HddmError: for a schedule that is unknown or does not go with the prediction type.
    """
    return as_field(expert, adapted(expert.network, expert.facts.round_time).to(device))


def _field(
    folder: Path, dtype: torch.dtype, device: torch.device | str, bases: Sequence[Path]
) -> VelocityField:
    unread = open_expert(folder, bases_in(bases) if bases else None)
    refuse_base(folder, unread.facts.adapter, bases)
    expert = unread.read(dtype)
    try:
        return field_of(expert, device)
    except HddmError as error:
        raise HddmError(f"{folder / EXPERT_FILE}: {error}") from error
