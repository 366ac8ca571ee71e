"""What all experiments share: options, settings, digits, work in processes, and results on disk.

An experiment is ``python -m benchmarks.<name>``. It keeps models and rows in ``runs/<name>``, and what is
there is not made again. It writes ``<date>-<name>-<subject>`` as .md, .json and, with a picture, .png.
"""

import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

import typer
from matplotlib.figure import Figure

from hddm.data.images import ImageSet, load_images, write_digits
from hddm.data.partition import partition
from hddm.evaluation.features import choose_extractor
from hddm.evaluation.scores import Scorer, Scores, Side
from hddm.training.settings import ExpertSettings
from hddm.utils.errors import HddmError
from hddm.utils.files import read_json, write_json
from hddm.utils.processes import compute_environment, environment
from hddm.utils.progress import Progress
from hddm.utils.work import machine
from hddm.utils.workers import Call, Workers

RESULTS = Path(__file__).parent / "results"
SETTINGS_FILE = "settings.json"

ResultsOption = Annotated[Path, typer.Option("--results", help="Where the result is written.")]
WorkOption = Annotated[Path, typer.Option("--work", help="Where models and single runs are kept.")]
QuickOption = Annotated[bool, typer.Option("--quick", help="About a minute; the numbers mean nothing.")]
SeedsOption = Annotated[int, typer.Option("--seeds", min=1)]
WorkersOption = Annotated[int, typer.Option("--workers", min=1, help="Processes, one thread each.")]
_PLACES = ("--archives", "--work", "--results")
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def command() -> str:
    """The command that started this process, without the places that it names."""
    kept = [word for word, before in zip(sys.argv[1:], sys.argv, strict=False) if before not in _PLACES]
    words = [word for word in kept if word not in _PLACES]
    module = Path(sys.argv[0])
    names = [one for one in (module.parent.name, module.stem) if one not in ("benchmarks", "__main__")]
    return " ".join(["python -m", ".".join(["benchmarks", *names]), *words])


def main(app: Callable[[], object]) -> None:
    """Run a command line; what a user can mend is said in a line."""
    try:
        app()
    except HddmError as error:
        sys.exit(f"{Path(sys.argv[0]).parent.name}: {error}")


@dataclass(frozen=True)
class Start:
    """One start of an experiment: its options, and on what machine and when it began."""

    results: Path = RESULTS
    work: Path = Path("runs")
    seeds: int = 1
    workers: int = 1
    command: str = field(default_factory=command)
    machine: dict[str, Any] = field(default_factory=machine)
    began: float = field(default_factory=time.perf_counter)
    load_average: float = field(default_factory=lambda: round(os.getloadavg()[0], 1))

    def write(
        self, name: str, lines: Sequence[str], content: Mapping[str, Any], picture: Figure | None = None
    ) -> Path:
        """Write ``<date>-<name>`` as .md, .json and perhaps .png; return the first.

        ``lines`` begin with the title. ``content`` may hold the ``threads`` and the ``accelerator``.
        """
        self.results.mkdir(parents=True, exist_ok=True)
        today = date.today().isoformat()
        stem = self.results / f"{today}-{name}"
        seconds, load = round(time.perf_counter() - self.began), round(os.getloadavg()[0], 1)
        packages = ", ".join(f"{package} {number}" for package, number in self.machine["packages"].items())
        threads = f", threads: {content['threads']}" if "threads" in content else ""
        head = (
            f"{today} · `{self.command}` · {self.machine['cores']} cores ({self.machine['processor']})"
            f"{threads}, {content.get('accelerator') or 'no accelerator'} · {self.machine['platform']} · "
            f"Python {self.machine['python']}, {packages} · {seconds:,} s. Load average when it began: "
            f"{self.load_average}, when it ended: {load}."
        )
        text = [lines[0], "", head, "", *lines[1:]]
        if picture is not None:
            picture.savefig(stem.with_suffix(".png"), dpi=130, metadata={"Software": None})
            text += ["", f"![{name}]({stem.name}.png)"]
        stem.with_suffix(".md").write_text("\n".join(text).rstrip() + "\n")
        measured_on = {"date": today, "load_average": [self.load_average, load], **self.machine}
        record = {"format": "1.0", "measured_on": measured_on, "command": self.command, "seconds": seconds}
        write_json(stem.with_suffix(".json"), plain({**record, **content}))
        return stem.with_suffix(".md")


def plain(value: Any) -> Any:
    """``value`` as JSON gives it back, None for NaN and infinity."""
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_json(settings: Any) -> dict[str, Any]:
    """A dataclass of settings, records within it, as JSON gives it back."""
    records = {key: one for key, one in vars(settings).items() if hasattr(one, "model_dump")}
    dumped = {key: one.model_dump(mode="json") for key, one in records.items()}
    content: dict[str, Any] = plain({**asdict(settings), **dumped})
    return content


def check_kept(folder: Path, settings: Mapping[str, Any], growing: Collection[str] = ()) -> None:
    """Record ``settings`` beside the models and rows that are kept in ``folder`` by their names alone.

    Mappings named by ``growing`` may gain entries.

    Raises:
        HddmError: for models or rows of other settings, or of settings that nothing says.
    """
    path = folder / SETTINGS_FILE
    before = read_json(path) if path.exists() else {}
    if not before and any(folder.glob("seed_*")):
        raise HddmError(
            f"{folder}: keeps models and rows, and no {SETTINGS_FILE} says of which settings; pass another "
            "--work, or delete that folder"
        )
    merged = {key: before.get(key, {}) | settings[key] for key in growing}
    now = {**plain(settings), **plain(merged)}
    old = {key: {**now[key], **one} if key in growing else one for key, one in before.items()}
    differing = [key for key in now if before and old.get(key) != now[key]]
    if differing:
        raise HddmError(
            f"{folder}: keeps models and rows of other settings ({', '.join(differing)}); pass another "
            "--work, or delete that folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, now)


DDPM_ON_DIGITS = ExpertSettings(
    objective="ddpm",
    prediction="epsilon",
    steps=1600,
    batch_size=64,
    time_sampling="uniform",
    optimizer="adamw",
    learning_rate=4e-3,
    ema_decay=0.99,
    size="small",
    rotary=False,
    weak_at=0,
)
SHORT_DDPM = DDPM_ON_DIGITS.model_copy(update={"steps": 20, "batch_size": 16, "size": "tiny"})
"""Trainings of DDPM experts by experiments on digits; the numbers of the short one mean nothing."""


class Digits:
    """scikit-learn's digits in ``folder``, and partitions of the training side."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.training, self.held_out = write_digits(folder / "digits")

    def shards(self, name: str, count: int) -> Path:
        """A partition, which is made unless it is there."""
        if not (self._folder / name).exists():
            partition(self.training, self._folder / name, count)
        return self._folder / name

    @cached_property
    def images(self) -> ImageSet:
        """The training side."""
        return load_images(self.training)

    @cached_property
    def fresh(self) -> ImageSet:
        """The held-out side."""
        return load_images(self.held_out)

    def scorer(self, num: int, resamples: int) -> Scorer:
        """Scores of ``num`` samples against both sides."""
        extractor = choose_extractor(self.images, min(len(self.images), len(self.fresh), num))
        sides = Side("training", self.images.pixels), Side("held_out", self.fresh.pixels)
        return Scorer(extractor, *sides, resamples=resamples)

    def real(self, scorer: Scorer) -> dict[str, Any]:
        """Distance of the held-out side to the training side."""
        return flat(scorer.score(self.fresh.pixels))["to_training"]


def flat(scores: Scores) -> dict[str, Any]:
    """Scores as the tables of `benchmarks.reports` take them."""
    found: dict[str, Any] = {
        f"to_{one.split}": one.distance.model_dump() for one in scores.splits if one.distance
    }
    ratio = None if scores.memorisation is None else scores.memorisation.ratio
    return {**found, "diversity": scores.diversity, "nearest_ratio": ratio}


def apart(
    threads: int, function: Callable[Arguments, Result], *args: Arguments.args, **options: Arguments.kwargs
) -> Result:
    """Call ``function`` in a fresh process, with the environment that hddm gives its own."""
    # glibc reads its variables when a process starts.
    fresh = multiprocessing.get_context("spawn")
    with environment(compute_environment(threads)), ProcessPoolExecutor(1, fresh) as pool:
        return pool.submit(function, *args, **options).result()


def run_calls(pool: Workers, calls: Sequence[Call], label: str) -> list[Any]:
    """Results of ``calls``, with a bar."""
    with Progress(sum(call.units for call in calls), label) as progress:
        return pool.run(calls, lambda call, units: progress(units))
