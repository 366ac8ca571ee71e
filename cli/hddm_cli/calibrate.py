"""hddm calibrate."""

from pathlib import Path
from typing import Annotated

import typer

from hddm_cli.options import InputArgument, InputOption, refuse_given


def calibrate(
    context: typer.Context,
    expert: Annotated[Path, InputArgument(help="Expert folder; its calibration is replaced.")],
    data: Annotated[
        Path | None,
        InputOption("--data", help="Shard folder to calibrate on; without it, samples of the expert itself."),
    ] = None,
    num_images: Annotated[
        int, typer.Option("--num-images", min=16, help="Samples to draw, without --data.")
    ] = 512,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Sampler steps, without --data.")] = 50,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the noise.")] = 0,
) -> None:
    """Measure the moments and the blend table that an expert needs near t = 1."""
    from hddm.training.calibrate import recalibrate

    if data is not None:
        refuse_given(context, "with --data no samples are drawn", "num_images", "steps")
        recalibrate(expert, data, seed)
        typer.echo(f"{expert}: calibrated on {data}")
        return
    recalibrate(expert, None, seed, num_images, steps)
    typer.echo(f"{expert}: calibrated on {num_images} samples of its own")
