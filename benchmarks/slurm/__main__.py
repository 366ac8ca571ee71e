"""Interrupt trainings under Slurm in every way that it knows; do they end with the same weights?

The files of ``docs/guides/clusters.md`` are submitted as they are, to a Slurm that this starts: two experts
and, once they are trained, their ensemble. Exits with 1 if a check fails.
"""

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
import yaml

from benchmarks.harness import (
    RESULTS,
    QuickOption,
    ResultsOption,
    Start,
    WorkOption,
    digit_shards,
    main,
)
from benchmarks.slurm.cases import (
    COUNT,
    Case,
    cancelled,
    killed,
    out_of_time,
    preempted,
    requeued,
)
from benchmarks.slurm.cluster import Slurm
from hddm.utils.errors import HddmError
from hddm.utils.processes import interruptible

STEPS, QUICK_STEPS = 1600, 1000
"""Slurm looks at time limits every 30 seconds, and the training must not be done by then."""
KILLS, QUICK_KILLS = 20, 4
SETTINGS = {
    "objective": "flow",
    "size": "tiny",
    "batch_size": 16,
    "device": "cpu",
    "threads": 1,
    "checkpoint_every": 20,
}


def prepare(work: Path, steps: int) -> Path:
    """Write shards, settings and a command ``hddm``, and train without interruption; return the experts."""
    shutil.rmtree(work, ignore_errors=True)
    (work / "bin").mkdir(parents=True)
    paths = os.pathsep.join(path for path in sys.path if path)
    hddm = work / "bin" / "hddm"
    lines = [
        "#!/bin/bash",
        f"export OMP_NUM_THREADS=1 PYTHONPATH={paths!r}",
        f'exec {sys.executable!r} -m hddm_cli "$@"',
    ]
    hddm.write_text("\n".join(lines) + "\n")
    hddm.chmod(0o755)
    digit_shards(work, COUNT).rename(work / "pixels")
    (work / "run.yaml").write_text(yaml.safe_dump(SETTINGS | {"steps": steps}))
    trainings: list[subprocess.Popen[bytes]] = []
    for k in range(COUNT):
        words = ["train", "expert", f"pixels/shard_{k}", "--out", f"experts/expert_{k}"]
        words += ["--config", "run.yaml"]
        trainings.append(subprocess.Popen([hddm, *words], cwd=work, start_new_session=True))
    if any([one.wait() for one in trainings]):
        raise HddmError(f"{work}: the uninterrupted trainings failed")
    return work / "experts"


def table(rows: Sequence[Mapping[str, object]], steps: int, version: str) -> list[str]:
    """The lines of the result, which begin with the title."""
    lines = [
        "# Trainings under Slurm that are interrupted",
        f"{version} on one node, with the files of the guide; {COUNT} experts of "
        f"{SETTINGS['size']} networks, trained for {steps:,} steps each on scikit-learn's digits.",
        "",
        "| what happens | interruptions | starts of steps | saved after a signal | weights of both experts |",
        "|---|---:|---:|---:|---|",
    ]
    for row in rows:
        equal = "equal, bit for bit" if row["equal"] else "**differ**"
        cells = [row["case"], row["interruptions"], row["starts"], row["saved"], equal]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


app = typer.Typer(add_completion=False)


@app.command()
def run(
    results: ResultsOption = RESULTS,
    work: WorkOption = Path("runs"),
    is_quick: QuickOption = False,
    only: Annotated[list[str] | None, typer.Option(help="Names of cases.")] = None,
    kills: Annotated[int, typer.Option(help="Trainings killed by SIGKILL.")] = KILLS,
) -> None:
    """Interrupt two trainings in every way, and compare them with uninterrupted ones."""
    start = Start(results=results, work=work)
    steps, kills = (QUICK_STEPS, QUICK_KILLS) if is_quick else (STEPS, kills)
    cases: dict[str, Callable[[Case], None]] = {
        "pre-empted": preempted,
        "requeued": requeued,
        "time limit": out_of_time,
        "cancelled and submitted again": cancelled,
        "killed": functools.partial(killed, kills=kills),
    }
    place = work.absolute() / "slurm"
    with interruptible(), Slurm(place / "cluster") as cluster:
        reference = prepare(place / "jobs", steps)
        rows: list[dict[str, object]] = []
        for name in only or cases:
            folder = place / "jobs" / name.replace(" ", "-")
            folder.mkdir()
            for shared in ("pixels", "run.yaml"):
                (folder / shared).symlink_to(place / "jobs" / shared)
            case = Case(name, cluster, folder)
            cases[name](case)
            case.compare(reference)
            rows.append(case.row())
            print(rows[-1], flush=True)
        version = cluster.said("sinfo", "--version")
    failed = [row for row in rows if row["problems"]]
    lines = table(rows, steps, version)
    print(start.write("slurm", lines, {"threads": 1, "slurm": version, "rows": rows}))
    if failed:
        names = ", ".join(str(row["case"]) for row in failed)
        raise HddmError(f"{names}: a check failed, as printed above")


if __name__ == "__main__":
    main(app)
