"""hddm encode."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from hddm_cli.options import AnyDevice, InputArgument, InputOption, Out, Overwrite, Seed, refuse_given


def encode(
    context: typer.Context,
    source: Annotated[Path, InputArgument(help="Shard of images, or the folder of all shards.")],
    out: Out,
    vae: Annotated[
        Path | None, InputOption("--vae", help="Folder of an AutoencoderKL or AutoencoderTiny; else pixels.")
    ] = None,
    text_encoder: Annotated[
        Path | None, InputOption("--text-encoder", help="Folder of a CLIP text encoder, for captions.")
    ] = None,
    tokenizer: Annotated[Path | None, InputOption("--tokenizer", help="Folder of its tokenizer.")] = None,
    resolution: Annotated[
        int | None,
        typer.Option("--resolution", min=1, help="Side to resize and crop to; default: as the images are."),
    ] = None,
    buckets: Annotated[
        bool,
        typer.Option(
            "--buckets", help="Fit each picture to the nearest aspect ratio, 1:2 to 2:1, of the same area."
        ),
    ] = False,
    bucket_step: Annotated[
        int | None,
        typer.Option(
            "--bucket-step", min=1, help="Sides of buckets are multiples of it; default: 4 numbers of a row."
        ),
    ] = None,
    random_crop: Annotated[
        bool, typer.Option("--random-crop/--center-crop", help="What is kept of the longer side.")
    ] = False,
    random_flip: Annotated[
        bool, typer.Option("--random-flip", help="Encode mirror images too, for flips in training.")
    ] = False,
    image_interpolation_mode: Annotated[
        Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"],
        typer.Option("--image-interpolation-mode", help="Of Pillow, to resize with."),
    ] = "lanczos",
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Images a network takes.")] = 16,
    device: AnyDevice = "auto",
    dtype: Annotated[
        Literal["float16", "bfloat16", "float32"],
        typer.Option("--dtype", help="That latents and tokens are stored in."),
    ] = "float16",
    max_bad: Annotated[
        int, typer.Option("--max-bad", min=0, help="Images that may be left out, by name.")
    ] = 0,
    seed: Seed = 0,
    overwrite: Overwrite = False,
) -> None:
    """Bring a shard's images to one size or to buckets, to latents and text tokens, once for all trainings.

    The same command goes on where a killed one stopped; --batch-size and --device may be others then.
    """
    from hddm.data.encoding import described, encode_shards
    from hddm.data.encoding_plan import EncodingSettings, plan_encoding
    from hddm.utils.progress import Progress

    if vae is None and text_encoder is None:
        refuse_given(context, "pixels are stored as bytes and pass no network", "dtype", "device")
    if not buckets:
        refuse_given(context, "it is of --buckets", "bucket_step")
    if resolution is None:
        refuse_given(
            context,
            "images are taken as they are without --resolution",
            "random_crop",
            "image_interpolation_mode",
        )
    settings = EncodingSettings(
        resolution=resolution,
        buckets=buckets,
        bucket_step=bucket_step,
        crop="random" if random_crop else "center",
        interpolation=image_interpolation_mode,
        random_flip=random_flip,
        dtype=dtype,
        seed=seed,
        batch_size=batch_size,
        max_bad=max_bad,
        device=device,
    )
    plan = plan_encoding(source, settings, vae, text_encoder, tokenizer)
    with Progress(plan.num_images, "encode") as progress:
        manifests = encode_shards(plan, out, overwrite, progress)
    for shard, manifest in zip(plan.shards, manifests, strict=True):
        shape = "×".join(map(str, manifest.encoding.shape))
        typer.echo(f"{out / shard.place}: {manifest.num_rows} images as {manifest.encoding.space}, {shape}")
        if buckets:
            typer.echo(f"  {described(plan, shard, manifest)}")
        for skipped in manifest.skipped:
            typer.echo(f"  left out: {skipped.file}: {skipped.reason}")
