"""hddm partition."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from hddm_cli.options import Out, Overwrite, Seed


def partition(
    images: Annotated[
        Path,
        typer.Argument(help="Folder of images, of class folders or with metadata.jsonl, tars, or Parquet."),
    ],
    out: Out,
    shards: Annotated[str, typer.Option("--shards", help="Number of shards, or auto: proposed, 2 to 16.")],
    seed: Seed = 0,
    overwrite: Overwrite = False,
    features: Annotated[
        str,
        typer.Option("--features", help="pixels, dinov2, clip, a model folder, or a name on the hub."),
    ] = "pixels",
    cache: Annotated[
        Path | None,
        typer.Option("--cache", help="Folder that keeps features; without it OUT.features."),
    ] = None,
    max_bad: Annotated[int, typer.Option("--max-bad", min=0, help="Broken images to skip, by name.")] = 0,
    held_out: Annotated[
        float, typer.Option("--held-out", help="Share of each shard that is kept from training.")
    ] = 0.0,
    caption_column: Annotated[
        str | None, typer.Option("--caption-column", help="Of the captions; else text or caption.")
    ] = None,
    label_column: Annotated[
        str | None, typer.Option("--label-column", help="Of the class labels; else label.")
    ] = None,
) -> None:
    """Divide images into shards of similar content and nearly equal size."""
    from hddm.data.partition import partition as divide
    from hddm.describe import describe

    folders = divide(
        images,
        out,
        _number(shards),
        seed,
        overwrite,
        features=features,
        cache=cache or out.with_name(f"{out.name}.features"),
        replace_cache=overwrite and cache is None,
        max_bad=max_bad,
        held_out=held_out,
        caption_column=caption_column,
        label_column=label_column,
    )
    facts = describe(out)
    for number, silhouette in (facts["proposal"] or {}).items():
        typer.echo(f"{number} shards: silhouette {silhouette:.3f}")
    for name in facts["skipped"]:
        typer.echo(f"skipped {images / name}: cannot be read", err=True)
    held = facts["held_out"] or [0] * len(folders)
    for folder, size, kept in zip(folders, facts["sizes"], held, strict=True):
        typer.echo(f"{folder}: {size} images" + (f", {kept} held out" if kept else ""))
    typer.echo(f"{out / 'report.html'}: what they look like")


def _number(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"{text!r} is neither a number from 1 nor auto", param_hint="--shards")
    return int(text)
