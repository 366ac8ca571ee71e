"""What all experiments share: options, settings, digits, work in processes, and results on disk.

An experiment is ``python -m benchmarks.<name>``. It writes ``<date>-<name>`` as .md, .json and, with a
picture, .png.
"""

import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

import typer
from matplotlib.figure import Figure

from hddm.data.images import write_digits
from hddm.data.partition import partition
from hddm.utils.errors import HddmError
from hddm.utils.files import write_json
from hddm.utils.processes import compute_environment, environment
from hddm.utils.work import machine
from hddm_cli.app import run_words

RESULTS = Path(__file__).parent / "results"

ResultsOption = Annotated[Path, typer.Option("--results", help="Where the result is written.")]
WorkOption = Annotated[Path, typer.Option("--work", help="Where models and single runs are kept.")]
QuickOption = Annotated[
    bool, typer.Option("--quick", help="About a minute; the numbers mean nothing.")
]
SeedsOption = Annotated[int, typer.Option("--seeds", min=1)]
WorkersOption = Annotated[int, typer.Option("--workers", min=1, help="Processes, one thread each.")]
_PLACES = ("--work", "--results", "--weights", "--out", "--images", "--pictures", "--before")
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def command() -> str:
    """The command that started this process, without the places that it names."""
    kept = [
        word for word, before in zip(sys.argv[1:], sys.argv, strict=False) if before not in _PLACES
    ]
    words = [word for word in kept if word not in _PLACES]
    module = Path(sys.argv[0])
    names = [
        one for one in (module.parent.name, module.stem) if one not in ("benchmarks", "__main__")
    ]
    return " ".join(["python -m", ".".join(["benchmarks", *names]), *words])


def main(app: Callable[[], object]) -> None:
    """Run a command line; what a user can mend is said in a line."""
    try:
        app()
    except HddmError as error:
        sys.exit(f"{Path(sys.argv[0]).parent.name}: {error}")


def run_once(out: Path, words: Sequence[str]) -> None:
    """Run a command of hddm unless its output is there; go on with a training that was cut off."""
    if out.exists():
        return
    begun = out.with_name(f"{out.name}.run").exists()
    run_words([*words, "--out", str(out), *(["--resume"] if begun else [])])


def shard_digits(work: Path, parts: int) -> None:
    """scikit-learn's digits below ``work``: ``digits``, and its training images in one shard and in several.

    The one shard is in ``all``, and the several, of similar content, are in ``parts``.
    """
    run_once(work / "digits", ["data", "digits"])
    training = str(work / "digits" / "train")
    for name, shards in (("all", 1), ("parts", parts)):
        words = ["partition", training, "--shards", str(shards), "--held-out", "0.2"]
        run_once(work / name, words)


def shard_photographs(work: Path, pictures: Path, classes: str, parts: int) -> None:
    """Photographs of these classes at 16×16 pixels below ``work``, as `shard_digits`; tests in ``test``.

    ``pictures`` has train/CLASS/*.jpg and test/CLASS/*.jpg.
    """
    for name, images, options in (
        ("all", "train", "--shards 1 --held-out 0.1"),
        ("parts", "train", f"--shards {parts} --held-out 0.1"),
        ("test", "test", "--shards 1 --held-out 0"),
    ):
        large = work / f"{name}-photos"
        words = ["partition", str(pictures / images), "--only", classes, *options.split()]
        run_once(large, words)
        run_once(work / name, ["encode", str(large), "--resolution", "16"])


def environment_of(checkout: Path) -> dict[str, str]:
    """Variables of a process that imports hddm and its command line from ``checkout``.

    It must run in this folder too: Python looks for modules in the working folder first.
    """
    places = map(str, (checkout, checkout / "cli"))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places)}


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
        self,
        name: str,
        lines: Sequence[str],
        content: Mapping[str, Any],
        picture: Figure | None = None,
    ) -> Path:
        """Write ``<date>-<name>`` as .md, .json and perhaps .png; return the first.

        ``lines`` begin with the title. ``content`` may hold the ``threads`` and the ``accelerator``.
        """
        self.results.mkdir(parents=True, exist_ok=True)
        today = date.today().isoformat()
        stem = self.results / f"{today}-{name}"
        seconds, load = round(time.perf_counter() - self.began), round(os.getloadavg()[0], 1)
        packages = ", ".join(
            f"{package} {number}" for package, number in self.machine["packages"].items()
        )
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
        record = {
            "format": "1.0",
            "measured_on": measured_on,
            "command": self.command,
            "seconds": seconds,
        }
        write_json(stem.with_suffix(".json"), plain({**record, **content}))
        return stem.with_suffix(".md")


def plain(value: Any) -> Any:
    """``value`` as JSON gives it back, None for NaN and infinity."""
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def digit_shards(folder: Path, count: int) -> Path:
    """A partition of scikit-learn's digits, without those that are held out."""
    training, _ = write_digits(folder / "digits")
    partition(training, folder / "shards", count)
    return folder / "shards"


def apart(
    threads: int,
    function: Callable[Arguments, Result],
    *args: Arguments.args,
    **options: Arguments.kwargs,
) -> Result:
    """Call ``function`` in a fresh process, with the environment that hddm gives its own."""
    # glibc reads its variables when a process starts.
    fresh = multiprocessing.get_context("spawn")
    with environment(compute_environment(threads)), ProcessPoolExecutor(1, fresh) as pool:
        return pool.submit(function, *args, **options).result()
