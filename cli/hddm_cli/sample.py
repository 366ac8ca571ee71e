"""hddm sample."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from hddm.utils.errors import UsageError, asked
from hddm_cli.options import (
    AnyDevice,
    InputArgument,
    InputOption,
    Out,
    Overwrite,
    Seed,
    StrategyOption,
    is_given,
    parse_size,
)


def sample(
    context: typer.Context,
    source: Annotated[Path, InputArgument(help="Expert or ensemble folder, or the Paris release.")],
    out: Out,
    num_images: Annotated[int, typer.Option("--num-images", min=1, help="Images to make.")] = 16,
    seed: Seed = 0,
    start: Annotated[
        int, typer.Option("--start", min=0, help="Number of the first image, to continue or to split work.")
    ] = 0,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", help="Text; several are cycled over the images.")
    ] = None,
    negative_prompt: Annotated[
        str | None,
        typer.Option("--negative-prompt", help="Text that guidance moves away from; default: no text."),
    ] = None,
    class_labels: Annotated[
        str | None,
        typer.Option(
            "--class-labels",
            help="Class names, or numbers from 0 where no name fits; comma-separated, cycled.",
        ),
    ] = None,
    conditions: Annotated[
        Path | None,
        InputOption(
            "--conditions", help="Safetensors file of conditions by keyword, and negative_<keyword>; cycled."
        ),
    ] = None,
    init_image: Annotated[
        Path | None,
        InputOption("--init-image", help="Picture to begin with, cropped and resized to the images' size."),
    ] = None,
    strength: Annotated[
        float | None,
        typer.Option(
            "--strength", min=0, max=1, help="How much of --init-image is new; default: 0.8, with --mask 1."
        ),
    ] = None,
    mask: Annotated[
        Path | None, InputOption("--mask", help="Picture that is white where --init-image is made anew.")
    ] = None,
    resampling_steps: Annotated[
        int, typer.Option("--resampling-steps", min=1, help="How often each step is taken with --mask.")
    ] = 10,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Solver steps; default: 25, or a student's own.")
    ] = None,
    strategy: Annotated[
        str | None,
        StrategyOption(help="draw, full, top-K, threshold-X or nucleus-X; default: the ensemble's own."),
    ] = None,
    expert: Annotated[
        int | None,
        typer.Option(
            "--expert", min=0, help="Use this expert alone (of a pair by noise both), without the router."
        ),
    ] = None,
    router_every: Annotated[
        int, typer.Option("--router-every", min=1, help="Ask the router at every n-th call only.")
    ] = 1,
    solver: Annotated[
        Literal["euler", "heun", "adams-bashforth", "adams-moulton"] | None,
        typer.Option("--solver", help="Solver of the ODE; default: adams-moulton, or a student's euler."),
    ] = None,
    shift: Annotated[
        float | None, typer.Option("--shift", help="Shift of the time grid, 1 is even; default: the model's.")
    ] = None,
    guidance_scale: Annotated[
        float, typer.Option("--guidance-scale", help="Strength of guidance; 1 is none.")
    ] = 1.0,
    guide_by: Annotated[
        Literal["condition", "weak"],
        typer.Option(
            "--guide-by", help="Away from no class or text, or from each expert's early, weaker self."
        ),
    ] = "condition",
    cfg_channels: Annotated[
        int | None,
        typer.Option("--cfg-channels", min=1, help="Guide the first n channels only; DiT's paper: 3."),
    ] = None,
    guidance_interval: Annotated[
        tuple[float, float], typer.Option("--guidance-interval", help="Guide between these t only.")
    ] = (0.0, 1.0),
    guidance_rescale: Annotated[
        float, typer.Option("--guidance-rescale", help="Share of the way back to the unguided deviation.")
    ] = 0.0,
    height: Annotated[
        int | None, typer.Option("--height", min=1, help="Of the images in pixels; default: the model's.")
    ] = None,
    width: Annotated[
        int | None, typer.Option("--width", min=1, help="Of the images in pixels; default: the model's.")
    ] = None,
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, help="Images at a time; changes them by rounding only.")
    ] = 64,
    device: AnyDevice = "auto",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "float64"],
        typer.Option("--dtype", help="Dtype that networks run in."),
    ] = "float32",
    offload: Annotated[
        Literal["none", "ram", "disk"],
        typer.Option("--offload", help="Where idle experts wait: on the device, in memory, on disk."),
    ] = "none",
    max_memory: Annotated[
        str | None, typer.Option("--max-memory", help="Limit of all weights on the device: 6GB, 500MB.")
    ] = None,
    compile_networks: Annotated[
        bool, typer.Option("--compile", help="Compile the experts; the first steps take minutes.")
    ] = False,
    output_type: Annotated[
        Literal["png", "latent"], typer.Option("--output-type", help="PNG images, or the experts' output.")
    ] = "png",
    grid: Annotated[
        bool,
        typer.Option(
            "--grid",
            help="Also write OUT.grid.png, a picture of up to 800 images, in rows by class or prompt.",
        ),
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", is_eager=True, help="Go on with a run of the same options, to the same images."
        ),
    ] = False,
    overwrite: Overwrite = False,
) -> None:
    """Make images from an expert or an ensemble. Image i depends on the seed and i alone."""
    if guidance_scale == 1:
        of_guidance = ("guide_by", "cfg_channels", "guidance_interval", "guidance_rescale")
        if given := [f"--{name.replace('_', '-')}" for name in of_guidance if is_given(context, name)]:
            raise UsageError(
                f"{' and '.join(given)}: take effect with a --guidance-scale that is not 1; give one"
            )
    if mask is None and is_given(context, "resampling_steps"):
        raise UsageError("--resampling-steps: takes effect with a --mask; give one")
    from hddm.pipelines.samples import SampleSettings, sample_to_folder
    from hddm.utils.progress import Progress
    from hddm.utils.records import OPTIONS, parse_record

    options = {
        "num_images": num_images,
        "seed": seed,
        "start": start,
        "steps": steps,
        "solver": solver,
        "shift": shift,
        "strategy": strategy,
        "expert": expert,
        "router_every": router_every,
        "guidance_scale": guidance_scale,
        "guide_by": guide_by,
        "cfg_channels": cfg_channels,
        "guidance_interval": guidance_interval,
        "guidance_rescale": guidance_rescale,
        "class_labels": class_labels,
        "prompts": tuple(prompt or ()),
        "negative_prompt": negative_prompt,
        "conditions": conditions,
        "init_image": init_image,
        "strength": strength,
        "mask": mask,
        "resampling_steps": resampling_steps,
        "height": height,
        "width": width,
        "batch_size": batch_size,
        "device": device,
        "dtype": dtype,
        "offload": offload,
        "max_memory": None if max_memory is None else parse_size(max_memory, "--max-memory"),
        "compile": compile_networks,
        "output_type": output_type,
    }
    with asked():
        settings = parse_record(options, SampleSettings, OPTIONS)

    with Progress(None, f"open {source}", is_drawn=False):
        shown = sample_to_folder(source, out, settings, overwrite, grid, resume)
    typer.echo(f"{out}: {num_images} images")
    if shown:
        typer.echo(shown)
