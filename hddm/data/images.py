"""Images in memory: resizing as in diffusers' training scripts, arrays with labels, and picture grids.

``train_text_to_image`` scales the shorter side to ``--resolution`` with ``--image_interpolation_mode``
(lanczos by default), then cuts a square from the middle (``--center_crop``) or from anywhere. Scaling is
Pillow's, whose filters widen where images shrink, as in torchvision's transforms of Pillow images.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hddm.data.decoding import LARGEST_IMAGE
from hddm.data.decoding import decode as decode
from hddm.data.sources import open_source
from hddm.utils.errors import TO_ONE_SIZE, HddmError

Crop = Literal["center", "random"]
Interpolation = Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"]


def fit_image(
    image: Image.Image,
    resolution: int,
    crop: Crop = "center",
    interpolation: Interpolation = "lanczos",
    generator: torch.Generator | None = None,
    name: object = "image",
) -> Image.Image:
    """``image`` as a square of ``resolution`` pixels a side.

    The shorter side becomes ``resolution``, the longer one floor(resolution × longer / shorter); then a
    square is cut. An image that has the size already stays as it is.

    Args:
        image: in mode L or RGB.
        resolution: pixels of a side, at least 1.
        crop: ``center``, where an odd pixel goes as in torchvision (half is rounded to even), or ``random``.
        interpolation: Pillow's filter of that name.
        generator: of the place of a random crop: uniform, one draw for rows, then one for columns; torch's
            own without.
        name: for the message.

    Raises:
        HddmError: for an image so long that it would have more than `LARGEST_IMAGE` pixels when scaled.
    """
    width, height = image.size
    shorter = min(width, height)
    size = resolution * width // shorter, resolution * height // shorter
    if size[0] * size[1] > LARGEST_IMAGE:
        raise HddmError(f"{name}: {width}×{height} becomes {size[0]}×{size[1]}; crop it or remove it")
    if size != image.size:
        image = image.resize(size, Image.Resampling[interpolation.upper()])
    spare = size[1] - resolution, size[0] - resolution
    if crop == "center":
        top, left = (round(pixels / 2) for pixels in spare)
    else:
        top, left = (
            int(torch.randint(pixels + 1, (), generator=generator)) if pixels else 0 for pixels in spare
        )
    if size == (resolution, resolution):
        return image
    return image.crop((left, top, left + resolution, top + resolution))


CELL = 96
"""Pixels of a cell's side."""
_GAP = 2
_GROUND = (128, 128, 128)
Key = TypeVar("Key")


def contact_sheet(
    rows: Sequence[Sequence[Key]], read: Callable[[Key], Image.Image], columns: int, cell: int = CELL
) -> Image.Image:
    """One picture of the images that ``read`` gives, one of them in memory at a time.

    Args:
        rows: what stands for each image, row by row.
        read: the image that something stands for.
        columns: images in a row, at most.
        cell: side in pixels of the square that each is scaled to fit: small ones by a whole factor, so that
            their pixels stay what they are.
    """
    pitch = cell + _GAP
    sheet = Image.new("RGB", (columns * pitch - _GAP, len(rows) * pitch - _GAP), _GROUND)
    for line, row in enumerate(rows):
        for column, key in enumerate(row):
            image = fitted(read(key).convert("RGB"), cell)
            left, top = column * pitch, line * pitch
            sheet.paste(image, (left + (cell - image.width) // 2, top + (cell - image.height) // 2))
    return sheet


def fitted(image: Image.Image, side: int) -> Image.Image:
    """``image`` as large as a square of ``side`` allows, enlarged by a whole factor only."""
    longest = max(image.size)
    if longest <= side:
        factor = side // longest
        return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    size = tuple(max(1, round(one * side / longest)) for one in image.size)
    return image.resize((size[0], size[1]), Image.Resampling.LANCZOS)


def lines_of(keys: Sequence[Key], columns: int) -> list[Sequence[Key]]:
    """``keys`` in rows of ``columns``."""
    return [keys[start : start + columns] for start in range(0, len(keys), columns)]


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
