"""hddm convert."""

import inspect
from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from hddm.utils.errors import UsageError
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
    source: Annotated[Path, InputArgument(help="Checkpoint file, model or pipeline folder, or expert.")],
    out: Out,
    allow_pickle: AllowPickle = False,
    num_heads: Annotated[
        int | None, typer.Option("--num-heads", min=1, help="Attention heads, for a size never published.")
    ] = None,
    sample_size: Annotated[
        int | None, typer.Option("--sample-size", min=1, help="Height and width of a sample, if not stated.")
    ] = None,
    weights: Annotated[
        Literal["ema", "raw"] | None,
        typer.Option("--weights", help="Set of weights; default ema where there is one."),
    ] = None,
    variant: Variant = None,
    schedule: Annotated[
        Path | None, InputOption("--schedule", help="scheduler_config.json instead of the source's own.")
    ] = None,
    prediction_type: Annotated[
        Prediction | None,
        typer.Option("--prediction-type", help="What the network predicts, if the source does not state it."),
    ] = None,
    noise_range: NoiseRange = None,
    architecture: Annotated[
        Literal["adaln-single"] | None,
        typer.Option("--architecture", help="Fold a DiT's adaLN-Zero to AdaLN-Single."),
    ] = None,
    modulation_rank: Annotated[
        int, typer.Option("--modulation-rank", min=0, help="Rank of the modulation that each block keeps.")
    ] = 0,
    text_dim: Annotated[
        int | None, typer.Option("--text-dim", min=1, help="Add attention to text tokens of this width.")
    ] = None,
    recipe: Annotated[
        Literal["exact", "paper"],
        typer.Option("--recipe", help="exact, or paper (fresh head, round(999 t)) to compare."),
    ] = "exact",
    licence: Annotated[
        str | None, typer.Option("--licence", help="Licence of the weights, if the source does not state it.")
    ] = None,
    base: Annotated[
        Path | None,
        InputOption("--base", help="Expert that a LoRA file changes; the result is an adapter of it."),
    ] = None,
    to_layout: Annotated[
        str | None, typer.Option("--to-layout", help="Write an expert back in this layout.")
    ] = None,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Skip the comparison with the source.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and print the plan; write nothing.")
    ] = False,
    overwrite: Overwrite = False,
) -> None:
    """Turn a pretrained checkpoint into an expert: the same network, read as a velocity field."""
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
    typer.echo(f"{out}: converted")
