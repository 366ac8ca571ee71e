"""hddm partition."""

from pathlib import Path
from typing import Annotated

import typer

from hddm.settings import PartitionSettings
from hddm.utils.errors import UsageError
from hddm_cli.options import OutOrAddress, Overwrite, SourceArgument, checked_by


def check_division(shards: int | None, settings: PartitionSettings) -> None:
    """Refuse images that are to be split in two ways, or in none."""
    if (shards is None) == (not settings.classes):
        raise UsageError(
            "--shards NUMBER splits by content, --classes NAME=CLASS,CLASS by class; pass one"
        )


@checked_by(check_division)
def partition(
    images: Annotated[
        list[Path],
        SourceArgument(
            help="Images: a folder, class folders, metadata.jsonl, .tar or .parquet files, or an address."
        ),
    ],
    out: OutOrAddress,
    settings: PartitionSettings,
    shards: Annotated[
        int | None, typer.Option(min=1, metavar="NUMBER", help="Number of shards.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Split images into shards of similar content, or by class.

    Several sources of images are taken together. If the command is interrupted, run it again to continue.
    """
    check_division(shards, settings)
    from hddm.data.partition import partition as divide
    from hddm.data.shard_records import (
        FORMAT,
        HELD_OUT,
        PARTITION_FILE,
        PartitionRecord,
        read_manifest,
    )
    from hddm.utils.addresses import made_at
    from hddm.utils.errors import TO_ONE_SIZE, counted, shown
    from hddm.utils.progress import Progress
    from hddm.utils.records import read_record

    cache, held_out = settings.cache, settings.held_out
    here = made_at(out)
    kept = cache or here.with_name(f"{here.name}.features")
    options, number = settings.model_copy(update={"cache": kept}), shards or len(settings.classes)
    with Progress(None, "partition"):
        folders = divide(
            images,
            out,
            number,
            options,
            overwrite=overwrite,
            replace_cache=overwrite and cache is None,
        )
    record = read_record(here / PARTITION_FILE, PartitionRecord, FORMAT)
    root = images[0] if len(images) == 1 else Path()
    for name in shown([f"{root / name}: cannot be read" for name in record.skipped]):
        typer.echo(f"skipped {name}", err=True)
    held = record.held_out or [None] * len(folders)
    for folder, size, fresh in zip(folders, record.sizes, held, strict=True):
        kept_back = "" if fresh is None else f", {fresh} held out"
        typer.echo(f"{folder}: {counted(size, 'image')}{kept_back}")
    if held_out:
        fresh, total = sum(record.held_out), record.images
        share = f"{100 * fresh / total:.1f} % (--held-out {held_out:g} is exact only on average)"
        typer.echo(f"{out / HELD_OUT}: {fresh} of {total} images, {share}")
    if record.copies:
        copies = counted(record.copies, "image is a copy of another", "images are copies of others")
        kept_together = (
            "; equal images are kept together, all to train on or all held out" if held_out else ""
        )
        typer.echo(f"{copies}{kept_together}")
    sizes = {read_manifest(here / folder.name).size for folder in folders}
    if len(sizes) > 1 or None in sizes:
        typer.echo(
            f"{out}: images of several sizes, and training takes one: {TO_ONE_SIZE}", err=True
        )
    typer.echo(f"{out / 'report.html'}: what they look like")
    if cache is None and here == out:
        again = f"kept for another partition of these images (--cache {kept})"
        typer.echo(f"{kept}: features, {again}; they can be deleted")
