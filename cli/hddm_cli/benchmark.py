"""hddm benchmark."""

from pathlib import Path
from typing import Annotated

import typer

from hddm.utils.errors import UsageError, optional
from hddm.utils.records import BENCHMARK_FILE
from hddm_cli.options import InputOption, refuse_other


def benchmark(
    which: Annotated[
        str,
        typer.Argument(
            metavar="PRESET|FILE",
            help="Preset (digits, photographs, cifar10, grow-digits, grow-cifar10, quickstart) or YAML file.",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Output folder, or a folder of the same benchmark to continue.")
    ] = None,
    data: Annotated[Path | None, InputOption(help="Folder of your images, $data in the file.")] = None,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Another value for one of the file's values."),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Training seeds, such as 0-4 or 5,6. Default: those of the file.")
    ] = None,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Score on held-out images, with the confirmation seeds.")
    ] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Steps at the same time. Default: as in the file.")
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(help="Address of a Ray cluster to run the steps on, or local. Default: without Ray."),
    ] = None,
    jobs: Annotated[
        Path | None,
        typer.Option(help="Folder of finished steps, to share them between benchmarks. Default: OUT/jobs."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the commands, to run them by hand, and do nothing.")
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace results of other settings in --out, but keep its jobs."),
    ] = False,
) -> None:
    """Train, sample and measure several models, and compare them.

    A benchmark is a file of hddm commands. Finished ones are not repeated: the same command continues an
    interrupted benchmark. Choose settings on validation images, then use --held-out to confirm them on images
    and seeds that were not used to choose.
    """
    if out is None and not dry_run:
        raise UsageError("--out is required, the folder to write")
    if ray is not None and workers is not None:
        raise UsageError("--workers: the cluster decides how many run at a time; drop one of the two")
    values = dict(_pair(one) for one in change or ())
    from hddm.benchmark.file import read_benchmark

    file = read_benchmark(which, values, seeds, held_out, workers)
    if out is not None:
        refuse_other(out, BENCHMARK_FILE, "benchmark")
    optional("matplotlib", "hddm benchmark", "train")
    from hddm.benchmark.report import REPORT_FILE, tables_text
    from hddm.benchmark.run import commands, run_benchmark
    from hddm.utils.ray_workers import RayWorkers
    from hddm_cli.lines import check_words, run_words

    if dry_run:
        for command in commands(file, data, check_words):
            typer.echo(command)
        return
    assert out is not None
    backend = None if ray is None else RayWorkers(ray)
    results = run_benchmark(
        file, out, run_words, check=check_words, data=data, jobs=jobs, overwrite=overwrite, backend=backend
    )
    typer.echo(tables_text(results))
    typer.echo(f"\nreport: {out / REPORT_FILE}\nfigures: {out / 'results.json'}")


def _pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign:
        raise UsageError(f"--set {text}: write NAME=VALUE, such as steps=100")
    return name, value
