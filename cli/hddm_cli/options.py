"""Options that several verbs share."""

import re
from pathlib import Path
from typing import Annotated

import typer

Out = Annotated[Path, typer.Option("--out", help="Folder to write; must not exist.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing --out.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of everything random.")]
Steps = Annotated[
    int | None, typer.Option("--steps", min=1, help="Training steps; required, here or in --config.")
]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Images a step.")]
LearningRate = Annotated[float, typer.Option("--learning-rate", help="Peak rate of AdamW.")]
Precision = Annotated[
    str, typer.Option("--mixed-precision", help="no, bf16 or fp16; weights and averages stay in float32.")
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or mps.")]
Size = Annotated[str, typer.Option("--size", help="Named network size: tiny, small, S/2 … XL/8.")]

_UNITS = {"": 1, "B": 1} | {
    unit: size
    for power, letter in enumerate("KMG", 1)
    for unit, size in ((letter, 1000**power), (f"{letter}B", 1000**power), (f"{letter}IB", 1024**power))
}


def parse_size(text: str, option: str) -> int:
    """Bytes in ``6GB``, ``500 MB`` or ``1.5GiB``.

    Raises:
        typer.BadParameter: for anything else.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS or not float(match[1]):
        raise typer.BadParameter(f"{text!r} is no amount of memory; write it as 6GB", param_hint=option)
    return int(float(match[1]) * _UNITS[match[2].upper()])
