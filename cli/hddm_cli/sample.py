"""hddm sample."""

from pathlib import Path
from typing import Annotated

import typer

from hddm_cli.options import Out, Overwrite, Seed


def sample(
    source: Annotated[Path, typer.Argument(help="Expert or ensemble folder.")],
    out: Out,
    num_images: Annotated[int, typer.Option("--num-images", min=1, help="Images to make.")] = 16,
    seed: Seed = 0,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Solver steps.")] = 50,
    strategy: Annotated[
        str | None,
        typer.Option(
            "--strategy",
            help="draw, full, top-K, threshold-X or nucleus-X; default: the ensemble's own.",
        ),
    ] = None,
    solver: Annotated[str, typer.Option("--solver", help="euler, heun or adams-bashforth.")] = "euler",
    shift: Annotated[float, typer.Option("--shift", help="Of the time grid; 1 is even.")] = 1.0,
    guidance_scale: Annotated[
        float, typer.Option("--guidance-scale", help="Classifier-free guidance; 1 is none.")
    ] = 1.0,
    class_labels: Annotated[
        str | None,
        typer.Option(
            "--class-labels",
            help="Class names, or numbers from 0 where no name fits; comma-separated, cycled.",
        ),
    ] = None,
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, help="Images at a time; does not change them.")
    ] = 64,
    overwrite: Overwrite = False,
) -> None:
    """Make images from an expert or an ensemble. Image i depends on the seed and i alone."""
    from hddm.progress import Progress
    from hddm.sample_folders import sample_to_folder

    with Progress(num_images, "sample") as progress:
        sample_to_folder(
            source,
            out,
            num_images,
            seed=seed,
            steps=steps,
            strategy=strategy,
            solver=solver,
            shift=shift,
            guidance_scale=guidance_scale,
            class_labels=class_labels,
            batch_size=batch_size,
            overwrite=overwrite,
            on_batch=progress,
        )
    typer.echo(f"{out}: {num_images} images")
