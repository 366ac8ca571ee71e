"""Permission to open experts whose networks are programs, which someone gives once for all that is opened.

A program computes whatever its author wanted. hddm runs nothing of it but operators on tensors; even so, to
open one is to run a stranger's program, and only the caller can decide to.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

from hddm.utils.errors import HddmError

Returned = TypeVar("Returned")
_IS_ALLOWED = ContextVar("programs_are_allowed", default=False)


@contextlib.contextmanager
def programs_allowed(is_allowed: bool) -> Iterator[None]:
    """Allow programs within this block, if ``is_allowed``; where they are already, they stay so."""
    token = _IS_ALLOWED.set(is_allowed or _IS_ALLOWED.get())
    try:
        yield
    finally:
        _IS_ALLOWED.reset(token)


def programs_are_allowed() -> bool:
    """True within a block that allows programs, to be passed on to another process."""
    return _IS_ALLOWED.get()


def opens_programs(function: Callable[..., Returned]) -> Callable[..., Returned]:
    """Give a function a keyword ``allow_program``, by which its caller allows programs while it runs."""

    @functools.wraps(function)
    def called(*arguments: Any, allow_program: bool = False, **values: Any) -> Returned:
        with programs_allowed(allow_program):
            return function(*arguments, **values)

    signature = inspect.signature(function)
    given = list(signature.parameters.values())
    keyword = inspect.Parameter.KEYWORD_ONLY
    given.append(inspect.Parameter("allow_program", keyword, default=False, annotation=bool))
    called.__signature__ = signature.replace(parameters=given)  # type: ignore[attr-defined]
    return called


def refuse_program(path: Path) -> None:
    """Raise an `HddmError` unless programs are allowed; ``path`` is the file of one."""
    if not _IS_ALLOWED.get():
        raise HddmError(
            f"{path}: the network is a program, and to open it is to run what its author wrote; if you trust "
            "them, pass `allow_program=True`"
        )
