"""Permission to open experts whose networks are programs, which someone gives once for all that is opened.

A program computes whatever its author wanted. hddm runs nothing of it but operators on tensors; even so, to
open one is to run a stranger's program, and only the caller can decide to.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

from hddm.utils.errors import HddmError

_IS_ALLOWED = ContextVar("programs_are_allowed", default=False)


@contextlib.contextmanager
def programs_allowed(is_allowed: bool) -> Iterator[None]:
    """Allow programs within this block, if ``is_allowed``; where they are already, they stay so."""
    token = _IS_ALLOWED.set(is_allowed or _IS_ALLOWED.get())
    try:
        yield
    finally:
        _IS_ALLOWED.reset(token)


def refuse_program(path: Path) -> None:
    """Raise an `HddmError` unless programs are allowed; ``path`` is the file of one."""
    if not _IS_ALLOWED.get():
        raise HddmError(
            f"{path}: the network is a program, and to open it is to run what its author wrote; if you trust "
            "them, pass `allow_program=True`"
        )
