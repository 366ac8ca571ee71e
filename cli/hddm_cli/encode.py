"""hddm encode."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from hddm_cli.options import AnyDevice, InputArgument, InputOption, MaxBad, Out, Overwrite, Seed, refuse_given


def encode(
    context: typer.Context,
    source: Annotated[Path, InputArgument(help="Shard folder of images, or the folder of all shards.")],
    out: Out,
    vae: Annotated[
        Path | None,
        InputOption(help="Folder of an AutoencoderKL or AutoencoderTiny. Default: store pixels."),
    ] = None,
    text_encoder: Annotated[
        Path | None, InputOption(help="Folder of a CLIP text encoder. Default: store no text tokens.")
    ] = None,
    tokenizer: Annotated[Path | None, InputOption(help="Folder of the text encoder's tokenizer.")] = None,
    resolution: Annotated[
        int | None,
        typer.Option(min=1, help="Side to resize and crop images to. Default: keep their size."),
    ] = None,
    random_crop: Annotated[
        bool,
        typer.Option("--random-crop/--center-crop", help="Position of the crop. Default: --center-crop."),
    ] = False,
    random_flip: Annotated[
        bool,
        typer.Option("--random-flip", help="Also encode mirrored images, for --random-flip in training."),
    ] = False,
    image_interpolation_mode: Annotated[
        Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"],
        typer.Option(help="Pillow filter for resizing."),
    ] = "lanczos",
    batch_size: Annotated[int, typer.Option(min=1, help="Images encoded together.")] = 16,
    device: AnyDevice = "auto",
    dtype: Annotated[
        Literal["float16", "bfloat16", "float32"],
        typer.Option(help="Number format of stored latents and text tokens."),
    ] = "float16",
    max_bad: MaxBad = 0,
    seed: Seed = 0,
    overwrite: Overwrite = False,
) -> None:
    """Resize a shard's images once and store pixels or latents.

    Trainings read the result in place of the images. Captions are stored as text tokens. If the command is
    interrupted, run it again to continue; --batch-size and --device may then differ.
    """
    from hddm.data.encoding import EncodingSettings, encode_shards

    if vae is None and text_encoder is None:
        refuse_given(context, "pixels are stored as bytes and pass no network", "dtype", "device")
    if resolution is None:
        refuse_given(
            context,
            "images are taken as they are without --resolution",
            "random_crop",
            "image_interpolation_mode",
        )
    settings = EncodingSettings(
        resolution=resolution,
        crop="random" if random_crop else "center",
        interpolation=image_interpolation_mode,
        random_flip=random_flip,
        dtype=dtype,
        seed=seed,
        batch_size=batch_size,
        max_bad=max_bad,
        device=device,
    )
    manifests = encode_shards(source, out, settings, vae, text_encoder, tokenizer, overwrite)
    for folder, manifest in manifests.items():
        if manifest.encoding is not None:
            shape = "×".join(map(str, manifest.encoding.shape))
            typer.echo(f"{folder}: {manifest.num_rows} images as {manifest.encoding.space}, {shape}")
        for skipped in manifest.skipped:
            typer.echo(f"  left out: {skipped.file}: {skipped.reason}")
