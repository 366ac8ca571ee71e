"""hddm evaluate."""

from pathlib import Path
from typing import Annotated

import typer


def evaluate(
    images: Annotated[Path, typer.Argument(help="Folder of samples, as hddm sample writes it.")],
    reference: Annotated[Path, typer.Option("--reference", help="Folder of training images.")],
    held_out: Annotated[
        Path | None, typer.Option("--held-out", help="Folder of images that no model has seen.")
    ] = None,
    allow_few: Annotated[
        bool, typer.Option("--allow-few", help="Measure fewer images than features; not comparable.")
    ] = False,
) -> None:
    """Fréchet distances, diversity and memorising of a folder of images, as JSON."""
    import json

    from hddm.evaluation.folders import evaluate_folder

    typer.echo(json.dumps(evaluate_folder(images, reference, held_out, allow_few), indent=2))
