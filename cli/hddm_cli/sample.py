"""hddm sample."""

from typing import Annotated

import typer

from hddm.settings import SampleSettings
from hddm.utils.errors import counted
from hddm_cli.options import DryRun, Model, Out, Overwrite, Resume, opens_experts
from hddm_cli.usage import show


@opens_experts
def sample(
    source: Model,
    out: Out,
    settings: SampleSettings,
    grid: Annotated[
        bool, typer.Option("--grid", help="Also save OUT.grid.png, a sheet of up to 800 images.")
    ] = False,
    resume: Resume = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
) -> None:
    """Generate images with an expert or an ensemble.

    Image i depends only on the seed and on i.
    """
    from hddm.experts.records import refuse_no_model
    from hddm.utils.progress import Progress

    refuse_no_model(source)
    if dry_run:
        with Progress(None, f"open {source}", is_drawn=False):
            from hddm.pipelines.needs import needs_of_sampling

            needs = needs_of_sampling(source, settings, grid)
        show(needs)
        return
    from hddm.pipelines.samples import sample_to_folder

    with Progress(None, f"open {source}", is_drawn=False):
        shown = sample_to_folder(source, out, settings, overwrite, grid, resume)
    typer.echo(f"{out}: {counted(settings.num_images, 'image')}")
    if shown:
        typer.echo(shown)
