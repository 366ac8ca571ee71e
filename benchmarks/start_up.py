"""Processor time and memory of commands: `python -m benchmarks.start_up`, beside libraries alone.

Records and refusals should take no more than 0.8 s of processor time, and verbs that compute little more than
libraries take to import, with one network. Each run is a process of its own, of one thread, and all take
turns. The least counts: others waited for the machine. ``--before CHECKOUT`` measures an older checkout in
the same run.
"""

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.commands import Used, used_by
from benchmarks.harness import (
    RESULTS,
    ResultsOption,
    Start,
    WorkOption,
    main,
    run_once,
    shard_digits,
)
from hddm.utils.progress import Progress

LIBRARIES = {
    "import torch": "import torch",
    "torch, and a UNet of diffusers": "import torch; from diffusers import UNet2DModel",
}
COMMANDS = {
    "--help": "--help",
    "inspect a flow expert": "inspect {two} --json",
    "inspect a DDPM expert": "inspect {one} --json",
    "inspect an ensemble of both": "inspect {ensemble} --json",
    "inspect a router": "inspect {router}",
    "inspect a shard": "inspect {parts}/shard_0",
    "plan a benchmark": "benchmark quickstart --dry-run",
    "compare two results": "compare {first} {second}",
    "an unknown option": "sample {one} --out {new} --nope 3",
    "a missing folder": "sample {new} --out {new}",
    "no model": "sample {digits} --out {new}",
    "no shard": "train expert {digits} --out {new} --objective flow --steps 1",
    "a bad settings file": "train expert {parts}/shard_0 --out {new} --objective flow --config {bad}",
    "sample": "sample {one} --out {new} --num-images 1 --steps 1 --device cpu",
    "verify": "verify {one} --device cpu",
    "train one step": "train expert {parts}/shard_0 --out {new} --objective flow --steps 1 --size tiny "
    "--device cpu",
}
RECIPE = "--steps 2 --size tiny --device cpu --threads 1"


@dataclass(frozen=True)
class Least:
    """The least of several runs: seconds of the processor, and MB of memory at the peak."""

    cpu: float
    megabytes: float

    @classmethod
    def of(cls, runs: Sequence[Used]) -> "Least":
        """That of these runs."""
        return cls(min(run.cpu for run in runs), min(run.peak for run in runs) / 1024**2)


def prepared(work: Path) -> dict[str, Path]:
    """Artefacts of digits that the commands are about, by their names there."""
    shard_digits(work, 2)
    parts = work / "parts"
    for number, name in enumerate(("one", "two")):
        shard = str(parts / f"shard_{number}")
        objective = ("ddpm", "flow")[number]
        words = ["train", "expert", shard, "--objective", objective, *RECIPE.split()]
        run_once(work / name, words)
    run_once(work / "router", ["train", "router", str(parts), *RECIPE.split()])
    members = [str(work / "one"), str(work / "two"), "--router", str(work / "router")]
    run_once(work / "ensemble", ["assemble", *members])
    for number, name in enumerate(("first", "second")):
        samples = work / f"{name}-samples"
        words = [
            "sample",
            str(work / ("one", "two")[number]),
            "--num-images",
            "200",
            "--steps",
            "2",
        ]
        run_once(samples, [*words, "--device", "cpu"])
        reference = ["--reference", str(work / "digits" / "train")]
        run_once(
            work / f"{name}.json",
            ["evaluate", str(samples), *reference, "--features", "classifier"],
        )
    (work / "bad").write_text("steps: [")
    names = ("one", "two", "ensemble", "router", "parts", "digits", "bad", "new")
    places = {name: (work / name).resolve() for name in names}
    return places | {name: (work / f"{name}.json").resolve() for name in ("first", "second")}


def measured(
    ways: Mapping[str, Sequence[str]], new: Path, checkouts: Mapping[str, Path], rounds: int
) -> dict[str, dict[str, Least]]:
    """What every way uses at least with each checkout, all in turn; ``new`` is removed after a run."""
    runs: dict[tuple[str, str], list[Used]] = {}
    with Progress(rounds * len(ways) * len(checkouts), "start commands") as progress:
        for _ in range(rounds):
            for name, words in ways.items():
                for when, checkout in checkouts.items():
                    used = used_by(
                        sys.executable, *words, checkout=checkout, threads=1, may_fail=True
                    )
                    runs.setdefault((when, name), []).append(used)
                    for made in (new, new.with_name(f"{new.name}.run")):
                        shutil.rmtree(made, ignore_errors=True)
                    progress(1)
    found: dict[str, dict[str, Least]] = {when: {} for when in checkouts}
    for (when, name), each in runs.items():
        found[when][name] = Least.of(each)
    return found


def start_up(
    results: ResultsOption = RESULTS,
    work: WorkOption = Path("runs/start-up"),
    before: Annotated[
        Path | None, typer.Option(help="Older checkout, measured in the same run.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
) -> None:
    """Measure what commands use, and write a table."""
    start = Start(results, work)
    work.mkdir(parents=True, exist_ok=True)
    places = prepared(work)
    ways = {name: ["-c", code] for name, code in LIBRARIES.items()}
    for name, line in COMMANDS.items():
        ways[name] = ["-m", "hddm_cli", *line.format(**places).split()]
    checkouts = {"now": Path(__file__).resolve().parents[1]}
    if before is not None:
        checkouts = {"before": before.resolve(), **checkouts}
    found = measured(ways, places["new"], checkouts, rounds)
    head = " | ".join(f"{when}, s | {when}, MB" for when in found)
    lines = [
        "# What commands use before they work",
        f"Seconds of the processor, user and system, and MB at the peak: the least of {rounds} rounds.",
        "",
        f"| | {head} |",
        f"|---|{'---:|' * 2 * len(found)}",
    ]
    for name in ways:
        cells = [f"{each[name].cpu:.2f} | {each[name].megabytes:.0f}" for each in found.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    content = {}
    for when, each in found.items():
        content[when] = {name: asdict(one) for name, one in each.items()}
    typer.echo(start.write("start-up", lines, {"used": content, "threads": 1}))


if __name__ == "__main__":
    main(lambda: typer.run(start_up))
