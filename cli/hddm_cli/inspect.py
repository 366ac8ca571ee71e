"""hddm inspect."""

from pathlib import Path
from typing import Annotated

import typer


def inspect(
    path: Annotated[Path, typer.Argument(help="Expert, router, ensemble, partition or shard folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Say what an artefact is: objective, schedule, shard, size, licence, provenance."""
    import json

    from hddm.describe import describe

    facts = describe(path)
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    for key, value in facts.items():
        typer.echo(f"{key}: {json.dumps(value) if isinstance(value, dict | list) else value}")
