"""Encoded images → pixels of 8 bits, gray or RGB, or a refusal by name.

As Hugging Face's ``datasets`` and the training scripts of diffusers do, so that a data set gives the same
pixels here: EXIF orientation is applied; palettes and CMYK become RGB; an alpha channel is dropped, which
shows the colours below it; profiles of colour are ignored; of an animation the first frame is taken. Gray
images stay gray.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps

from hddm.errors import HddmError

LARGEST_IMAGE = 89_478_485
"""Pixels of the largest image that is decoded, Pillow's own bound: 256 MiB in RGB."""

# Other decoders of Pillow run programs (EPS) or have no use here.
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
# EXIF orientations that change an image, and those of them that exchange its sides.
_TURNED, _SIDEWAYS = range(2, 9), range(5, 9)
_GRAY = {"1", "L"}
_COLOUR = {"RGB", "RGBA", "RGBX", "P", "LA", "CMYK", "YCbCr"}
_DEEP = {"I;16", "I;16L", "I;16B", "I;16N"}


class OversizedImageError(HddmError):
    """An image of more pixels than are decoded."""


@dataclass(frozen=True)
class Header:
    """What an encoded image says about itself; width and height are those of the upright image."""

    format: str
    mode: str
    width: int
    height: int
    transparent: bool
    turned: bool
    animated: bool


def read_header(content: bytes, name: Path) -> Header:
    """The header of one encoded image, at the cost of no pixels.

    Raises:
        HddmError: as `open_image`, for damage that shows so early.
    """
    with _opened(content, name) as image:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
        width, height = image.size
        return Header(
            image.format or "",
            image.mode,
            *((height, width) if orientation in _SIDEWAYS else (width, height)),
            image.has_transparency_data,
            orientation in _TURNED,
            # A JPEG of two pictures has a preview or a depth map, which nobody takes for a film.
            image.format != "MPO" and getattr(image, "is_animated", False),
        )


def open_image(content: bytes, name: Path) -> Image.Image:
    """One encoded image, upright, in mode L or RGB.

    16-bit gray is divided by 257 and rounded, so that 65535 becomes 255; of 16-bit colour Pillow keeps the
    upper 8 bits.

    Args:
        content: a PNG, JPEG, WebP, BMP, GIF or TIFF.
        name: for the message.

    Raises:
        OversizedImageError: for more than `LARGEST_IMAGE` pixels, before they are decoded.
        HddmError: for what is no image or is damaged, and for a mode without 8-bit form.
    """
    with _opened(content, name) as image:
        mode, kind = image.mode, image.format
        upright: Image.Image = ImageOps.exif_transpose(image)
        if mode in _GRAY:
            return upright.convert("L")
        if mode in _COLOUR:
            # Straight to RGB, a palette with several transparent colours gives a warning.
            return (upright.convert("RGBA") if mode == "P" else upright).convert("RGB")
        # Before its version 11, Pillow opened a PNG of 16 bits in 32.
        if mode in _DEEP or (mode == "I" and kind == "PNG"):
            return Image.fromarray(_shallow(np.asarray(upright)))
    raise HddmError(f"{name}: mode {mode} has no 8-bit form; convert it to gray or RGB first")


def decode(content: bytes, name: Path) -> NDArray[np.uint8]:
    """Pixels (H, W) or (H, W, 3) of one encoded image.

    Raises:
        HddmError: as `open_image`.
    """
    return np.asarray(open_image(content, name))


@contextmanager
def _opened(content: bytes, name: Path) -> Iterator[Image.Image]:
    bound = f"more than {LARGEST_IMAGE} pixels; scale it down or remove it"
    try:
        with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            if image.width * image.height > LARGEST_IMAGE:
                raise OversizedImageError(f"{name}: is {image.width}×{image.height}, {bound}")
            yield image
    except HddmError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise OversizedImageError(f"{name}: has {bound}") from error
    except Exception as error:
        # Decoders of damaged files also raise SyntaxError, ValueError and more.
        raise HddmError(f"{name}: cannot be read as an image; remove it or save it again") from error


def _shallow(deep: NDArray[Any]) -> NDArray[np.uint8]:
    """Values of 16 bits / 257, rounded; 257 is odd, so that no value lies halfway."""
    return ((deep.astype(np.uint32) + 128) // 257).astype(np.uint8)
