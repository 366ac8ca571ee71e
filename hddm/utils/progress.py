"""Progress of long work: a bar on a terminal, else a line every tenth and minute; none for short work."""

import math
import shutil
import sys
import time
from typing import Self

from tqdm import tqdm

_SHORT = 5.0
"""Seconds; work expected to take less prints no lines."""
_FIRST, _NEXT = 10.0, 60.0
"""Seconds after which a line is due: the first one, and one after another."""


class Progress:
    """``with Progress(total, "encode") as advance: advance(n)``; written to standard error.

    ``total`` counts units of work; each has ``size`` of the bar's ``unit``. ``label`` starts a line.
    """

    def __init__(self, total: int, label: str, unit: str = "it", size: int = 1) -> None:
        self._total, self._label, self._size, self._done = total, label, size, 0
        self._start = self._spoke = time.perf_counter()
        self._is_silent = True
        self._first: tuple[float, int] | None = None
        self._bar: tqdm[None] | None = None
        if sys.stderr.isatty():
            # tqdm draws nothing on a terminal without a size, as in some containers.
            columns, lines = shutil.get_terminal_size()
            self._bar = tqdm(
                total=total * size,
                desc=label,
                unit=unit,
                unit_scale=True,
                smoothing=0.05,
                ncols=columns,
                nrows=lines,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ended: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, units: int) -> None:
        """Count ``units`` more."""
        before, self._done = self._done, self._done + units
        if self._bar is not None:
            self._bar.update(self._done * self._size - self._bar.n)
            return
        now = time.perf_counter()
        # What was done before this start may be counted at once.
        self._first = self._first or (now, self._done)
        is_tenth = 10 * before // self._total != 10 * self._done // self._total
        is_short = (now - self._start) * self._total < _SHORT * self._done
        is_due = now - self._spoke >= (_FIRST if self._is_silent else _NEXT)
        if is_due or (is_tenth and not is_short):
            self._spoke, self._is_silent = now, False
            percent = f"{100 * self._done // self._total} %"
            print(", ".join([f"{self._label}: {percent}", *self._details()]), file=sys.stderr, flush=True)

    def _details(self) -> list[str]:
        """Further parts of a line: the time that is left at the pace so far."""
        if self._first is None or not self._first[1] < self._done < self._total:
            return []
        pace = (self._spoke - self._first[0]) / (self._done - self._first[1])
        return [f"{_duration(pace * (self._total - self._done))} left"]


class TrainingProgress(Progress):
    """``with TrainingProgress(steps, batch_size, "train") as progress: progress.reach(step, loss, seconds)``.

    A line gives the step and, over the steps since the previous line, mean loss, images per second, and the
    remaining time at that rate. Waits between steps do not count. The bar counts images.
    """

    def __init__(self, steps: int, batch_size: int, label: str) -> None:
        super().__init__(steps, label, " images", batch_size)
        self._begun = False
        self._forget()

    def _forget(self) -> None:
        self._loss_sum, self._losses = 0.0, 0
        self._seconds, self._timed = 0.0, 0

    def reach(self, step: int, loss: float, seconds: float) -> None:
        """Report ``step``; ``loss`` is the mean since the last call, ``seconds`` the sum, NaN if unknown.

        The first call only starts the count, as does a return to an earlier step from a checkpoint; its time
        does not count, since the first step of a process takes longer.
        """
        steps = step - self._done
        if not self._begun or steps <= 0:
            self._begin(step)
            steps = 1
        elif math.isfinite(seconds):
            self._seconds, self._timed = self._seconds + seconds, self._timed + steps
        if math.isfinite(loss):
            self._loss_sum, self._losses = self._loss_sum + steps * loss, self._losses + steps
        if self._bar is not None:
            self._bar.set_postfix_str(", ".join([f"step {step}", *self._mean_loss()]), refresh=False)
        self(step - self._done)
        if self._bar is not None and step == self._total:
            # Its last rate would include work after the training.
            self._bar.close()

    def _begin(self, step: int) -> None:
        """Count losses and time from ``step`` on."""
        self._begun = True
        self._forget()
        if self._bar is not None:
            self._bar.reset()
            self._bar.n = self._bar.last_print_n = (step - 1) * self._size
            self._bar.initial = step * self._size

    def _details(self) -> list[str]:
        details = [f"step {self._done} of {self._total}", *self._mean_loss()]
        if self._timed and self._seconds > 0:
            pace = self._seconds / self._timed
            details.append(f"{_short(self._size / pace)} images/s")
            if self._done < self._total:
                details.append(f"{_duration((self._total - self._done) * pace)} left")
        self._forget()
        return details

    def _mean_loss(self) -> list[str]:
        return [f"loss {self._loss_sum / self._losses:.4f}"] if self._losses else []


def _short(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


def _duration(seconds: float) -> str:
    """Format as ``45 s``, ``12 min`` or ``3 h 05 min``."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"
