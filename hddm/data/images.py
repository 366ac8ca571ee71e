"""Images in memory: bytes (N, C, H, W), with their labels."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hddm.data.decoding import decode as decode
from hddm.data.sources import open_source
from hddm.errors import HddmError
from hddm.wording import TO_ONE_SIZE

_BORDER = 96


@dataclass(frozen=True)
class ImageSet:
    """Images of one size.

    ``pixels`` (N, C, H, W) in uint8 with C = 1 (all gray) or 3; ``labels`` (N,), None for a folder
    without classes; ``classes`` their names; ``files`` the paths, relative to ``root``.
    """

    root: Path
    files: tuple[str, ...]
    pixels: Tensor
    labels: Tensor | None
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.files)

    @property
    def normalised(self) -> Tensor:
        """Pixels in [-1, 1], float32: what experts are trained on."""
        return to_unit_range(self.pixels)


def to_unit_range(pixels: Tensor) -> Tensor:
    """Bytes to float32 in [-1, 1]."""
    return pixels.float() / 127.5 - 1


def to_bytes(images: Tensor) -> Tensor:
    """Images (N, C, H, W) in [-1, 1] to bytes, clipped and rounded.

    Raises:
        HddmError: for NaN or Inf, which would become black or white.
    """
    broken = (~images.isfinite()).reshape(len(images), -1).any(1).nonzero()[:, 0].tolist()
    if broken:
        raise HddmError(f"{len(broken)} images hold NaN or Inf, the first of them numbers {broken[:8]}")
    return ((images.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def load_images(root: Path) -> ImageSet:
    """Read all images of any source that `hddm.data.sources.open_source` opens, in sorted order.

    Raises:
        HddmError: for a missing or empty folder, a file that is no image, a mode that has no 8-bit
            equivalent or images of different sizes; the message names the file.
    """
    source = open_source(root)
    names = source.files
    pixels = stack([decode(source.read(i), root / name) for i, name in enumerate(names)], names, root)
    labels = None if source.labels is None else torch.tensor(source.labels)
    return ImageSet(root, tuple(names), pixels, labels, source.classes)


def stack(images: Sequence[np.ndarray], names: Sequence[str], root: Path) -> Tensor:
    """Bytes (N, C, H, W): gray where all images are, RGB otherwise; ``names`` are relative to ``root``."""
    size = images[0].shape[:2]
    for image, name in zip(images, names, strict=True):
        if image.shape[:2] != size:
            raise HddmError(
                f"{root / name}: is {image.shape[1]}×{image.shape[0]}, {names[0]} is {size[1]}×{size[0]}; "
                f"{TO_ONE_SIZE}"
            )
    colour = any(image.ndim == 3 for image in images)
    if colour:
        images = [i if i.ndim == 3 else np.repeat(i[..., None], 3, axis=2) for i in images]
        return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()
    return torch.from_numpy(np.stack(images))[:, None]


def tiled(images: Tensor, columns: int, scale: int) -> Tensor:
    """Images (N, C, H, W) in bytes as one (C, H', W'), ``scale`` times as large, each with a thin border."""
    big = images.repeat_interleave(scale, 2).repeat_interleave(scale, 3)
    big = torch.nn.functional.pad(big, (1, 1, 1, 1), value=_BORDER)
    missing = -len(big) % columns
    big = torch.cat([big, torch.full((missing, *big.shape[1:]), _BORDER, dtype=torch.uint8)])
    return torch.cat([torch.cat(list(row), dim=2) for row in big.split(columns)], dim=1)


def save_png(pixels: Tensor, path: Path) -> None:
    """Write one image (C, H, W) in uint8."""
    array = pixels.permute(1, 2, 0).numpy()
    Image.fromarray(array[..., 0] if array.shape[2] == 1 else array).save(path)
