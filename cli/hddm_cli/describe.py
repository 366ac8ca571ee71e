"""hddm describe."""

from pathlib import Path
from typing import Annotated

import typer

from hddm_cli.options import InputArgument, InputOption


def describe(
    expert: Annotated[Path, InputArgument(help="Expert folder; its topic is replaced.")],
    captions: Annotated[Path | None, InputOption(help="Text file with one caption per line.")] = None,
    data: Annotated[Path | None, InputOption(help="Shard folder of images with captions.")] = None,
    text: Annotated[
        str | None, typer.Option(help='Phrases to use as captions, such as "oil paintings, portraits".')
    ] = None,
    text_encoder: Annotated[
        Path | None, InputOption(help="Folder of the text encoder. Default: the expert's own.")
    ] = None,
    tokenizer: Annotated[Path | None, InputOption(help="Folder of the text encoder's tokenizer.")] = None,
) -> None:
    """Describe an expert by its captions, so that prompts find it.

    An ensemble then sends prompts to the experts with similar captions. Provide --captions, --data or --text.
    """
    from hddm.experts.topics import describe_topic

    made = describe_topic(expert, captions, data, text, text_encoder, tokenizer)
    typer.echo(f"{expert}: described by {made.count} captions, {made.source}")
