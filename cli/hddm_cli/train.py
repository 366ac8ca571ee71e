"""hddm train expert, hddm train router."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hddm_cli.options import (
    InputArgument,
    InputOption,
    NoiseRange,
    Out,
    Overwrite,
    Prediction,
    Size,
    Steps,
    refuse_given,
)
from hddm_cli.training_options import FILE, KEEPING, LOOP, PICTURES, GivenOptions, takes

commands = typer.Typer(
    help="Train one expert on its shard, all of them, or the router.", no_args_is_help=True
)


Init = Annotated[
    Path | None,
    InputOption("--init", help="Expert folder to train on from: its network, prediction and schedule."),
]
LoraRank = Annotated[
    int | None,
    typer.Option("--lora-rank", min=1, help="Train a LoRA adapter of --init; --out holds that alone."),
]
LoraAlpha = Annotated[
    float | None, typer.Option("--lora-alpha", help="It is scaled by alpha/rank; by default alpha = rank.")
]
Schedule = Annotated[
    Path | None,
    InputOption(
        "--schedule", help="DDPM: a diffusers scheduler_config.json, of either family; default cosine."
    ),
]
RandomFlip = Annotated[bool, typer.Option("--random-flip", help="Mirror half the images, at random.")]

FIXED_BY_INIT = ("size", "schedule", "prediction", "weighting", "rotary")
LEARNING = {
    "size": (Size, "small"),
    "time_sampling": (
        Annotated[
            Literal["uniform", "logit-normal"] | None,
            typer.Option(
                "--time-sampling", help="Distribution of noise levels; default: uniform (ddpm), logit-normal."
            ),
        ],
        None,
    ),
    "noise_range": (NoiseRange, None),
    "prediction": (
        Annotated[
            Prediction | None,
            typer.Option(
                "--prediction",
                help="What the network predicts; default: epsilon (ddpm), sample (flow; learns faster).",
            ),
        ],
        None,
    ),
    "weighting": (
        Annotated[
            Literal["prediction", "velocity"] | None,
            typer.Option("--weighting", help="What the loss is taken in; default: velocity for x_0."),
        ],
        None,
    ),
    "rotary": (
        Annotated[
            bool | None,
            typer.Option("--rotary/--no-rotary", help="Rotary positions of patches; default: rotary."),
        ],
        None,
    ),
    "snr_gamma": (
        Annotated[
            float | None, typer.Option("--snr-gamma", help="DDPM: min-SNR weights of this gamma, as 5.")
        ],
        None,
    ),
    "class_conditional": (
        Annotated[bool, typer.Option("--class-conditional", help="Learn from the class folders' labels.")],
        False,
    ),
    "text_conditional": (
        Annotated[
            bool, typer.Option("--text-conditional", help="Learn from captions, as hddm encode kept them.")
        ],
        False,
    ),
    "condition_dropout": (
        Annotated[
            float,
            typer.Option("--condition-dropout", min=0, max=1, help="Share of images without conditions."),
        ],
        0.1,
    ),
    "random_flip": (RandomFlip, False),
    "weak_at": (
        Annotated[
            float | None,
            typer.Option(
                "--weak-at",
                help="Share of --steps after which a weaker self is kept to guide by; default 0.25, 0: none.",
            ),
        ],
        None,
    ),
}
"""Options of what an expert learns, but for its objective."""


@commands.command("expert")
@takes(LEARNING, LOOP, KEEPING, PICTURES, FILE)
def expert(
    context: typer.Context,
    shard: Annotated[Path, InputArgument(help="Shard folder, as hddm partition or hddm encode writes it.")],
    out: Out,
    objective: Annotated[
        Literal["ddpm", "flow"] | None, typer.Option("--objective", help="What it learns.")
    ] = None,
    steps: Steps = None,
    init: Init = None,
    lora_rank: LoraRank = None,
    lora_alpha: LoraAlpha = None,
    schedule: Schedule = None,
    overwrite: Overwrite = False,
    **given: Any,
) -> None:
    """Train one expert alone, on one shard.

    The run is kept in OUT.run, with checkpoints, TensorBoard logs and samples; --resume goes on with it.
    """
    if init is not None:
        refuse_given(context, "--init fixes it", *FIXED_BY_INIT)

    from hddm.training.settings import ExpertSettings

    own = {"objective": objective, "steps": steps, "lora_rank": lora_rank, "lora_alpha": lora_alpha}
    options = GivenOptions(context, {**own, **given})
    if init is not None:
        options.refuse_in_file("--init fixes it", *FIXED_BY_INIT)
    settings, run = options.settings(ExpertSettings), options.run()

    from hddm.training.continuation import continue_expert
    from hddm.training.expert import CALIBRATION_COST, train_expert, with_schedule
    from hddm.training.loop import summary_of
    from hddm.utils.progress import TrainingProgress

    with TrainingProgress(settings.steps, settings.batch_size, "train", CALIBRATION_COST) as progress:
        if init is not None:
            losses = continue_expert(init, shard, out, settings, overwrite, progress.reach, run=run)
        else:
            settings, chosen, source = with_schedule(settings, schedule)
            losses = train_expert(shard, out, settings, chosen, source, overwrite, progress.reach, run)
    if losses:
        typer.echo(f"{out}: {summary_of(losses)}")


@commands.command("router")
@takes(LOOP, KEEPING, FILE)
def router(
    context: typer.Context,
    shards: Annotated[
        list[Path], InputArgument(help="Partition folders, as hddm partition or encode writes them.")
    ],
    out: Out,
    steps: Steps = None,
    size: Size = "tiny",
    random_flip: RandomFlip = False,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate", help="Keep 15 % of every shard from training, and fit temperatures to it."
        ),
    ] = False,
    overwrite: Overwrite = False,
    **given: Any,
) -> None:
    """Train the router that tells the shards apart, on noised images."""
    from hddm.training.settings import RouterSettings

    own = {"steps": steps, "size": size, "random_flip": random_flip, "calibrate": calibrate}
    options = GivenOptions(context, {**own, **given})
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
