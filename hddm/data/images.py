"""Images: decoding to 8-bit pixels, resizing, tensors with labels, picture grids, and digits to try it on.

Pixels equal those of Hugging Face's ``datasets`` and diffusers' training scripts: EXIF orientation is
applied; palettes and CMYK become RGB; an alpha channel is dropped, which shows the colours below it; colour
profiles are ignored; of an animation, the first frame is read. Gray images stay gray. `fit_image` resizes as
``train_text_to_image`` does. torch is imported lazily, so that ``hddm data check`` runs without it.
"""

import hashlib
import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo

from hddm.utils.errors import TO_ONE_SIZE, HddmError, counted, optional, shown

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_IMAGE = 89_478_485
"""Pixels of the largest image that is decoded (Pillow's own limit): 256 MiB in RGB."""

# Other decoders of Pillow run programs (EPS) or have no use here.
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
_GRAY = {"1", "L"}
_COLOUR = {"RGB", "RGBA", "RGBX", "P", "LA", "CMYK", "YCbCr"}
_DEEP = {"I;16", "I;16L", "I;16B", "I;16N"}


class OversizedImageError(HddmError):
    """An image of more than `LARGEST_IMAGE` pixels."""


class Decoded(NamedTuple):
    """Pixels (H, W) or (H, W, 3), upright, and what the encoded image was: Pillow's mode and format."""

    pixels: NDArray[np.uint8]
    mode: str
    format: str
    is_transparent: bool


def read_image(content: bytes, name: Path) -> Decoded:
    """Decode one encoded image; raises as `open_image`."""
    with _opened(content, name) as image:
        pixels = np.asarray(as_trained(image, name))
        return Decoded(pixels, image.mode, image.format or "", image.has_transparency_data)


def open_image(content: bytes, name: Path, most: int = LARGEST_IMAGE) -> Image.Image:
    """Decode one PNG, JPEG, WebP, BMP, GIF or TIFF to what `as_trained` makes of it.

    Raises:
        OversizedImageError: for more than ``most`` pixels, before they are decoded.
        HddmError: for a file that is no image or damaged, and as `as_trained`.
    """
    with _opened(content, name, most) as image:
        return as_trained(image, name)


def open_holes(content: bytes, name: Path, most: int = LARGEST_IMAGE) -> Image.Image | None:
    """A mask in mode L, white where an encoded image is fully transparent; None if it has no transparency.

    Raises as `open_image`.
    """
    with _opened(content, name, most) as image:
        if not image.has_transparency_data:
            return None
        alpha = ImageOps.exif_transpose(image).convert("RGBA").getchannel("A")
        return alpha.point(lambda level: 0 if level else 255)


def as_trained(image: Image.Image, name: object = "image") -> Image.Image:
    """The image upright in mode L or RGB, as experts are trained on it; ``name`` is for the message.

    16-bit gray is divided by 257 and rounded, so that 65535 becomes 255; of 16-bit colour Pillow keeps the
    upper 8 bits. Raises `HddmError` for a mode without 8-bit form.
    """
    mode, kind = image.mode, image.format
    upright: Image.Image = ImageOps.exif_transpose(image)
    if mode in _GRAY:
        return upright.convert("L")
    if mode in _COLOUR:
        # Converting straight to RGB warns for palettes with several transparent colours.
        return (upright.convert("RGBA") if mode == "P" else upright).convert("RGB")
    # Before its version 11, Pillow opened a PNG of 16 bits in 32.
    if mode in _DEEP or (mode == "I" and kind == "PNG"):
        deep = np.asarray(upright).astype(np.uint32)
        # Rounded; 257 is odd, so no value lies halfway.
        return Image.fromarray(((deep + 128) // 257).astype(np.uint8))
    raise HddmError(f"{name}: mode {mode} has no 8-bit form; convert it to gray or RGB first")


def decode_image(content: bytes, name: Path) -> NDArray[np.uint8]:
    """Pixels (H, W) or (H, W, 3) of one encoded image; raises as `open_image`."""
    return read_image(content, name).pixels


@contextmanager
def _opened(content: bytes, name: Path, most: int = LARGEST_IMAGE) -> Iterator[Image.Image]:
    bound = f"more than {most} pixels; scale it down or remove it"
    try:
        with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            if image.width * image.height > most:
                raise OversizedImageError(f"{name}: is {image.width}×{image.height}, {bound}")
            yield image
    except HddmError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise OversizedImageError(f"{name}: has {bound}") from error
    except Exception as error:
        # Decoders of damaged files also raise SyntaxError, ValueError and more.
        raise HddmError(
            f"{name}: cannot be read as an image; remove it or save it again"
        ) from error


def in_colour(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pixels (H, W, 3) of a gray (H, W) or colour image."""
    return pixels if pixels.ndim == 3 else np.repeat(pixels[..., None], 3, axis=2)


THREADS = 8
"""Threads that read and decode images; Pillow releases Python's lock."""
Item = TypeVar("Item")
Returned = TypeVar("Returned")


def read_ahead(
    pool: ThreadPoolExecutor,
    read: Callable[[Item], Returned],
    batches: Iterable[Sequence[Item]],
    ahead: int,
) -> Iterator[list[Returned]]:
    """Results of ``read`` for every item, in batches, while the next ``ahead`` batches are being read."""
    waiting: deque[list[Future[Returned]]] = deque()
    for batch in batches:
        waiting.append([pool.submit(read, item) for item in batch])
        if len(waiting) > ahead:
            yield [future.result() for future in waiting.popleft()]
    while waiting:
        yield [future.result() for future in waiting.popleft()]


def too_many_bad(origin: Path | str, reasons: Sequence[str], max_bad: int) -> HddmError:
    """Error for more than ``max_bad`` bad images in ``origin``; ``reasons`` name one each, so far."""
    return HddmError(
        f"{origin}: {counted(len(reasons), 'image')} cannot be read, and {max_bad} may be; hddm data check "
        "lists all; repair or remove them, or leave them out with `max_bad` where that is an option",
        shown(reasons),
    )


def shared_images(
    option: str, path: Path, total: int, among: str, shared: Mapping[str, str]
) -> HddmError:
    """Error for an ``option`` whose images must not be ``among`` others, and some of ``total`` are.

    ``shared`` has their names, each with that of the image that it equals.
    """
    name, other = next(iter(shared.items()))
    example = f"such as {name}, which is {other} there"
    if len(shared) == total:
        remedy = "name other images; hddm partition --held-out keeps some"
        return HddmError(f"`{option}` {path}: all its images are also {among}, {example}; {remedy}")
    number = f"{len(shared)} of {counted(total, 'image')} are also {among}, {example}"
    remedy = "remove them here, or name other images; hddm partition --held-out keeps some"
    return HddmError(f"`{option}` {path}: {number}; {remedy}", shown(list(shared)))


def pixel_digest(pixels: NDArray[np.uint8]) -> bytes:
    """SHA-256 of an image's shape and RGB pixels; ``pixels`` are (H, W) or (H, W, 3)."""
    colour = in_colour(pixels)
    return hashlib.sha256(f"{colour.shape}".encode() + colour.tobytes()).digest()


def fit_image(image: Image.Image, resolution: int, name: object = "image") -> Image.Image:
    """Resize and crop ``image`` (mode L or RGB) to a square with sides of ``resolution`` pixels.

    The shorter side becomes ``resolution``, the longer one floor(resolution × longer / shorter), by Pillow's
    Lanczos filter. The square is cut from the centre, where an odd pixel goes as in torchvision
    (half is rounded to even). An image of the right size is unchanged. Raises `HddmError`, with ``name``, for
    an image so long that it would have more than `LARGEST_IMAGE` pixels when scaled.
    """
    width, height = image.size
    shorter = min(width, height)
    size = resolution * width // shorter, resolution * height // shorter
    if size[0] * size[1] > LARGEST_IMAGE:
        raise HddmError(
            f"{name}: {width}×{height} becomes {size[0]}×{size[1]}; crop it or remove it"
        )
    if size != image.size:
        image = image.resize(size, Image.Resampling.LANCZOS)
    if size == (resolution, resolution):
        return image
    left = round((size[0] - resolution) / 2)
    top = round((size[1] - resolution) / 2)
    return image.crop((left, top, left + resolution, top + resolution))


CELL = 96
"""Pixels of a cell's side."""
_GAP, _GRAY_LEVEL, _BORDER = 2, (128, 128, 128), 96


def contact_sheet(
    items: Sequence[Item], read: Callable[[Item], Image.Image], columns: int, cell: int = CELL
) -> Image.Image:
    """Grid of the images that ``read`` returns for ``items``, ``columns`` a row; one is in memory at a time.

    Each is scaled to fit a square of ``cell`` pixels, small ones by an
    integer factor, so that their pixels stay sharp.
    """
    pitch = cell + _GAP
    size = columns * pitch - _GAP, -(-len(items) // columns) * pitch - _GAP
    sheet = Image.new("RGB", size, _GRAY_LEVEL)
    for number, item in enumerate(items):
        image = _scaled(read(item).convert("RGB"), cell)
        row, column = divmod(number, columns)
        left = column * pitch + (cell - image.width) // 2
        top = row * pitch + (cell - image.height) // 2
        sheet.paste(image, (left, top))
    return sheet


def _scaled(image: Image.Image, side: int) -> Image.Image:
    longest = max(image.size)
    if longest <= side:
        factor = side // longest
        return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    width = max(1, round(image.width * side / longest))
    height = max(1, round(image.height * side / longest))
    return image.resize((width, height), Image.Resampling.LANCZOS)


@dataclass(frozen=True)
class ImageSet:
    """Images of one size.

    ``pixels`` (N, C, H, W) are uint8 with C = 1 (all gray) or 3; ``labels`` (N,) are None for a folder
    without classes; ``files`` are paths relative to ``root``.
    """

    root: Path
    files: tuple[str, ...]
    pixels: "Tensor"
    labels: "Tensor | None"
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.files)


def to_unit_range(pixels: "Tensor") -> "Tensor":
    """Bytes to float32 in [-1, 1]."""
    return pixels.float() / 127.5 - 1


def to_bytes(images: "Tensor") -> "Tensor":
    """Convert images (N, C, H, W) in [-1, 1] to bytes, clipped and rounded.

    Raises `HddmError` for NaN or Inf, which would become black or white.
    """
    broken = (~images.isfinite()).reshape(len(images), -1).any(1).nonzero()[:, 0].tolist()
    if broken:
        raise HddmError(
            f"{len(broken)} images hold NaN or Inf, the first of them numbers {broken[:8]}"
        )
    return ((images.clamp(-1, 1) + 1) * 127.5).round().byte()


def stack(images: Sequence[np.ndarray], names: Sequence[str], root: Path) -> "Tensor":
    """Bytes (N, C, H, W): gray if all images are, else RGB.

    Raises `HddmError` for images of different sizes, by their ``names`` in ``root``.
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
    """Tile images (N, C, H, W) in bytes to one (C, H', W'), scaled by ``scale``, with thin borders."""
    import torch

    big = images.repeat_interleave(scale, 2).repeat_interleave(scale, 3)
    big = torch.nn.functional.pad(big, (1, 1, 1, 1), value=_BORDER)
    missing = -len(big) % columns
    big = torch.cat([big, torch.full((missing, *big.shape[1:]), _BORDER, dtype=torch.uint8)])
    return torch.cat([torch.cat(list(row), dim=2) for row in big.split(columns)], dim=1)


def save_png(
    pixels: "Tensor", file: Path | BinaryIO, texts: Mapping[str, str] | None = None
) -> None:
    """Write one image (C, H, W) in uint8, with ``texts`` by keyword as chunks of the PNG."""
    array = pixels.permute(1, 2, 0).numpy()
    info = PngInfo()
    for key, text in (texts or {}).items():
        info.add_itxt(key, text)
    if array.shape[2] == 1:
        array = array[..., 0]
    Image.fromarray(array).save(file, "png", pnginfo=info)


def have_equal_pixels(one: Path, other: Path) -> bool:
    """True for two PNG files of one mode, one size and equal pixels, whatever else they say."""
    with Image.open(one) as first, Image.open(other) as second:
        same = (first.mode, first.size) == (second.mode, second.size)
        return same and first.tobytes() == second.tobytes()


TRAINING, HELD_OUT = "train", "held_out"
_HELD_OUT_SHARE = 5


def write_digits(folder: Path, seed: int = 0) -> tuple[Path, Path]:
    """Write ``train/<digit>/<n>.png`` and ``held_out/<digit>/<n>.png``; return both folders.

    1,797 images of 8×8 pixels from the test part of the UCI Optical Recognition of Handwritten Digits
    set. A fifth of them, chosen at random, is held out before anything looks at the rest.
    """
    bunch = optional("sklearn.datasets", "the digits", "train").load_digits()
    # Levels are 0 … 16.
    pixels = np.round(bunch.images / 16 * 255).astype(np.uint8)
    # Not from the table of streams: this split belongs to the data, and published results share it.
    order = np.random.default_rng(seed).permutation(len(pixels))
    held_out = set(order[: len(pixels) // _HELD_OUT_SHARE].tolist())
    for index, (image, digit) in enumerate(zip(pixels, bunch.target.tolist(), strict=True)):
        side = HELD_OUT if index in held_out else TRAINING
        path = folder / side / str(digit) / f"{index:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    return folder / TRAINING, folder / HELD_OUT
