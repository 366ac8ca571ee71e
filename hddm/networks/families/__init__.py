"""The kinds of networks that an expert may have, one file each: every object of a `Family` here is one.

Installed packages add families by entry points of the group ``hddm.families``, each the name of a `Family`
object. Nothing in a folder can add one, so no file decides which code runs.
"""

import functools
import importlib
import pkgutil
from collections.abc import Mapping

from torch import nn

from hddm.condition_names import TEXT, TEXT_MASK
from hddm.networks.encoders import ALONE, TextEncoderClass, TokenizerClass
from hddm.networks.families.family import Family as Family
from hddm.networks.families.family import Pipeline
from hddm.networks.families.installed import installed_families
from hddm.utils.errors import HddmError


@functools.cache
def families() -> Mapping[str, Family]:
    """All families by the class that a ``config.json`` names.

    Raises `HddmError` as `installed_families`, and for a class, layout or pipeline that two families have.
    """
    found = _own()
    for place, family in installed_families():
        for other in found.values():
            for what, name in sorted(_names_of(family) & _names_of(other)):
                raise HddmError(
                    f"{place}: the {what} {name} has a family already, {other.name}; rename it "
                    "there, or uninstall the package"
                )
        found[family.name] = family
    return found


def _own() -> dict[str, Family]:
    """The families of the files in this folder."""
    found: dict[str, Family] = {}
    for file in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{file.name}")
        for one in vars(module).values():
            if isinstance(one, Family):
                found[one.name] = one
    return found


def _names_of(family: Family) -> set[tuple[str, str]]:
    """What other families cannot be called too, with its kind."""
    found = {("class", family.name)}
    if family.layout:
        found.add(("layout", family.layout))
    if family.former_norm:
        found.add(("former norm_type", family.former_norm))
    for pipeline in family.pipelines:
        for name in (pipeline.name, *pipeline.former_names):
            found.add(("pipeline", name))
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


@functools.cache
def text_conditions() -> tuple[str, ...]:
    """Conditions of all families that text encoders make."""
    names = dict.fromkeys((TEXT, TEXT_MASK))
    for pipeline in pipelines().values():
        if pipeline.prompts is not None:
            names.update(dict.fromkeys(pipeline.prompts.conditions))
    return tuple(names)


def pipelines() -> Mapping[str, Pipeline]:
    """Pipelines around the networks of all families, by class, former ones too."""
    found = {}
    for family in families().values():
        for pipeline in family.pipelines:
            for name in (pipeline.name, *pipeline.former_names):
                found[name] = pipeline
    return found


@functools.cache
def text_encoders() -> Mapping[str, TextEncoderClass]:
    """Text encoders by each class that a config may name, those that a pipeline has alone before others.

    Raises `HddmError` for a class that two families read in different ways.
    """
    kinds = [*ALONE]
    for pipeline in pipelines().values():
        if pipeline.prompts is not None:
            kinds += pipeline.prompts.encoders
    found: dict[str, TextEncoderClass] = {}
    for kind in kinds:
        for name in kind.names:
            other = found.setdefault(name, kind)
            if kind != other and kind.name == other.name:
                raise HddmError(
                    f"two families read the text encoder {name} in different ways; give both one "
                    "TextEncoderClass"
                )
    return found


def tokenizers() -> Mapping[str, TokenizerClass]:
    """Tokenizers of all text encoders by each class that a config may name; raises as `text_encoders`."""
    found: dict[str, TokenizerClass] = {}
    for encoder in text_encoders().values():
        kind = encoder.tokenizer
        for name in kind.names:
            if found.setdefault(name, kind) != kind:
                raise HddmError(
                    f"two families read the tokenizer {name} in different ways; give both one "
                    "TokenizerClass"
                )
    return found


def pipeline_networks() -> tuple[str, ...]:
    """Names by which these pipelines keep their network, such as ``unet``."""
    return tuple(sorted({pipeline.network for pipeline in pipelines().values()}))
