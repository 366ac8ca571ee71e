"""hddm benchmark."""

from pathlib import Path
from typing import Annotated

import typer

from hddm.utils.records import BENCHMARK_FILE
from hddm_cli.options import InputOption, refuse_other


def benchmark(
    which: Annotated[
        str,
        typer.Argument(
            metavar="PRESET|FILE",
            help="digits, cifar10-small, cifar10, grow-digits, grow-cifar10, or a YAML file.",
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", help="Folder to write, or of a benchmark like this one, to go on with.")
    ],
    data: Annotated[
        Path | None, InputOption("--data", help="Folder of the images that the settings name.")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option("--seeds", help="Training seeds, as 0-4 or 5,6, instead of the settings'.")
    ] = None,
    held_out: Annotated[
        bool,
        typer.Option("--held-out", help="Confirm: score on held-out images, with the confirmation seeds."),
    ] = False,
    workers: Annotated[int | None, typer.Option("--workers", min=1, help="Jobs at a time.")] = None,
    jobs: Annotated[
        Path | None,
        typer.Option("--jobs", help="Where finished jobs lie, to share them between benchmarks; OUT/jobs."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace results of other settings in --out; jobs stay.")
    ] = False,
) -> None:
    """Train what is missing and compare: one model, homogeneous and mixed ensembles, at equal compute.

    Settings are chosen on validation images; --held-out confirms them on images and seeds that chose nothing.
    The same command goes on with a benchmark that was interrupted.
    """
    from hddm.benchmark.presets import chosen, load_settings, settings_file

    # An unknown one is refused before torch is imported, as is a folder of something else.
    settings_file(which)
    refuse_other(out, BENCHMARK_FILE, "benchmark")

    from hddm.benchmark.report import tables_text
    from hddm.benchmark.run import run_benchmark

    settings = chosen(load_settings(which), seeds, held_out, workers)
    results = run_benchmark(settings, out, data, jobs, overwrite)
    typer.echo(tables_text(results))
    typer.echo(f"\nreport: {out / 'report.html'}\nfigures: {out / 'results.json'}")
