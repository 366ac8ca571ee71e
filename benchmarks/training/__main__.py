"""``python -m benchmarks.training``: see ``--help``."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class DType(StrEnum):
    """Choices of --dtype."""

    float32 = "float32"
    bfloat16 = "bfloat16"


def training(
    results: Annotated[Path, typer.Option("--results", help="Where the result is written.")] = Path(
        __file__
    ).parents[1]
    / "results",
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    dtype: Annotated[list[DType] | None, typer.Option("--dtype", help="Once or twice; default both.")] = None,
    compile_networks: Annotated[bool, typer.Option("--compile", help="torch.compile every network.")] = False,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Default 15.")] = None,
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="Default: all cores.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Half a minute; the numbers mean nothing.")] = False,
) -> None:
    """Time training steps: hddm's, and a plain loop around diffusers' DiT."""
    from benchmarks.training.measure import measure_training

    command = " ".join(part for part in sys.argv[1:] if not part.startswith("/") and part != "--results")
    dtypes = [one.value for one in dtype or DType]
    typer.echo(measure_training(device, dtypes, compile_networks, rounds, threads, quick, results, command))


if __name__ == "__main__":
    typer.run(training)
