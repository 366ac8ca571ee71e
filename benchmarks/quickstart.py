"""How long the quickstart takes, and the environment that it needs: `python -m benchmarks.quickstart`.

Quickstarts run in this environment, whose modules Python has compiled. ``--before CHECKOUT`` measures an
older checkout in the same run, in turns with this one. With ``--install``, `make` also makes an environment
in a new clone with each installer that is there, whose caches should be warm, and a first quickstart runs in
it, which compiles the modules that it imports.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from benchmarks.commands import used_by
from benchmarks.harness import RESULTS, ResultsOption, Start, WorkOption, main
from hddm.utils.progress import Progress

HERE = Path(__file__).resolve().parents[1]
INSTALLERS = {"pip": ["VENV=.venv", "UV="], "uv": ["VENV=.venv", "UV=uv"]}
"""Options of make for them."""


def quickstart(
    results: ResultsOption = RESULTS,
    work: WorkOption = Path("runs/quickstart-time"),
    before: Annotated[
        Path | None, typer.Option(help="Older checkout, measured in the same run.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 2,
    install: Annotated[bool, typer.Option(help="Make new environments too.")] = False,
) -> None:
    """Measure quickstarts, and write a table."""
    start = Start(results, work)
    work.mkdir(parents=True, exist_ok=True)
    seconds: dict[str, list[float]] = {}
    if install:
        for name, options in INSTALLERS.items():
            if name == "pip" or shutil.which(name):
                clone = _cloned(work / "clone")
                seconds[f"install by {name}"] = [_made(clone, ".venv/.ready", options)]
                seconds[f"the first quickstart there, {name}"] = [
                    _made(clone, "quickstart", options)
                ]
    checkouts = {"quickstart": HERE}
    if before is not None:
        checkouts = {"quickstart, before": before.resolve(), **checkouts}
    processor: dict[str, list[float]] = {}
    with Progress(rounds * len(checkouts), "quickstarts") as progress:
        for _ in range(rounds):
            for name, checkout in checkouts.items():
                out = (work / "out").resolve()
                shutil.rmtree(out, ignore_errors=True)
                words = ("-m", "hddm_cli", "quickstart", "--out", out)
                used = used_by(sys.executable, *words, checkout=checkout)
                seconds.setdefault(name, []).append(used.seconds)
                processor.setdefault(name, []).append(used.cpu)
                progress(1)
    lines = [
        "# The quickstart, and the environment that it needs",
        f"Medians, and in brackets all of {rounds} rounds; of installing one.",
        "",
        "| | seconds | of the processor |",
        "|---|---:|---:|",
    ]
    for name, each in seconds.items():
        lines.append(f"| {name} | {_cell(each)} | {_cell(processor.get(name, []))} |")
    typer.echo(start.write("quickstart", lines, {"seconds": seconds, "processor": processor}))


def _cloned(clone: Path) -> Path:
    shutil.rmtree(clone, ignore_errors=True)
    subprocess.run(["git", "clone", "--quiet", HERE, clone], check=True)
    return clone


def _made(clone: Path, target: str, options: list[str]) -> float:
    """Seconds that make takes for a target in a clone."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    began = time.perf_counter()
    subprocess.run(["make", target, *options], cwd=clone, env=environment, check=True)
    return time.perf_counter() - began


def _cell(values: list[float]) -> str:
    if len(values) < 2:
        return " ".join(f"{value:.0f}" for value in values) or "–"
    return f"{median(values):.0f} [{', '.join(f'{value:.0f}' for value in values)}]"


if __name__ == "__main__":
    main(lambda: typer.run(quickstart))
