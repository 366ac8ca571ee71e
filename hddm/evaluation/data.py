"""The images of one side, with what a result must say about them."""

import hashlib
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from hddm.data.decoding import read_header
from hddm.data.images import ImageSet, decode, stack
from hddm.data.sources import open_source
from hddm.errors import HddmError

FEWEST = 2


@dataclass(frozen=True)
class DataFacts:
    """What was measured: ``hash`` is of all pixels, whatever their order, names and encoding.

    ``shape`` (C, H, W) is that of the measured images; ``modes`` counts images by Pillow's mode of their
    files, and ``made_colour`` those gray ones that became RGB since others are in colour.
    """

    path: str
    images: int
    hash: str
    shape: tuple[int, ...]
    modes: dict[str, int]
    made_colour: int = 0


@dataclass(frozen=True)
class Side:
    """Images (N, C, H, W) in bytes and what is said about them."""

    images: ImageSet
    facts: DataFacts


def read_side(root: Path, refuse_jpeg: bool = False) -> Side:
    """All images of any source, in sorted order.

    Args:
        root: as `hddm.data.sources.open_source`.
        refuse_jpeg: whether JPEG files, whose compression moves distances, are refused.

    Raises:
        HddmError: as `hddm.data.images.load_images`, for JPEG files, by content, and for fewer than `FEWEST`
            images.
    """
    source = open_source(root)
    names = source.files
    if len(names) < FEWEST:
        raise HddmError(f"{root}: holds {len(names)} image; a distance needs at least {FEWEST} a side")
    arrays, modes, digests = [], Counter[str](), []
    for i, name in enumerate(names):
        content = source.read(i)
        header = read_header(content, root / name)
        if refuse_jpeg and header.format in ("JPEG", "MPO"):
            raise HddmError(f"{root / name}: JPEG compression moves a Fréchet distance; save samples as PNG")
        modes[header.mode] += 1
        arrays.append(decode(content, root / name))
        digests.append(_digest(arrays[-1]))
    pixels = stack(arrays, names)
    gray = sum(array.ndim == 2 for array in arrays) if pixels.shape[1] == 3 else 0
    labels = None if source.labels is None else torch.tensor(source.labels)
    images = ImageSet(root, tuple(names), pixels, labels, source.classes)
    digest = hashlib.sha256(b"".join(sorted(digests))).hexdigest()
    facts = DataFacts(str(root), len(names), digest, tuple(pixels.shape[1:]), dict(modes), gray)
    return Side(images, facts)


def alike(sides: dict[str, Side]) -> dict[str, Side]:
    """The same sides, gray ones in RGB where another is in colour.

    Raises:
        HddmError: for images of different sizes.
    """
    sizes = {name: side.facts.shape[1:] for name, side in sides.items()}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} {side.facts.shape}" for name, side in sides.items())
        raise HddmError(
            f"images of different shapes (C, H, W) do not compare: {listed}; resize none of them "
            "by hand, but make samples and references of one size"
        )
    if len({side.facts.shape[0] for side in sides.values()}) == 1:
        return sides
    return {name: _in_colour(side) for name, side in sides.items()}


def _in_colour(side: Side) -> Side:
    if side.facts.shape[0] == 3:
        return side
    pixels = side.images.pixels.expand(-1, 3, -1, -1)
    facts = replace(side.facts, shape=tuple(pixels.shape[1:]), made_colour=side.facts.images)
    return Side(replace(side.images, pixels=pixels), facts)


def _digest(array: NDArray[np.uint8]) -> bytes:
    content = f"{array.shape} ".encode() + np.ascontiguousarray(array).tobytes()
    return hashlib.sha256(content).digest()
