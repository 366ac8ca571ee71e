"""hddm train all."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hddm.training.settings import FIXED_BY_INIT, ExpertSettings, RunOptions, parse_objectives
from hddm.utils.errors import asked, counted
from hddm_cli.options import InputOption, Overwrite, refuse_given
from hddm_cli.train import Init, Schedule
from hddm_cli.training_options import GivenOptions, takes

if TYPE_CHECKING:
    from hddm.training.islands import Island, Outcome


@takes(ExpertSettings, RunOptions)
def train_all(
    context: typer.Context,
    shards: Annotated[
        Path,
        InputOption(metavar="FOLDER", help="Partition folder, written by hddm partition or hddm encode."),
    ],
    out: Annotated[Path, typer.Option(help="Folder of all experts (OUT/expert_0, OUT/expert_1, …).")],
    objective: Annotated[
        str | None,
        typer.Option(help="Objective: ddpm or flow, or one per shard, such as 0=ddpm,3=ddpm,*=flow."),
    ] = None,
    parallel: Annotated[int, typer.Option(min=1, help="Experts trained at the same time.")] = 1,
    ray: Annotated[
        str | None,
        typer.Option(help="Address of a Ray cluster to train on, or local. Default: without Ray."),
    ] = None,
    retries: Annotated[
        int, typer.Option(min=0, help="Maximum number of restarts of an expert whose process is killed.")
    ] = 3,
    init: Init = None,
    schedule: Schedule = None,
    overwrite: Overwrite = False,
    **given: Any,
) -> None:
    """Train an expert on every shard.

    Each trains alone, in its own process or on a Ray cluster. If a process is killed, its expert restarts
    from the last checkpoint and the others continue. Use --resume to finish what is left.
    """
    if init is not None:
        refuse_given(context, "--init fixes it", *FIXED_BY_INIT)
    if ray is not None:
        refuse_given(context, "the cluster decides how many run at a time", "parallel")

    from hddm.data.shard_records import find_shards

    folders = find_shards(shards)
    options = GivenOptions(context, given)
    if objective is None:
        objectives: list[str] = [options.settings(ExpertSettings).objective] * len(folders)
    else:
        with asked():
            objectives = parse_objectives(objective, len(folders))
    settings = {name: options.settings(ExpertSettings, objective=name) for name in set(objectives)}
    run = options.run()
    # Only now, since a slip in an option is reported at once.
    from hddm.training.islands import make_islands, refuse_failed
    from hddm.utils.files import alone

    with asked():
        islands = make_islands(folders, out, objectives, settings, run, schedule, init, overwrite)
    # Two of these with one --out would each train some of the experts.
    with alone(out):
        outcomes = _trained(islands, parallel, retries, ray)
    for one in outcomes:
        if one.summary:
            typer.echo(f"{one.island.out}: {one.summary}")
    refuse_failed(outcomes)


def _trained(islands: Sequence["Island"], parallel: int, retries: int, ray: str | None) -> list["Outcome"]:
    """Train ``islands`` with a bar each, and return how each ended."""
    from hddm.training.fitting import CALIBRATION_COST
    from hddm.training.islands import train_islands
    from hddm.utils.progress import Progress, TrainingProgress
    from hddm.utils.ray_workers import RayWorkers
    from hddm.utils.workers import Workers

    by_index = {island.index: island for island in islands}
    backend = Workers(parallel, retries) if ray is None else RayWorkers(ray, retries)
    with contextlib.ExitStack() as stack:
        stack.enter_context(Progress(None, f"train {counted(len(islands), 'expert')}", is_drawn=False))
        bars: dict[int, TrainingProgress] = {}

        def on_step(index: int, step: int, loss: float, seconds: float) -> None:
            if index not in bars:
                of = by_index[index]
                bar = TrainingProgress(of.settings.steps, of.settings.batch_size, of.name, CALIBRATION_COST)
                bars[index] = stack.enter_context(bar)
            bars[index].reach(step, loss, seconds)

        return train_islands(islands, backend, on_step)
