"""Being told to stop: save, then leave with a code that says by what.

Exit codes: 130 after SIGINT, 143 after SIGTERM, 138 after SIGUSR1. What a training had done is saved, and
``--resume`` goes on from there. A second signal exits at once, if it comes `TOGETHER` seconds or more after
the first: a scheduler and its launcher may both pass one request on. Checkpoints are complete or absent, so
it may come in the middle of a write.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from hddm.errors import HddmError

TOGETHER = 1.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Stopped(HddmError):
    """A signal ended the work, which is saved; ``exit_code`` is 128 plus its number."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number

    @property
    def exit_code(self) -> int:
        """What the process should exit with."""
        return 128 + self.number

    def __reduce__(self) -> Any:
        return type(self), (self.message, self.number)


class StopRequest:
    """Within the block signals only leave a note, ``number``; handlers that were there run too.

    Outside the main thread, where Python takes no handlers, nothing changes.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._since = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._before = {one: signal.signal(one, self._note) for one in SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for one, handler in self._before.items():
            # None is a handler that was not set from Python.
            signal.signal(one, signal.SIG_DFL if handler is None else handler)

    @property
    def requested(self) -> bool:
        """Whether a signal came."""
        return self.number is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None:
            if time.monotonic() - self._since >= TOGETHER:
                os._exit(128 + number)
            return
        self.number, self._since = number, time.monotonic()
        handler: Callable[..., object] | int | None = self._before.get(signal.Signals(number))
        # Python's own turns SIGINT into an exception, in the middle of a step.
        if callable(handler) and handler is not signal.default_int_handler:
            handler(number, frame)
