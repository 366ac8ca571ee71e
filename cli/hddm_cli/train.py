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
from hddm_cli.usage import Verb

commands = typer.Typer(help="Train one expert, all experts or the router.", no_args_is_help=True)


Init = Annotated[
    Path | None, InputOption(help="Expert to continue from, with its network, prediction and schedule.")
]
LoraRank = Annotated[
    int | None, typer.Option(min=1, help="Rank of a LoRA adapter of --init to train; --out holds only it.")
]
LoraAlpha = Annotated[
    float | None, typer.Option(help="Scale of the adapter, as ALPHA/RANK. Default: the rank.")
]
Schedule = Annotated[
    Path | None, InputOption(help="Noise schedule (DDPM only): a diffusers scheduler file. Default: cosine.")
]
RandomFlip = Annotated[bool, typer.Option("--random-flip", help="Mirror half of the images at random.")]

FIXED_BY_INIT = ("size", "schedule", "prediction", "weighting", "rotary")
LEARNING = {
    "size": (Size, "small"),
    "time_sampling": (
        Annotated[
            Literal["uniform", "logit-normal"] | None,
            typer.Option(
                help="Distribution of noise levels. Default: logit-normal; uniform for DDPM, unless "
                "--prediction is sample."
            ),
        ],
        None,
    ),
    "noise_range": (NoiseRange, None),
    "prediction": (
        Annotated[
            Prediction | None,
            typer.Option(help="Quantity that the network predicts. Default: epsilon (DDPM), sample (flow)."),
        ],
        None,
    ),
    "weighting": (
        Annotated[
            Literal["prediction", "velocity"] | None,
            typer.Option(
                help="Quantity that the loss compares. Default: velocity if --prediction is sample, else "
                "prediction."
            ),
        ],
        None,
    ),
    "rotary": (
        Annotated[
            bool | None,
            typer.Option("--rotary/--no-rotary", help="Rotary position embeddings. Default: --rotary."),
        ],
        None,
    ),
    "snr_gamma": (
        Annotated[
            float | None,
            typer.Option(help="Gamma of min-SNR loss weights (DDPM only), such as 5. Default: no weights."),
        ],
        None,
    ),
    "class_conditional": (
        Annotated[bool, typer.Option("--class-conditional", help="Train on the labels of class folders.")],
        False,
    ),
    "text_conditional": (
        Annotated[
            bool, typer.Option("--text-conditional", help="Train on captions, as saved by hddm encode.")
        ],
        False,
    ),
    "condition_dropout": (
        Annotated[
            float, typer.Option(min=0, max=1, help="Share of images that are trained without conditions.")
        ],
        0.1,
    ),
    "random_flip": (RandomFlip, False),
    "weak_at": (
        Annotated[
            float | None,
            typer.Option(
                help="Share of --steps after which a weak model for autoguidance is saved; 0 for none. "
                "Default: 0.25; 0 with --init."
            ),
        ],
        None,
    ),
}
"""Options of what an expert learns, but for its objective."""


@commands.command("expert", cls=Verb)
@takes(LEARNING, LOOP, KEEPING, PICTURES, FILE)
def expert(
    context: typer.Context,
    shard: Annotated[Path, InputArgument(help="Shard folder, written by hddm partition or hddm encode.")],
    out: Out,
    objective: Annotated[
        Literal["ddpm", "flow"] | None,
        typer.Option(help="Training objective. Required, here or in --config."),
    ] = None,
    steps: Steps = None,
    init: Init = None,
    lora_rank: LoraRank = None,
    lora_alpha: LoraAlpha = None,
    schedule: Schedule = None,
    overwrite: Overwrite = False,
    **given: Any,
) -> None:
    """Train one expert on one shard.

    Checkpoints, TensorBoard logs and sample grids are saved in OUT.run; --resume continues from there.
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


@commands.command("router", cls=Verb)
@takes(LOOP, KEEPING, FILE)
def router(
    context: typer.Context,
    shards: Annotated[
        list[Path], InputArgument(help="Partition folders, written by hddm partition or hddm encode.")
    ],
    out: Out,
    steps: Steps = None,
    size: Size = "tiny",
    random_flip: RandomFlip = False,
    calibrate: Annotated[
        bool,
        typer.Option("--calibrate", help="Hold out 15 % of every shard and fit temperatures on it."),
    ] = False,
    overwrite: Overwrite = False,
    **given: Any,
) -> None:
    """Train the router, which recognises shards from noisy images."""
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
