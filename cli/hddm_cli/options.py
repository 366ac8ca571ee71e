"""Options that several verbs share."""

from pathlib import Path
from typing import Annotated

import typer

Out = Annotated[Path, typer.Option("--out", help="Folder to write; must not exist.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing --out.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of everything random.")]
Steps = Annotated[int, typer.Option("--steps", min=1, help="Training steps.")]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Images a step.")]
LearningRate = Annotated[float, typer.Option("--learning-rate", help="Peak rate of AdamW.")]
Size = Annotated[str, typer.Option("--size", help="Named network size: tiny, small, S/2 … XL/8.")]
