"""hddm calibrate."""

from pathlib import Path
from typing import Annotated

import typer

from hddm_cli.options import InputArgument, InputOption, Seed, refuse_given


def calibrate(
    context: typer.Context,
    expert: Annotated[Path, InputArgument(help="Expert folder; its calibration is replaced.")],
    data: Annotated[
        Path | None,
        InputOption(help="Shard folder to calibrate on. Default: samples of the expert itself."),
    ] = None,
    num_images: Annotated[int, typer.Option(min=16, help="Samples to draw, without --data.")] = 512,
    steps: Annotated[int, typer.Option(min=1, help="Sampling steps, without --data.")] = 50,
    seed: Seed = 0,
) -> None:
    """Measure the statistics that an expert needs near pure noise.

    These are the moments of its data and the table that blends its prediction with a Gaussian's near t = 1.
    """
    from hddm.training.calibrate import recalibrate

    if data is not None:
        refuse_given(context, "with --data no samples are drawn", "num_images", "steps")
        recalibrate(expert, data, seed)
        typer.echo(f"{expert}: calibrated on {data}")
        return
    recalibrate(expert, None, seed, num_images, steps)
    typer.echo(f"{expert}: calibrated on {num_images} samples of its own")
