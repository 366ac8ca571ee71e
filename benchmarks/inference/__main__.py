"""``python -m benchmarks.inference``: see ``--help``."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class DType(StrEnum):
    """Choices of --dtype."""

    float32 = "float32"
    bfloat16 = "bfloat16"


def inference(
    results: Annotated[Path, typer.Option("--results", help="Where the result is written.")] = Path(
        __file__
    ).parents[1]
    / "results",
    work: Annotated[Path, typer.Option("--work", help="Where 1.3 GB of experts lie while it runs.")] = Path(
        "runs/inference"
    ),
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    dtype: Annotated[list[DType] | None, typer.Option("--dtype", help="Once or twice; default both.")] = None,
    compile_networks: Annotated[bool, typer.Option("--compile", help="torch.compile every network.")] = False,
    memory: Annotated[bool, typer.Option("--memory/--no-memory", help="Measure memory too.")] = True,
    repeats: Annotated[int | None, typer.Option("--repeats", min=1, help="Rounds; default 5.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Half a minute; the numbers mean nothing.")] = False,
) -> None:
    """Time a step and peak memory of ensembles of random weights."""
    from diffusers.utils import logging

    from benchmarks.inference.measure import measure_inference

    # It warns of casting a whole model.
    logging.set_verbosity_error()

    kept = [part for part in sys.argv[1:] if not part.startswith("/")]
    command = " ".join(part for part in kept if part not in ("--work", "--results"))
    dtypes = [one.value for one in dtype or DType]
    written = measure_inference(
        device, dtypes, compile_networks, memory, repeats, quick, work, results, command
    )
    typer.echo(written)


if __name__ == "__main__":
    typer.run(inference)
