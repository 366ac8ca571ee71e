"""``python -m benchmarks.inference``: see ``--help``."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from diffusers.utils import logging

from benchmarks.harness import RESULTS, QuickOption, ResultsOption, Start, WorkOption, main
from benchmarks.inference.memory import measure_memory
from benchmarks.inference.models import settings_for
from benchmarks.inference.report import lines
from benchmarks.inference.times import measure_times, operations
from benchmarks.timing import CompileOption, DeviceOption, DType, DTypeOption, name_of, timed


def measure_inference(
    start: Start,
    device: str,
    dtypes: Sequence[str],
    compiled: bool = False,
    memory: bool = True,
    repeats: int | None = None,
    quick: bool = False,
) -> Path:
    """Times a dtype after another, then memory; returns the Markdown file."""
    settings = settings_for(device, quick)
    settings = replace(settings, repeats=repeats or settings.repeats)
    times = {dtype: measure_times(settings, device, dtype, compiled) for dtype in dtypes}
    taken = {
        dtype: measure_memory(settings, device, dtype, start.work) for dtype in dtypes if memory
    }
    content = {
        **timed(settings, device, compiled, torch.get_num_threads(), times),
        "mflop": operations(settings),
        "memory": {
            dtype: {"expert_bytes": size, "rows": rows} for dtype, (size, rows) in taken.items()
        },
    }
    text = lines(settings, content, times, taken)
    return start.write(name_of(settings, device, compiled), text, content)


def inference(
    results: ResultsOption = RESULTS,
    work: WorkOption = Path("runs/inference"),
    device: DeviceOption = "cpu",
    dtype: DTypeOption = None,
    compile_networks: CompileOption = False,
    memory: Annotated[
        bool, typer.Option("--memory/--no-memory", help="With 1.3 GB on disk.")
    ] = True,
    repeats: Annotated[
        int | None, typer.Option("--repeats", min=1, help="Rounds; default 5.")
    ] = None,
    quick: QuickOption = False,
) -> None:
    """Time a step and peak memory of ensembles of random weights."""
    # It warns of casting a whole model.
    logging.set_verbosity_error()
    dtypes = [one.value for one in dtype or DType]
    start = Start(results, work)
    typer.echo(measure_inference(start, device, dtypes, compile_networks, memory, repeats, quick))


if __name__ == "__main__":
    main(lambda: typer.run(inference))
