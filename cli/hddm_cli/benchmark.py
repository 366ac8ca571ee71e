"""hddm benchmark."""

from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BeforeValidator, Field

from hddm.benchmark.file import preset_names, read_benchmark
from hddm.settings import Described, InputPath, Positive, Shown
from hddm.utils.errors import HddmError, UsageError, optional
from hddm.utils.records import BENCHMARK_FILE
from hddm_cli.options import refuse_other


def _pairs(texts: Any) -> Any:
    """Values by name, of texts ``NAME=VALUE``."""
    for text in texts:
        if "=" not in text:
            raise HddmError("write NAME=VALUE, such as steps=100")
    return dict(text.split("=", 1) for text in texts)


class BenchmarkOptions(Described):
    """What a benchmark runs on, and where."""

    out: Path | None = None
    """Output folder, or a folder of the same benchmark to continue."""
    data: InputPath | None = None
    """Folder of your images, $data in the file."""
    set: Annotated[dict[str, str], BeforeValidator(_pairs), Shown("NAME=VALUE")] = Field({})
    """Another value for one of the file's values."""
    seeds: str | None = None
    """Training seeds, such as 0-4 or 5,6. Default: those of the file."""
    held_out: bool = False
    """Score on held-out images, with the confirmation seeds."""
    workers: Positive | None = None
    """Steps at the same time, without `ray`. Default: as in the file."""
    ray: str | None = None
    """Address of a Ray cluster to run the steps on, or local. Default: without Ray."""
    jobs: Path | None = None
    """Folder of finished steps, to share them between benchmarks. Default: OUT/jobs."""
    dry_run: bool = False
    """Print the commands, to run them by hand, and do nothing."""
    overwrite: bool = False
    """Replace results of other settings in `out`, but keep its jobs."""


def benchmark(
    which: Annotated[
        str,
        typer.Argument(
            metavar="PRESET|FILE",
            help=f"Preset ({', '.join(preset_names())}) or YAML file.",
        ),
    ],
    options: BenchmarkOptions,
) -> None:
    """Train, sample and measure several models, and compare them.

    A benchmark is a file of hddm commands. Finished ones are not repeated: the same command continues an
    interrupted benchmark. Choose settings on validation images, then use --held-out to confirm them on images
    and seeds that were not used to choose.
    """
    out = options.out
    if out is None and not options.dry_run:
        raise UsageError("--out is required, the folder to write")

    file = read_benchmark(which, options.set, options.seeds, options.held_out, options.workers)
    if out is not None:
        refuse_other(out, BENCHMARK_FILE, "benchmark")
    optional("matplotlib", "hddm benchmark", "train")
    from hddm.benchmark.report import REPORT_FILE, tables_text
    from hddm.benchmark.run import commands, run_benchmark
    from hddm.utils.ray_workers import RayWorkers
    from hddm_cli.lines import LINES

    if options.dry_run:
        for command in commands(file, LINES, options.data):
            typer.echo(command)
        return
    assert out is not None
    backend = None if options.ray is None else RayWorkers(options.ray)
    where: dict[str, Any] = {
        "data": options.data,
        "jobs": options.jobs,
        "overwrite": options.overwrite,
    }
    results = run_benchmark(file, out, LINES, backend=backend, **where)
    typer.echo(tables_text(results))
    typer.echo(f"\nreport: {out / REPORT_FILE}\nfigures: {out / 'results.json'}")
