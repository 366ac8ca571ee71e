"""hddm describe."""

from pathlib import Path
from typing import Annotated

import typer

from hddm_cli.options import InputArgument, InputOption


def describe(
    expert: Annotated[Path, InputArgument(help="Expert folder; its topic is replaced.")],
    captions: Annotated[
        Path | None, InputOption("--captions", help="Text file with a caption of its images a line.")
    ] = None,
    data: Annotated[Path | None, InputOption("--data", help="Shard of images with captions.")] = None,
    text: Annotated[
        str | None,
        typer.Option("--text", help='Phrases in place of captions, as "oil paintings, portraits".'),
    ] = None,
    text_encoder: Annotated[
        Path | None, InputOption("--text-encoder", help="Folder; default: what the expert keeps.")
    ] = None,
    tokenizer: Annotated[Path | None, InputOption("--tokenizer", help="Folder of its tokenizer.")] = None,
) -> None:
    """Say what an expert's captions are about, so that an ensemble sends it the prompts that are for it."""
    from hddm.training.topics import describe_topic

    made = describe_topic(expert, captions, data, text, text_encoder, tokenizer)
    typer.echo(f"{expert}: described by {made.count} captions, {made.source}")
