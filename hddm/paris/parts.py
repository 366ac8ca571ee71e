"""Experts and router of a Paris release: files, constructor arguments and facts, before weights are read."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hddm.errors import HddmError
from hddm.experts import EXPERT_FILE, ExpertFacts
from hddm.models.router import RouterTransformer
from hddm.models.transformer import ExpertTransformer
from hddm.paris.facts import TIME_SCALE, expert_facts
from hddm.paris.files import ROUTER, expert_folders, numbered, shapes_in, weights_of
from hddm.paris.sizes import check_same, expected, expert_arguments, router_arguments, unlike
from hddm.weight_files import read_header

_MARKERS = {"layers.0.scale_shift_table", "t_block.1.weight", "text_proj.weight", "pos_embed"}


@dataclass(frozen=True)
class ParisPart:
    """A file of weights, and the constructor arguments of the network that they fit."""

    weights: Path
    arguments: dict[str, Any]


def is_paris(folder: Path) -> bool:
    """Whether ``folder`` holds the Paris release, by the tensor names of its first expert.

    One in its layout whose expert cannot be read counts too: `paris_experts` says what is wrong. Expert
    folders that hddm wrote do not count, though their tensors may have the same names.
    """
    try:
        names = expert_folders(folder)
        if not names or (folder / names[0] / EXPERT_FILE).exists():
            return False
        return read_header(weights_of(folder, names[0]))[0].keys() >= _MARKERS
    except HddmError:
        return (folder / ROUTER).is_dir()


def paris_experts(folder: Path) -> list[tuple[ParisPart, ExpertFacts]]:
    """The experts, in order, for `ExpertTransformer`; headers are read and no weights.

    Raises:
        HddmError: in one line with file and remedy, for a gap in the numbers, pickles alone, links that lead
            out, tensors that make no such network (all are listed), experts of different sizes, and a
            scheduler, VAE or text encoder that contradicts them.
    """
    parts: list[ParisPart] = []
    wanted: Mapping[str, Tensor] = {}
    for name in numbered(folder):
        path = weights_of(folder, name)
        found = shapes_in(path)
        arguments = expert_arguments(found, path)
        if not parts:
            wanted = expected(ExpertTransformer, arguments, found, path)
        _check_alike(arguments, parts[0] if parts else None, path)
        check_same(wanted, found, path)
        parts.append(ParisPart(path, arguments))
    facts = expert_facts(folder, parts[0].arguments)
    return [(part, facts) for part in parts]


def paris_router(folder: Path) -> tuple[ParisPart, float]:
    """The router, for `RouterTransformer`, and its time scale.

    What trained its outputs is not part of the release, so there are no `RouterFacts`.

    Raises:
        HddmError: as `paris_experts`, and for a router of another number of experts or size of samples.
    """
    names = numbered(folder)
    if not (folder / ROUTER).is_dir():
        raise HddmError(f"{folder}: has experts and no {ROUTER}/; fetch the whole release")
    path, of_expert = weights_of(folder, ROUTER), weights_of(folder, names[0])
    found = shapes_in(path)
    arguments = router_arguments(found, path)
    check_same(expected(RouterTransformer, arguments, found, path), found, path)
    if arguments["num_experts"] != len(names):
        raise HddmError(
            f"{path}: tells {arguments['num_experts']} experts apart, and {folder} holds {len(names)}; fetch "
            "the whole release"
        )
    expert = ParisPart(of_expert, expert_arguments(shapes_in(of_expert), of_expert))
    _check_alike({key: arguments[key] for key in ("sample_size", "in_channels")}, expert, path)
    return ParisPart(path, arguments), TIME_SCALE


def _check_alike(arguments: Mapping[str, Any], first: ParisPart | None, path: Path) -> None:
    """Refuse sizes that are not those of the ``first`` part."""
    if first is not None and (differing := unlike(arguments, first.arguments)):
        raise HddmError(f"{path}: has {differing} in {first.weights}; take all from one release")
