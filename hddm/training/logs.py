"""Where figures and pictures of a training go, and that none of these places can end it.

TensorBoard's event files lie in the run folder. Over any number of resumes they read as one run: each process
writes a file of its own, which sorts behind those before it and begins by declaring void what they hold from
its first step on. That a killed process logged steps after its last checkpoint is therefore never seen.
"""

import logging
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)


class Sink(Protocol):
    """A place for figures and pictures."""

    def put(self, step: int, figures: Mapping[str, float], pictures: Mapping[str, "Tensor"]) -> None:
        """Keep ``figures``, and ``pictures`` (C, H, W) in bytes, by name."""

    def sync(self) -> None:
        """Make sure that what was put is kept if the process is killed."""

    def close(self, failed: bool) -> None:
        """Nothing more comes; ``failed`` says whether the training ended early."""


class Guarded:
    """A sink whose failure is one warning, after which it is left alone.

    Args:
        name: what it is called in the warning.
        start: opens it, given the first step that is put.
    """

    def __init__(self, name: str, start: Callable[[int], Sink]) -> None:
        self._name, self._start = name, start
        self._sink: Sink | None = None
        self._failed = False

    def put(self, step: int, figures: Mapping[str, float], pictures: Mapping[str, "Tensor"]) -> None:
        """As `Sink.put`."""
        self._try(lambda sink: sink.put(step, figures, pictures))

    def begin(self, step: int) -> None:
        """Open the sink before its first entry; ``step`` is the first of this process."""
        if self._sink is None and not self._failed:
            try:
                self._sink = self._start(step)
            except Exception as error:
                self._give_up(error)

    def sync(self) -> None:
        """As `Sink.sync`."""
        self._try(lambda sink: sink.sync())

    def close(self, failed: bool) -> None:
        """As `Sink.close`."""
        self._try(lambda sink: sink.close(failed))
        self._sink = None

    def _try(self, act: Callable[[Sink], None]) -> None:
        if self._sink is None:
            return
        try:
            act(self._sink)
        # Whatever fails in what only looks at a training, weeks of it must not be lost to that.
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._failed, self._sink = True, None
        reason = " ".join(str(error).split()) or type(error).__name__
        log.warning("%s: %s; the training goes on without it", self._name, reason)


class EventLog:
    """TensorBoard events in ``folder``; ``first`` is the first step of this process.

    Written here and not by ``SummaryWriter``, which names files by the clock alone, so that those of a
    machine whose clock is behind would sort before what they replace, and which meets a full disk in a
    thread of its own.
    """

    def __init__(self, folder: Path, first: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event: Any = Event
        folder.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = (folder / _next_name(folder)).open("xb")
        self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        self._write(step=first, session_log=SessionLog(status=SessionLog.START))
        self._file.flush()

    def put(self, step: int, figures: Mapping[str, float], pictures: Mapping[str, "Tensor"]) -> None:
        """As `Sink.put`."""
        from torch.utils.tensorboard.summary import image, scalar

        for name, value in figures.items():
            self._write(step=step, summary=scalar(name, value))
        for name, pixels in pictures.items():
            self._write(step=step, summary=image(name, pixels.numpy(), dataformats="CHW"))
        self._file.flush()

    def sync(self) -> None:
        """As `Sink.sync`, and if the machine loses its power."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self, failed: bool) -> None:
        """As `Sink.close`."""
        self._file.close()

    def _write(self, **content: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **content).SerializeToString())


def _next_name(folder: Path) -> str:
    """A name that sorts behind those of all event files in ``folder``, which are read in that order."""
    found = [re.match(r"events\.out\.tfevents\.(\d+)\.", path.name) for path in folder.iterdir()]
    newest = max((int(match[1]) for match in found if match), default=0)
    stamp = max(int(time.time()), newest + 1)
    return f"events.out.tfevents.{stamp:010d}.{socket.gethostname()}.{os.getpid()}"
