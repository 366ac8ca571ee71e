"""hddm sample."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from hddm.utils.errors import UsageError, asked
from hddm_cli.options import (
    AnyDevice,
    Dtype,
    InputOption,
    Model,
    Out,
    Overwrite,
    Seed,
    StrategyOption,
    is_given,
    parse_size,
)


def sample(
    context: typer.Context,
    source: Model,
    out: Out,
    num_images: Annotated[int, typer.Option(min=1, help="Number of images.")] = 16,
    seed: Seed = 0,
    start: Annotated[
        int, typer.Option(min=0, help="Number of the first image, to continue or to split work.")
    ] = 0,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Text prompt; several are cycled over the images.")
    ] = None,
    negative_prompt: Annotated[
        str | None, typer.Option(help="Text that guidance moves away from. Default: no text.")
    ] = None,
    class_labels: Annotated[
        str | None,
        typer.Option(help="Class names or numbers, separated by commas and cycled over the images."),
    ] = None,
    conditions: Annotated[
        Path | None,
        InputOption(help="Safetensors file of conditions by name or negative_NAME, cycled over the images."),
    ] = None,
    init_image: Annotated[
        Path | None, InputOption(help="Image to edit; it is cropped and resized to the output size.")
    ] = None,
    strength: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Amount of change to --init-image. Default: 0.8; 1 with --mask."),
    ] = None,
    mask: Annotated[
        Path | None, InputOption(help="Mask image, white where --init-image is replaced.")
    ] = None,
    resampling_steps: Annotated[int, typer.Option(min=1, help="Repeats of each step with --mask.")] = 10,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Solver steps. Default: 25, or a distilled student's own.")
    ] = None,
    strategy: Annotated[
        str | None,
        StrategyOption(
            help="Strategy: draw, commit-X, full, top-K, threshold-X or nucleus-X. Default: the ensemble's."
        ),
    ] = None,
    expert: Annotated[
        int | None, typer.Option(min=0, help="Index of an expert to use alone, without the router.")
    ] = None,
    router_every: Annotated[int, typer.Option(min=1, help="Network calls per call of the router.")] = 1,
    solver: Annotated[
        Literal["euler", "heun", "adams-bashforth", "adams-moulton"] | None,
        typer.Option(help="ODE solver. Default: adams-moulton; euler for a distilled student."),
    ] = None,
    shift: Annotated[
        float | None, typer.Option(help="Shift of the time grid; 1 is even. Default: the model's own.")
    ] = None,
    guidance_scale: Annotated[float, typer.Option(help="Guidance scale; 1 is no guidance.")] = 1.0,
    guide_by: Annotated[
        Literal["condition", "weak"],
        typer.Option(help="Guide away from the unconditional prediction or from each expert's weak model."),
    ] = "condition",
    cfg_channels: Annotated[
        int | None,
        typer.Option(min=1, help="Number of channels to guide, such as 3 for DiT. Default: all."),
    ] = None,
    guidance_interval: Annotated[
        tuple[float, float], typer.Option(metavar="LOW HIGH", help="Noise levels t that are guided.")
    ] = (0.0, 1.0),
    guidance_rescale: Annotated[
        float, typer.Option(help="Strength of rescaling to the unguided standard deviation, 0 to 1.")
    ] = 0.0,
    height: Annotated[int | None, typer.Option(min=1, help="Image height. Default: the model's own.")] = None,
    width: Annotated[int | None, typer.Option(min=1, help="Image width. Default: the model's own.")] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Images computed together; it affects rounding only.")
    ] = 64,
    device: AnyDevice = "auto",
    dtype: Dtype = "float32",
    offload: Annotated[
        Literal["none", "ram", "disk"],
        typer.Option(help="Place of idle experts: on the device (none), in memory or on disk."),
    ] = "none",
    max_memory: Annotated[
        str | None,
        typer.Option(help="Limit of weights on the device with --offload, such as 6GB. Default: no limit."),
    ] = None,
    compile_networks: Annotated[
        bool, typer.Option("--compile", help="Compile the experts; the first steps then take minutes.")
    ] = False,
    output_type: Annotated[
        Literal["png", "latent"], typer.Option(help="PNG images, or the experts' output as latents.")
    ] = "png",
    grid: Annotated[
        bool,
        typer.Option("--grid", help="Also save OUT.grid.png, a sheet of up to 800 images."),
    ] = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", is_eager=True, help="Resume an interrupted run with the same options."),
    ] = False,
    overwrite: Overwrite = False,
) -> None:
    """Generate images with an expert or an ensemble.

    Image i depends only on the seed and on i.
    """
    given = dict(locals())
    if guidance_scale == 1:
        of_guidance = ("guide_by", "cfg_channels", "guidance_interval", "guidance_rescale")
        if useless := [f"--{name.replace('_', '-')}" for name in of_guidance if is_given(context, name)]:
            raise UsageError(f"{' and '.join(useless)}: only with a --guidance-scale other than 1")
    if mask is None and is_given(context, "resampling_steps"):
        raise UsageError("--resampling-steps: needs a --mask")
    from hddm.pipelines.samples import SampleSettings, sample_to_folder
    from hddm.utils.progress import Progress
    from hddm.utils.records import OPTIONS, parse_record

    options = {name: value for name, value in given.items() if name in SampleSettings.model_fields}
    options |= {"prompts": tuple(prompt or ()), "compile": compile_networks}
    options["max_memory"] = None if max_memory is None else parse_size(max_memory, "--max-memory")
    with asked():
        settings = parse_record(options, SampleSettings, OPTIONS)

    with Progress(None, f"open {source}", is_drawn=False):
        shown = sample_to_folder(source, out, settings, overwrite, grid, resume)
    typer.echo(f"{out}: {num_images} images")
    if shown:
        typer.echo(shown)
