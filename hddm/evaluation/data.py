"""The images of one side, with what a result must say about them."""

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from hddm.data.bad_images import too_many_bad
from hddm.data.images import ImageSet, stack
from hddm.errors import HddmError
from hddm.evaluation.pictures import Pictures, Role, read_pictures
from hddm.wording import counted

FEWEST = 2


@dataclass(frozen=True)
class DataFacts:
    """What was measured: ``hash`` is of all pixels, whatever their order, names and encoding.

    ``shape`` (C, H, W) is that of the measured images; ``modes`` counts images by Pillow's mode of their
    files, and ``made_colour`` those gray ones that became RGB since others are in colour. ``skipped`` are the
    names of those that could not be read.
    """

    path: str
    images: int
    hash: str
    shape: tuple[int, ...]
    modes: dict[str, int]
    made_colour: int = 0
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True)
class Side:
    """Images (N, C, H, W) in bytes and what is said about them."""

    images: ImageSet
    facts: DataFacts


def read_data(paths: Mapping[Role, Path], max_bad: int = 0) -> dict[str, Side]:
    """The images of each side, in sorted order.

    Args:
        paths: as `hddm.evaluation.pictures.read_pictures`.
        max_bad: images, of all sides together, that may be unreadable; they are left out, by name.

    Raises:
        HddmError: as `read_pictures`; for more than ``max_bad`` images that cannot be read, all by name; for
            images of several sizes, and fewer than `FEWEST` of them on a side.
    """
    read = {role: read_pictures(path, role) for role, path in paths.items()}
    bad = [reason for one in read.values() for reason in one.bad.values()]
    if len(bad) > max_bad:
        places = dict.fromkeys(str(paths[role]) for role, one in read.items() if one.bad)
        raise too_many_bad(", ".join(places), bad, max_bad)
    return {role: _side(paths[role], one) for role, one in read.items()}


def _side(root: Path, found: Pictures) -> Side:
    names, arrays = found.names, found.arrays
    if len(names) < FEWEST:
        raise HddmError(
            f"{root}: holds {counted(len(names), 'image')}; a distance needs at least {FEWEST} a side"
        )
    pixels = stack(arrays, names, root)
    gray = sum(array.ndim == 2 for array in arrays) if pixels.shape[1] == 3 else 0
    labels = None if found.labels is None else torch.tensor(found.labels)
    images = ImageSet(root, tuple(names), pixels, labels, found.classes)
    digest = hashlib.sha256(b"".join(sorted(map(_digest, arrays)))).hexdigest()
    shape, modes = tuple(pixels.shape[1:]), dict(Counter(found.modes))
    return Side(images, DataFacts(str(root), len(names), digest, shape, modes, gray, tuple(found.bad)))


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
