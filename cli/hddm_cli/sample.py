"""hddm sample."""

from typing import Annotated

import typer

from hddm.settings import SampleSettings
from hddm.utils.errors import UsageError
from hddm_cli.options import Model, Out, Overwrite, Resume


def sample(
    source: Model,
    out: Out,
    settings: SampleSettings,
    grid: Annotated[
        bool, typer.Option("--grid", help="Also save OUT.grid.png, a sheet of up to 800 images.")
    ] = False,
    resume: Resume = False,
    overwrite: Overwrite = False,
) -> None:
    """Generate images with an expert or an ensemble.

    Image i depends only on the seed and on i.
    """
    if settings.guidance_scale == 1:
        of_guidance = ("guide_by", "cfg_channels", "guidance_interval", "guidance_rescale")
        if useless := [name for name in of_guidance if name in settings.model_fields_set]:
            options = " and ".join(f"--{name.replace('_', '-')}" for name in useless)
            raise UsageError(f"{options}: only with a --guidance-scale other than 1")
    if settings.mask is None and "resampling_steps" in settings.model_fields_set:
        raise UsageError("--resampling-steps: needs a --mask")
    from hddm.pipelines.samples import sample_to_folder
    from hddm.utils.progress import Progress

    with Progress(None, f"open {source}", is_drawn=False):
        shown = sample_to_folder(source, out, settings, overwrite, grid, resume)
    typer.echo(f"{out}: {settings.num_images} images")
    if shown:
        typer.echo(shown)
