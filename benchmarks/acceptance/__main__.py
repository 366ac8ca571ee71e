"""``python -m benchmarks.acceptance``: see ``--help``."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.acceptance.entries import gigabytes
from benchmarks.acceptance.plan import all_stages, chosen
from benchmarks.acceptance.report import Report
from benchmarks.acceptance.stages import Finished, Kit, costs, has_problem, run_stages
from benchmarks.harness import RESULTS, command, main
from benchmarks.timing import DeviceOption
from hddm.utils.errors import UsageError


@contextlib.contextmanager
def prepared(kit: Kit) -> Iterator[Kit]:
    """The kit with addresses: of the hub itself, or of stand-ins on this machine."""
    if kit.is_real:
        yield kit
        return
    # It imports tests, which take long.
    from benchmarks.acceptance.stand_ins import local_hub

    with local_hub(kit.work) as (_, addresses):
        yield replace(kit, addresses=addresses)


def show(one: Finished) -> None:
    """Print goal and figure of a stage, line by line."""
    mark = " (stand-in)" if one.result.is_stand_in else ""
    for figure in one.result.figures:
        typer.echo(f"  {figure.line}")
    reason = f": {one.reason}" if one.reason else ""
    kept = ", by an earlier start"
    if not one.was_kept:
        kept = f", {one.seconds:.0f} s ({one.processor:.0f} s of the processor)"
    typer.echo(f"{one.stage}{mark}: {one.outcome}{reason}{kept}")


def acceptance(
    device: DeviceOption = "cpu",
    hub: Annotated[
        bool, typer.Option("--hub", help="Download published models; else tiny stand-ins.")
    ] = False,
    again: Annotated[
        list[str] | None, typer.Option("--again", help="A stage or group to run in any case.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="A stage or group; default: all.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Where the report is written.")] = RESULTS,
    work: Annotated[
        Path, typer.Option("--work", help="Where downloads, experts and finished stages are kept.")
    ] = Path("runs/acceptance"),
    samples: Annotated[
        int, typer.Option("--samples", min=2, help="For the FID; published: 50,000.")
    ] = 10_000,
    statistics: Annotated[
        str | None,
        typer.Option("--statistics", help="ADM's VIRTUAL_imagenet256_labeled.npz, or its address."),
    ] = None,
    images: Annotated[
        Path | None, typer.Option("--images", help="Folder that is partitioned; default: digits.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="Default: all cores.")
    ] = None,
) -> None:
    """Prove on this machine what needs a GPU and a network; a stage that is done is not run again."""
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device {device}: torch sees no such device; use cpu")
    work = work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    kit = Kit(device, hub, work, samples, statistics, images, threads or os.cpu_count() or 1)
    stages = chosen(all_stages(device), only or [], again or [])
    if hub:
        free = shutil.disk_usage(work).free / 1e9
        typer.echo(
            f"downloads up to {gigabytes():.0f} GB, and needs as much again for experts; "
            f"{free:.0f} GB are free"
        )
    else:
        typer.echo("makes stand-ins of the published models first, which takes a minute")
    listed = f"{len(stages)} stages on {device}; each prints its goals and figures when it ends"
    typer.echo(f"{listed}, and is not run again by the same command")
    report = Report(kit, command(), out)
    page = report.write()
    with prepared(kit) as ready:
        for one in run_stages(stages, ready, again or []):
            report.finished.append(one)
            show(one)
            page = report.write()
    typer.echo(costs(report.finished))
    typer.echo(page)
    raise typer.Exit(has_problem(report.finished))


if __name__ == "__main__":
    main(lambda: typer.run(acceptance))
