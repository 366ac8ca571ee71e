"""Train many experts at once, each alone (an island), on this machine or on a cluster."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from hddm.data.shards import open_shard
from hddm.experts.expert_folders import open_expert
from hddm.experts.records import EXPERT_FILE
from hddm.networks.programs.permission import programs_allowed, programs_are_allowed
from hddm.training.continuation import continue_expert, resolve_continued
from hddm.training.expert import resolve_new, train_expert
from hddm.training.loop import OnTrainingStep, summary_of
from hddm.training.resume import has_run, recipe_before, refuse_run
from hddm.training.settings import ExpertSettings, RunOptions
from hddm.training.state import discard_runs, wait_for_run
from hddm.utils.errors import HddmError
from hddm.utils.processes import stoppable
from hddm.utils.workers import RETRIES, Backend, Call, Workers

OnIsland = Callable[[int, int, float, float], None]
"""Called with an island's index, a step, and the loss and the seconds of it."""


@dataclass(frozen=True)
class Island:
    """One training of the expert folder ``out`` on the shard folder with number ``index``.

    ``schedule`` is a diffusers scheduler config for DDPM, and ``init`` an expert folder to continue, whose
    network may be a program with ``allow_program``.
    """

    index: int
    shard: Path
    out: Path
    settings: ExpertSettings
    run: RunOptions
    schedule: Path | None = None
    init: Path | None = None
    overwrite: bool = False
    allow_program: bool = False

    @property
    def name(self) -> str:
        return self.out.name


Outcome = str | HddmError
"""The end of an island: a line for users, "" where it was complete before, or its failure."""


def make_islands(
    shards: Sequence[Path],
    out: Path,
    objectives: Sequence[str],
    settings: Mapping[str, ExpertSettings],
    run: RunOptions,
    schedule: Path | None = None,
    init: Path | None = None,
    overwrite: bool = False,
) -> list[Island]:
    """Make an island for each shard, which writes ``out/expert_k``.

    ``objectives`` has one per shard, and ``settings`` are by objective; ``schedule`` is for DDPM.
    """
    islands = []
    for index, (shard, objective) in enumerate(zip(shards, objectives, strict=True)):
        place, own = out / f"expert_{index}", schedule if objective == "ddpm" else None
        islands.append(
            Island(
                index,
                shard,
                place,
                settings[objective],
                run,
                own,
                init,
                overwrite,
                programs_are_allowed(),
            )
        )
    return islands


def train_islands(
    islands: Sequence[Island], backend: Backend | None = None, on_step: OnIsland | None = None
) -> list[Outcome]:
    """Train islands, which share nothing; return their outcomes in their order.

    One whose process dies (killed, out of memory, a bug) is started again from its last checkpoint; one that
    fails for a reason that the user must mend is not. The others continue in both cases. The ``backend`` is
    `Workers`, one after the other, by default.

    Raises:
        HddmError: for folders that are in the way, and settings that do not fit a shard, before anything
            starts; for an unreachable backend.
        Stopped: after a signal, with all runs saved.
    """
    prepare(islands)
    calls = [_call(one) for one in islands]

    def report(call: Call, *step: Any) -> None:
        if on_step is not None:
            on_step(call.arguments["island"].index, *step)

    kept = f"{islands[0].out.parent}: stopped; progress is saved, and `resume=True` continues"
    with stoppable(kept), backend or Workers(1, RETRIES) as workers:
        return workers.run(calls, report, keep_going=True)


def _call(island: Island) -> Call:
    """Return the call that trains an island in a process of its own."""
    return Call(
        _train,
        {"island": island},
        island.name,
        threads=island.settings.threads,
        uses_gpu=island.settings.device in ("auto", "cuda"),
        writes=island.out / EXPERT_FILE,
    )


def _train(island: Island, report: OnTrainingStep) -> str:
    """Train an island in a process of its own, which writes its log to its standard error."""
    logging.basicConfig(format=f"hddm: {island.name}: %(message)s", force=True)
    logging.getLogger("hddm").setLevel(logging.INFO)
    wait_for_run(island.out)
    return summary_of(train_island(island, report))


def prepare(islands: Sequence[Island]) -> None:
    """Check ``islands``, and remove the runs that ``overwrite`` without ``resume`` replaces.

    All folders that are in the way or in use, and all settings that a shard does not allow, raise one
    `HddmError` before anything is removed.
    """
    problems = []
    for one in islands:
        try:
            _check(one)
        except HddmError as error:
            problems.append(f"{one.name}: {error.message}")
    if problems:
        number = f"{len(problems)} of {len(islands)} experts cannot be trained as requested"
        raise HddmError(f"{islands[0].out.parent}: {number}, so none was started", problems)
    discard_runs([one.out for one in islands if one.overwrite and not one.run.resume])


def _check(island: Island) -> None:
    before = recipe_before(island.out, EXPERT_FILE, island.run, island.overwrite)
    if not (island.run.resume or island.overwrite):
        refuse_run(island.out)
    try:
        shard = open_shard(island.shard, is_outline=True)
    except HddmError:
        # Data that cannot be read fails later, and alone.
        return
    if island.init is None:
        resolve_new(shard, island.settings, island.schedule, before)
    else:
        resolve_continued(island.init, open_expert(island.init), shard, island.settings, before)


def train_island(island: Island, on_step: OnTrainingStep | None = None) -> list[float]:
    """Train an island in this process, after `prepare`; return the loss of every step.

    Raises `HddmError` as `train_expert` and `continue_expert`, and for a disk that is full or fails;
    `Stopped` after a signal, with the run saved.
    """
    # A run that `prepare` has left is resumed, whether of this start or of the one before.
    run = island.run.model_copy(update={"resume": island.run.resume or has_run(island.out)})
    shard, out, settings, overwrite = island.shard, island.out, island.settings, island.overwrite
    try:
        if island.init is not None:
            with programs_allowed(island.allow_program):
                return continue_expert(island.init, shard, out, settings, overwrite, on_step, run)
        return train_expert(shard, out, settings, island.schedule, overwrite, on_step, run)
    except (OSError, SafetensorError) as error:
        text = f"could not be written, or its data read ({error}); fix that, and `resume=True` continues"
        raise HddmError(f"{out}: {text}") from error


def refuse_failed(islands: Sequence[Island], outcomes: Sequence[Outcome]) -> None:
    """Raise an `HddmError` if one of ``islands`` failed, with the causes of each."""
    failed = 0
    causes: list[str] = []
    for island, outcome in zip(islands, outcomes, strict=True):
        if isinstance(outcome, HddmError):
            failed += 1
            causes.append(f"{island.name}: {outcome.message}")
            causes += [f"{island.name}: {detail}" for detail in outcome.details]
    if failed:
        others = "the others are finished, and " if failed < len(outcomes) else ""
        number = f"{failed} of {len(outcomes)} experts failed"
        raise HddmError(
            f"{islands[0].out.parent}: {number}; {others}`resume=True` continues these", causes
        )
