"""Decoding of image files to pixels of 8 bits, gray or RGB, or a refusal that names the file.

The rules are those of Hugging Face's ``datasets`` and of diffusers' training scripts, so that a data set
gives the same pixels: EXIF orientation is applied; palettes and CMYK become RGB; an alpha channel is dropped,
which shows the colours below it; colour profiles are ignored; an animation gives its first frame. Gray images
stay gray. Also here: how many bad images may be skipped, and which images are equal in every pixel.
"""

import hashlib
import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps

from hddm.data.sources import ImageSource
from hddm.utils.errors import HddmError, counted, shown
from hddm.utils.progress import Progress

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
    """Header of an encoded image; width and height are those of the upright image."""

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


def in_colour(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pixels (H, W, 3) of a gray (H, W) or colour image."""
    return pixels if pixels.ndim == 3 else np.repeat(pixels[..., None], 3, axis=2)


THREADS = 8
"""That read and decode images; Pillow works outside Python's lock."""
_BATCH = 1024
"""Images that wait for a thread at a time."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def read_ahead(
    pool: ThreadPoolExecutor, read: Callable[[Item], Result], batches: Iterable[Sequence[Item]], ahead: int
) -> Iterator[list[Result]]:
    """Results of ``read`` for every item, by batches, while the next ``ahead`` batches are being read."""
    waiting: deque[list[Future[Result]]] = deque()
    for batch in batches:
        waiting.append([pool.submit(read, item) for item in batch])
        if len(waiting) > ahead:
            yield [future.result() for future in waiting.popleft()]
    while waiting:
        yield [future.result() for future in waiting.popleft()]


def why_bad(source: ImageSource, row: int) -> str | None:
    """Why an image cannot be read, None where it can."""
    try:
        decode(source.read(row), source.root / source.files[row])
    except HddmError as error:
        return error.message
    return None


def find_bad(source: ImageSource, rows: range) -> dict[int, str]:
    """Why images cannot be read, by number, for those of ``rows`` that cannot."""
    found: dict[int, str] = {}
    if not rows:
        return found
    with Progress(len(rows), "look for other bad images") as advance, ThreadPoolExecutor(THREADS) as pool:
        for start in range(rows.start, rows.stop, _BATCH):
            part = range(start, min(start + _BATCH, rows.stop))
            reasons = pool.map(lambda row: why_bad(source, row), part)
            found |= {row: reason for row, reason in zip(part, reasons, strict=True) if reason is not None}
            advance(len(part))
    return found


def too_many_bad(origin: Path | str, reasons: Sequence[str], max_bad: int) -> HddmError:
    """The error of more bad images, in ``origin``, than ``max_bad``; ``reasons`` name one each."""
    them = "it" if len(reasons) == 1 else "them"
    return HddmError(
        f"{origin}: {counted(len(reasons), 'image')} cannot be read, and {max_bad} may be; mend or remove "
        f"{them}, or leave {them} out with --max-bad {len(reasons)} where that is an option",
        shown(reasons),
    )


_TRAINING = frozenset({"train", "training"})
_OTHERS = frozenset(
    {"test", "testing", "val", "valid", "validation", "dev", "eval", "evaluation"}
    | {"held_out", "held-out", "heldout", "holdout"}
)


def pixel_digest(pixels: NDArray[np.uint8]) -> bytes:
    """SHA-256 of an image's shape and RGB pixels; ``pixels`` are (H, W) or (H, W, 3)."""
    colour = in_colour(pixels)
    return hashlib.sha256(f"{colour.shape}".encode() + colour.tobytes()).digest()


def equal_groups(digests: NDArray[np.uint8]) -> list[list[int]]:
    """Rows of ``digests`` (N, 32) that are equal to another, in groups; all in ascending order."""
    words = np.ascontiguousarray(digests).view(np.uint64)
    order = np.lexsort((np.arange(len(words)), *words.T))
    equal = (words[order[1:]] == words[order[:-1]]).all(1)
    edges = np.diff(equal.astype(np.int8), prepend=0, append=0)
    runs = zip(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1), strict=True)
    return sorted(order[first : last + 1].tolist() for first, last in runs)


def count_copies(digests: NDArray[np.uint8]) -> int:
    """How many of ``digests`` (N, 32) are equal to one before."""
    return sum(len(group) - 1 for group in equal_groups(digests))


def split_of(files: Sequence[str]) -> tuple[str, ...]:
    """The folders at the top of ``files`` that are sides of a split, as ``train`` and ``test``, sorted.

    None unless there are images to train on and others, which a class of that name would not bring.
    """
    folders = {name.split("/")[0] for name in files if "/" in name}
    sides = {name for name in folders if name.lower() in _TRAINING | _OTHERS}
    known = {name.lower() for name in sides}
    return tuple(sorted(sides)) if known & _TRAINING and known & _OTHERS else ()
