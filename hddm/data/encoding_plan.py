"""Plan of an encoding (shards, options, networks), checked before the first image is encoded."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from hddm.data.images import THREADS, Crop, Header, Interpolation, fit_image, open_image, read_header
from hddm.data.shard_records import (
    MANIFEST,
    PARTITION_FILE,
    Computed,
    Dtype,
    EncodingRecord,
    ImageEntry,
    ShardManifest,
    find_held_out,
    find_shards,
    image_path,
    read_content,
    read_manifest,
)
from hddm.data.shards import RowLayout, layout_of
from hddm.networks.identity import TextEncoderRecord, VaeRecord
from hddm.networks.text_encoder import CLIP, read_text_encoder, read_tokenizer, text_encoder_facts
from hddm.networks.vae import read_vae, scale_of, vae_facts
from hddm.utils.errors import HddmError, UsageError
from hddm.utils.records import Record, Seed
from hddm.utils.streams import Use, generator
from hddm.utils.tensors import available_device

if TYPE_CHECKING:
    from diffusers import AutoencoderKL, AutoencoderTiny
    from transformers import CLIPTextModel, CLIPTokenizer


class EncodingSettings(Record):
    """Options of an encoding; see `hddm.data.shard_records.EncodingRecord`.

    Without ``resolution`` images keep their size. ``random_flip`` also encodes mirrored images. ``dtype`` is
    that of stored latents and tokens; networks run in float32. ``max_bad`` limits the skipped images of all
    shards.
    """

    resolution: int | None = Field(default=None, ge=1)
    crop: Crop = "center"
    interpolation: Interpolation = "lanczos"
    random_flip: bool = False
    dtype: Dtype = "float16"
    seed: Seed = 0
    batch_size: int = Field(default=16, ge=1)
    max_bad: int = Field(default=0, ge=0)
    device: str = "auto"


@dataclass(frozen=True)
class ShardToEncode:
    """A shard of images: its folder, and its place below the output folder ("" for the output itself)."""

    folder: Path
    place: str
    manifest: ShardManifest


@dataclass(frozen=True)
class EncodingPlan:
    """Shards to encode, networks, and layout of a row; ``channels`` are stored or passed to the VAE."""

    source: Path
    shards: tuple[ShardToEncode, ...]
    settings: EncodingSettings
    encoding: EncodingRecord
    channels: int
    vae: "AutoencoderKL | AutoencoderTiny | None"
    vae_record: VaeRecord | None
    text: "tuple[CLIPTextModel, CLIPTokenizer] | None"
    text_record: TextEncoderRecord | None

    @property
    def record(self) -> str:
        """Name of the JSON file that marks the output's kind."""
        return MANIFEST if self.shards[0].place == "" else PARTITION_FILE

    @property
    def num_images(self) -> int:
        """Images in all shards."""
        return sum(len(shard.manifest.images) for shard in self.shards)

    @property
    def layout(self) -> RowLayout:
        """Shape of a row and dtype of each tensor."""
        return layout_of(self.encoding, self.vae_record, self.text_record)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of all tensors."""
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in self.layout.values())

    @property
    def computed(self) -> Computed | None:
        """Device and batches of the networks, None without networks."""
        if self.vae is None and self.text is None:
            return None
        one = self.settings
        return Computed(device=one.device, batch_size=one.batch_size, torch=str(torch.__version__))

    def identity(self) -> dict[str, Any]:
        """Plain values that decide the content, apart from rounding: batches may become smaller."""
        return {
            "shards": {shard.place: shard.manifest.hash for shard in self.shards},
            "encoding": self.encoding.model_dump(mode="json"),
            "vae": self.vae_record and self.vae_record.model_dump(),
            "text_encoder": self.text_record and self.text_record.model_dump(),
        }

    def read_image(self, shard: ShardToEncode, index: int) -> Tensor:
        """Pixels (`channels`, H, W) of an image in uint8; gray is repeated to RGB.

        Its random crop depends on the seed and ``index`` alone. Raises as `read_content`, `open_image`,
        `fit_image`.
        """
        one, entry = self.settings, shard.manifest.images[index]
        path = shard.folder / entry.file
        image = open_image(read_content(shard.folder, entry), path)
        if one.resolution is not None:
            draws = generator(one.seed, Use.CROPS, index) if one.crop == "random" else None
            image = fit_image(image, one.resolution, one.crop, one.interpolation, draws, path)
        pixels = torch.from_numpy(np.array(image))
        pixels = pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)
        if len(pixels) > self.channels:
            raise HddmError(f"{path}: is in colour, and {self.channels} channel is encoded")
        return pixels.expand(self.channels, -1, -1).contiguous()


def plan_encoding(
    source: Path,
    settings: EncodingSettings,
    vae: Path | None = None,
    text_encoder: Path | None = None,
    tokenizer: Path | None = None,
) -> EncodingPlan:
    """Check ``source`` (a shard of images or a partition) and the networks' folders; open the networks.

    Raises `HddmError` for conflicting options, captions missing for a text encoder, images of several sizes
    without a resolution, and a size that the VAE does not take.
    """
    if (text_encoder is None) != (tokenizer is None):
        lacking = "--tokenizer" if tokenizer is None else "--text-encoder"
        raise UsageError(f"{lacking}: text needs a text encoder and its tokenizer; name both folders")
    if settings.random_flip and vae is None:
        raise HddmError(
            "--random-flip: only latents need it, since training mirrors pixels itself; leave it out"
        )
    if settings.resolution is None and settings.crop == "random":
        raise UsageError("--random-crop: needs --resolution, the side that images are cropped to")
    shards = _shards(source)
    device = available_device(settings.device)
    settings = settings.model_copy(update={"device": str(device)})
    network = None if vae is None else read_vae(vae)
    channels, size = _size(source, shards, settings, network is None)
    shape, vae_record = (channels, *size), None
    if vae is not None and network is not None:
        # Not diffusers' own `to`, which warns of casts that do not happen here.
        nn.Module.to(network, device)
        channels, shape = _latent_shape(vae, network, size)
        vae_record = vae_facts(vae)
    text, text_record = None, None
    if text_encoder is not None and tokenizer is not None:
        for shard in shards:
            images = shard.manifest.images
            if without := [entry.file for entry in images if entry.caption is None]:
                raise HddmError(
                    f"{shard.folder}: {len(without)} of {len(images)} images have no caption, as "
                    f"{without[0]}; drop --text-encoder or partition images with captions"
                )
        text = (read_text_encoder(text_encoder), read_tokenizer(tokenizer))
        nn.Module.to(text[0], device)
        text_record = text_encoder_facts(text_encoder, text[1].model_max_length)
        if text_record.kind != CLIP:
            raise HddmError(f"{text_encoder}: is a {text_record.kind}, but captions need a {CLIP}")
    is_fitted = settings.resolution is not None
    encoding = EncodingRecord(
        space="pixels" if network is None else "latents",
        shape=shape,
        dtype="uint8" if network is None else settings.dtype,
        resolution=settings.resolution,
        crop=settings.crop if is_fitted else None,
        interpolation=settings.interpolation if is_fitted else None,
        mirrored=settings.random_flip,
        text_dtype=None if text is None else settings.dtype,
        seed=settings.seed if is_fitted and settings.crop == "random" else 0,
    )
    return EncodingPlan(source, shards, settings, encoding, channels, network, vae_record, text, text_record)


def _shards(source: Path) -> tuple[ShardToEncode, ...]:
    """Shards in ``source``, those of held-out images last."""
    folders = [source]
    if (source / PARTITION_FILE).is_file():
        folders = [*find_shards(source), *find_held_out(source)]
    shards = []
    for folder in folders:
        place = "" if folder == source else folder.relative_to(source).as_posix()
        shards.append(ShardToEncode(folder, place, read_manifest(folder)))
    return tuple(shards)


def _size(
    source: Path, shards: tuple[ShardToEncode, ...], settings: EncodingSettings, is_pixels: bool
) -> tuple[int, tuple[int, int]]:
    """Channels of all images, and their size (H, W) after resizing."""
    side = settings.resolution
    if side is not None and not is_pixels:
        return 3, (side, side)
    channels, sizes = survey((shard.folder, shard.manifest.images) for shard in shards)
    if side is not None:
        return channels, (side, side)
    if len(sizes) != 1:
        some = ", ".join(f"{width}×{height}" for height, width in sorted(sizes)[:3])
        raise HddmError(
            f"{source}: holds images of {len(sizes)} sizes ({some}{', …' if len(sizes) > 3 else ''}); bring "
            "them to one with --resolution"
        )
    return channels, sizes.pop()


def survey(shards: Iterable[tuple[Path, Sequence[ImageEntry]]]) -> tuple[int, set[tuple[int, int]]]:
    """Channels shared by all images, 1 or 3, and their sizes (H, W), from headers; skips non-images."""
    paths = [image_path(folder, entry) for folder, entries in shards for entry in entries]
    with ThreadPoolExecutor(THREADS) as pool:
        headers = [header for header in pool.map(_header, paths) if header is not None]
    is_gray = all(header.mode in ("1", "L") or header.mode.startswith("I") for header in headers)
    return 1 if is_gray else 3, {(header.height, header.width) for header in headers}


def _header(path: Path) -> Header | None:
    try:
        return read_header(path, path)
    except HddmError:
        return None


def _latent_shape(
    folder: Path, vae: "AutoencoderKL | AutoencoderTiny", size: tuple[int, int]
) -> tuple[int, tuple[int, int, int]]:
    """Channels of the VAE's images and (C, h, w) of its latents."""
    factor, channels = scale_of(vae), int(vae.config.in_channels)
    if channels not in (1, 3):
        raise HddmError(f"{folder}: encodes images of {channels} channels, not of 1 or 3")
    if size[0] % factor or size[1] % factor:
        raise HddmError(
            f"{folder}: encodes sides that are multiples of {factor}, not {size[1]}×{size[0]}; change "
            f"--resolution"
        )
    return channels, (int(vae.config.latent_channels), size[0] // factor, size[1] // factor)
