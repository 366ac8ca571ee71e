"""Images of a shard as an encoding takes them: of one size, gray or in colour, read by threads."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from PIL import ExifTags, Image
from torch import Tensor

from hddm.data.decoding import open_image
from hddm.data.resize import Crop, Interpolation, fit_image
from hddm.data.shard_records import ImageEntry, image_path, read_content
from hddm.errors import HddmError
from hddm.tensors import generator

_CROP_STREAM = 1
_AHEAD = 2
"""Batches that are read while the networks are at one."""

THREADS = 8
"""That read images; Pillow works outside Python's lock."""

_TURNED = range(5, 9)
"""EXIF orientations that exchange width and height."""

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Fit:
    """How images are brought to a square of side ``resolution``, as diffusers' training scripts do it."""

    resolution: int
    crop: Crop = "center"
    interpolation: Interpolation = "lanczos"
    seed: int = 0

    def __call__(self, image: Image.Image, index: int, name: Path) -> Image.Image:
        """As `fit_image`; the crop of image ``index`` depends on (``seed``, ``index``) alone."""
        draws = generator(self.seed, _CROP_STREAM, index) if self.crop == "random" else None
        return fit_image(image, self.resolution, self.crop, self.interpolation, draws, name)


def survey(shards: Iterable[tuple[Path, Sequence[ImageEntry]]]) -> tuple[int, set[tuple[int, int]]]:
    """Channels that all images share, 1 or 3, and their sizes (H, W), by their headers alone.

    Files that are no images are left for whoever reads them.
    """
    places = [image_path(folder, entry) for folder, entries in shards for entry in entries]
    with ThreadPoolExecutor(THREADS) as pool:
        found = [one for one in pool.map(_header, places) if one is not None]
    channels = 3 if any(colour for colour, _ in found) else 1
    return channels, {size for _, size in found}


def _header(path: Path) -> tuple[bool, tuple[int, int]] | None:
    """Whether an image has colours, and its (H, W) upright; None for a file that is no image."""
    try:
        with Image.open(path) as image:
            mode, (width, height) = image.mode, image.size
            is_turned = image.getexif().get(ExifTags.Base.Orientation, 1) in _TURNED
    except Exception:  # whatever a decoder makes of a damaged file
        return None
    is_gray = mode in ("1", "L") or mode.startswith("I")
    return not is_gray, (width, height) if is_turned else (height, width)


def read_image(folder: Path, entry: ImageEntry, index: int, channels: int, fit: Fit | None) -> Tensor:
    """Pixels (``channels``, H, W) in uint8 of image ``index`` of a shard; gray is repeated for colour.

    Raises:
        HddmError: as `read_content`, `open_image` and `fit_image`.
    """
    path = folder / entry.file
    image = open_image(read_content(folder, entry), path)
    if fit is not None:
        image = fit(image, index, path)
    pixels = torch.from_numpy(np.array(image))
    pixels = pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)
    if len(pixels) > channels:
        raise HddmError(f"{path}: is in colour, and {channels} channel is encoded")
    return pixels.expand(channels, -1, -1).contiguous()


def read_ahead(
    pool: ThreadPoolExecutor, read: Callable[[Item], Result], batches: Iterable[Sequence[Item]]
) -> Iterator[list[Result]]:
    """What ``read`` gives for every item, a batch at a time, while the next batches are being read."""
    waiting: deque[list[Future[Result]]] = deque()
    for batch in batches:
        waiting.append([pool.submit(read, item) for item in batch])
        if len(waiting) > _AHEAD:
            yield [future.result() for future in waiting.popleft()]
    while waiting:
        yield [future.result() for future in waiting.popleft()]
