"""``python -m benchmarks.training``: see ``--help``."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness import RESULTS, QuickOption, ResultsOption, Start, apart, main
from benchmarks.timing import CompileOption, DeviceOption, DType, DTypeOption, name_of, timed
from benchmarks.training.networks import settings_for
from benchmarks.training.report import lines
from benchmarks.training.tables import measure_gains, measure_table
from benchmarks.training.times import measure_times
from hddm.utils.errors import UsageError


def measure_training(
    start: Start,
    device: str,
    dtypes: Sequence[str],
    compiled: bool = False,
    rounds: int | None = None,
    threads: int | None = None,
    quick: bool = False,
) -> Path:
    """Times a dtype after another, each in a process of its own; returns the Markdown file."""
    settings = settings_for(device, quick)
    settings = replace(settings, rounds=rounds or settings.rounds)
    threads = threads or os.cpu_count() or 1
    # The environment is the same for every way.
    measured = {
        dtype: apart(threads, measure_times, settings, device, dtype, compiled) for dtype in dtypes
    }
    times = {dtype: found for dtype, (found, _, _) in measured.items()}
    content = {
        **timed(settings, device, compiled, threads, times),
        "million_parameters": next(iter(measured.values()))[1],
        "waited": {dtype: waited for dtype, (_, _, waited) in measured.items()},
    }
    text = lines(settings, content, times)
    return start.write(name_of(settings, device, compiled, "-speed"), text, content)


def training(
    results: ResultsOption = RESULTS,
    device: DeviceOption = "cpu",
    dtype: DTypeOption = None,
    compile_networks: CompileOption = False,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Default 15.")] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="Default: all cores.")
    ] = None,
    quick: QuickOption = False,
    every_cell: Annotated[
        bool,
        typer.Option(
            "--table", help="Both widths, dtypes and numbers of threads, eager and compiled."
        ),
    ] = False,
    gains: Annotated[
        bool, typer.Option("--gains", help="What compiling costs and gains: all or one block.")
    ] = False,
) -> None:
    """Time training steps: hddm's, and a plain loop around diffusers' DiT."""
    if every_cell or gains:
        if dtype or compile_networks or threads or device != "cpu":
            raise UsageError(
                "--table and --gains have their own --dtype, --compile and --threads, on a CPU; drop yours"
            )
        if gains and (every_cell or rounds):
            raise UsageError("--gains runs alone, with its own calls; drop --table and --rounds")
        start = Start(results)
        typer.echo(
            measure_gains(start, quick) if gains else measure_table(start, rounds or 5, quick)
        )
        return
    dtypes = [one.value for one in dtype or DType]
    typer.echo(
        measure_training(Start(results), device, dtypes, compile_networks, rounds, threads, quick)
    )


if __name__ == "__main__":
    main(lambda: typer.run(training))
