"""Images: files decoded to 8-bit pixels, brought to one size, as tensors with labels, and in picture grids.

A file gives the pixels that it gives to Hugging Face's ``datasets`` and to diffusers' training scripts: EXIF
orientation is applied; palettes and CMYK become RGB; an alpha channel is dropped, which shows the colours
below it; colour profiles are ignored; an animation gives its first frame. Gray images stay gray. `fit_image`
resizes as ``train_text_to_image`` does.

torch is imported where it is needed: ``hddm data check`` decodes without it.
"""

import hashlib
import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps

from hddm.data.sources import open_source
from hddm.utils.errors import TO_ONE_SIZE, HddmError, counted, shown

if TYPE_CHECKING:
    import torch
    from torch import Tensor

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
    """An image of more than `LARGEST_IMAGE` pixels."""


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


def read_header(content: bytes | Path, name: Path) -> Header:
    """The header of one encoded image, or of a file; no pixel is decoded.

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

    ``content`` is a PNG, JPEG, WebP, BMP, GIF or TIFF; ``name`` is for the message. 16-bit gray is divided by
    257 and rounded, so that 65535 becomes 255; of 16-bit colour Pillow keeps the upper 8 bits.

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
            deep = np.asarray(upright).astype(np.uint32)
            # Rounded: 257 is odd, so that no value lies halfway.
            return Image.fromarray(((deep + 128) // 257).astype(np.uint8))
    raise HddmError(f"{name}: mode {mode} has no 8-bit form; convert it to gray or RGB first")


def decode(content: bytes, name: Path) -> NDArray[np.uint8]:
    """Pixels (H, W) or (H, W, 3) of one encoded image.

    Raises:
        HddmError: as `open_image`.
    """
    return np.asarray(open_image(content, name))


@contextmanager
def _opened(content: bytes | Path, name: Path) -> Iterator[Image.Image]:
    bound = f"more than {LARGEST_IMAGE} pixels; scale it down or remove it"
    try:
        file = content if isinstance(content, Path) else io.BytesIO(content)
        with Image.open(file, formats=_FORMATS) as image:
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


def in_colour(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pixels (H, W, 3) of a gray (H, W) or colour image."""
    return pixels if pixels.ndim == 3 else np.repeat(pixels[..., None], 3, axis=2)


THREADS = 8
"""That read and decode images; Pillow works outside Python's lock."""
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


def too_many_bad(origin: Path | str, reasons: Sequence[str], max_bad: int) -> HddmError:
    """The error of more bad images, in ``origin``, than ``max_bad``; ``reasons`` name one each."""
    them = "it" if len(reasons) == 1 else "them"
    return HddmError(
        f"{origin}: {counted(len(reasons), 'image')} cannot be read, and {max_bad} may be; mend or remove "
        f"{them}, or leave {them} out with --max-bad {len(reasons)} where that is an option",
        shown(reasons),
    )


def pixel_digest(pixels: NDArray[np.uint8]) -> bytes:
    """SHA-256 of an image's shape and RGB pixels; ``pixels`` are (H, W) or (H, W, 3)."""
    colour = in_colour(pixels)
    return hashlib.sha256(f"{colour.shape}".encode() + colour.tobytes()).digest()


Crop = Literal["center", "random"]
Interpolation = Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"]


def fit_image(
    image: Image.Image,
    resolution: int,
    crop: Crop = "center",
    interpolation: Interpolation = "lanczos",
    generator: "torch.Generator | None" = None,
    name: object = "image",
) -> Image.Image:
    """``image``, in mode L or RGB, as a square of ``resolution`` pixels a side.

    The shorter side becomes ``resolution``, the longer one floor(resolution × longer / shorter), by Pillow's
    filter ``interpolation``; then a square is cut from the middle, where an odd pixel goes as in torchvision
    (half is rounded to even), or at random: uniform, one draw of ``generator`` for rows, then one for
    columns. An image that has the size already stays as it is. ``name`` is for the message.

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
    if size == (resolution, resolution):
        return image
    spare = size[1] - resolution, size[0] - resolution
    if crop == "center":
        top, left = (round(pixels / 2) for pixels in spare)
    else:
        import torch

        top, left = (
            int(torch.randint(pixels + 1, (), generator=generator)) if pixels else 0 for pixels in spare
        )
    return image.crop((left, top, left + resolution, top + resolution))


CELL = 96
"""Pixels of a cell's side."""
_GAP, _GRAY_LEVEL, _BORDER = 2, (128, 128, 128), 96
Key = TypeVar("Key")


def contact_sheet(
    rows: Sequence[Sequence[Key]], read: Callable[[Key], Image.Image], columns: int, cell: int = CELL
) -> Image.Image:
    """One picture of the images that ``read`` gives for the keys in ``rows``; one is in memory at a time.

    A row has ``columns`` images at most. Each is scaled to fit a square of ``cell`` pixels: small ones by a
    whole factor, so that their pixels stay what they are.
    """
    pitch = cell + _GAP
    sheet = Image.new("RGB", (columns * pitch - _GAP, len(rows) * pitch - _GAP), _GRAY_LEVEL)
    for line, row in enumerate(rows):
        for column, key in enumerate(row):
            image = _scaled(read(key).convert("RGB"), cell)
            left, top = column * pitch, line * pitch
            sheet.paste(image, (left + (cell - image.width) // 2, top + (cell - image.height) // 2))
    return sheet


def _scaled(image: Image.Image, side: int) -> Image.Image:
    longest = max(image.size)
    if longest <= side:
        factor = side // longest
        return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    size = tuple(max(1, round(one * side / longest)) for one in image.size)
    return image.resize((size[0], size[1]), Image.Resampling.LANCZOS)


def lines_of(keys: Sequence[Key], columns: int) -> list[Sequence[Key]]:
    """``keys`` in rows of ``columns``."""
    return [keys[start : start + columns] for start in range(0, len(keys), columns)]


@dataclass(frozen=True)
class ImageSet:
    """Images of one size.

    ``pixels`` (N, C, H, W) in uint8 with C = 1 (all gray) or 3; ``labels`` (N,), None for a folder
    without classes; ``classes`` their names; ``files`` the paths, relative to ``root``.
    """

    root: Path
    files: tuple[str, ...]
    pixels: "Tensor"
    labels: "Tensor | None"
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.files)

    @property
    def normalised(self) -> "Tensor":
        """Pixels in [-1, 1], float32: what experts are trained on."""
        return to_unit_range(self.pixels)


def to_unit_range(pixels: "Tensor") -> "Tensor":
    """Bytes to float32 in [-1, 1]."""
    return pixels.float() / 127.5 - 1


def to_bytes(images: "Tensor") -> "Tensor":
    """Images (N, C, H, W) in [-1, 1] to bytes, clipped and rounded.

    Raises:
        HddmError: for NaN or Inf, which would become black or white.
    """
    broken = (~images.isfinite()).reshape(len(images), -1).any(1).nonzero()[:, 0].tolist()
    if broken:
        raise HddmError(f"{len(broken)} images hold NaN or Inf, the first of them numbers {broken[:8]}")
    return ((images.clamp(-1, 1) + 1) * 127.5).round().byte()


def load_images(root: Path) -> ImageSet:
    """Read all images of any source that `hddm.data.sources.open_source` opens, in sorted order.

    Raises:
        HddmError: as `open_source`, `decode` and `stack`.
    """
    import torch

    source = open_source(root)
    names = source.files
    pixels = stack([decode(source.read(i), root / name) for i, name in enumerate(names)], names, root)
    labels = None if source.labels is None else torch.tensor(source.labels)
    return ImageSet(root, tuple(names), pixels, labels, source.classes)


def stack(images: Sequence[np.ndarray], names: Sequence[str], root: Path) -> "Tensor":
    """Bytes (N, C, H, W): gray where all images are, RGB otherwise.

    Raises:
        HddmError: for images of different sizes, by their ``names`` in ``root``.
    """
    import torch

    size = images[0].shape[:2]
    for image, name in zip(images, names, strict=True):
        if image.shape[:2] != size:
            raise HddmError(
                f"{root / name}: is {image.shape[1]}×{image.shape[0]}, {names[0]} is {size[1]}×{size[0]}; "
                f"{TO_ONE_SIZE}"
            )
    if any(image.ndim == 3 for image in images):
        colour = np.stack([in_colour(image) for image in images])
        return torch.from_numpy(colour).permute(0, 3, 1, 2).contiguous()
    return torch.from_numpy(np.stack(images))[:, None]


def tiled(images: "Tensor", columns: int, scale: int) -> "Tensor":
    """Images (N, C, H, W) in bytes as one (C, H', W'), ``scale`` times as large, each with a thin border."""
    import torch

    big = images.repeat_interleave(scale, 2).repeat_interleave(scale, 3)
    big = torch.nn.functional.pad(big, (1, 1, 1, 1), value=_BORDER)
    missing = -len(big) % columns
    big = torch.cat([big, torch.full((missing, *big.shape[1:]), _BORDER, dtype=torch.uint8)])
    return torch.cat([torch.cat(list(row), dim=2) for row in big.split(columns)], dim=1)


def save_png(pixels: "Tensor", path: Path) -> None:
    """Write one image (C, H, W) in uint8."""
    array = pixels.permute(1, 2, 0).numpy()
    Image.fromarray(array[..., 0] if array.shape[2] == 1 else array).save(path)
