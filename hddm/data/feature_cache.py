"""Features of all images on disk, computed in parts, so that a killed run resumes at the next part.

features/
  features.json                  source, extractor and hashes
  part_00000.safetensors         features (n, d) float32, SHA-256 of files and of pixels (n, 32), of 1,024
                                 images in the order of the source; its header names broken ones
"""

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file
from torch import Tensor

from hddm.data.features import Extractor
from hddm.data.images import THREADS, decode, in_colour, pixel_digest, too_many_bad
from hddm.data.shards import Rows
from hddm.data.sources.base import ImageSource
from hddm.utils.documents import parse_object
from hddm.utils.errors import HddmError, one_line
from hddm.utils.files import write_json, write_whole
from hddm.utils.progress import Progress
from hddm.utils.records import FEATURES_FILE, Record, read_record
from hddm.utils.tensors import read_header, read_safetensors, refuse_non_finite, refuse_other_kinds

FORMAT = "1.0"
PART = 1024
"""Images per part."""


class FeatureRecord(Record):
    """``features.json``: source of the features, and extractor."""

    format: str
    images: int
    source: str
    """Hash of the images' names and `hddm.data.sources.base.ImageSource.size`."""
    features: str
    extractor: str
    """`hddm.data.features.Extractor.identity`."""
    part: int
    """Images per part; the last may have fewer."""


@dataclass(frozen=True)
class ImageFeatures:
    """Features (M, d) of the readable images, mapped from disk; ``features[rows]`` selects rows.

    Row j is image ``rows[j]`` of the source. ``files`` (M, 32) and ``pixels`` (M, 32) are the SHA-256 of its
    file and of its RGB pixels. ``broken`` maps the number of an unreadable image to the reason.
    """

    rows: NDArray[np.int64]
    files: NDArray[np.uint8]
    pixels: NDArray[np.uint8]
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
    record = FeatureRecord(
        format=FORMAT,
        images=len(source),
        source=_fingerprint(source),
        features=extractor.name,
        extractor=extractor.identity,
        part=part,
    )
    _claim(folder, record, replace)
    broken: dict[int, str] = {}
    paths = [folder / f"part_{n:05d}.safetensors" for n in range(-(-len(source) // part))]
    _forget_mended(source, folder, paths)
    missing = [path for path in paths if not path.exists()]
    if missing:
        extractor.prepare(source, folder)
    with Progress(len(source), "features") as advance:
        for number, path in enumerate(paths):
            rows = range(number * part, min((number + 1) * part, len(source)))
            broken |= _write_part(path, source, extractor, rows) if path in missing else _broken_in(path)
            if len(broken) > max_bad:
                break
            advance(len(rows))
    if len(broken) > max_bad:
        # List all broken images at once, for repair; decoding is far faster than computing features.
        broken |= _find_broken(source, range(rows.stop, len(source)))
        raise too_many_bad(source.root, list(broken.values()), max_bad)
    return _opened(paths, len(source), broken)


def _claim(folder: Path, record: FeatureRecord, replace: bool) -> None:
    """Create ``folder`` for ``record``; refuse a folder of another."""
    if (folder / FEATURES_FILE).is_file():
        known = read_record(folder / FEATURES_FILE, FeatureRecord, FORMAT)
        if known == record:
            return
        if not replace:
            raise HddmError(
                f"{folder}: holds {_difference(known, record)}; remove it, or name another folder with "
                "--cache"
            )
        for path in folder.glob("*.safetensors"):
            path.unlink()
    # A killed run leaves drafts of the record.
    elif folder.exists() and not (
        folder.is_dir() and all(one.name.startswith(f".{FEATURES_FILE}.part-") for one in folder.iterdir())
    ):
        raise HddmError(f"{folder}: contains other files than features; name another folder with --cache")
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / FEATURES_FILE, lambda draft: write_json(draft, record.model_dump()))


def _difference(known: FeatureRecord, record: FeatureRecord) -> str:
    differences = {
        "images": f"features of other images ({known.images} of them, now {record.images})",
        "source": "features of other images, or of these before they changed",
        "features": f"other features ({known.features}, not {record.features})",
        "part": f"parts of {known.part} images, not {record.part}",
    }
    for key, difference in differences.items():
        if getattr(known, key) != getattr(record, key):
            return difference
    return f"{known.features} of another seed or other weights"


def _forget_mended(source: ImageSource, folder: Path, parts: Sequence[Path]) -> None:
    """Remove parts with broken images that are readable by now.

    If the extractor learnt from the images, it did so without these, so all parts are removed. Mended parts
    go last, so that a run after a kill finds them again.
    """
    mended = [
        path
        for path in parts
        if path.exists() and any(_why_broken(source, row) is None for row in _broken_in(path))
    ]
    learnt = [path for path in folder.glob("*.safetensors") if path not in parts]
    if mended and learnt:
        mended = [*(path for path in parts if path not in mended), *learnt, *mended]
    for path in mended:
        path.unlink(missing_ok=True)


def _broken_in(part: Path) -> dict[int, str]:
    """Broken images of a part: number to reason."""
    try:
        note = parse_object(read_header(part)[1]["note"], str(part))
        return {int(row): str(reason) for row, reason in note.items()}
    except (HddmError, KeyError, ValueError, AttributeError) as error:
        raise HddmError(f"{part}: cannot be read ({one_line(error)}); remove it") from error


def _why_broken(source: ImageSource, row: int) -> str | None:
    try:
        decode(source.read(row), source.root / source.files[row])
    except HddmError as error:
        return error.message
    return None


def _find_broken(source: ImageSource, rows: range) -> dict[int, str]:
    """Broken images among ``rows``: number to reason."""
    found: dict[int, str] = {}
    with Progress(len(rows), "look for other bad images") as advance, ThreadPoolExecutor(THREADS) as pool:
        for start in range(rows.start, rows.stop, PART):
            part = range(start, min(start + PART, rows.stop))
            reasons = pool.map(lambda row: _why_broken(source, row), part)
            found |= {row: reason for row, reason in zip(part, reasons, strict=True) if reason is not None}
            advance(len(part))
    return found


def _write_part(path: Path, source: ImageSource, extractor: Extractor, rows: range) -> dict[int, str]:
    """Write the part of the images ``rows``; returns the broken ones, number to reason."""
    sound: list[int] = []
    features: list[NDArray[np.float32]] = []
    files, pixels = bytearray(), bytearray()
    broken: dict[int, str] = {}
    for start in range(rows.start, rows.stop, extractor.batch):
        images, names = [], []
        for row in range(start, min(start + extractor.batch, rows.stop)):
            name = source.root / source.files[row]
            try:
                content = source.read(row)
                image = in_colour(decode(content, name))
            except HddmError as error:
                broken[row] = error.message
                continue
            files += hashlib.sha256(content).digest()
            pixels += pixel_digest(image)
            images.append(image)
            names.append(name)
            sound.append(row)
        if images:
            features.append(_finite(extractor(images), names, extractor.name))
    made = np.concatenate(features) if features else np.zeros((0, 0))
    tensors: dict[str, NDArray[Any]] = {
        "sound": np.array(sound, dtype=np.int64),
        "files": np.frombuffer(files, dtype=np.uint8).reshape(-1, 32),
        "pixels": np.frombuffer(pixels, dtype=np.uint8).reshape(-1, 32),
        "features": np.ascontiguousarray(made, dtype=np.float32),
    }
    write_whole(path, lambda draft: save_file(tensors, draft, {"note": json.dumps(broken)}))
    return broken


def _finite(features: NDArray[np.float32], names: Sequence[Path], extractor: str) -> NDArray[np.float32]:
    worst = np.flatnonzero(~np.isfinite(features).all(1))
    if len(worst):
        raise HddmError(f"{names[worst[0]]}: {extractor} gives NaN or Inf for it; use other --features")
    return features


def _opened(paths: Sequence[Path], images: int, broken: dict[int, str]) -> ImageFeatures:
    read = {path: _part(path) for path in paths}
    parts = [part for part in read.values() if len(part["sound"])]
    last = -1
    for path, part in read.items():
        # The rows of a part follow those of the part before.
        rows = part["sound"]
        if len(rows) and (rows[0] <= last or rows[-1] >= images or not (rows.diff() > 0).all()):
            raise HddmError(f"{path}: belongs to other images; delete it")
        if len(rows) and part["features"].shape[1] != parts[0]["features"].shape[1]:
            raise HddmError(f"{path}: its features are of another length than the rest; remove it")
        last = int(rows[-1]) if len(rows) else last
    if not parts:
        raise HddmError(f"{paths[0].parent}: holds features of no image, since none could be read")
    numbers, files, pixels = (
        torch.cat([part[n] for part in parts]).numpy() for n in ("sound", "files", "pixels")
    )
    return ImageFeatures(numbers, files, pixels, broken, Rows(tuple(part["features"] for part in parts)))


def _part(path: Path) -> dict[str, Tensor]:
    """Tensors of a part; raises `HddmError` for others than `_write_part` writes."""
    part = read_safetensors(path)
    kinds = {"sound": (torch.int64, 1), "features": (torch.float32, 2)}
    refuse_other_kinds(path, part, kinds | dict.fromkeys(("files", "pixels"), (torch.uint8, 2)))
    if part["files"].shape[1] != 32 or part["pixels"].shape[1] != 32:
        raise HddmError(f"{path}: holds no hashes of images; remove it")
    refuse_non_finite(path, {"features": part["features"]})
    return part


def _fingerprint(source: ImageSource) -> str:
    digest = hashlib.sha256()
    for number, name in enumerate(source.files):
        digest.update(f"{name} {source.size(number)}\n".encode())
    return digest.hexdigest()
