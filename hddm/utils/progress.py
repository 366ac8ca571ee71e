"""Progress of long work: a bar on a terminal, else a line every tenth and minute; none for short work."""

import contextlib
import math
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import ClassVar, Self

from tqdm import tqdm

_SHORT = 5.0
"""Seconds; work expected to take less prints no lines."""
_OFTEN, _SELDOM, _SETTLED = 10.0, 60.0, 180.0
"""Most seconds between lines in the first minutes of a work and after them; seconds of the first minutes."""
_BEAT = 1.0
"""Seconds between looks at the clock."""


class Progress:
    """``with Progress(total, "encode") as advance: advance(n)``; written to standard error.

    ``total`` counts units of work, called ``unit`` in the bar. With None the work cannot be counted, and
    lines report how long it has taken, as they do until the remaining time is known. ``label`` starts a
    line; ``more`` returns parts that end it; without ``is_drawn`` there is no bar. A thread speaks while
    nothing is counted, of the innermost work: none is silent for long.
    """

    is_quiet = False
    """True in worker processes, whose work is counted by the one that started them."""
    heard: ClassVar[Callable[[float], None] | None] = None
    """Called in worker processes with the part of a work that is done, in [0, 1], as it is counted."""
    opened: ClassVar[list["Progress"]] = []
    """Works in progress, the innermost last."""

    def __init__(
        self,
        total: int | None,
        label: str,
        unit: str = "it",
        more: Callable[[], list[str]] = list,
        is_drawn: bool = True,
    ) -> None:
        self._total, self._label, self._more, self._done = total, label, more, 0
        self._start = self._spoke = time.perf_counter()
        self._first: tuple[float, int] | None = None
        self._lock, self._ended = threading.RLock(), threading.Event()
        self._bar: tqdm[None] | None = None
        if is_drawn:
            self._draw(unit, "{desc}: {elapsed}" if total is None else None)

    def _draw(self, unit: str, bar_format: str | None) -> None:
        total = self._total
        if sys.stderr.isatty() and not self.is_quiet:
            # tqdm draws nothing on a terminal without a size, as in some containers.
            columns, lines = shutil.get_terminal_size()
            self._bar = tqdm(
                total=total,
                desc=self._label,
                unit=unit,
                unit_scale=total is not None and total >= 1_000_000,
                smoothing=0.05,
                ncols=columns,
                nrows=lines,
                bar_format=bar_format,
                leave=total is not None,
            )

    def __enter__(self) -> Self:
        if Progress.opened:
            # What was silent before this work counts.
            self._spoke = Progress.opened[-1]._spoke
            # The outermost is a verb that starts, and from here on it has started.
            Progress.opened[0]._ended.set()
        Progress.opened.append(self)
        if not self.is_quiet:
            threading.Thread(target=self._beat, daemon=True, name="speaks while nothing is counted").start()
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
            if self.is_quiet and Progress.heard is not None and self._total:
                Progress.heard(self._done / self._total)
            if self._bar is not None:
                self._bar.update(self._done - self._bar.n)
                return
            now, total = time.perf_counter(), self._total or self._done
            # What was done before this start may be counted at once.
            self._first = self._first or (now, self._done)
            is_tenth = 10 * before // total != 10 * self._done // total
            is_short = (now - self._start) * total < _SHORT * self._done
            if is_tenth and not is_short and not self.is_quiet:
                self._speak(now)
            else:
                self._speak_if_due(now)

    def skip(self, units: int) -> None:
        """Count ``units`` that were done before; they do not count for the remaining time."""
        with self._lock:
            self._done += units
            if self._first is not None:
                self._first = (self._first[0], self._first[1] + units)
            if self._bar is not None:
                self._bar.update(units)

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
                if self._bar is None:
                    if Progress.opened[-1:] == [self]:
                        self._speak_if_due(time.perf_counter())
                elif not self._bar.disable:
                    self._bar.refresh()

    def _speak_if_due(self, now: float) -> None:
        pause = _OFTEN if now - self._start < _SETTLED else _SELDOM
        if not self.is_quiet and now - self._spoke >= pause:
            self._speak(now)

    def _speak(self, now: float) -> None:
        self._spoke = now
        done = [] if self._total is None else [f"{100 * self._done // self._total} %"]
        print(
            f"{self._label}: {', '.join([*done, *self._details(), *self._more()])}",
            file=sys.stderr,
            flush=True,
        )

    def _details(self) -> list[str]:
        """Further parts of a line: the time that is left at the pace so far."""
        if self._done == self._total:
            return []
        if self._total is None or self._first is None or self._done <= self._first[1]:
            return [f"{duration(self._spoke - self._start)} so far"]
        pace = (self._spoke - self._first[0]) / (self._done - self._first[1])
        return [f"{duration(pace * (self._total - self._done))} left"]


class TrainingProgress(Progress):
    """``with TrainingProgress(steps, batch_size, "train") as progress: progress.reach(step, loss, seconds)``.

    A line gives the step and, over the steps since the previous line, mean loss, images per second, and the
    remaining time at that rate. Waits between steps do not count. The bar counts steps, and is drawn from the
    first one on. ``after`` is the number of images whose training takes as long as what follows the last
    step, and is a part of the remaining time.
    """

    def __init__(self, steps: int, batch_size: int, label: str, after: float = 0.0) -> None:
        super().__init__(steps, label, " steps", is_drawn=False)
        self._batch_size, self._after, self._begun = batch_size, after, False
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
                self._begin(step)
                steps = 1
            elif math.isfinite(seconds):
                self._seconds, self._timed = self._seconds + seconds, self._timed + steps
            if math.isfinite(loss):
                self._loss_sum, self._losses = self._loss_sum + steps * loss, self._losses + steps
            if self._bar is not None:
                details = [*self._mean_loss(), *self._rate(), *self._left(step)]
                self._bar.set_postfix_str(", ".join(details), refresh=False)
            self(step - self._done)
            if step == self._total:
                # What follows the last step is no part of the training, nor of its rate.
                self.__exit__()

    def _begin(self, step: int) -> None:
        """Count losses and time from ``step`` on."""
        if not self._begun:
            # The time that is left comes with the details.
            self._draw(" steps", "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}, {rate_fmt}{postfix}]")
        self._begun = True
        self._forget()
        if self._bar is not None:
            self._bar.reset()
            self._bar.n = self._bar.last_print_n = step - 1
            self._bar.initial = step

    def _details(self) -> list[str]:
        if not self._begun:
            return [f"preparing for {duration(self._spoke - self._start)}"]
        step = f"step {self._done} of {self._total}"
        details = [step, *self._mean_loss(), *self._rate(), *self._left(self._done)]
        self._forget()
        return details

    def _left(self, step: int) -> list[str]:
        images = ((self._total or 0) - step) * self._batch_size + self._after
        if not self._rate() or images <= 0:
            return []
        return [f"{duration(images / self._batch_size * self._seconds / self._timed)} left"]

    def _mean_loss(self) -> list[str]:
        return [f"loss {self._loss_sum / self._losses:.4f}"] if self._losses else []

    def _rate(self) -> list[str]:
        if not self._timed or self._seconds <= 0:
            return []
        rate = self._batch_size * self._timed / self._seconds
        return [f"{rate:.0f} images/s" if rate >= 100 else f"{rate:.3g} images/s"]


@contextlib.contextmanager
def heard(hear: Callable[[float], None]) -> Iterator[None]:
    """Tell ``hear`` the progress of all work in the block, none of which is shown."""
    before = Progress.heard, Progress.is_quiet
    Progress.heard, Progress.is_quiet = hear, True
    try:
        yield
    finally:
        Progress.heard, Progress.is_quiet = before


def duration(seconds: float) -> str:
    """Format as ``45 s``, ``12 min`` or ``3 h 05 min``."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"
