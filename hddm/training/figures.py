"""The figures of a training: means since the last entry, and what the step of an entry has itself.

What is summed since the last entry is part of the training's state, so that a resumed run logs what the
uninterrupted one does, wherever its checkpoint lies between two entries.
"""

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any

import torch

from hddm.training.loop import StepReport

BINS = 5
"""Noise levels t in [0, 1] are told apart in so many bins of equal width."""
_NOTE = "figures"


class Figures:
    """Collects figures step by step, and gives them every ``every`` steps.

    Losses of steps that were left out since they were not finite do not count.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._images = 0
        self._since: float | None = None

    def add(self, report: StepReport) -> dict[str, float]:
        """Take in a step.

        Returns:
            The entry, at steps that ``every`` divides; else nothing. ``train/loss`` and
            ``train/loss_by_noise/0.2-0.4``, the losses of samples with t there: means since the last
            entry, absent where there was none. ``train/gradient_norm``, before clipping, and
            ``train/learning_rate``: of this step. ``train/images_per_second``: since the last entry of this
            process, with the time that checkpoints took and without that of `paused`.
        """
        kept = report.state.notes.get(_NOTE)
        if kept is None or kept["step"] != report.step - 1:
            kept = {"loss": [0.0, 0], "bins": [[0.0, 0] for _ in range(BINS)]}
        if math.isfinite(report.loss):
            _count(kept, report)
        due = report.step % self.every == 0
        entry = self._entry(kept, report) if due else {}
        if due:
            kept = {"loss": [0.0, 0], "bins": [[0.0, 0] for _ in range(BINS)]}
        report.state.notes[_NOTE] = kept | {"step": report.step}
        self._time(report, entry, due)
        return entry

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The time of the block does not count as the training's."""
        start = time.perf_counter()
        yield
        if self._since is not None:
            self._since += time.perf_counter() - start

    def _entry(self, kept: dict[str, Any], report: StepReport) -> dict[str, float]:
        sums = {"train/loss": kept["loss"]}
        for index, each in enumerate(kept["bins"]):
            sums[f"train/loss_by_noise/{index / BINS:.1f}-{(index + 1) / BINS:.1f}"] = each
        entry = {name: total / count for name, (total, count) in sums.items() if count}
        if math.isfinite(report.grad_norm):
            entry["train/gradient_norm"] = report.grad_norm
        return entry | {"train/learning_rate": report.learning_rate}

    def _time(self, report: StepReport, entry: dict[str, float], due: bool) -> None:
        now = time.perf_counter()
        # When the first step of a process began is not known.
        if self._since is None:
            self._since = now
            return
        self._images += len(report.losses)
        if due:
            entry["train/images_per_second"] = self._images / max(now - self._since, 1e-9)
            self._images, self._since = 0, now


def _count(kept: dict[str, Any], report: StepReport) -> None:
    kept["loss"] = [kept["loss"][0] + report.loss, kept["loss"][1] + 1]
    known = report.t.isfinite()
    bins = (report.t[known] * BINS).long().clamp(0, BINS - 1)
    sums = torch.zeros(BINS, dtype=torch.float64).index_add_(0, bins, report.losses[known].double())
    counts = bins.bincount(minlength=BINS)
    kept["bins"] = [
        [total + more, count + number]
        for (total, count), more, number in zip(kept["bins"], sums.tolist(), counts.tolist(), strict=True)
    ]
