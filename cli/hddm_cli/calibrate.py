"""hddm calibrate."""

from pathlib import Path
from typing import Annotated

import typer


def calibrate(
    expert: Annotated[Path, typer.Argument(help="Expert folder; its calibration is replaced.")],
    data: Annotated[Path, typer.Option("--data", help="Shard folder to calibrate on.")],
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the noise.")] = 0,
) -> None:
    """Measure the moments and the blend table that an expert needs near t = 1."""
    from hddm.training.recalibrate import recalibrate

    recalibrate(expert, data, seed)
    typer.echo(f"{expert}: calibrated on {data}")
