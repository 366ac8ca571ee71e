"""Islands in training: made ready together, then each trained by whoever runs it."""

from collections.abc import Sequence
from dataclasses import replace

from safetensors import SafetensorError

from hddm.errors import HddmError
from hddm.experts import EXPERT_FILE
from hddm.files import check_absent
from hddm.training.continuation import continue_expert
from hddm.training.expert import ddpm_schedule, train_expert
from hddm.training.island_jobs import Island
from hddm.training.loop import OnStep
from hddm.training.run_folder import discard_runs
from hddm.training.run_records import recorded, run_folder_of
from hddm.training.runs import completed


def threaded(islands: Sequence[Island], default: int) -> list[Island]:
    """``islands`` with a number of threads each: theirs, that of a run to go on with, or ``default``."""
    return [
        replace(one, settings=completed(one.settings, one.out if one.run.resume else None, default))
        for one in islands
    ]


def prepare(islands: Sequence[Island]) -> None:
    """Make ``islands`` ready to be gone on with, finished ones among them.

    A run that ``overwrite`` without ``resume`` is to replace is removed here, so that every start after this
    goes on with what the one before has done.

    Raises:
        HddmError: for folders that are in the way or worked on, all of them at once, before anything is
            removed.
    """
    problems = [problem for island in islands for problem in _in_the_way(island)]
    if problems:
        raise HddmError(
            f"{islands[0].out.parent}: holds experts or runs already; --resume goes on with them, "
            "--overwrite starts anew",
            problems,
        )
    discard_runs([island.out for island in islands if island.overwrite and not island.run.resume])


def train_island(island: Island, on_step: OnStep | None = None) -> list[float]:
    """Train an island that `prepare` gave, here and now; the loss of every step.

    Raises:
        HddmError: as `train_expert` and `continue_expert`, and for a disk that is full or fails.
        Stopped: after a signal, with the run saved.
    """
    run = island.run.model_copy(update={"resume": True})
    shard, out, settings, overwrite = island.shard, island.out, island.settings, island.overwrite
    try:
        if island.init is not None:
            return continue_expert(island.init, shard, out, settings, overwrite, on_step, run=run)
        schedule, source = ddpm_schedule(island.schedule)
        return train_expert(shard, out, settings, schedule, source, overwrite, on_step, run)
    except (OSError, SafetensorError) as error:
        raise HddmError(
            f"{out}: could not be written, or its data read ({error}); mend that, and --resume goes on"
        ) from error


def _in_the_way(island: Island) -> list[str]:
    problems: list[str] = []
    if island.run.resume and not island.overwrite and (island.out / EXPERT_FILE).exists():
        return problems
    try:
        check_absent(island.out, EXPERT_FILE, island.overwrite)
    except HddmError as error:
        problems.append(error.message)
    if recorded(island.out) and not (island.run.resume or island.overwrite):
        problems.append(f"{run_folder_of(island.out)}: holds a run")
    return problems
