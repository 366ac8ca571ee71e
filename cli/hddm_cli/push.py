"""hddm push."""

from pathlib import Path
from typing import Annotated

import typer

from hddm.settings import Described, InputPath
from hddm.utils.errors import UsageError
from hddm_cli.options import InputArgument, opens_experts
from hddm_cli.usage import say


class PushOptions(Described):
    """What is published."""

    private: bool = False
    """Make a new repository private."""
    licence: str | None = None
    """Licence of experts of your own that record none."""
    picture: InputPath | None = None
    """Picture for the model card, such as a sheet of samples."""
    results: InputPath | None = None
    """Results for the card: a file of hddm evaluate, or a Markdown table."""
    dry_run: bool = False
    """Print the card and the files, but send nothing."""


@opens_experts
def push(
    ensemble: Annotated[
        Path, InputArgument(help="Ensemble folder; only files in its manifests are sent.")
    ],
    name: Annotated[
        str,
        typer.Argument(
            metavar="OWNER/NAME", help="Repository, created if it does not exist; or an address."
        ),
    ],
    options: PushOptions,
) -> None:
    """Publish an ensemble on the Hugging Face Hub, or copy it to an address such as s3://bucket/name.

    The model card is written from the records of its parts, unless the folder holds a README.md of your own.
    Log in with hf auth login, or set HF_TOKEN.
    """
    from hddm.pipelines.hub import CARD, plan_upload, upload, upload_to_address
    from hddm.utils.addresses import address_of

    address = address_of(name)
    if address is not None and options.private:
        raise UsageError("--private: is for a hub; who may read an address is set where it is")
    name = name if address is None else str(address)
    planned = plan_upload(ensemble, name, options.licence, options.picture, options.results)
    for note in planned.notes:
        say(f"note: {note}")
    if not options.dry_run and address is not None:
        upload_to_address(planned, address)
        typer.echo(address)
        return
    if not options.dry_run:
        typer.echo(upload(planned, options.private or None))
        return
    card = planned.files[CARD]
    typer.echo(card.decode() if isinstance(card, bytes) else card.read_text(encoding="utf-8"))
    for file, size in planned.sizes.items():
        typer.echo(f"{size:>14,}  {file}")
    typer.echo(
        f"{name}: {len(planned.files)} files, {sum(planned.sizes.values()):,} bytes; nothing sent (--dry-run)"
    )
