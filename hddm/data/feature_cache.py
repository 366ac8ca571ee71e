"""Features of all images on disk, computed in parts, so that a killed run continues at the next part.

features/
  features.json                  source, extractor and hashes
  part_00000.safetensors         features (n, d) float32, SHA-256 of files and of pixels (n, 32), of 1,024
                                 images in the order of the source; its header names those that are broken
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hddm.data.atomic_tensors import read_tensors, write_tensors
from hddm.data.decoding import decode, find_bad, in_colour, pixel_digest, too_many_bad, why_bad
from hddm.data.features import Extractor
from hddm.data.sources import ImageSource
from hddm.utils.errors import HddmError
from hddm.utils.files import write_json, write_whole
from hddm.utils.progress import Progress
from hddm.utils.records import FEATURES_FILE, Record, read_record
from hddm.utils.tensors import read_safetensors

FORMAT = "1.0"
PART = 1024
"""Images whose features are written at once."""


class FeatureRecord(Record):
    """``features.json``: what the features are of, and what made them."""

    format: str
    images: int
    source: str
    """Hash of the images' names and of `hddm.data.sources.base.ImageSource.size` of each."""
    features: str
    extractor: str
    """`hddm.data.features.Extractor.identity`."""
    part: int
    """Images of a part; the last may have fewer."""


@dataclass(frozen=True)
class ImageFeatures:
    """Features (M, d) of the images that can be read, mapped from disk; ``features[rows]`` are some of them.

    Row j is image ``rows[j]`` of the source. ``files`` (M, 32) and ``pixels`` (M, 32) are the SHA-256 of its
    file and of its RGB pixels. ``broken`` says by number why an image cannot be read.
    """

    rows: NDArray[np.int64]
    files: NDArray[np.uint8]
    pixels: NDArray[np.uint8]
    broken: dict[int, str]
    parts: tuple[NDArray[np.float32], ...]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def shape(self) -> tuple[int, int]:
        """(M, d)."""
        return len(self), self.parts[0].shape[1]

    def __getitem__(self, rows: NDArray[np.int64], /) -> NDArray[np.float32]:
        ends = np.cumsum([len(part) for part in self.parts])
        number = np.searchsorted(ends, rows, side="right")
        found = np.empty((len(rows), self.shape[1]), dtype=np.float32)
        for one in np.unique(number).tolist():
            wanted = np.flatnonzero(number == one)
            found[wanted] = self.parts[one][rows[wanted] - (ends[one] - len(self.parts[one]))]
        return found


def compute_features(
    source: ImageSource,
    extractor: Extractor,
    folder: Path,
    max_bad: int = 0,
    replace: bool = False,
    part: int = PART,
) -> ImageFeatures:
    """Features of ``source``, read from ``folder`` as far as they are there and computed there otherwise.

    The parts are the same, bit for bit, wherever a run on the same device was killed before. Broken images
    are tried again each time: a disk or a permission may have failed only for a while.

    Args:
        source: the images.
        extractor: what makes the features.
        folder: where they are kept.
        max_bad: images that may be broken; they get no features.
        replace: whether features of other images or of another extractor may go.
        part: images whose features are written at once.

    Raises:
        HddmError: for a ``folder`` of something else, more than ``max_bad`` broken images, by name, and
            features that are not finite.
    """
    facts = FeatureRecord(
        format=FORMAT,
        images=len(source),
        source=_fingerprint(source),
        features=extractor.name,
        extractor=extractor.identity,
        part=part,
    )
    _claim(folder, facts, replace)
    broken: dict[int, str] = {}
    paths = [folder / f"part_{n:05d}.safetensors" for n in range(-(-len(source) // part))]
    _forget_mended(source, folder, paths)
    missing = [path for path in paths if not path.exists()]
    if missing:
        extractor.prepare(source, folder)
    with Progress(len(source), "features") as advance:
        for number, path in enumerate(paths):
            rows = range(number * part, min((number + 1) * part, len(source)))
            if path in missing:
                tensors, found = _extract(source, extractor, rows)
                write_tensors(path, tensors, found)
            else:
                _, found = read_tensors(path, "sound")
            broken |= {int(row): reason for row, reason in found.items()}
            if len(broken) > max_bad:
                break
            advance(len(rows))
    if len(broken) > max_bad:
        # Whoever mends them wants all names at once; features would take far longer than a look.
        broken |= find_bad(source, range(rows.stop, len(source)))
        raise too_many_bad(source.root, list(broken.values()), max_bad)
    return _opened(paths, broken)


def _claim(folder: Path, facts: FeatureRecord, replace: bool) -> None:
    """Make ``folder`` that of ``facts``, unless it is another's."""
    if folder.exists() and not (folder / FEATURES_FILE).is_file() and not _is_empty(folder):
        raise HddmError(f"{folder}: holds other things than features; name another folder with --cache")
    if (folder / FEATURES_FILE).is_file():
        known = read_record(folder / FEATURES_FILE, FeatureRecord, FORMAT)
        if known == facts:
            return
        if not replace:
            raise HddmError(
                f"{folder}: holds {_difference(known, facts)}; remove it, or name another folder with --cache"
            )
        for path in folder.glob("*.safetensors"):
            path.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / FEATURES_FILE, lambda draft: write_json(draft, facts.model_dump()))


def _is_empty(folder: Path) -> bool:
    """True if ``folder`` holds nothing but drafts of a killed run."""
    return folder.is_dir() and all(
        path.name.startswith(f".{FEATURES_FILE}.part-") for path in folder.iterdir()
    )


def _difference(known: FeatureRecord, facts: FeatureRecord) -> str:
    if known.images != facts.images:
        return f"features of other images ({known.images} of them, now {facts.images})"
    if known.source != facts.source:
        return "features of other images, or of these before they changed"
    if known.features != facts.features:
        return f"other features ({known.features}, not {facts.features})"
    if known.part != facts.part:
        return f"parts of {known.part} images, not {facts.part}"
    return f"{known.features} of another seed or other weights"


def _forget_mended(source: ImageSource, folder: Path, parts: Sequence[Path]) -> None:
    """Remove parts with broken images that can be read by now.

    Where something was learnt from the images, it was without these, and all goes. The mended parts go last:
    after a kill they are found again.
    """
    mended = [path for path in parts if path.exists() and _is_mended(source, path)]
    learnt = [path for path in folder.glob("*.safetensors") if path not in parts]
    if mended and learnt:
        mended = [*(path for path in parts if path not in mended), *learnt, *mended]
    for path in mended:
        path.unlink(missing_ok=True)


def _is_mended(source: ImageSource, part: Path) -> bool:
    _, broken = read_tensors(part, "sound")
    return any(why_bad(source, int(row)) is None for row in broken)


def _extract(
    source: ImageSource, extractor: Extractor, rows: range
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Tensors of a part, and why images of it cannot be read."""
    sound: list[int] = []
    features: list[NDArray[np.float32]] = []
    digests: list[tuple[bytes, bytes]] = []
    broken: dict[str, str] = {}
    for start in range(rows.start, rows.stop, extractor.batch):
        images, names = [], []
        for row in range(start, min(start + extractor.batch, rows.stop)):
            name = source.root / source.files[row]
            try:
                content = source.read(row)
                image = in_colour(decode(content, name))
            except HddmError as error:
                broken[str(row)] = error.message
                continue
            digests.append((hashlib.sha256(content).digest(), pixel_digest(image)))
            images.append(image)
            names.append(name)
            sound.append(row)
        if images:
            features.append(_finite(extractor(images), names, extractor.name))
    made = np.concatenate(features) if features else np.zeros((0, 0), dtype=np.float32)
    hashes = np.frombuffer(b"".join(a + b for a, b in digests), dtype=np.uint8).reshape(-1, 2, 32)
    tensors: dict[str, np.ndarray] = {
        "sound": np.array(sound, dtype=np.int64),
        "files": np.ascontiguousarray(hashes[:, 0]),
        "pixels": np.ascontiguousarray(hashes[:, 1]),
        "features": np.ascontiguousarray(made, dtype=np.float32),
    }
    return tensors, broken


def _finite(features: NDArray[np.float32], names: Sequence[Path], extractor: str) -> NDArray[np.float32]:
    worst = np.flatnonzero(~np.isfinite(features).all(1))
    if len(worst):
        raise HddmError(f"{names[worst[0]]}: {extractor} gives NaN or Inf for it; take other --features")
    return features


def _opened(paths: Sequence[Path], broken: dict[int, str]) -> ImageFeatures:
    parts = [{name: tensor.numpy() for name, tensor in read_safetensors(path).items()} for path in paths]
    parts = [part for part in parts if len(part["sound"])]
    rows, files, pixels = (np.concatenate([part[n] for part in parts]) for n in ("sound", "files", "pixels"))
    return ImageFeatures(rows, files, pixels, broken, tuple(part["features"] for part in parts))


def _fingerprint(source: ImageSource) -> str:
    digest = hashlib.sha256()
    for number, name in enumerate(source.files):
        digest.update(f"{name} {source.size(number)}\n".encode())
    return digest.hexdigest()
