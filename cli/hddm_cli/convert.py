"""hddm convert."""

import inspect
from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from hddm.utils.errors import UsageError, asked
from hddm.utils.files import check_absent, refuse_full_disk, refuse_pickle
from hddm_cli.options import (
    AllowPickle,
    InputArgument,
    InputOption,
    NoiseRange,
    Out,
    Overwrite,
    Prediction,
    Variant,
    refuse_given,
)

# The parameters that have a say when an expert is written back, and when a LoRA is converted.
_WITH_TO_LAYOUT = {"context", "source", "out", "to_layout", "dry_run", "overwrite"}
_WITH_BASE = {"context", "source", "out", "base", "licence", "dry_run", "overwrite"}


def convert(
    context: typer.Context,
    source: Annotated[
        Path, InputArgument(help="Checkpoint file, model folder, pipeline folder or expert folder.")
    ],
    out: Out,
    allow_pickle: AllowPickle = False,
    num_heads: Annotated[
        int | None, typer.Option(min=1, help="Number of attention heads, for networks of unusual size.")
    ] = None,
    sample_size: Annotated[
        int | None, typer.Option(min=1, help="Height and width of a sample. Default: as in the source.")
    ] = None,
    weights: Annotated[
        Literal["ema", "raw"] | None,
        typer.Option(help="Set of weights. Default: ema if the source has it."),
    ] = None,
    variant: Variant = None,
    schedule: Annotated[
        Path | None,
        InputOption(help="Noise schedule, a scheduler_config.json. Default: as in the source."),
    ] = None,
    prediction_type: Annotated[
        Prediction | None,
        typer.Option(help="Quantity that the network predicts. Default: as in the source."),
    ] = None,
    noise_range: NoiseRange = None,
    architecture: Annotated[
        Literal["adaln-single"] | None,
        typer.Option(help="Architecture to convert a DiT to. Default: keep adaLN-Zero."),
    ] = None,
    modulation_rank: Annotated[
        int, typer.Option(min=0, help="Rank of the modulation that each block keeps with --architecture.")
    ] = 0,
    text_dim: Annotated[
        int | None, typer.Option(min=1, help="Width of text tokens, to add attention to them.")
    ] = None,
    recipe: Annotated[
        Literal["exact", "paper"],
        typer.Option(help="Conversion recipe; paper (new head, round(999 t)) is for comparisons."),
    ] = "exact",
    licence: Annotated[
        str | None, typer.Option(help="Licence of the weights. Default: as in the source.")
    ] = None,
    base: Annotated[
        Path | None, InputOption(help="Expert that a LoRA file changes; the output is its adapter.")
    ] = None,
    to_layout: Annotated[
        str | None, typer.Option(help="Layout to write an expert back in, such as facebook-dit.")
    ] = None,
    data: Annotated[
        Path | None,
        InputOption(help="Shard of images like the model's own, to check the stated conventions on."),
    ] = None,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Skip the comparison with the source.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and print the plan, but write nothing.")
    ] = False,
    overwrite: Overwrite = False,
) -> None:
    """Turn a pretrained checkpoint into an expert.

    The network stays the same and is read as a velocity field.
    """
    from hddm.utils.progress import Progress

    if to_layout is not None:
        idle = set(inspect.signature(convert).parameters) - _WITH_TO_LAYOUT
        refuse_given(context, "--to-layout writes an expert as it is", *sorted(idle))
        from hddm.checkpoints.write_back import write_back

        with Progress(None, "write back"):
            lines = write_back(source, out, to_layout, dry_run, overwrite)
        for line in lines:
            typer.echo(line)
        return
    if base is not None:
        idle = set(inspect.signature(convert).parameters) - _WITH_BASE
        refuse_given(context, "--base converts a LoRA file, which has it from its base", *sorted(idle))
        from hddm.checkpoints.lora import convert_lora

        with Progress(None, "convert"):
            lines = convert_lora(source, base, out, licence, dry_run, overwrite)
        for line in lines:
            typer.echo(line)
        return
    if modulation_rank and architecture is None:
        raise UsageError(f"--modulation-rank {modulation_rank}: needs --architecture adaln-single")
    # Of a folder that holds both kinds, safetensors are read.
    pickles = [] if any(source.rglob("*.safetensors")) else source.rglob("diffusion_pytorch_model*.bin")
    for file in [source] if source.is_file() and source.suffix != ".json" else pickles:
        refuse_pickle(file, allow_pickle)

    from hddm.checkpoints.convert import verdict, write
    from hddm.checkpoints.plan import Conversion, plan, summary
    from hddm.utils.records import EXPERT_FILE

    conversion = Conversion(
        allow_pickle=allow_pickle,
        weights=weights,
        variant=variant,
        num_heads=num_heads,
        sample_size=sample_size,
        schedule=schedule,
        prediction_type=prediction_type,
        architecture=architecture,
        modulation_rank=modulation_rank,
        text_dim=text_dim,
        recipe=recipe,
        licence=licence,
        # Its callback has read it.
        noise_range=cast("tuple[float, float] | None", noise_range),
    )
    with Progress(None, "read the checkpoint"):
        planned = plan(source, conversion)
    check_absent(out, EXPERT_FILE, overwrite)
    shard = None
    if data is not None:
        from hddm.data.shards import open_shard
        from hddm.training.expert import check_fit
        from hddm.training.verify import warn_of_misreading

        with asked():
            shard = open_shard(data)
            check_fit(shard, planned.record, None)
    for line in summary(planned):
        typer.echo(line)
    if dry_run:
        refuse_full_disk(out, planned.size)
        typer.echo(f"{out}: nothing written (--dry-run)")
        return
    with Progress(None, "convert"):
        verified = write(planned, out, not no_verify, overwrite)
    for line in verdict(planned, verified):
        typer.echo(line)
    if shard is not None:
        with Progress(None, "try it on images"):
            warn_of_misreading(out, shard)
    typer.echo(f"{out}: converted")
