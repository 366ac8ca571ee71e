"""hddm inspect."""

from pathlib import Path
from typing import Annotated

import typer

from hddm_cli.options import InputArgument
from hddm_cli.plain import plain_lines


def inspect(
    path: Annotated[Path, InputArgument(help="Any folder of hddm's, a result, images, or a checkpoint.")],
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read pickle files; what is no weight is refused.")
    ] = False,
    variant: Annotated[str | None, typer.Option("--variant", help="Of the weights file, as fp16.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Say what an artefact is: objective, schedule, shard, size, licence, provenance."""
    import json

    from hddm.checkpoints.inspect import inspected

    facts = inspected(path, allow_pickle, variant)
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    for line in plain_lines(facts):
        typer.echo(line)
