"""hddm push."""

from pathlib import Path
from typing import Annotated

import typer

from hddm_cli.options import InputArgument, InputOption
from hddm_cli.usage import say


def push(
    ensemble: Annotated[Path, InputArgument(help="Ensemble folder; only files in its manifests are sent.")],
    name: Annotated[
        str, typer.Argument(metavar="OWNER/NAME", help="Repository; created if it does not exist.")
    ],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    licence: Annotated[
        str | None, typer.Option(help="Licence of experts of your own that record none.")
    ] = None,
    picture: Annotated[
        Path | None, InputOption(help="Picture for the model card, such as a sheet of samples.")
    ] = None,
    results: Annotated[
        Path | None, InputOption(help="Results for the card: a file of hddm evaluate, or a Markdown table.")
    ] = None,
    message: Annotated[str | None, typer.Option(help="Commit message.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the card and the files, but send nothing.")
    ] = False,
) -> None:
    """Publish an ensemble on the Hugging Face Hub.

    The model card is written from the records of its parts, unless the folder holds a README.md of your own.
    Log in with hf auth login, or set HF_TOKEN.
    """
    from hddm.pipelines.card import CARD
    from hddm.pipelines.hub import plan_upload, upload

    planned = plan_upload(ensemble, name, licence, picture, results)
    for note in planned.notes:
        say(f"note: {note}")
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
