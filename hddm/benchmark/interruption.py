"""A signal to a benchmark: its workers save, and it ends with a code that says by what."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from hddm.utils.processes import SIGNALS, Stopped


@contextmanager
def stoppable(out: Path) -> Iterator[None]:
    """Within the block a signal raises `Stopped`, on which `hddm.utils.processes.Workers` stops its own.

    Outside the main thread, where Python takes no handlers, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        for one in SIGNALS:
            # A second one ends it at once.
            signal.signal(one, signal.SIG_DFL)
        raise Stopped(f"{out}: stopped; what was done is saved, and the same command goes on with it", number)

    before = {one: signal.signal(one, stop) for one in SIGNALS}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, signal.SIG_DFL if handler is None else handler)
