"""hddm play."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from hddm.settings import Computing
from hddm_cli.options import Model, ModelArgument, opens_experts


@opens_experts
def play(
    ensemble: Model,
    settings: Computing,
    after: Annotated[
        Path | None, ModelArgument(help="Second model, to show both side by side.")
    ] = None,
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port of the page, or the next free one.")
    ] = 7860,
) -> None:
    """Open a local web page that generates images.

    It also shows what each expert contributes. On a terminal, the page opens in a browser.
    """
    from hddm.experts.records import refuse_no_model

    sources = [ensemble] if after is None else [ensemble, after]
    for source in sources:
        refuse_no_model(source)
    from hddm.serving.page import Play, serve
    from hddm.utils.progress import Progress

    with Progress(None, "open"):
        opened = Play(sources, settings)
    for model in opened.models:
        typer.echo(f"{model.source}: {', '.join(model.names)}")
    with serve(opened, port) as (address, thread):
        typer.echo(f"{address} (Ctrl-C ends it)")
        if sys.stdout.isatty():
            import webbrowser

            webbrowser.open(address)
        thread.join()
