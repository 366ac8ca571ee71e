"""hddm encode."""

from pathlib import Path
from typing import Annotated

import typer

from hddm.settings import EncodingSettings
from hddm_cli.options import InputArgument, OutOrAddress, Overwrite


def encode(
    source: Annotated[
        Path, InputArgument(help="Shard folder of images, or the folder of all shards.")
    ],
    out: OutOrAddress,
    settings: EncodingSettings,
    overwrite: Overwrite = False,
) -> None:
    """Resize a shard's images once and store pixels or latents.

    Trainings read the result in place of the images. Captions are stored as text tokens. If the command is
    interrupted, run it again to continue; --batch-size and --device may then differ.
    """
    from hddm.data.encoding import encode_shards

    for folder, made in encode_shards(source, out, settings, overwrite).items():
        shape = "×".join(map(str, made.encoding.shape))
        typer.echo(f"{folder}: {made.rows} images as {made.encoding.space}, {shape}")
        for skipped in made.skipped:
            typer.echo(f"  left out: {skipped.file}: {skipped.reason}")
