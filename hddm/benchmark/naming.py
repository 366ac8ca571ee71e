"""Errors that say what they are about."""

from collections.abc import Iterator
from contextlib import contextmanager

from hddm.errors import HddmError
from hddm.training.signals import Stopped


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
