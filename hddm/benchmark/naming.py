"""Errors that say what they are about."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hddm.utils.errors import HddmError
from hddm.utils.processes import Call, Report, Stopped


@contextmanager
def named(what: str) -> Iterator[None]:
    """A block that is about ``what``: an `HddmError` in it begins with that.

    Raises:
        HddmError: as the block; `Stopped` as it is.
    """
    try:
        yield
    except Stopped:
        raise
    except HddmError as error:
        raise HddmError(f"{what}: {error.message}", error.details) from error


def named_call(what: str, call: Call) -> Call:
    """``call`` as it is, in whose errors a worker says that it is about ``what``."""
    return Call(_within, {"what": what, "call": call}, call.units)


def _within(what: str, call: Call, report: Report) -> Any:
    with named(what):
        return call.function(**call.arguments, report=report)
