"""What an island trains: one expert on one shard, which shares nothing with the others but a disk."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors import SafetensorError

from hddm.errors import HddmError
from hddm.experts import EXPERT_FILE
from hddm.files import check_absent
from hddm.training.continuation import continue_expert
from hddm.training.expert import ddpm_schedule, train_expert
from hddm.training.loop import OnStep
from hddm.training.run_folder import RunOptions, discard_runs, recorded, run_folder_of
from hddm.training.runs import completed
from hddm.training.settings import ExpertSettings
from hddm.training.trend import Trend

OBJECTIVES = ("ddpm", "flow")
REST = "*"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Island:
    """One training.

    Args:
        index: of its shard.
        shard: the folder to train on.
        out: the expert folder to write.
        settings: see `ExpertSettings`; ``threads`` are given to it.
        run: how the run beside ``out`` is kept.
        schedule: a diffusers scheduler config for DDPM; cosine by default.
        init: an expert folder to train on from.
        overwrite: whether an existing ``out`` is replaced.
    """

    index: int
    shard: Path
    out: Path
    settings: ExpertSettings
    run: RunOptions
    schedule: Path | None = None
    init: Path | None = None
    overwrite: bool = False

    @property
    def name(self) -> str:
        """What to call it in messages."""
        return self.out.name

    @property
    def threads(self) -> int:
        """CPU threads that it computes with."""
        return self.settings.threads or 1


@dataclass(frozen=True)
class Outcome:
    """How an island ended.

    ``trend`` is None for one that failed, or was finished before. ``starts`` are how often it was started, as
    far as is known.
    """

    island: Island
    trend: Trend | None = None
    failure: HddmError | None = None
    starts: int = 0


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
    """An island a shard, which writes ``out/expert_k``.

    What concerns one objective alone, ``snr_gamma`` and ``schedule``, is left out for the other where both
    are there.

    Args:
        shards: folders, as `hddm.data.shard_records.find_shards` gives them.
        out: the folder of all experts.
        objectives: one a shard.
        settings: by objective.
        run: how each run is kept.
        schedule: see `Island`.
        init: see `Island`.
        overwrite: see `Island`.

    Raises:
        HddmError: for an option of DDPM where no shard learns it.
    """
    given = {"--schedule": schedule, "--snr-gamma": next(iter(settings.values())).snr_gamma}
    for option, value in given.items():
        if value is not None and "ddpm" not in objectives:
            raise HddmError(f"{option} {value}: is for ddpm, and no shard has that objective; drop it")
    islands = []
    for index, (shard, objective) in enumerate(zip(shards, objectives, strict=True)):
        is_ddpm = objective == "ddpm"
        own = settings[objective]
        islands.append(
            Island(
                index,
                shard,
                out / f"expert_{index}",
                own if is_ddpm else own.model_copy(update={"snr_gamma": None}),
                run,
                schedule if is_ddpm else None,
                init,
                overwrite,
            )
        )
    return islands


def parse_objectives(text: str, shards: int) -> list[str]:
    """One objective a shard, from ``0=ddpm,3=ddpm,*=flow``; ``*`` is every shard that is not named.

    A name alone, as ``flow``, is for all.

    Raises:
        HddmError: for a shard that is not there, is named twice, or has no objective, and for an objective
            that is unknown.
    """
    chosen: dict[str, str] = {}
    for part in text.split(","):
        key, given, objective = (piece.strip() for piece in part.rpartition("="))
        key = key if given else REST
        if objective not in OBJECTIVES:
            raise HddmError(
                f"--objective {text}: {part.strip()!r} names no objective; write ddpm or flow for a "
                "shard, as 0=ddpm,*=flow"
            )
        if key != REST and (not key.isdecimal() or int(key) >= shards):
            raise HddmError(f"--objective {text}: there is no shard {key!r}; shards are 0 to {shards - 1}")
        key = key if key == REST else str(int(key))
        if key in chosen:
            raise HddmError(f"--objective {text}: names {key} twice; name each shard once")
        chosen[key] = objective
    missing = [str(k) for k in range(shards) if str(k) not in chosen]
    if missing and REST not in chosen:
        raise HddmError(
            f"--objective {text}: says nothing of shard {', '.join(missing)}; add *=flow for the rest"
        )
    return [chosen.get(str(k), chosen.get(REST, "")) for k in range(shards)]


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


def refuse_failed(outcomes: Sequence[Outcome]) -> None:
    """Refuse to call it done where an island failed.

    Raises:
        HddmError: with every failure.
    """
    failed = [one for one in outcomes if one.failure is not None]
    if failed:
        lines = [f"{one.island.name}: {line}" for one in failed for line in _lines(one.failure)]
        raise HddmError(
            f"{failed[0].island.out.parent}: {len(failed)} of {len(outcomes)} experts failed; the others are "
            "finished, and --resume goes on with these",
            lines,
        )


def _lines(failure: HddmError | None) -> tuple[str, ...]:
    return () if failure is None else (failure.message, *failure.details)


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
