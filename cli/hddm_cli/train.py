"""hddm train expert, hddm train router."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hddm_cli.combinations import refuse_given
from hddm_cli.options import BatchSize, LearningRate, Out, Overwrite, Seed, Size, Steps

commands = typer.Typer(help="Train one expert on its shard, or the router.", no_args_is_help=True)


class ObjectiveName(StrEnum):
    """Choices of --objective."""

    ddpm = "ddpm"
    flow = "flow"


class TimeSampling(StrEnum):
    """Choices of --time-sampling."""

    uniform = "uniform"
    logit_normal = "logit-normal"


@commands.command("expert")
def expert(
    context: typer.Context,
    shard: Annotated[Path, typer.Argument(help="Shard folder, as hddm partition writes it.")],
    out: Out,
    objective: Annotated[ObjectiveName, typer.Option("--objective", help="What it learns.")],
    steps: Steps,
    batch_size: BatchSize = 128,
    learning_rate: LearningRate = 1e-4,
    size: Size = "small",
    seed: Seed = 0,
    init: Annotated[
        Path | None,
        typer.Option("--init", help="Expert folder to train on from: its network, prediction and schedule."),
    ] = None,
    schedule: Annotated[
        Path | None,
        typer.Option(
            "--schedule", help="DDPM: a diffusers scheduler_config.json, of either family; default cosine."
        ),
    ] = None,
    time_sampling: Annotated[
        TimeSampling, typer.Option("--time-sampling", help="Distribution of noise levels.")
    ] = TimeSampling.uniform,
    class_conditional: Annotated[
        bool, typer.Option("--class-conditional", help="Learn from the class folders' labels.")
    ] = False,
    condition_dropout: Annotated[
        float,
        typer.Option("--condition-dropout", min=0, max=1, help="Share of labels dropped."),
    ] = 0.1,
    ema_decay: Annotated[float, typer.Option("--ema-decay", help="Of the weights' average.")] = 0.999,
    overwrite: Overwrite = False,
) -> None:
    """Train one expert alone, on one shard."""
    if init is not None:
        refuse_given(context, "--init fixes it", "size", "schedule")

    from hddm.errors import HddmError
    from hddm.facts import parse_facts
    from hddm.progress import Progress
    from hddm.schedules.diffusers_configs import declared_prediction_type, from_diffusers
    from hddm.training.continuation import continue_expert
    from hddm.training.expert import ExpertSettings, train_expert

    settings = parse_facts(
        {
            "objective": objective.value,
            "steps": steps,
            "batch_size": batch_size,
            "learning_rate": learning_rate,
            "size": size,
            "seed": seed,
            "time_sampling": time_sampling.value,
            "class_conditional": class_conditional,
            "condition_dropout": condition_dropout,
            "ema_decay": ema_decay,
        },
        ExpertSettings,
        "options",
    )
    declared = declared_prediction_type(schedule) if schedule else None
    if declared not in (None, "epsilon"):
        raise HddmError(f"{schedule}: prediction_type is {declared!r}, and DDPM training here learns epsilon")
    with Progress(steps, "train") as progress:
        if init is not None:
            losses = continue_expert(init, shard, out, settings, overwrite, lambda step, loss: progress(1))
        else:
            losses = train_expert(
                shard,
                out,
                settings,
                from_diffusers(schedule) if schedule else None,
                str(schedule) if schedule else "default of the objective",
                overwrite,
                on_step=lambda step, loss: progress(1),
            )
    typer.echo(f"{out}: loss {losses[0]:.4f} → {losses[-1]:.4f}")


@commands.command("router")
def router(
    shards: Annotated[Path, typer.Argument(help="Partition folder, as hddm partition writes it.")],
    out: Out,
    steps: Steps,
    batch_size: BatchSize = 128,
    learning_rate: LearningRate = 1e-4,
    size: Size = "tiny",
    seed: Seed = 0,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate", help="Keep 15 % of every shard from training, and fit temperatures to it."
        ),
    ] = False,
    overwrite: Overwrite = False,
) -> None:
    """Train the router that tells the shards apart, on noised images."""
    from hddm.experts import FORMAT, ROUTER_FILE, RouterFacts
    from hddm.facts import parse_facts, read_facts
    from hddm.progress import Progress
    from hddm.training.router import RouterSettings, train_router

    settings = parse_facts(
        {
            "steps": steps,
            "batch_size": batch_size,
            "learning_rate": learning_rate,
            "size": size,
            "seed": seed,
            "calibrate": calibrate,
        },
        RouterSettings,
        "options",
    )
    with Progress(steps, "train") as progress:
        losses = train_router(shards, out, settings, overwrite, on_step=lambda step, loss: progress(1))
    typer.echo(f"{out}: cross-entropy {losses[0]:.4f} → {losses[-1]:.4f}")
    if calibrate:
        found = read_facts(out / ROUTER_FILE, RouterFacts, FORMAT).calibration
        typer.echo(
            f"{out}: calibrated on {sum(found['held_out_images'])} images kept from training: expected "
            f"calibration error {found['ece_before']:.4f} → {found['ece_after']:.4f}"
        )
