"""Features of all images on disk, computed in parts, so that a killed run resumes at the next part.

features/                            a `hddm.utils.work.Work`
  features.json                      number and hash of the images, extractor
  part_00000.safetensors             features (n, d) float32, SHA-256 of files and of pixels (n, 32), and
                                     shapes (n, 3), of 1,024 images in the order of the source
  part_00000.safetensors.done.json   its hash, and its broken images with reasons
"""

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file

from hddm.data.features import Extractor
from hddm.data.images import THREADS, decode, in_colour, pixel_digest, read_ahead, too_many_bad
from hddm.data.shards import Rows
from hddm.data.sources.base import ImageSource
from hddm.utils.errors import HddmError
from hddm.utils.files import sha256_of, write_whole
from hddm.utils.progress import Progress
from hddm.utils.records import FEATURES_FILE
from hddm.utils.tensors import read_safetensors
from hddm.utils.work import Work

FORMAT = "2.1"
PART = 1024
"""Images per part."""


@dataclass(frozen=True)
class ImageFeatures:
    """Features (M, d) of the readable images, mapped from disk; ``features[rows]`` selects rows.

    Row j is image ``rows[j]`` of the source. ``files`` (M, 32) and ``pixels`` (M, 32) are the SHA-256 of its
    file and of its RGB pixels, ``shapes`` (M, 3) height, width and channels. ``broken`` maps the number of an
    unreadable image to the reason.
    """

    rows: NDArray[np.int64]
    files: NDArray[np.uint8]
    pixels: NDArray[np.uint8]
    shapes: NDArray[np.int64]
    broken: dict[int, str]
    features: Rows

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def shape(self) -> tuple[int, int]:
        """(M, d)."""
        return len(self), self.features.shape[0]

    def __getitem__(self, rows: NDArray[np.int64], /) -> NDArray[np.float32]:
        found: NDArray[np.float32] = self.features.take(torch.from_numpy(rows)).numpy()
        return found


def compute_features(
    source: ImageSource,
    extractor: Extractor,
    folder: Path,
    max_bad: int = 0,
    replace: bool = False,
    part: int = PART,
) -> ImageFeatures:
    """Features of ``source``: parts found in ``folder`` are read, others are computed and written there.

    Parts are equal bit for bit wherever a run on the same device was killed. At most ``max_bad`` images may
    be broken; they get no features and are tried again each time. ``replace`` allows removing features of
    other images or another extractor. A part has ``part`` images. Raises `HddmError` for a ``folder`` of
    something else, more than ``max_bad`` broken images, by name, and features that are not finite.
    """
    work = Work(
        folder, FEATURES_FILE, f"{folder}: another process computes features in it", "another --cache"
    )
    identity = {
        "format": FORMAT,
        "images": len(source),
        "source": _fingerprint(source),
        "features": extractor.name,
        "extractor": extractor.identity,
        "part": part,
    }
    text = "holds features of other images, of these before they changed, or by another extractor"
    broken: dict[int, str] = {}
    with work.held(), Progress(len(source), "features") as advance:
        work.begin(identity, f"{folder}: {text}; remove it, or name another folder with --cache", replace)
        paths = [folder / f"part_{n:05d}.safetensors" for n in range(-(-len(source) // part))]
        known = _known_parts(work, paths, source)
        if len(known) < len(paths):
            extractor.prepare(source, folder)
        for number, path in enumerate(paths):
            rows = range(number * part, min((number + 1) * part, len(source)))
            broken |= known[path] if path in known else _write_part(work, path, source, extractor, rows)
            if len(broken) > max_bad:
                # List all broken images at once, for repair; decoding is far faster than computing features.
                broken |= _find_broken(source, range(rows.stop, len(source)))
                raise too_many_bad(source.root, list(broken.values()), max_bad)
            advance(len(rows))
        read = [one for one in map(read_safetensors, paths) if len(one["sound"])]
    if not read:
        raise HddmError(f"{folder}: holds features of no image, since none could be read")
    numbers, files, pixels, shapes = (
        torch.cat([one[name] for one in read]).numpy() for name in ("sound", "files", "pixels", "shapes")
    )
    return ImageFeatures(numbers, files, pixels, shapes, broken, Rows(tuple(one["features"] for one in read)))


def _known_parts(work: Work, paths: Sequence[Path], source: ImageSource) -> dict[Path, dict[int, str]]:
    """Parts that are done, with their broken images; none, and all removed, if one of these is readable now.

    The extractor may have learnt from the other images alone, so everything is computed again.
    """
    known = {
        path: {int(row): str(reason) for row, reason in done["broken"].items()}
        for path in paths
        if (done := work.done(path)) is not None
    }
    mended = {p for p, rows in known.items() if any(_why_broken(source, row) is None for row in rows)}
    if not mended:
        return known
    # Mended parts go last, so that a run after a kill finds them again.
    for path in sorted(work.folder.glob("*.safetensors"), key=mended.__contains__):
        path.unlink()
        work.forget(path)
    return {}


def _why_broken(source: ImageSource, row: int) -> str | None:
    try:
        decode(source.read(row), source.root / source.files[row])
    except HddmError as error:
        return error.message
    return None


def _find_broken(source: ImageSource, rows: range) -> dict[int, str]:
    """Broken images among ``rows``: number to reason."""
    look = partial(_why_broken, source)
    with Progress(len(rows), "look for other bad images") as advance, ThreadPoolExecutor(THREADS) as pool:
        found: dict[int, str] = {}
        for row, (reason,) in zip(rows, read_ahead(pool, look, ([row] for row in rows), PART), strict=True):
            if reason is not None:
                found[row] = reason
            advance(1)
    return found


def _write_part(
    work: Work, path: Path, source: ImageSource, extractor: Extractor, rows: range
) -> dict[int, str]:
    """Write the part of the images ``rows``; returns the broken ones, number to reason."""
    sound: list[int] = []
    shapes: list[tuple[int, int, int]] = []
    features: list[NDArray[np.float32]] = []
    files, digests = bytearray(), bytearray()
    broken: dict[int, str] = {}
    for start in range(rows.start, rows.stop, extractor.batch):
        images, names = [], []
        for row in range(start, min(start + extractor.batch, rows.stop)):
            name = source.root / source.files[row]
            try:
                content = source.read(row)
                pixels = decode(content, name)
            except HddmError as error:
                broken[row] = error.message
                continue
            files += hashlib.sha256(content).digest()
            digests += pixel_digest(pixels)
            shapes.append((*pixels.shape[:2], 1 if pixels.ndim == 2 else 3))
            images.append(in_colour(pixels))
            names.append(name)
            sound.append(row)
        if images:
            features.append(_finite(extractor(images), names, extractor.name))
    made = np.concatenate(features) if features else np.zeros((0, 0))
    tensors: dict[str, NDArray[Any]] = {
        "sound": np.array(sound, dtype=np.int64),
        "files": np.frombuffer(files, dtype=np.uint8).reshape(-1, 32),
        "pixels": np.frombuffer(digests, dtype=np.uint8).reshape(-1, 32),
        "shapes": np.array(shapes, dtype=np.int64).reshape(-1, 3),
        "features": np.ascontiguousarray(made, dtype=np.float32),
    }
    write_whole(path, lambda draft: save_file(tensors, draft))
    work.finish(path, {"broken": broken}, {path.name: sha256_of(path)})
    return broken


def _finite(features: NDArray[np.float32], names: Sequence[Path], extractor: str) -> NDArray[np.float32]:
    worst = np.flatnonzero(~np.isfinite(features).all(1))
    if len(worst):
        raise HddmError(f"{names[worst[0]]}: {extractor} gives NaN or Inf for it; use other --features")
    return features


def _fingerprint(source: ImageSource) -> str:
    digest = hashlib.sha256()
    for name, image in zip(source.files, source.images, strict=True):
        digest.update(f"{name} {image.size()}\n".encode())
    return digest.hexdigest()
