"""The kinds of networks that an expert may have, one file each.

Installed packages add families by entry points of the group ``hddm.families``, each the name of a `Family`
object. Nothing in a folder can add one, so no file decides which code runs.
"""

import functools
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points

from torch import nn

from hddm.networks.families.dit import DIT
from hddm.networks.families.expert import EXPERT
from hddm.networks.families.family import Family as Family
from hddm.networks.families.family import Pipeline
from hddm.networks.families.flux import FLUX
from hddm.networks.families.pixart import PIXART
from hddm.networks.families.sd3 import SD3
from hddm.networks.families.stable_diffusion import STABLE_DIFFUSION
from hddm.networks.families.unet import UNET
from hddm.utils.errors import HddmError, one_line

GROUP = "hddm.families"
_OWN = (EXPERT, DIT, PIXART, SD3, FLUX, UNET, STABLE_DIFFUSION)


@functools.cache
def families() -> Mapping[str, Family]:
    """All families by the class that a ``config.json`` names.

    Raises `HddmError` for an entry point that cannot be loaded or is no family, and for a class, layout or
    pipeline that two families have.
    """
    found: dict[str, Family] = {one.name: one for one in _OWN}
    for entry in entry_points(group=GROUP):
        family = _loaded(entry)
        for other in found.values():
            for what, name in sorted(_names_of(family) & _names_of(other)):
                raise HddmError(
                    f"{_place(entry)}: the {what} {name} has a family already, {other.name}; rename it "
                    "there, or uninstall the package"
                )
        found[family.name] = family
    return found


def _loaded(entry: EntryPoint) -> Family:
    """The family that an entry point names; raises an `HddmError` where that is none."""
    try:
        family = entry.load()
    except Exception as error:  # a package may raise anything
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise HddmError(
            f"{_place(entry)}: cannot be loaded ({reason}); repair or uninstall the package"
        ) from error
    if not isinstance(family, Family):
        raise HddmError(
            f"{_place(entry)}: names no object of the class hddm.networks.families.family.Family"
        )
    name = getattr(family, "name", None)
    kind = getattr(getattr(family, "network", None), "__name__", None)
    if name is None or name != kind:
        raise HddmError(
            f"{_place(entry)}: the family is called {name}, and the class of its network {kind}"
        )
    return family


def _place(entry: EntryPoint) -> str:
    package = "unknown" if entry.dist is None else entry.dist.name
    return f"package {package}: entry point {entry.name} = {entry.value} of {GROUP}"


def _names_of(family: Family) -> set[tuple[str, str]]:
    """What other families cannot be called too, with its kind."""
    found = {("class", family.name)}
    if family.layout:
        found.add(("layout", family.layout))
    if family.former_norm:
        found.add(("former norm_type", family.former_norm))
    for pipeline in family.pipelines:
        found.add(("pipeline", pipeline.name))
    return found


def family_of(network: object) -> Family | None:
    """The family of a network, compiled or not, or of a class; None for any other object."""
    inner = getattr(network, "_orig_mod", network)
    kind = inner if isinstance(inner, type) else type(inner)
    return families().get(kind.__name__)


def known_family(network: nn.Module | type[nn.Module]) -> Family:
    """The family of a network, or of a class, that has one."""
    family = family_of(network)
    assert family is not None
    return family


def layouts() -> Mapping[str, Family]:
    """Families by the layout of their folders, those that other tools write."""
    return {one.layout: one for one in families().values() if one.layout}


@functools.cache
def sample_settings() -> frozenset[str]:
    """Conditions of all families that say how a sample is made, and not what it shows."""
    names = set[str]()
    for family in families().values():
        names.update(family.settings)
    return frozenset(names)


def pipelines() -> Mapping[str, Pipeline]:
    """Pipelines around the networks of all families, by class."""
    found = {}
    for family in families().values():
        for pipeline in family.pipelines:
            found[pipeline.name] = pipeline
    return found
