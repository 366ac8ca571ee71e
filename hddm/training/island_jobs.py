"""Islands: trainings of one expert on one shard each, which share nothing but a disk."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hddm.training.resume import recipe_before, run_folder_of
from hddm.training.settings import ExpertSettings, RunOptions
from hddm.utils.errors import HddmError, UsageError, did_you_mean
from hddm.utils.records import EXPERT_FILE

OBJECTIVES = ("ddpm", "flow")
REST = "*"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Island:
    """One training of the expert folder ``out`` on the shard folder with number ``index``.

    ``schedule`` is a diffusers scheduler config for DDPM, and ``init`` an expert folder to continue.
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
        return self.out.name

    def threads(self, default: int) -> int:
        """Return its CPU threads: the requested ones, those of the run that it resumes, or ``default``."""
        if self.settings.threads is not None or not self.run.resume:
            return self.settings.threads or default
        return int(recipe_before(self.out, EXPERT_FILE, self.run, self.overwrite).get("threads", default))


@dataclass(frozen=True)
class Outcome:
    """The end of an island: a line for users, "" where it was complete before, or its failure."""

    island: Island
    summary: str = ""
    failure: HddmError | None = None


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

    ``objectives`` has one per shard, and ``settings`` are by objective. ``snr_gamma`` and ``schedule`` are
    left out for flow, and flow_prediction for DDPM; where all shards would leave one out it raises an
    `HddmError`.
    """
    shared = next(iter(settings.values()))
    for option, value, objective in (
        ("--schedule", schedule, "ddpm"),
        ("--snr-gamma", shared.snr_gamma, "ddpm"),
        ("--prediction", shared.prediction if shared.prediction == "flow_prediction" else None, "flow"),
    ):
        if value is not None and objective not in objectives:
            raise UsageError(
                f"{option} {value}: is for {objective}, and no shard has that objective; drop it"
            )
    islands = []
    for index, (shard, objective) in enumerate(zip(shards, objectives, strict=True)):
        own, path = settings[objective], schedule
        if objective != "ddpm":
            own, path = own.model_copy(update={"snr_gamma": None}), None
        elif own.prediction == "flow_prediction":
            own = own.model_copy(update={"prediction": None})
        islands.append(Island(index, shard, out / f"expert_{index}", own, run, path, init, overwrite))
    return islands


def parse_objectives(text: str, shards: int, name: str = "--objective") -> list[str]:
    """Parse one objective per shard from ``0=ddpm,3=ddpm,*=flow``; a name alone, as ``flow``, is for all.

    Raises `HddmError` for a shard that does not exist, comes twice or has no objective, or an unknown
    objective.
    """
    chosen: dict[str, str] = {}
    for part in text.split(","):
        key, given, objective = (piece.strip() for piece in part.rpartition("="))
        key = key if given else REST
        if objective not in OBJECTIVES:
            hint = f"write ddpm or flow for a shard, as 0=ddpm,*=flow{did_you_mean(objective, OBJECTIVES)}"
            raise HddmError(f"{name} {text}: {part.strip()!r} is not an objective; {hint}")
        if key != REST and (not key.isdecimal() or int(key) >= shards):
            raise HddmError(f"{name} {text}: there is no shard {key!r}; shards are 0 to {shards - 1}")
        key = key if key == REST else str(int(key))
        if key in chosen:
            raise HddmError(f"{name} {text}: names {key} twice; name each shard once")
        chosen[key] = objective
    found = [chosen.get(str(k), chosen.get(REST, "")) for k in range(shards)]
    if missing := [str(k) for k, one in enumerate(found) if not one]:
        problem = f"has no objective for shard {', '.join(missing)}; add *=flow for the rest"
        raise HddmError(f"{name} {text}: {problem}")
    return found


def refuse_failed(outcomes: Sequence[Outcome]) -> None:
    """Raise an `HddmError` if an island failed, with every cause once and the experts that it concerns."""
    failed = [(one.island, one.failure) for one in outcomes if one.failure is not None]
    concerned: dict[str, list[str]] = {}
    for island, failure in failed:
        for line in (failure.message, *failure.details):
            # Without its folder at the beginning, a cause reads the same for all islands.
            for folder in (island.out, run_folder_of(island.out)):
                line = line.removeprefix(f"{folder}: ")
            concerned.setdefault(line, []).append(island.name)
    lines = [
        f"{'each of them' if 1 < len(names) == len(failed) else ', '.join(names)}: {cause}"
        for cause, names in concerned.items()
    ]
    others = "the others are finished, and " if len(failed) < len(outcomes) else ""
    number = f"{len(failed)} of {len(outcomes)} experts failed"
    if failed:
        raise HddmError(f"{failed[0][0].out.parent}: {number}; {others}--resume continues these", lines)
