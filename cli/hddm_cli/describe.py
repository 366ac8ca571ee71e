"""hddm describe."""

from pathlib import Path
from typing import Annotated

import typer

from hddm.settings import Described, InputPath, ModelPath
from hddm.utils.errors import counted
from hddm_cli.options import InputArgument, opens_experts


class Captions(Described):
    """Where captions come from, and what reads them."""

    captions: InputPath | None = None
    """Text file with one caption per line."""
    data: InputPath | None = None
    """Shard folder of images with captions."""
    text: str | None = None
    """Phrases to use as captions, with commas between them: "oil paintings, portraits"."""
    text_encoder: ModelPath | None = None
    """Folder of the text encoder. Default: the expert's own."""
    tokenizer: ModelPath | None = None
    """Folder of the text encoder's tokenizer."""


@opens_experts
def describe(
    expert: Annotated[Path, InputArgument(help="Expert folder; its topic is replaced.")],
    source: Captions,
) -> None:
    """Describe an expert by its captions, so that prompts find it.

    An ensemble then sends prompts to the experts with similar captions. Provide --captions, --data or --text.
    """
    from hddm.experts.records import refuse_no_expert

    refuse_no_expert(expert)
    from hddm.experts.topics import describe_topic

    made = describe_topic(expert, **dict(source))
    what = counted(made.count, "caption" if source.text is None else "phrase")
    typer.echo(f"{expert}: described by {what}: {made.source}")
