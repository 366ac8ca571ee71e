"""An island's own process: trains, tells how far it is, and ends with whoever started it.

To be stopped it gets a message, not a signal: a scheduler, or Ctrl-C in a terminal, signals every process at
once, and a second signal would end a training that is just being saved.
"""

import logging
import os
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import FrameType

from hddm.errors import HddmError
from hddm.training.island_jobs import Island
from hddm.training.island_training import train_island
from hddm.training.signals import SIGNALS, Stopped
from hddm.training.trend import Trend, mean, trend_of

REPORT_SECONDS = 0.1


@dataclass(frozen=True)
class Stepped:
    """A step is done; since the last such message ``loss`` is the mean, NaN where none was finite.

    ``seconds`` are those of these steps.
    """

    step: int
    loss: float
    seconds: float


@dataclass(frozen=True)
class Logged:
    """Something worth knowing happened."""

    level: int
    message: str


@dataclass(frozen=True)
class Ended:
    """It ended by itself: ``done``, it cannot be done, or it was stopped."""

    done: bool = False
    trend: Trend | None = None
    failure: HddmError | None = None


def work(island: Island, connection: "Connection[object, int]") -> None:
    """Train ``island``; the body of its process.

    Args:
        island: what to train.
        connection: gets `Stepped`, `Logged` and last `Ended`, unless the process dies; a number that comes
            is of a signal to stop as after. Its other end closed, the one who reads is gone: stop as well.
    """
    logger = logging.getLogger("hddm")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(_Forwarding(connection))
    told = _Told(connection, island.settings.steps)
    for one in SIGNALS:
        signal.signal(one, told.on_signal)
    ended = Ended()
    try:
        losses = train_island(island, told.on_step)
        # No losses where the expert was there already: its process died after it had written it.
        ended = Ended(True, trend_of(losses))
    except Stopped:
        pass
    except HddmError as error:
        ended = Ended(failure=error)
    _send(connection, ended)


class _Told:
    """Listens for the request to stop."""

    def __init__(self, connection: "Connection[object, int]", steps: int) -> None:
        self._connection, self._steps = connection, steps
        self._stopping = False
        self._reported = 0.0
        self._step, self._losses, self._seconds = 0, list[float](), 0.0

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        # A training in its loop has a handler of its own, which calls this one; before and after it there
        # is nothing to be saved.
        if signal.getsignal(number) == self.on_signal:
            raise SystemExit(128 + number)
        self._stopping = True

    def on_step(self, step: int, loss: float, seconds: float) -> None:
        self._step = step
        self._losses.append(loss)
        self._seconds += seconds
        # The last step is told before the calibration that follows it.
        due = step == self._steps or time.monotonic() - self._reported >= REPORT_SECONDS
        if due and not self._report():
            self._stop(signal.SIGTERM)
        try:
            if self._connection.poll():
                self._stop(self._connection.recv())
        except (EOFError, OSError):
            self._stop(signal.SIGTERM)

    def _report(self) -> bool:
        """Tell of the steps since the last report; False where nobody reads."""
        message = Stepped(self._step, mean(self._losses), self._seconds)
        self._losses, self._seconds = [], 0.0
        self._reported = time.monotonic()
        return _send(self._connection, message)

    def _stop(self, number: int) -> None:
        if not self._stopping:
            self._stopping = True
            os.kill(os.getpid(), number)


class _Forwarding(logging.Handler):
    """Sends what is logged to who started the process."""

    def __init__(self, connection: "Connection[object, int]") -> None:
        super().__init__()
        self._connection = connection

    def emit(self, record: logging.LogRecord) -> None:
        _send(self._connection, Logged(record.levelno, record.getMessage()))


def _send(connection: "Connection[object, int]", message: object) -> bool:
    """Send where somebody still reads."""
    try:
        connection.send(message)
    except OSError:
        return False
    return True
