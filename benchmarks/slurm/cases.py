"""Ways in which Slurm ends a job, and what two trainings make of each."""

import contextlib
import math
import os
import random
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.slurm.cluster import Slurm
from hddm.utils.errors import HddmError
from hddm.utils.files import sha256_of

FILES = Path(__file__).parents[2] / "integrations" / "clusters"
EXPERTS, ASSEMBLE = FILES / "experts.sbatch", FILES / "assemble.sbatch"
WEIGHTS = ("diffusion_pytorch_model", "weak", "calibration")
"""Files of tensors of an expert, without the suffix."""
LONGEST = 900.0
"""Seconds that a step of a case may take."""
COUNT = 2


@dataclass
class Case:
    """One way of interrupting two trainings, in a folder of its own, and what came of it."""

    name: str
    cluster: Slurm
    folder: Path
    job: str = ""
    interruptions: int = 0
    earlier: list[str] = field(default_factory=lambda: [""] * COUNT)
    """What the tasks of an earlier job have written."""
    problems: list[str] = field(default_factory=list)

    def submit(self, *options: str, with_ensemble: bool = True) -> str:
        """Submit the experts and what depends on them; return the number of that."""
        path = str(self.folder.parent / "bin")
        array = f"--array=0-{COUNT - 1}"
        self.job = self.cluster.submit(self.folder, array, *options, EXPERTS, path=path)
        if not with_ensemble:
            return ""
        after = f"--dependency=afterok:{self.job}"
        return self.cluster.submit(self.folder, after, ASSEMBLE, path=path)

    @property
    def tasks(self) -> list[str]:
        return [f"{self.job}_{k}" for k in range(COUNT)]

    def log(self, task: str) -> str:
        """What a task has written in all of its lives."""
        path, before = self.folder / f"experts-{task}.log", self.earlier[int(task[-1])]
        return before + path.read_text(errors="replace") if path.exists() else before

    def lives(self, task: str) -> int:
        """How often a task has reached its steps."""
        return self.log(task).count("continuing from step") + self.log(task).count("starts again")

    def wait(self, is_true: Callable[[], bool], what: str, seconds: float = LONGEST) -> None:
        """Wait for something, while requeued tasks are started at once."""
        end = time.monotonic() + seconds
        while not is_true():
            if time.monotonic() > end:
                raise HddmError(f"{self.folder}: {what}: not after {seconds:.0f} s")
            for task in self.tasks:
                self.cluster.release(task)
            time.sleep(0.5)

    def wait_for_steps(self) -> None:
        """Wait until all tasks are in the middle of their steps, with a checkpoint."""
        runs = [self.folder / "experts" / f"expert_{k}.run" / "checkpoints" for k in range(COUNT)]
        self.wait(lambda: all(any(run.glob("step_*")) for run in runs), "first checkpoint")

    def finish(self) -> None:
        """Wait until all tasks have ended well."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.wait(lambda: all(self.cluster.state(one) in ended for one in self.tasks), "the end")
        for task in self.tasks:
            state = self.cluster.state(task)
            self.check(state == "COMPLETED", f"{task}: ended as {state}")

    def check(self, holds: bool, problem: str) -> None:
        if not holds:
            self.problems.append(problem)
            print(f"{self.name}: {problem}", flush=True)

    def compare(self, reference: Path) -> None:
        """Compare experts with uninterrupted ones, and what was continued with what was saved."""
        for k, task in enumerate(self.tasks):
            for name in WEIGHTS:
                place = Path(f"expert_{k}") / f"{name}.safetensors"
                mine, other = self.folder / "experts" / place, reference / place
                is_same = mine.exists() and sha256_of(mine) == sha256_of(other)
                self.check(is_same, f"{mine}: differs from {other}")
            log, last = self.log(task), 0
            # A run that was told to stop goes on exactly there, and no run falls back.
            for said, step in re.findall(r"(stopped after|continuing from) step (\d+)", log):
                number = int(step)
                self.check(number >= last, f"{task}: {said} step {number}, after step {last}")
                last = number
            for stopped, continued in re.findall(
                r"stopped after step (\d+).*?(?:continuing from step (\d+)|\Z)", log, re.S
            ):
                self.check(stopped == continued, f"{task}: stopped at {stopped}, not {continued}")

    def row(self) -> dict[str, object]:
        """The line of the results."""
        lives = [self.lives(task) for task in self.tasks]
        saved = [self.log(task).count("stopped after step") for task in self.tasks]
        return {
            "case": self.name,
            "interruptions": self.interruptions,
            "starts": sum(lives),
            "saved": sum(saved),
            "equal": not any("differs" in one for one in self.problems),
            "problems": self.problems,
        }


def preempted(case: Case) -> None:
    """A job of a partition that goes first takes one of the two CPUs."""
    ensemble = case.submit()
    case.wait_for_steps()
    urgent = case.cluster.submit(
        case.folder, "--partition=high", "--output=urgent.log", "--wrap=sleep 1"
    )
    case.wait(lambda: case.cluster.state(urgent) == "COMPLETED", "the urgent job")
    case.interruptions = sum(case.cluster.restarts(task) for task in case.tasks)
    case.check(case.interruptions == 1, f"{case.interruptions} tasks were pre-empted, not 1")
    case.finish()
    _check_ensemble(case, ensemble)


def requeued(case: Case) -> None:
    """An administrator, or the loss of a node, puts the job back into the queue."""
    ensemble = case.submit()
    case.wait_for_steps()
    for task in case.tasks:
        case.cluster.said("scontrol", "requeue", task)
    case.interruptions = COUNT
    case.wait(lambda: all(map(case.cluster.restarts, case.tasks)), "the requeuing")
    case.finish()
    _check_ensemble(case, ensemble)


def out_of_time(case: Case) -> None:
    """The time limit comes, and before it the signal of the file."""
    ensemble = case.submit("--time=60")
    case.wait_for_steps()
    for task in case.tasks:
        # The signal is due five minutes before the end, and so at once.
        hours, minutes, _ = case.cluster.show(task)["RunTime"].split(":")
        case.cluster.update(task, f"TimeLimit={60 * int(hours) + int(minutes) + 3}")
    case.wait(lambda: all(map(case.cluster.restarts, case.tasks)), "the signal")
    case.interruptions = COUNT
    case.finish()
    for task in case.tasks:
        case.check("exit code 138" in case.log(task), f"{task}: was not stopped by SIGUSR1")
        # A task that requeues all of the array would interrupt others while they save.
        case.check(case.cluster.restarts(task) == 1, f"{task}: was requeued more than once")
    _check_ensemble(case, ensemble)


def cancelled(case: Case) -> None:
    """A user cancels the job, which must not return to the queue, and submits it again."""
    case.submit(with_ensemble=False)
    case.wait_for_steps()
    case.cluster.said("scancel", case.job)
    case.wait(lambda: _are(case, "CANCELLED"), "the cancelling")
    case.interruptions = COUNT
    restarts = [case.cluster.restarts(task) for task in case.tasks]
    case.check(restarts == [0] * COUNT, f"a cancelled job was requeued: {restarts}")
    for task in case.tasks:
        case.check("progress is saved" in case.log(task), f"{task}: has not saved its training")
    case.earlier = [case.log(task) for task in case.tasks]
    case.submit(with_ensemble=False)
    case.finish()


@dataclass
class Killer:
    """Kills the training of a task once in each of its lives, at a random moment."""

    case: Case
    task: str
    drawn: random.Random
    kills: int = 0
    _life: int = -1
    _seen: int = 0
    _due: float | None = None

    def look(self, now: float) -> None:
        """Kill it if the moment has come, and requeue it if it was killed."""
        case, task = self.case, self.task
        found = case.cluster.show(task)
        if found.get("JobState") == "FAILED":
            case.cluster.said("scontrol", "requeue", task)
        if found.get("JobState") != "RUNNING":
            return
        life = int(found["Restarts"])
        if life != self._life:
            self._life, self._seen, self._due = life, case.lives(task), None
            # Two of five are killed while they start, the others while they take steps.
            if self.drawn.random() < 0.4:
                self._due = now + self.drawn.uniform(1, 15)
        if self._due is None and case.lives(task) > self._seen:
            self._due = now + self.drawn.uniform(0, 4)
        if self._due is not None and now >= self._due:
            processes = case.cluster.processes(task)
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            if processes:
                self.kills += 1
                self._due = math.inf


def killed(case: Case, kills: int) -> None:
    """The training is killed by SIGKILL at random moments, as by a kernel without memory, and requeued."""
    drawn = random.Random(0)
    case.submit(with_ensemble=False)
    killers = [Killer(case, task, drawn) for task in case.tasks]

    def is_done() -> bool:
        for one in killers:
            one.look(time.monotonic())
        case.interruptions = sum(one.kills for one in killers)
        return case.interruptions >= kills or _are(case, "COMPLETED")

    case.wait(is_done, f"{kills} kills", LONGEST + 60 * kills)
    case.wait(lambda: all([_is_completed(case, task) for task in case.tasks]), "the end")
    case.finish()
    case.check(case.interruptions >= kills, f"{case.interruptions} kills, not {kills}")


def _is_completed(case: Case, task: str) -> bool:
    """Return whether a task has ended well; requeue it if it was killed."""
    state = case.cluster.state(task)
    if state == "FAILED":
        case.cluster.said("scontrol", "requeue", task)
    return state == "COMPLETED"


def _are(case: Case, state: str) -> bool:
    return all(case.cluster.state(task) == state for task in case.tasks)


def _check_ensemble(case: Case, job: str) -> None:
    case.wait(
        lambda: case.cluster.state(job) not in ("PENDING", "RUNNING", "COMPLETING"), "ensemble"
    )
    state = case.cluster.state(job)
    is_there = (case.folder / "ensemble" / "model_index.json").exists()
    case.check(state == "COMPLETED" and is_there, f"the ensemble was not assembled: {state}")
