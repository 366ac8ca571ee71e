"""The workload of a benchmark: what is left to train, sample and score, and the time that this takes."""

import time
from collections.abc import Mapping

from hddm.benchmark.settings import SamplingPoint
from hddm.ensemble import Strategy
from hddm.utils.progress import duration

TRAIN, SAMPLE, SCORE = "train", "sample", "score"
_SCORE = 10.0
"""Seconds that a score is taken to need before one was made."""
_CALLS = {"heun": 2}
"""Calls of the velocity in a step, by solver; of others 1."""


class Workload:
    """Units left by seed and stage: operations of trainings and samples, numbers of scores.

    Time follows from the pace of each stage so far, for samples at first from that of training.
    """

    def __init__(self, todo: Mapping[tuple[int, str], int]) -> None:
        self._todo = dict(todo)
        self._done: dict[str, int] = {}
        self._seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def total(self, stage: str) -> int:
        """Units left of ``stage`` over all seeds."""
        return sum(units for (_, one), units in self._todo.items() if one == stage)

    def begin(self, seed: int, stage: str, units: int) -> None:
        """Start ``stage``, whose ``units`` are now known exactly."""
        self._todo[seed, stage] = units
        self._since = time.perf_counter()

    def count(self, seed: int, stage: str, units: int) -> None:
        """Count ``units`` as done."""
        now = time.perf_counter()
        self._todo[seed, stage] -= units
        self._done[stage] = self._done.get(stage, 0) + units
        self._seconds[stage] = self._seconds.get(stage, 0.0) + now - self._since
        self._since = now

    def left(self) -> list[str]:
        """Part of a line of progress: the time left of all seeds and stages, once it can be told."""
        paces = {stage: done / self._seconds[stage] for stage, done in self._done.items() if done}
        if SAMPLE not in paces and TRAIN in paces:
            paces[SAMPLE] = paces[TRAIN]
        paces.setdefault(SCORE, 1 / _SCORE)
        todo = {key: units for key, units in self._todo.items() if units}
        if not {stage for _, stage in todo} <= paces.keys():
            return []
        return [f"{duration(sum(units / paces[stage] for (_, stage), units in todo.items()))} to the end"]


def evaluations(point: SamplingPoint, experts: int) -> int:
    """Networks that run for one image at ``point``, of a model of so many ``experts``, at most."""
    strategy = Strategy.parse(point.strategy)
    at_once = {"draw": 1, "top": int(strategy.value)}.get(strategy.kind, experts)
    guided = 1 if point.guidance_scale == 1 else 2
    return point.steps * _CALLS.get(point.solver, 1) * min(at_once, max(1, experts)) * guided
