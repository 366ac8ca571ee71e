"""hddm train expert, hddm train router, hddm train all."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import Field

from hddm.settings import Described, Positive
from hddm.training.settings import (
    AllSettings,
    ExpertSettings,
    RouterSettings,
    RunOptions,
    check_init,
    parse_objectives,
)
from hddm.utils.errors import UsageError, counted, errors_as
from hddm_cli.options import (
    Config,
    DryRun,
    InputArgument,
    InputOption,
    ModelOption,
    Out,
    OutOrAddress,
    Overwrite,
    Without,
    add,
    checked_by,
    on_this_machine,
    opens_experts,
)
from hddm_cli.usage import say, show

if TYPE_CHECKING:
    from hddm.training.islands import Island, Outcome

group = typer.Typer(help="Train one expert, all experts or the router.", no_args_is_help=True)
Init = Annotated[
    Path | None,
    ModelOption(help="Expert to continue from, with its network, prediction and schedule."),
]
ScheduleFile = Annotated[
    Path | None,
    InputOption(help="Noise schedule (DDPM only): a diffusers scheduler file. Default: cosine."),
]


def refuse_unfinished(out: Path, run: RunOptions, overwrite: bool) -> None:
    """Refuse a run that is in the way of a new one."""
    from hddm.training.resume import refuse_run

    if not (run.resume or overwrite):
        refuse_run(out)


@opens_experts
@checked_by(check_init)
def expert(
    shard: Annotated[
        Path, InputArgument(help="Shard folder, written by hddm partition or hddm encode.")
    ],
    out: OutOrAddress,
    settings: ExpertSettings,
    run: RunOptions,
    init: Init = None,
    schedule: ScheduleFile = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    config: Config = None,
) -> None:
    """Train one expert on one shard.

    Checkpoints, TensorBoard logs and sample grids are saved in OUT.run; --resume continues from there.
    """
    check_init(settings, init, schedule)
    from hddm.data.shard_records import refuse_no_shard

    refuse_no_shard(shard)
    start = {"init": init, "schedule": schedule}
    if dry_run:
        from hddm.training.train import needs_to_train

        show(needs_to_train(shard, out, settings, run, **start))
        return
    refuse_unfinished(out, run, overwrite)
    from hddm.training.train import train

    train(shard, out, settings=settings, run=run, overwrite=overwrite, report=say, **start)


def router(
    shards: Annotated[
        list[Path],
        InputArgument(help="Partition folders, written by hddm partition or hddm encode."),
    ],
    out: Out,
    settings: RouterSettings,
    run: Annotated[RunOptions, Without(("sample_every", "held_out", "validate_every"))],
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    config: Config = None,
) -> None:
    """Train the router, which recognises shards from noisy images.

    With --condition it sees the class or the caption of an image, too.
    """
    if dry_run:
        from hddm.training.router import needs_of_router

        show(needs_of_router(shards, out, settings, run))
        return
    refuse_unfinished(out, run, overwrite)

    from hddm.experts.records import FORMAT, ROUTER_FILE, RouterRecord
    from hddm.training.loop import summary_of
    from hddm.training.router import train_router
    from hddm.training.router_accuracy import accuracy_text, condition_text
    from hddm.utils.progress import TrainingProgress
    from hddm.utils.records import read_record

    with TrainingProgress(settings.steps, settings.batch_size, "train") as progress:
        losses = train_router(shards, out, settings, overwrite, progress.reach, run)
    if not losses:
        return
    typer.echo(f"{out}: {summary_of(losses, 'cross-entropy')}")
    record = read_record(out / ROUTER_FILE, RouterRecord, FORMAT)
    if len(record.shard_images) > 1:
        accuracy = record.training["accuracy"]
        typer.echo(f"{out}: {accuracy_text(accuracy)}")
        if record.condition is not None:
            typer.echo(f"{out}: {condition_text(accuracy)}")
    if settings.calibrate:
        found = record.calibration
        typer.echo(
            f"{out}: calibrated on {sum(found['held_out_images'])} images kept from training: expected "
            f"calibration error {found['ece_before']:.4f} → {found['ece_after']:.4f}"
        )


class IslandOptions(Described):
    """Where experts are trained."""

    parallel: Positive | None = None
    """Experts trained at the same time, without `ray`. Default: 1."""
    ray: str | None = None
    """Address of a Ray cluster to train on, or local. Default: without Ray."""
    retries: Annotated[int, Field(ge=0)] = 3
    """Maximum number of restarts of an expert whose process is killed."""


@opens_experts
@checked_by(check_init)
def train_all(
    shards: Annotated[
        Path,
        InputOption(
            metavar="FOLDER", help="Partition folder, written by hddm partition or hddm encode."
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="Folder of all experts (OUT/expert_0, OUT/expert_1, …).", callback=on_this_machine
        ),
    ],
    settings: AllSettings,
    run: Annotated[RunOptions, Without(("held_out", "validate_every", "run_name"))],
    where: IslandOptions,
    init: Init = None,
    schedule: ScheduleFile = None,
    overwrite: Overwrite = False,
    config: Config = None,
) -> None:
    """Train an expert on every shard.

    Each trains alone, in its own process or on a Ray cluster. If a process is killed, its expert restarts
    from the last checkpoint and the others continue. Use --resume to finish what is left.
    """
    check_init(settings, init, schedule)
    from hddm.data.shard_records import find_shards

    folders = find_shards(shards)
    with errors_as(UsageError):
        objectives = parse_objectives(settings.objective, len(folders))
    of = {name: settings.with_objective(name) for name in set(objectives)}
    refuse_unfinished(out, run, overwrite)
    # Only now, since a slip in an option is reported at once.
    from hddm.training.islands import make_islands, refuse_failed
    from hddm.utils.files import alone

    with errors_as(UsageError):
        islands = make_islands(folders, out, objectives, of, run, schedule, init, overwrite)
    # Two of these with one --out would each train some of the experts.
    with alone(out):
        outcomes = _trained(islands, where)
    for island, outcome in zip(islands, outcomes, strict=True):
        if outcome and isinstance(outcome, str):
            say(f"{island.out}: {outcome}")
    refuse_failed(islands, outcomes)


def _trained(islands: Sequence["Island"], where: IslandOptions) -> list["Outcome"]:
    """Train ``islands`` with a bar each, and return how each ended."""
    from hddm.training.islands import train_islands
    from hddm.utils.progress import Progress, TrainingProgress
    from hddm.utils.ray_workers import RayWorkers
    from hddm.utils.workers import Workers

    by_index = {island.index: island for island in islands}
    retries = where.retries
    backend = RayWorkers(where.ray, retries) if where.ray else Workers(where.parallel or 1, retries)
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            Progress(None, f"train {counted(len(islands), 'expert')}", is_drawn=False)
        )
        bars: dict[int, TrainingProgress] = {}

        def on_step(index: int, step: int, loss: float, seconds: float) -> None:
            if index not in bars:
                of = by_index[index]
                bar = TrainingProgress(of.settings.steps, of.settings.batch_size, of.name)
                bars[index] = stack.enter_context(bar)
            bars[index].reach(step, loss, seconds)

        return train_islands(islands, backend, on_step)


add(group, expert)
add(group, router)
add(group, train_all, name="all")
