"""hddm benchmark."""

from pathlib import Path
from typing import Annotated

import typer

from hddm.utils.errors import optional
from hddm.utils.records import BENCHMARK_FILE
from hddm_cli.options import InputOption, refuse_other


def benchmark(
    which: Annotated[
        str,
        typer.Argument(
            metavar="PRESET|FILE",
            help="Preset (digits, cifar10-small, cifar10, grow-digits or grow-cifar10), or a YAML file.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Output folder, or a folder of the same benchmark to continue.")],
    data: Annotated[Path | None, InputOption(help="Folder of the images that the settings name.")] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Training seeds, such as 0-4 or 5,6. Default: those of the settings.")
    ] = None,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Score on held-out images, with the confirmation seeds.")
    ] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Jobs at the same time. Default: as in the settings.")
    ] = None,
    jobs: Annotated[
        Path | None,
        typer.Option(help="Folder of finished jobs, to share them between benchmarks. Default: OUT/jobs."),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace results of other settings in --out, but keep its jobs."),
    ] = False,
) -> None:
    """Compare one model with ensembles at equal training compute.

    Trains what is missing; the same command continues an interrupted benchmark. Choose settings on
    validation images, then use --held-out to confirm them on images and seeds that were not used to choose.
    """
    from hddm.benchmark.presets import chosen, load_settings, settings_file

    # An unknown one is refused before torch is imported, as is a folder of something else.
    settings_file(which)
    refuse_other(out, BENCHMARK_FILE, "benchmark")

    optional("matplotlib", "hddm benchmark", "train")
    from hddm.benchmark.report import tables_text
    from hddm.benchmark.run import run_benchmark

    settings = chosen(load_settings(which), seeds, held_out, workers)
    results = run_benchmark(settings, out, data, jobs, overwrite)
    typer.echo(tables_text(results))
    typer.echo(f"\nreport: {out / 'report.html'}\nfigures: {out / 'results.json'}")
