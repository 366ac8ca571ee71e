"""Places for the figures and pictures of a training; none of them can end it (`Guarded`).

`EventLog` writes TensorBoard's event files into the run folder. Over any number of resumes they read as one
run: each process writes a file of its own, which sorts behind those before it and begins by declaring void
what they hold from its first step on. Steps that a killed process logged after its last checkpoint are never
seen.

`WandbLog` is Weights & Biases, for those who ask for it: it never prompts, and resumed runs stay one run.
`Trend` sums up the losses of a training in a line.
"""

import logging
import math
import netrc
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, Protocol
from urllib.parse import urlsplit

from hddm.utils.errors import HddmError, counted
from hddm.utils.files import read_json, write_json

LONGEST = 100
SHORTEST = 10
"""Steps that a mean is taken over, a tenth of all, at most and at least."""


@dataclass(frozen=True)
class Trend:
    """Means of the loss over the ``over`` first and last steps of a training, which took ``steps``.

    A single step's loss says more of its images, noise and times than of the weights. Where the steps are too
    few to compare, both means are that of all; NaN where no loss was finite.
    """

    steps: int
    over: int
    first: float = math.nan
    last: float = math.nan

    def text(self, loss: str = "loss") -> str:
        """Return a line for users; ``loss`` is its name there."""
        trained = f"trained for {counted(self.steps, 'step')}"
        if not math.isfinite(self.last):
            return trained
        if self.over == self.steps:
            return f"{trained}, {loss} {self.last:.4f} (mean of all steps)"
        means = f"means of the first and the last {self.over} steps"
        return f"{trained}, {loss} {self.first:.4f} → {self.last:.4f} ({means})"


def trend_of(losses: Sequence[float]) -> Trend | None:
    """The trend of the losses of all steps, those left out that were not finite; None of no steps."""
    over = min(LONGEST, len(losses) // 10)
    ends = mean(losses[:over]), mean(losses[len(losses) - over :])
    if over < SHORTEST or not all(map(math.isfinite, ends)):
        over, ends = len(losses), (mean(losses), mean(losses))
    return Trend(len(losses), over, *ends) if losses else None


def mean(losses: Sequence[float]) -> float:
    """The mean of those that are finite; NaN of none."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    return sum(finite) / len(finite) if finite else math.nan


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
        """Close; ``failed`` says whether the training ended early."""


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


RECORD = "wandb.json"
TIMEOUT = 60.0
"""Seconds that a server may take to answer at first."""


class WandbLog:
    """A W&B run whose files lie in ``folder``/wandb, and whose id in ``folder``/wandb.json.

    Without an API key it is written offline, for ``wandb sync``. W&B cannot take back what a killed process
    logged after its last checkpoint; those steps are left out when they come again.

    Args:
        folder: the run folder.
        project: W&B's name for many runs.
        settings: of the training, shown beside its figures.

    Raises:
        HddmError: without wandb.
    """

    def __init__(self, folder: Path, project: str, settings: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise HddmError("needs wandb: pip install 'hddm-diffusion[wandb]'") from error
        self._wandb: Any = wandb
        self._path = folder / RECORD
        known = read_json(self._path) if self._path.exists() else {}
        self._id = str(known.get("id") or secrets.token_hex(8))
        self._logged = int(known.get("step", 0))
        self._last = self._logged
        self._record(self._logged)
        self._run: Any = wandb.init(
            project=project,
            id=self._id,
            name=folder.stem,
            dir=str(folder),
            config=dict(settings),
            resume="allow",
            mode=_mode(),
            settings=wandb.Settings(console="off", silent=True, init_timeout=TIMEOUT),
        )

    def put(self, step: int, figures: Mapping[str, float], pictures: Mapping[str, "Tensor"]) -> None:
        """As `Sink.put`."""
        if step <= self._logged:
            return
        self._run.log(dict(figures), step=step)
        # Apart, since W&B names a picture's file by the step of the call before.
        images = {
            name: self._wandb.Image(pixels.permute(1, 2, 0).numpy()) for name, pixels in pictures.items()
        }
        if images:
            self._run.log(images, step=step)
        if step > self._last:
            # W&B keeps a step back until the next one comes, so this one may still be lost.
            self._record(self._last)
            self._last = step

    def sync(self) -> None:
        """Do nothing: a process of W&B's own has what was put."""

    def close(self, failed: bool) -> None:
        """As `Sink.close`."""
        self._run.finish(exit_code=int(failed))
        self._record(self._last)

    def _record(self, step: int) -> None:
        draft = self._path.with_name(f".{RECORD}")
        write_json(draft, {"id": self._id, "step": step})
        os.replace(draft, self._path)


def _mode() -> Literal["online", "offline", "disabled"]:
    asked = os.environ.get("WANDB_MODE")
    if asked == "disabled":
        return "disabled"
    if asked == "offline":
        return "offline"
    if _has_key():
        return "online"
    log.info(
        "W&B: no API key in WANDB_API_KEY or ~/.netrc, so the run is written offline; wandb sync sends it"
    )
    return "offline"


def _has_key() -> bool:
    """Return true where W&B has a key, or its equal, and need not ask."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    places = [os.environ.get("NETRC"), "~/.netrc", "~/_netrc"]
    path = next((path for place in places if place and (path := Path(place).expanduser()).is_file()), None)
    try:
        return path is not None and netrc.netrc(path).authenticators(host) is not None
    except (netrc.NetrcParseError, OSError):
        return False
