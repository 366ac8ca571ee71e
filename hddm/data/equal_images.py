"""Images that are equal in every pixel, whatever their names and encoding, and the sides of a split."""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hddm.data.features import in_colour

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
