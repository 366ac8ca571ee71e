"""hddm partition."""

from pathlib import Path
from typing import Annotated

import typer

from hddm_cli.options import Out, Overwrite, Seed


def partition(
    images: Annotated[Path, typer.Argument(help="Folder of images, or of class folders.")],
    out: Out,
    shards: Annotated[int, typer.Option("--shards", min=1, help="Number of shards.")],
    seed: Seed = 0,
    overwrite: Overwrite = False,
) -> None:
    """Divide images into shards of similar content and nearly equal size."""
    from hddm.data.partition import partition as divide
    from hddm.describe import describe

    for folder in divide(images, out, shards, seed, overwrite):
        typer.echo(f"{folder}: {describe(folder)['images']} images")
