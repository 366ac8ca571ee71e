"""Image folders in memory: bytes (N, C, H, W), with class folders as labels."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hddm.errors import HddmError

SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}
_GRAY = {"1", "L"}
_COLOUR = {"RGB", "RGBA", "P", "LA", "CMYK", "YCbCr"}


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
    """Read ``root/<class>/<file>`` or ``root/<file>``, in sorted order.

    Raises:
        HddmError: for a missing or empty folder, a file that is no image, a mode that has no 8-bit
            equivalent or images of different sizes; the message names the file.
    """
    if not root.is_dir():
        raise HddmError(f"{root}: no such folder of images")
    files = sorted(
        str(path.relative_to(root))
        for path in root.rglob("*")
        if path.suffix.lower() in SUFFIXES and path.is_file()
    )
    if not files:
        raise HddmError(f"{root}: holds no images ({', '.join(sorted(SUFFIXES))})")
    pixels = stack([decode((root / name).read_bytes(), root / name) for name in files], files)
    parents = [Path(name).parts[0] if len(Path(name).parts) > 1 else None for name in files]
    if None in parents:
        return ImageSet(root, tuple(files), pixels, None, ())
    classes = tuple(sorted({parent for parent in parents if parent is not None}))
    labels = torch.tensor([classes.index(str(parent)) for parent in parents])
    return ImageSet(root, tuple(files), pixels, labels, classes)


def decode(content: bytes, path: Path) -> np.ndarray:
    """Pixels (H, W) or (H, W, 3) in uint8 of one encoded image; ``path`` is for the message."""
    try:
        with Image.open(io.BytesIO(content)) as image:
            if image.mode in _GRAY:
                return np.asarray(image.convert("L"))
            if image.mode in _COLOUR:
                return np.asarray(image.convert("RGB"))
            mode = image.mode
    except Exception as error:
        # Decoders of damaged files also raise SyntaxError, ValueError and more.
        raise HddmError(f"{path}: cannot be read as an image; remove it or save it again") from error
    raise HddmError(f"{path}: mode {mode} has no 8-bit form; convert it to gray or RGB first")


def stack(images: Sequence[np.ndarray], names: Sequence[str]) -> Tensor:
    """Bytes (N, C, H, W): gray where all images are, RGB otherwise."""
    size = images[0].shape[:2]
    for image, name in zip(images, names, strict=True):
        if image.shape[:2] != size:
            raise HddmError(
                f"{name}: is {image.shape[1]}×{image.shape[0]}, {names[0]} is {size[1]}×{size[0]}; "
                "resize the images to one size first"
            )
    colour = any(image.ndim == 3 for image in images)
    if colour:
        images = [i if i.ndim == 3 else np.repeat(i[..., None], 3, axis=2) for i in images]
        return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()
    return torch.from_numpy(np.stack(images))[:, None]


def save_png(pixels: Tensor, path: Path) -> None:
    """Write one image (C, H, W) in uint8."""
    array = pixels.permute(1, 2, 0).numpy()
    Image.fromarray(array[..., 0] if array.shape[2] == 1 else array).save(path)
