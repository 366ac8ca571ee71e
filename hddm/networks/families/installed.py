"""Families of installed packages, found by entry points; what they get wrong is told by their names.

A package may hold anything. Its fields are checked when it is loaded; from then on each of its methods tells
what it raises, or returns of another kind than `Family` says, as a `FamilyError`.
"""

import functools
import inspect
import re
import typing
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import torch
from diffusers import ConfigMixin, ModelMixin
from pydantic import ConfigDict, TypeAdapter, ValidationError

from hddm.networks.families.family import Family
from hddm.utils.errors import HddmError, one_line

GROUP = "hddm.families"
_ANY_CLASS = ConfigDict(arbitrary_types_allowed=True, strict=True)
_PATTERNS = ("lora_layers", "lora_parameters")


class FamilyError(HddmError):
    """What the family of an installed package refuses or gets wrong; the message names both."""


def installed_families() -> Iterator[tuple[str, Family]]:
    """Families of installed packages, each with the place that names it.

    Raises `HddmError` for an entry point that cannot be loaded, or that names no sound family.
    """
    for entry in entry_points(group=GROUP):
        place = f"{_package(entry)}: entry point {entry.name} = {entry.value} of {GROUP}"
        yield place, _loaded(entry, place)


def may_be_added() -> str:
    """End of a message about an unknown class or layout: how a package adds it, and which ones add any."""
    packages = {_package(entry).removeprefix("package ") for entry in entry_points(group=GROUP)}
    found = ", ".join(sorted(packages)) or "none"
    return f"an installed package may add it (entry points {GROUP}; installed: {found})"


def _package(entry: EntryPoint) -> str:
    return f"package {'unknown' if entry.dist is None else entry.dist.name}"


def _loaded(entry: EntryPoint, place: str) -> Family:
    """The family that an entry point names, whose methods tell their errors."""
    try:
        family = entry.load()
        kind = getattr(family, "network", None)
    except Exception as error:  # a package may raise anything
        raise HddmError(
            f"{place}: cannot be loaded ({_reason(error)}); repair or uninstall the package"
        ) from error
    if not isinstance(family, Family):
        raise HddmError(f"{place}: names no object of the class {Family.__module__}.Family")
    name, class_name = getattr(family, "name", None), getattr(kind, "__name__", None)
    if name is None or name != class_name:
        raise HddmError(
            f"{place}: the family is called {name}, and the class of its network {class_name}"
        )
    if problem := _problem(family):
        raise HddmError(f"{place}: {problem}; correct it in the package")
    _tell_errors(family, f"{_package(entry)}: the family of {name}")
    return family


def _problem(family: Family) -> str | None:
    """What is wrong with the fields of a family, or its network; None if nothing is."""
    kind = family.network
    # The decorator wraps the constructor; without it, the network has no config.
    has_config = issubclass(kind, ConfigMixin) and hasattr(kind.__init__, "__wrapped__")
    if not issubclass(kind, ModelMixin) or not has_config:
        return (
            f"{family.name} is no ModelMixin with ConfigMixin of diffusers whose constructor is decorated "
            "by register_to_config"
        )
    if family.states_size and not family.has_key("sample_size"):
        return f"{family.name} takes no sample_size, so states_size must be False"
    for field, hint in typing.get_type_hints(Family).items():
        value = getattr(family, field)
        if not _is_of(hint, value):
            return f"{field} is {one_line(repr(value), 60)}, and must be of {_written(hint)}"
    if not family.layout:
        return "layout is empty; name the one of its folders, which hddm convert prints"
    for field in _PATTERNS:
        try:
            re.compile(getattr(family, field))
        except re.error as error:
            return f"{field} is no regular expression ({one_line(error)})"
    # Without them a small file could declare a huge network.
    keys = [key for group in family.depths for key in group]
    if keys and not any(map(family.has_key, keys)):
        return (
            f"depths names {', '.join(keys)}, which {family.name} does not take; name its arguments that "
            "say how many blocks there are, or () if none does"
        )
    return None


def _tell_errors(family: Family, place: str) -> None:
    """Let all methods of a family tell their errors as its own, beginning with ``place``."""
    for name, plain in inspect.getmembers(Family, inspect.isfunction):
        if not name.startswith("_"):
            hint = typing.get_type_hints(plain)["return"]
            setattr(family, name, _telling(getattr(family, name), name, hint, place))


def _telling(method: Callable[..., Any], name: str, hint: Any, place: str) -> Callable[..., Any]:
    """``method``, which raises a `FamilyError` in place of any fault of its own."""

    @functools.wraps(method)
    def told(*args: Any, **kwargs: Any) -> Any:
        try:
            found = method(*args, **kwargs)
        # No fault of the family: one with little memory, or one that it calls has said its own.
        except (FamilyError, MemoryError, torch.OutOfMemoryError):
            raise
        except HddmError as error:
            # Those of a kind, such as a stop, mean more than their text.
            if type(error) is not HddmError:
                raise
            raise FamilyError(f"{place}: {error.message}", error.details) from error
        except Exception as error:  # a package may raise anything
            raise FamilyError(
                f"{place}: {name}() fails ({_reason(error)}); correct it there"
            ) from error
        if not _is_of(hint, found):
            said = f"returns {one_line(repr(found), 60)}, and must return {_written(hint)}"
            raise FamilyError(f"{place}: {name}() {said}; correct it there")
        return found

    return told


def _is_of(hint: Any, value: object) -> bool:
    """True if ``value`` is of the type ``hint``; numbers and lists are not converted."""
    if isinstance(hint, type) and typing.get_origin(hint) is None:
        return isinstance(value, hint)
    try:
        _adapter(hint).validate_python(value)
    except ValidationError:
        return False
    return True


@functools.cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint, config=_ANY_CLASS)


def _written(hint: Any) -> str:
    return (
        hint.__name__ if isinstance(hint, type) and typing.get_origin(hint) is None else str(hint)
    )


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error)}"
