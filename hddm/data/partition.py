"""Partition of a data set into shards of similar content and nearly equal size, or by class, and its report.

Images may be held out.

The hash of its pixels decides whether an image is held out. So equal images are on one side, whatever the
number of shards, the features, and images added or removed: the held-out images of one partition were not
trained on in another. In return, the held-out share is exact only on average.
"""

import hashlib
import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hddm.data.clustering import Array, Indices, Points, cluster, normalise, propose
from hddm.data.features import ImageFeatures, compute_features, open_feature_extractor
from hddm.data.images import contact_sheet, lines_of, open_image
from hddm.data.shard_records import (
    FORMAT,
    HELD_OUT,
    MANIFEST,
    MIN_IMAGES,
    PARTITION_FILE,
    ImageEntry,
    PartitionRecord,
    ShardManifest,
    content_hash,
    holds_shard,
)
from hddm.data.sources import open_source, pick
from hddm.data.sources.base import ImageSource
from hddm.settings import keywords
from hddm.utils.errors import HddmError, UsageError, counted, shown
from hddm.utils.files import check_absent, link_or_copy, new_folder, sha256_of, write_json
from hddm.utils.streams import Use, stream

FINE_PER_SHARD = 8
_ROUNDING = 1e-9


@keywords
def partition(
    images: Path | Sequence[Path],
    out: Path,
    num_shards: int | Literal["auto"],
    seed: int = 0,
    overwrite: bool = False,
    *,
    features: str = "pixels",
    cache: Path | None = None,
    replace_cache: bool = False,
    max_bad: int = 0,
    held_out: float = 0.0,
    caption_column: str | None = None,
    label_column: str | None = None,
    classes: Sequence[Sequence[str]] | None = None,
    only: Sequence[str] = (),
) -> list[Path]:
    """Divide images into shards of similar content by balanced hierarchical k-means on their features.

    Before any are held out, sizes of shards differ by at most `FINE_PER_SHARD` images, the fine clusters of
    each. Returns the shard folders, in order.

    Args:
        images: source, as in `hddm.data.sources.open_source`, or several that are taken together.
        out: folder of the partition.
        num_shards: a number, or "auto" for the largest silhouette (`hddm.data.clustering.propose`).
        seed: of clusters, of the images that pixel components are fitted on, and of the report's pictures.
        overwrite: replace an existing partition.
        features: as in `hddm.data.features.open_feature_extractor`.
        cache: folder to keep features in; none keeps nothing.
        replace_cache: replace features of other images or settings in ``cache``.
        max_bad: most broken images; they are left out and named in the record.
        held_out: average share in [0, 1) of the images that goes to ``held_out/shard_k`` instead.
        caption_column: as in `open_source`.
        label_column: as in `open_source`.
        classes: names of the classes of each shard, to divide by them instead of by features.
        only: names of the classes to take; all, if empty.

    Raises:
        HddmError: for a partition or a shard as source, unreadable images, a cache of other images, fewer
            than `MIN_IMAGES` per shard, or a share that leaves too few on a side; for a class that
            ``classes`` has in no shard or in several. All but a share that by chance leaves too few are found
            before features are computed.
    """
    if num_shards != "auto" and num_shards < 1:
        raise UsageError(f"`shards` {num_shards}: must be 1 or more")
    if not 0 <= held_out < 1:
        raise UsageError(f"`held_out` {held_out:g}: must be 0 or more, and below 1")
    folders = [images] if isinstance(images, Path) else list(images)
    for folder in folders:
        _refuse_partition(folder)
    source = pick([open_source(folder, caption_column, label_column) for folder in folders], only)
    # Images that a shard needs to expect `MIN_IMAGES` on both sides.
    needed = MIN_IMAGES / (min(held_out, 1 - held_out) if held_out else 1)
    least = math.ceil(needed * (2 if num_shards == "auto" else num_shards) - _ROUNDING)
    if len(source) < least:
        why = f" and `held_out` {held_out:g}, to have {MIN_IMAGES} on each side" if held_out else ""
        text = f"{len(source)} images are too few for `shards` {num_shards}{why}: it takes {least}"
        raise HddmError(f"{source.root}: {text}")
    shard_of = None if classes is None else _shard_of_class(source, classes, num_shards)
    check_absent(out, PARTITION_FILE, overwrite)
    extractor = open_feature_extractor(features, seed)
    out.parent.mkdir(parents=True, exist_ok=True)
    passing = TemporaryDirectory(prefix=f".{out.name}.features-", dir=out.parent) if cache is None else None
    with passing or nullcontext(str(cache)) as place:
        found = compute_features(source, extractor, Path(place), max_bad, replace_cache)
        proposal = propose(found, needed, seed) if num_shards == "auto" else None
        # Of equals, the smaller.
        wanted = max(proposal, key=lambda k: (proposal[k], -k)) if proposal else int(num_shards)
        fine = 0 if shard_of is not None else FINE_PER_SHARD * wanted
        if shard_of is None:
            assignment = cluster(found, wanted, fine, seed)
        else:
            assignment = shard_of[np.asarray(source.labels)[found.rows]]
        # The first 8 bytes of each pixel hash, in [0, 1); images below the share are held out.
        numbers = np.ascontiguousarray(found.pixels[:, :8]).view(">u8")[:, 0] / 2.0**64
        is_held_out = numbers < held_out
        sizes, held = (
            np.bincount(assignment[side], minlength=wanted).tolist() for side in (~is_held_out, is_held_out)
        )
        if (left := min(sizes)) < MIN_IMAGES:
            text = f"{source.root}: with `shards` {wanted}, `held_out` {held_out:g} shard {sizes.index(left)}"
            needs = f"has {counted(left, 'image')} left to train on and needs {MIN_IMAGES}"
            raise HddmError(f"{text} {needs}; use a smaller `held_out`, or fewer shards")
        with new_folder(out, PARTITION_FILE, overwrite) as draft:
            record = PartitionRecord(
                format=FORMAT,
                images=len(found),
                features=extractor.name,
                extractor=extractor.identity,
                fine_clusters=fine,
                seed=seed,
                sizes=sizes,
                hashes=_write_shards(source, found, assignment, is_held_out, wanted, draft, cache),
                held_out_share=held_out,
                held_out=tuple(held) if held_out else (),
                copies=len(found) - len(np.unique(found.pixels, axis=0)),
                skipped=tuple(source.files[row] for row in found.broken),
                proposal=proposal,
            )
            write_json(draft / PARTITION_FILE, record.model_dump())
            write_report(draft, source, found, assignment, record)
    return [out / f"shard_{k}" for k in range(wanted)]


def _shard_of_class(
    source: ImageSource, classes: Sequence[Sequence[str]], num_shards: int | Literal["auto"]
) -> Indices:
    """Shard of each class number; refuses ``classes`` that are not the source's, each once."""
    named = [name for names in classes for name in names]
    if source.labels is None or sorted(named) != sorted(source.classes) or len(classes) != num_shards:
        raise HddmError(
            f"{source.root}: its classes are {', '.join(source.classes) or 'unknown'}; name each of them in "
            f"one of {num_shards} shards, not {[*map(list, classes)]}"
        )
    return np.array([next(k for k, names in enumerate(classes) if name in names) for name in source.classes])


def _refuse_partition(images: Path) -> None:
    """Refuse a partition (its pictures and held-out images would be trained on) and a shard (no classes)."""
    if (images / PARTITION_FILE).is_file():
        raise HddmError(f"{images}: is already a partition; name the original images")
    if holds_shard(images):
        raise HddmError(f"{images}: is already a shard; name the images that it was made of")


def _write_shards(
    source: ImageSource,
    features: ImageFeatures,
    shard: Indices,
    held_out: NDArray[np.bool_],
    num_shards: int,
    folder: Path,
    cache: Path | None,
) -> list[str]:
    """Write each shard and its held-out images; returns the hashes of the training shards."""
    parts = [(k, folder / f"shard_{k}", False) for k in range(num_shards)]
    parts += [(k, folder / HELD_OUT / f"shard_{k}", True) for k in np.unique(shard[held_out]).tolist()]
    chosen = [np.flatnonzero((shard == k) & (held_out == is_kept)) for k, _, is_kept in parts]
    entries = [
        _write_images(source, features, rows, target, cache)
        for (_, target, _), rows in zip(parts, chosen, strict=True)
    ]
    hashes = [content_hash(one, source.classes) for one in entries]
    of_all = hashlib.sha256("\n".join(hashes[:num_shards]).encode()).hexdigest()
    for (k, target, is_kept), rows, images, digest in zip(parts, chosen, entries, hashes, strict=True):
        shapes = features.shapes[rows]
        is_one_size = (shapes[:, :2] == shapes[0, :2]).all()
        manifest = ShardManifest(
            format=FORMAT,
            shard=k,
            num_shards=num_shards,
            classes=list(source.classes),
            hash=digest,
            partition=of_all,
            held_out_of=hashes[k] if is_kept else None,
            channels=3 if (shapes[:, 2] == 3).any() else 1,
            size=(int(shapes[0, 0]), int(shapes[0, 1])) if is_one_size else None,
            images=images,
        )
        write_json(target / MANIFEST, manifest.model_dump())
    return hashes[:num_shards]


def _write_images(
    source: ImageSource,
    features: ImageFeatures,
    chosen: Indices,
    folder: Path,
    cache: Path | None,
) -> list[ImageEntry]:
    """Write images as hard links if the source has files and the file system allows, else as copies."""
    entries = []
    for place in chosen.tolist():
        row = int(features.rows[place])
        name = f"images/{source.files[row]}"
        copy, path = folder / name, source.images[row].path
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path is None:
            copy.write_bytes(source.read(row))
        else:
            link_or_copy(path, copy)
        sha256 = sha256_of(copy)
        if sha256 != features.files[place].tobytes().hex():
            remedy = f"remove {cache}, or name another folder with `cache`" if cache else "partition again"
            raise HddmError(
                f"{source.root / source.files[row]}: changed since its features were computed; {remedy}"
            )
        label = None if source.labels is None else int(source.labels[row])
        caption = None if source.captions is None else source.captions[row]
        entries.append(ImageEntry(file=name, sha256=sha256, label=label, caption=caption))
    return entries


PICTURES = "pictures"
COLUMNS, SHOWN = 8, 24
"""Pictures per line, and per shard and kind."""
_CLASSES = 12
"""Most frequent classes listed per shard."""
_SKIPPED = 1000
"""Skipped files listed by name; the record has all."""
_BATCH = 4096


def measure(
    features: Points, shard: Indices, num_shards: int, shown: int = SHOWN
) -> tuple[Array, list[Indices]]:
    """Distances (K, K) between images with ``features`` (M, d) and their ``shard`` (M,), and nearest images.

    Row j is the mean over shard j of the distance to each centre. Centres are the directions of the mean unit
    feature, distances 1 - cosine. The lists have the images nearest to their shard's centre, in ascending
    distance.
    """
    num = len(features)
    batches = [np.arange(start, min(start + _BATCH, num)) for start in range(0, num, _BATCH)]
    sums = np.zeros((num_shards, features.shape[1]))
    for rows in batches:
        np.add.at(sums, shard[rows], normalise(features[rows]))
    centres = normalise(sums)
    totals = np.zeros((num_shards, num_shards))
    own = np.empty(num)
    for rows in batches:
        distances = 1 - normalise(features[rows]) @ centres.T
        np.add.at(totals, shard[rows], distances)
        own[rows] = distances[np.arange(len(rows)), shard[rows]]
    members = [np.flatnonzero(shard == k) for k in range(num_shards)]
    nearest = [rows[np.argsort(own[rows], kind="stable")[:shown]] for rows in members]
    return totals / np.bincount(shard, minlength=num_shards)[:, None], nearest


def write_report(
    folder: Path, source: ImageSource, features: ImageFeatures, shard: Indices, record: PartitionRecord
) -> None:
    """Write ``report.html`` and its pictures; ``shard`` (M,) includes held-out images."""
    from hddm.utils.pages import templates

    def open_row(row: int) -> Image.Image:
        return open_image(source.read(row), source.root / source.files[row])

    num_shards = len(record.sizes)
    distances, nearest = measure(features, shard, num_shards)
    draws = np.random.default_rng(stream(record.seed, Use.REPORT_IMAGES))
    (folder / PICTURES).mkdir()
    for k in range(num_shards):
        members = np.flatnonzero(shard == k)
        chosen = np.sort(draws.choice(members, min(SHOWN, len(members)), replace=False))
        for kind, rows in (("nearest", nearest[k]), ("random", chosen)):
            lines = lines_of(features.rows[rows].tolist(), COLUMNS)
            sheet = contact_sheet(lines, open_row, COLUMNS)
            sheet.save(folder / PICTURES / f"shard_{k}_{kind}.png")
    page = (
        templates(is_html=True)
        .get_template("data/partition_report.html.j2")
        .render(
            record=record,
            distances=distances,
            largest=distances.max(),
            classes=_classes(source, features.rows, shard, num_shards),
            pictures=PICTURES,
            counted=counted,
            shown=shown,
            most_skipped=_SKIPPED,
        )
    )
    (folder / "report.html").write_text(page, encoding="utf-8")


def _classes(
    source: ImageSource, rows: Indices, shard: Indices, num_shards: int
) -> list[list[tuple[str, int, float]]]:
    """By shard: the most frequent classes, their images in it, and the share of the class that those are."""
    if source.labels is None:
        return []
    labels = np.asarray(source.labels)[rows]
    counts = np.zeros((num_shards, len(source.classes)), dtype=np.int64)
    np.add.at(counts, (shard, labels), 1)
    totals = counts.sum(0)
    order = np.argsort(-counts, axis=1, kind="stable")[:, :_CLASSES]
    return [
        [(source.classes[c], int(one[c]), float(one[c] / totals[c])) for c in line if one[c]]
        for one, line in zip(counts, order.tolist(), strict=True)
    ]
