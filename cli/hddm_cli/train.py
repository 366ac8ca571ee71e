"""hddm train expert, hddm train router."""

from pathlib import Path
from typing import Annotated, Any

import typer

from hddm.training.settings import FIXED_BY_INIT, ExpertSettings, RouterSettings, RunOptions
from hddm_cli.options import InputArgument, InputOption, Out, Overwrite, refuse_given
from hddm_cli.training_options import GivenOptions, takes
from hddm_cli.usage import Verb

commands = typer.Typer(help="Train one expert, all experts or the router.", no_args_is_help=True)


Init = Annotated[
    Path | None, InputOption(help="Expert to continue from, with its network, prediction and schedule.")
]
Schedule = Annotated[
    Path | None, InputOption(help="Noise schedule (DDPM only): a diffusers scheduler file. Default: cosine.")
]


@commands.command("expert", cls=Verb)
@takes(ExpertSettings, RunOptions)
def expert(
    context: typer.Context,
    shard: Annotated[Path, InputArgument(help="Shard folder, written by hddm partition or hddm encode.")],
    out: Out,
    init: Init = None,
    schedule: Schedule = None,
    overwrite: Overwrite = False,
    **given: Any,
) -> None:
    """Train one expert on one shard.

    Checkpoints, TensorBoard logs and sample grids are saved in OUT.run; --resume continues from there.
    """
    options = GivenOptions(context, given)
    if init is not None:
        refuse_given(context, "--init fixes it", *FIXED_BY_INIT)
        options.refuse_in_file("--init fixes it", *FIXED_BY_INIT)
    settings, run = options.settings(ExpertSettings), options.run()

    from hddm.training.continuation import continue_expert
    from hddm.training.expert import train_expert
    from hddm.training.fitting import CALIBRATION_COST
    from hddm.training.loop import summary_of
    from hddm.utils.progress import TrainingProgress

    with TrainingProgress(settings.steps, settings.batch_size, "train", CALIBRATION_COST) as progress:
        if init is not None:
            losses = continue_expert(init, shard, out, settings, overwrite, progress.reach, run)
        else:
            losses = train_expert(shard, out, settings, schedule, None, overwrite, progress.reach, run)
    if losses:
        typer.echo(f"{out}: {summary_of(losses)}")


@commands.command("router", cls=Verb)
@takes(RouterSettings, RunOptions, without=("sample_every",))
def router(
    context: typer.Context,
    shards: Annotated[
        list[Path], InputArgument(help="Partition folders, written by hddm partition or hddm encode.")
    ],
    out: Out,
    overwrite: Overwrite = False,
    **given: Any,
) -> None:
    """Train the router, which recognises shards from noisy images."""
    options = GivenOptions(context, given)
    settings, run = options.settings(RouterSettings), options.run()

    from hddm.experts.records import FORMAT, ROUTER_FILE, RouterRecord
    from hddm.training.loop import summary_of
    from hddm.training.router import accuracy_text, train_router
    from hddm.utils.progress import TrainingProgress
    from hddm.utils.records import read_record

    with TrainingProgress(settings.steps, settings.batch_size, "train") as progress:
        losses = train_router(shards, out, settings, overwrite, progress.reach, run)
    if not losses:
        return
    typer.echo(f"{out}: {summary_of(losses, 'cross-entropy')}")
    record = read_record(out / ROUTER_FILE, RouterRecord, FORMAT)
    if len(record.shard_images) > 1:
        typer.echo(f"{out}: {accuracy_text(record.training['accuracy'])}")
    if settings.calibrate:
        found = record.calibration
        typer.echo(
            f"{out}: calibrated on {sum(found['held_out_images'])} images kept from training: expected "
            f"calibration error {found['ece_before']:.4f} → {found['ece_after']:.4f}"
        )
