"""Progress of long work: a bar on a terminal, else a line every tenth and minute; none for short work."""

import contextlib
import math
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import ClassVar, Self

from tqdm import tqdm

from hddm.utils.processes import is_first

_SHORT = 5.0
"""Seconds; work expected to take less prints no lines."""
_EVIDENCE, _SHARE = 5.0, 0.1
"""Seconds of counting, and where units differ the share of all work, before the time left is shown."""
_OFTEN, _SELDOM, _FIRST_MINUTES = 10.0, 60.0, 180.0
"""Most seconds between lines in the first minutes of a work and after them; seconds of the first minutes."""
_DRAW = 0.1
"""Seconds between drawings of a bar."""
_BEAT = 1.0
"""Seconds between looks at the clock."""


class _Pace:
    """How fast a work goes, by what was counted recently.

    Recent is the later half of what was counted since the first count, and of the time since then, whichever
    is shorter: one forgets slow parts soon, the other fast ones. The time before the first count is not
    typical, since files are opened and code is compiled.
    """

    _MARKS = 200
    """About as many marks are kept."""

    def __init__(self, is_even: bool = True) -> None:
        self._share = 0.0 if is_even else _SHARE
        self._first: tuple[float, int] | None = None
        self._marks: deque[tuple[float, int]] = deque()

    def mark(self, now: float, units: int) -> None:
        """Note how many ``units`` are counted by ``now``."""
        if self._first is None:
            self._first = now, units
        start, uncounted = self._first
        if self._marks and now - self._marks[-1][0] < (now - start) / self._MARKS:
            return
        self._marks.append((now, units))
        half = (start + now) / 2, (uncounted + units) / 2
        while len(self._marks) > 2 and (
            self._marks[1][0] <= half[0] or self._marks[1][1] <= half[1]
        ):
            self._marks.popleft()

    def seconds(self, now: float, units: int, further: int) -> float | None:
        """How long ``further`` units take after ``units`` by ``now``; None without enough evidence."""
        if self._first is None:
            return None
        start, uncounted = self._first
        counting, counted = now - start, units - uncounted
        if counting < _EVIDENCE or counted < self._share * (counted + further):
            return None
        since, before = self._marks[0]
        return (now - since) / (units - before) * further if units > before else None


class Progress:
    """``with Progress(total, "encode") as advance: advance(n)``; written to standard error.

    ``total`` counts units of work. With None the work cannot be counted, and lines report how long it has
    taken, as they do until the remaining time is known. ``label`` starts a line; ``more`` returns parts that
    end it; without ``is_drawn`` there is no bar. Without ``is_even`` units take different times, as the
    steps of a benchmark do, so the remaining time is shown later. While nothing is counted, a thread prints a
    line about the innermost work, so that no work is silent for long. A line that says the same as the one
    before it is left out, for at most a minute.
    """

    heard: ClassVar["_Whole | None"] = None
    """Told what is done, in worker processes; then nothing is shown."""
    opened: ClassVar[list["Progress"]] = []
    """Works in progress, the innermost last."""

    def __init__(
        self,
        total: int | None,
        label: str,
        more: Callable[[], list[str]] = list,
        is_drawn: bool = True,
        is_even: bool = True,
    ) -> None:
        self._total, self._label, self._more, self._done = total, label, more, 0
        self._start = self._spoke = time.perf_counter()
        self._pace, self._skipped = _Pace(is_even), 0
        self._lock, self._ended = threading.RLock(), threading.Event()
        self._bar: tqdm[None] | None = None
        self._printed, self._printed_at = "", -math.inf
        self._is_held = False
        """Whether the line that was due last was left out."""
        if is_drawn:
            self._draw()

    def _draw(self) -> None:
        """Draw a bar, on a terminal."""
        if sys.stderr.isatty() and Progress.heard is None and is_first():
            shape = "{desc}" if self._total is None else "{desc} |{bar}|"
            # tqdm draws nothing on a terminal without a size, as in some containers.
            columns, rows = shutil.get_terminal_size()
            keeps = self._total is not None
            self._bar = tqdm(
                total=self._total,
                desc=self._label,
                bar_format=shape,
                ncols=columns,
                nrows=rows,
                leave=keeps,
            )

    def __enter__(self) -> Self:
        if Progress.opened:
            # What was silent before this work counts.
            self._spoke = Progress.opened[-1]._spoke
            if isinstance(Progress.opened[0], Startup):
                # From here on the command has started.
                Progress.opened[0]._ended.set()
        Progress.opened.append(self)
        if Progress.heard is None:
            threading.Thread(
                target=self._beat, daemon=True, name="speaks while nothing is counted"
            ).start()
        return self

    def __exit__(self, *ended: object) -> None:
        self._ended.set()
        if self in Progress.opened:
            Progress.opened.remove(self)
            for outer in Progress.opened[-1:]:
                outer._spoke = max(outer._spoke, self._spoke)
        with self._lock:
            if self._bar is not None:
                self._bar.close()

    def __call__(self, units: int) -> None:
        """Count ``units`` more."""
        with self._lock:
            before, self._done = self._done, self._done + units
            if Progress.heard is not None:
                if self._total:
                    Progress.heard.add(self, self._done / self._total)
                return
            now, total = time.perf_counter(), self._total or self._done
            self._pace.mark(now, self._done - self._skipped)
            is_tenth = 10 * before // total != 10 * self._done // total
            is_short = self._bar is None and (now - self._start) * total < _SHORT * self._done
            if is_tenth and not is_short:
                self._speak(now)
            else:
                self._speak_if_due(now)

    @property
    def has_ended(self) -> bool:
        """True after the block, and after the last step of a training."""
        return self._ended.is_set()

    def skip(self, units: int) -> None:
        """Count ``units`` that were done before; they do not count for the remaining time."""
        with self._lock:
            self._done += units
            self._skipped += units

    def say(self, text: str) -> None:
        """Print lines of their own, above the bar."""
        with self._lock:
            self._spoke = time.perf_counter()
            tqdm.write(text, file=sys.stderr)
            sys.stderr.flush()

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT):
            with self._lock:
                # The main thread may have left the block while this one waited for the lock.
                if self._ended.is_set():
                    return
                if self._bar is not None or Progress.opened[-1:] == [self]:
                    self._speak_if_due(time.perf_counter())

    def _speak_if_due(self, now: float) -> None:
        is_early = now - self._start < _FIRST_MINUTES
        pause = _OFTEN if is_early or self._is_held else _SELDOM
        if now - self._spoke >= (pause if self._bar is None else _DRAW):
            self._speak(now)

    def _speak(self, now: float) -> None:
        self._spoke = now
        if not is_first():
            return
        done = [] if self._total is None else [f"{100 * self._done // self._total} %"]
        text = f"{self._label}: {', '.join([*done, *self._details(), *self._more()])}"
        if self._bar is not None:
            self._bar.n = self._done
            self._bar.set_description_str(text)
            return
        self._is_held = text == self._printed and now - self._printed_at < _SELDOM
        if not self._is_held:
            print(text, file=sys.stderr, flush=True)
            self._printed, self._printed_at = text, now

    def _details(self) -> list[str]:
        """Further parts of a line: the time that is left, or that was spent while that is not known."""
        if self._done == self._total:
            return []
        left = self._left(self._spoke)
        return [f"{self._spent()} so far" if left is None else f"{duration(left)} left"]

    def _spent(self) -> str:
        """How long it has taken, as finely as lines follow each other."""
        seconds = self._spoke - self._start
        return f"{max(1, round(seconds))} s" if seconds < _FIRST_MINUTES else duration(seconds)

    def _left(self, now: float) -> float | None:
        """Seconds until the end, at the recent pace; None at the end, and before there is evidence."""
        if self._total is None or self._done >= self._total:
            return None
        return self._pace.seconds(now, self._done - self._skipped, self._total - self._done)


class Startup(Progress):
    """The start of a command: libraries take seconds to load, and on a busy machine a minute."""

    def __init__(self, label: str) -> None:
        super().__init__(None, label, is_drawn=False)

    def _details(self) -> list[str]:
        library = _loading()
        return [f"loading {library}" if library else "preparing", *super()._details()]


def _loading() -> str | None:
    """The library that is being imported, by another thread perhaps."""
    for name, module in sys.modules.copy().items():
        library = name.partition(".")[0]
        if library in sys.stdlib_module_names or library in _OWN:
            continue
        # Not getattr, which would import parts of a module that loads them when asked.
        spec = getattr(module, "__dict__", {}).get("__spec__")
        if getattr(spec, "_initializing", False):
            return library
    return None


_OWN = ("hddm", "hddm_cli", "__main__")


class TrainingProgress(Progress):
    """``with TrainingProgress(steps, batch_size, "train") as progress: progress.reach(step, loss, seconds)``.

    A line gives the step, mean loss and images per second over the steps since the previous line, and the
    time that is left of the training; a bar gives loss and rate over all steps, and is drawn from the first
    one on. Waits between steps, as for a checkpoint, do not count in the rate.
    """

    def __init__(self, steps: int, batch_size: int, label: str) -> None:
        super().__init__(steps, label, is_drawn=False)
        self._batch_size, self._begun = batch_size, False
        self._forget()

    def _forget(self) -> None:
        self._loss_sum, self._losses = 0.0, 0
        self._seconds, self._timed = 0.0, 0

    def reach(self, step: int, loss: float, seconds: float) -> None:
        """Report ``step``; ``loss`` is the mean since the last call, ``seconds`` the sum, NaN if unknown.

        The first call only starts the count, as does a return to an earlier step from a checkpoint; its time
        does not count, since the first step of a process takes longer.
        """
        with self._lock:
            steps = step - self._done
            if not self._begun or steps <= 0:
                if not self._begun:
                    self._draw()
                self._begun, steps = True, 1
                self._pace = _Pace()
                self._forget()
            elif math.isfinite(seconds):
                self._seconds, self._timed = self._seconds + seconds, self._timed + steps
            if math.isfinite(loss):
                self._loss_sum, self._losses = self._loss_sum + steps * loss, self._losses + steps
            self(step - self._done)
            if step == self._total:
                # What follows the last step is no part of the training, nor of its rate.
                self.__exit__()

    def _speak(self, now: float) -> None:
        super()._speak(now)
        if self._bar is None:
            self._forget()

    def _details(self) -> list[str]:
        if not self._begun:
            return [f"preparing for {self._spent()}"]
        details = [f"step {self._done} of {self._total}"]
        if self._losses:
            details.append(f"loss {self._loss_sum / self._losses:.4f}")
        if self._timed and self._seconds > 0:
            rate = self._batch_size * self._timed / self._seconds
            details.append(f"{rate:.0f} images/s" if rate >= 100 else f"{rate:.3g} images/s")
        left = self._left(self._spoke)
        return details if left is None else [*details, f"{duration(left)} left"]


class _Whole:
    """What is done of several works, one after the other, whose number is not known.

    Each takes most of what those before it left, so that the whole is never done while one may follow. A work
    within another is a part of that.
    """

    _MOST = 0.9

    def __init__(self, hear: Callable[[float], None]) -> None:
        self._hear = hear
        self._work: Progress | None = None
        self._before, self._reached = 0.0, 0.0

    def add(self, work: Progress, part: float) -> None:
        """Report that a ``part`` of ``work`` is done."""
        if self._work is not work:
            if self._work is not None and not self._work.has_ended:
                return
            self._work, self._before = work, self._reached
        self._reached = self._before + self._MOST * (1 - self._before) * part
        self._hear(self._reached)


@contextlib.contextmanager
def heard(hear: Callable[[float], None]) -> Iterator[None]:
    """Report to ``hear`` which part, below 1, of the work in the block is done; none of it is shown."""
    before, Progress.heard = Progress.heard, _Whole(hear)
    try:
        yield
    finally:
        Progress.heard = before


def duration(seconds: float) -> str:
    """Format as ``45 s``, ``12 min`` or ``3 h 05 min``."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"
