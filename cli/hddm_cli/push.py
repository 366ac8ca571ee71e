"""hddm push."""

from pathlib import Path
from typing import Annotated

import typer

from hddm_cli.options import InputArgument, InputOption


def push(
    ensemble: Annotated[Path, InputArgument(help="Ensemble folder; what its manifests list is sent.")],
    name: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Repository; made if it is not there.")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository a private one.")] = False,
    licence: Annotated[
        str | None, typer.Option("--licence", help="Licence of the experts that record none; you own them.")
    ] = None,
    picture: Annotated[
        Path | None, InputOption("--picture", help="Picture for the card, such as a sheet of samples.")
    ] = None,
    results: Annotated[
        Path | None,
        InputOption("--results", help="Of hddm evaluate --out, or a table in Markdown, for the card."),
    ] = None,
    message: Annotated[str | None, typer.Option("--message", help="Of the commit.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the card and the files; send nothing.")
    ] = False,
) -> None:
    """Publish an ensemble on the Hugging Face hub, with a model card made of what its parts record.

    The token is that of HF_TOKEN, or of hf auth login. A README.md of yours in the folder is the card.
    """
    from hddm.pipelines.card import CARD
    from hddm.pipelines.hub import plan_upload, upload

    planned = plan_upload(ensemble, name, licence, picture, results)
    for note in planned.notes:
        typer.echo(f"note: {note}")
    if not dry_run:
        typer.echo(upload(planned, private or None, message=message))
        return
    card = planned.files[CARD]
    typer.echo(card.decode() if isinstance(card, bytes) else card.read_text(encoding="utf-8"))
    for file, size in planned.sizes.items():
        typer.echo(f"{size:>14,}  {file}")
    typer.echo(
        f"{name}: {len(planned.files)} files, {sum(planned.sizes.values()):,} bytes; nothing sent (--dry-run)"
    )
