"""hddm play."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from hddm_cli.options import AnyDevice, InputArgument


def play(
    ensemble: Annotated[Path, InputArgument(help="Ensemble or expert folder, or the Paris release.")],
    after: Annotated[
        Path | None, InputArgument(help="A second one, to see both beside each other: before and after.")
    ] = None,
    port: Annotated[
        int, typer.Option("--port", min=1, max=65535, help="Port of the page; if taken, the next free one.")
    ] = 7860,
    browser: Annotated[
        bool | None,
        typer.Option("--open/--no-open", help="Open the page in a browser; default: on a terminal."),
    ] = None,
    device: AnyDevice = "auto",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "float64"],
        typer.Option("--dtype", help="Dtype that networks run in."),
    ] = "float32",
) -> None:
    """Open a page on this machine to make images with an ensemble, and to see which expert paints what."""
    from hddm.serving.page import Play, serve
    from hddm.utils.progress import Progress

    with Progress(None, "open"):
        opened = Play([ensemble] if after is None else [ensemble, after], device, dtype)
    for model in opened.models:
        typer.echo(f"{model.source}: {', '.join(model.names)}")
    with serve(opened, port) as (address, thread):
        typer.echo(f"{address} (Ctrl-C ends it)")
        if sys.stdout.isatty() if browser is None else browser:
            import webbrowser

            webbrowser.open(address)
        thread.join()
