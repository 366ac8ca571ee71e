"""The steps of a seed, each run as soon as what it waits for is done, and the count of their operations."""

import contextlib
import io
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hddm.benchmark.costs import calibration_path, cost_path
from hddm.benchmark.lines import RunCommand
from hddm.benchmark.origin import counted_parts
from hddm.benchmark.overlap import (
    refuse_shared_images,
    steps_before_first_comparison,
    steps_before_shared_images,
)
from hddm.benchmark.plan import SeedPlan
from hddm.benchmark.steps import Step, link_to
from hddm.utils.errors import HddmError, errors_as
from hddm.utils.files import remove
from hddm.utils.progress import Progress, duration, heard
from hddm.utils.work import machine
from hddm.utils.workers import Backend, Call

COUNTING = 5_000
"""Units of counting a step's operations."""


def units_with_counting(step: Step) -> int:
    """Units of progress of a step, and of counting its operations if that is done."""
    return step.units + (COUNTING if step.is_counted else 0)


def waits(steps: Iterable[Step], scored: frozenset[str]) -> dict[str, set[str]]:
    """Identities of the steps that each of ``steps`` waits for, by its identity.

    They are its inputs, and for what learns from images also those ``scored`` ones that none may be of.
    """
    found = {}
    for step in steps:
        found[step.identity] = {read.identity for read in step.inputs.values()}
        if step.kind.learns:
            found[step.identity] |= scored
    return found


def longest_first(steps: Sequence[Step], waits_for: Mapping[str, set[str]]) -> list[Step]:
    """Sort steps by the time of the longest chain that begins with them, and runs to an end.

    So the chain that decides when all is done starts first.
    """
    chains: dict[str, int] = {}

    def comes_late(step: Step) -> tuple[bool, int]:
        # What waits for a step is deeper, but for what learns: it waits for images of any depth.
        return any(one.kind.learns for one in step.upstream), step.depth

    for step in sorted(steps, key=comes_late, reverse=True):
        chain = chains.get(step.identity, 0) + step.units
        chains[step.identity] = chain
        for read in waits_for[step.identity]:
            chains[read] = max(chains.get(read, 0), chain)
    return sorted(steps, key=lambda step: -chains[step.identity])


@dataclass(frozen=True)
class SeedRun:
    """The steps of a seed, run by ``workers``; people see them in ``out``."""

    plan: SeedPlan
    out: Path
    run: RunCommand
    workers: Backend
    progress: Progress
    shows_commands: bool
    _reported: Counter[str] = field(default_factory=Counter, init=False)
    _unchecked: set[str] = field(default_factory=set, init=False)
    """Identities of steps that ended since images were compared, after which there is more to compare."""

    @cached_property
    def steps(self) -> list[Step]:
        """Each step once, whatever its names."""
        return list({step.identity: step for step in self.plan.all}.values())

    def do_all(self) -> None:
        """Do the steps that are not done, each once what it waits for is, then count their operations."""
        left = [step for step in self.steps if not step.is_done]
        names = {step.identity: step.label for step in left}
        # So that images that are scored too are refused before anything learns from them.
        waits_for = waits(left, steps_before_first_comparison(self.plan))
        calls = []
        for step in longest_first(left, waits_for):
            after = frozenset(names[one] for one in waits_for[step.identity] if one in names)
            call = Call(
                _do,
                self._arguments(step),
                step.label,
                units=step.units,
                uses_gpu=step.values.get("device") != "cpu",
                writes=step.result,
                after=after,
            )
            calls.append(call)
        self._link([step for step in self.steps if step.is_done])
        refuse_shared_images(self.plan)
        self.workers.run(calls, self._report, self._start, self._end)
        self._refuse_shared_images()
        self._count_all(sum(step.is_counted for step in left))

    def _count_all(self, expected: int) -> None:
        """Count operations that are not counted; the units of progress of ``expected`` steps are for it."""
        needed: dict[str, Step] = {}
        models = {row.model.identity: row.model for row in self.plan.rows}
        for row in self.plan.rows:
            needed[row.samples.identity] = row.samples
        for model in models.values():
            for step in counted_parts(model, self.plan.not_counted):
                needed[step.identity] = step
        uncounted = {}
        calls = []
        for step in needed.values():
            if step.is_counted and not step.work.has(cost_path(step)):
                uncounted[cost_path(step)] = step
            if step.may_calibrate and not step.work.has(calibration_path(step)):
                name = f"operations of the calibration of {step.label}"
                calls.append(Call(_count_calibration, {"step": step}, name, uses_gpu=False))
        # Units of what was expected to be counted, and shares the count of another step.
        self.progress.skip(COUNTING * (expected - len(uncounted)))
        for step in uncounted.values():
            name = f"operations of {step.label}"
            calls.append(Call(_count, self._arguments(step), name, units=COUNTING, uses_gpu=False))
        self.workers.run(calls, self._report, on_end=lambda call, _: self._report(call, 1.0))

    def _arguments(self, step: Step) -> dict[str, Any]:
        return {"step": step, "run": self.run}

    def _report(self, call: Call, part: float) -> None:
        # Of a step that was started again, the part that is done again does not count.
        before = self._reported[call.name]
        self._reported[call.name] = max(before, int(part * call.units))
        self.progress(self._reported[call.name] - before)

    def _start(self, call: Call) -> None:
        step = call.arguments["step"]
        # Before what takes long.
        if step.kind.learns or step.verb in ("sample", "evaluate"):
            self._refuse_shared_images()
        if self.shows_commands:
            about = self.plan.file.about.get(step.name)
            introduction = f"\n{about}\n" if about else ""
            self.progress.say(f"{introduction}  {step.shown}")

    def _end(self, call: Call, seconds: float) -> None:
        step = call.arguments["step"]
        self._report(call, 1.0)
        if self.shows_commands:
            self.progress.say(f"    {call.name}: {duration(seconds)}")
        self._link([step])
        if step.identity in self._before_shared_images:
            self._unchecked.add(step.identity)

    @cached_property
    def _before_shared_images(self) -> frozenset[str]:
        return steps_before_shared_images(self.plan)

    def _refuse_shared_images(self) -> None:
        """Look for shared images again if there is more to look at."""
        if self._unchecked:
            refuse_shared_images(self.plan)
            self._unchecked.clear()

    def _link(self, steps: Iterable[Step]) -> None:
        """Link to what steps wrote by all their names, for people to look at."""
        identities = {step.identity for step in steps}
        for step in self.plan.all:
            if step.identity in identities:
                for ending, path in step.written.items():
                    link_to(self.out / (step.label + ending), path)


def _do(step: Step, run: RunCommand, report: Callable[[float], None]) -> float:
    """Run a step, whose inputs are done, and record it; return its seconds."""
    started = time.perf_counter()
    printed = io.StringIO()
    if step.kind.is_training:
        # Imported here, as below: it imports torch, and what plans these calls in another process does not.
        from hddm.training.state import wait_for_run

        wait_for_run(step.path)
    if not step.kind.continues:
        # Of a start that was killed before it could record this step.
        for remains in step.written.values():
            remove(remains)
    step.path.parent.mkdir(parents=True, exist_ok=True)
    step.link_inputs()
    with _started(step, printed), heard(report):
        # What began with other data or settings would be continued after a kill as if it were of these.
        step.refuse_changed()
        run([*step.command(), *step.kind.continues])
        if not step.result.exists():
            raise HddmError("wrote nothing; a step of a benchmark writes a file or folder")
        try:
            step.refuse_changed()
        except HddmError:
            step.forget()
            raise
    for ending in (".run", ".features"):
        remove(step.path.with_name(step.path.name + ending))
    seconds = round(time.perf_counter() - started, 1)
    record = {
        "command": step.shown,
        "seconds": seconds,
        "machine": machine(),
        "said": printed.getvalue(),
    }
    step.work.finish(step.path, record, step.files)
    return seconds


def _count(step: Step, run: RunCommand, report: Callable[[float], None]) -> None:
    """Count the operations of one image of a training or of a sampling, and record them."""
    from hddm.benchmark.counting import TrainingCost, count_sampling, count_training

    step.link_inputs()
    line = step.placed_line
    with _started(step, io.StringIO()), heard(report):
        if step.verb == "sample":
            cost = TrainingCost(count_sampling(line, run), 0)
        else:
            is_of_few_steps = step.values.get("sampling_steps") is not None
            cost = count_training(line, run, is_of_few_steps)
        step.refuse_changed()
    step.work.finish(cost_path(step), cost._asdict())


def _count_calibration(step: Step, report: Callable[[float], None]) -> None:
    """Count the operations of the calibration of a step that is done, and record them."""
    from hddm.benchmark.counting import calibration_flop

    with _started(step, io.StringIO()):
        flop = calibration_flop(step)
    step.work.finish(calibration_path(step), {"flop": flop})


@contextlib.contextmanager
def _started(step: Step, printed: io.StringIO) -> Iterator[None]:
    """Block in which a step runs: its errors have its name, and what it prints is kept."""
    with (
        errors_as(HddmError, f"step {step.name!r} ({step.shown})"),
        contextlib.redirect_stdout(printed),
    ):
        yield
