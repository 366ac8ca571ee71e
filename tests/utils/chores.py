"""Work for processes of their own. They import this file, which imports nothing that takes long."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from hddm.utils.errors import HddmError

ReportNumber = Callable[[int], None]


def square(value: int, seconds: float, report: ReportNumber) -> int:
    """Work that takes a while."""
    time.sleep(seconds)
    report(value)
    return value**2


def refuse(report: ReportNumber) -> None:
    raise HddmError("a file is missing: add it")


def touch(path: Path, report: ReportNumber) -> None:
    time.sleep(0.2)
    path.touch()


def stay_until_told(path: Path, report: ReportNumber) -> None:
    """Work that saves when it is told to stop, as a training does, and that has an end of its own."""
    told: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    path.touch()
    report(1)
    for _ in range(100):
        if told:
            signal.signal(signal.SIGTERM, before)
            raise HddmError("saved")
        time.sleep(0.05)


def die(report: ReportNumber) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def give_up(report: ReportNumber) -> None:
    os.write(2, b"where it was\nno more room\n")
    os._exit(3)


def fail(path: Path, report: ReportNumber) -> int:
    """A bug, but for the second start."""
    with path.open("a") as file:
        file.write(".")
    if len(path.read_text()) != 2:
        raise KeyError("x")
    return 5


def die_with_all(path: Path, report: ReportNumber) -> None:
    """As where a scheduler sends a signal to all processes."""
    with path.open("a") as file:
        file.write(".")
    os.kill(os.getppid(), signal.SIGTERM)
    die(report)
