"""Families of installed packages, found by entry points; errors in them name the family.

A package may hold anything. Its fields are checked when it is loaded. What one of its methods raises later,
or returns of another kind than `Family` says, becomes a `FamilyError`.
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
_PATTERNS = ("lora_layers", "lora_parameters", "exact_layers")


class FamilyError(HddmError):
    """What the family of an installed package refuses or gets wrong; the message names both."""


def installed_families() -> Iterator[tuple[str, Family]]:
    """Families of installed packages, each with the place that names it.

    Raises `HddmError` for an entry point that cannot be loaded, or that names no sound family.
    """
    for entry in entry_points(group=GROUP):
        place = f"package {_package(entry)}: entry point {entry.name} = {entry.value} of {GROUP}"
        try:
            family = entry.load()
            problem = _problem(family)
        except Exception as error:  # a package may raise anything
            raise HddmError(
                f"{place}: cannot be loaded ({_reason(error)}); repair or uninstall the package"
            ) from error
        if problem is not None:
            raise HddmError(f"{place}: {problem}; correct it in the package")
        _tell_errors(family, f"package {_package(entry)}: the family of {family.name}")
        yield place, family


def may_be_added() -> str:
    """End of a message about an unknown class or layout: how a package adds it, and which ones add any."""
    packages = ", ".join(sorted({_package(entry) for entry in entry_points(group=GROUP)}))
    return (
        f"an installed package may add it (entry points {GROUP}; installed: {packages or 'none'})"
    )


def _package(entry: EntryPoint) -> str:
    return "unknown" if entry.dist is None else entry.dist.name


def _problem(family: object) -> str | None:
    """What is wrong with an object that should be a family; None if nothing is."""
    if not isinstance(family, Family):
        return f"it names no object of the class {Family.__module__}.Family"
    name, kind = getattr(family, "name", None), getattr(family, "network", None)
    class_name = getattr(kind, "__name__", None)
    if name is None or name != class_name:
        return f"the family is called {name}, and the class of its network {class_name}"
    if not _has_config(kind):
        return (
            f"{name} is no ModelMixin with ConfigMixin of diffusers whose constructor is decorated by "
            "register_to_config"
        )
    for field, hint in typing.get_type_hints(Family).items():
        value = getattr(family, field)
        if not _is_of(hint, value):
            return f"{field} is {one_line(repr(value), 60)}, and must be of {_written(hint)}"
    for field in _PATTERNS:
        try:
            re.compile(getattr(family, field))
        except re.error as error:
            return f"{field} is no regular expression ({one_line(error)})"
    if not family.layout:
        return "layout is empty; name the one of its folders, which hddm convert prints"
    if family.states_size and not family.has_key("sample_size"):
        return f"{name} takes no sample_size, so states_size must be False"
    # Without them a small file could declare a huge network.
    keys = [key for group in family.depths for key in group]
    if keys and not any(map(family.has_key, keys)):
        return (
            f"depths names {', '.join(keys)}, which {name} does not take; name its arguments that say how "
            "many blocks there are, or () if none does"
        )
    return None


def _has_config(kind: object) -> bool:
    """True for a network's class of diffusers whose constructor keeps its arguments in a config."""
    if not isinstance(kind, type) or not issubclass(kind, ModelMixin):
        return False
    # The decorator that does so wraps the constructor.
    is_decorated = hasattr(inspect.getattr_static(kind, "__init__"), "__wrapped__")
    return issubclass(kind, ConfigMixin) and is_decorated


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
    """True if ``value`` is of the type ``hint``; a list is no tuple, and a whole number is a float too."""
    # Compiled networks pass here, with tensors, and pydantic cannot be compiled.
    if _is_plain(hint):
        return isinstance(value, hint)
    try:
        _adapter(hint).validate_python(value)
    except ValidationError:
        return False
    return True


@functools.cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint, config=_ANY_CLASS)


def _is_plain(hint: Any) -> bool:
    """True for a class without parameters, other than float."""
    return isinstance(hint, type) and typing.get_origin(hint) is None and hint is not float


def _written(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error)}"
