"""Partition of a data set into shards of similar content and nearly equal size, or by class, and its report.

Images may be held out.

The hash of its pixels decides whether an image is held out. So equal images are on one side, whatever the
number of shards, the features, and images added or removed: the held-out images of one partition were not
trained on in another. In return, the held-out share is exact only on average.
"""

import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image

from hddm.data.clustering import Indices, cluster
from hddm.data.division import WRITTEN, Division, ShardPart, write_shards
from hddm.data.features import ImageFeatures, compute_features, open_feature_extractor
from hddm.data.images import contact_sheet, open_image
from hddm.data.shard_records import (
    FORMAT,
    HELD_OUT,
    MIN_IMAGES,
    PARTITION_FILE,
    SHARD_FILE,
    PartitionRecord,
    holds_shard,
    refuse_without_tables,
)
from hddm.data.sources import open_source, pick
from hddm.data.sources.base import ImageSource
from hddm.settings import PartitionSettings, keywords
from hddm.utils.addresses import Address, is_file, refuse_address
from hddm.utils.errors import HddmError, UsageError, counted
from hddm.utils.files import check_absent, write_json
from hddm.utils.streams import Use, stream
from hddm.utils.work import open_draft

FINE_PER_SHARD = 8
_ROUNDING = 1e-9


@keywords
def partition(
    images: Path | Sequence[Path],
    out: Path,
    num_shards: int,
    settings: PartitionSettings,
    *,
    overwrite: bool = False,
    replace_cache: bool = False,
) -> list[Path]:
    """Divide images into shards of similar content by balanced hierarchical k-means on their features.

    Before any are held out, sizes of shards differ by at most `FINE_PER_SHARD` images, the fine clusters of
    each. Returns the shard folders, in order. A call that was killed continues when it is repeated: with the
    features that it computed, and the images that it wrote.

    Args:
        images: source, as in `hddm.data.sources.open_source`, or several that are taken together.
        out: folder of the partition, or the address that it is uploaded to (`hddm.utils.uploading`).
        num_shards: number of shards.
        settings: its fields are keywords: see `hddm.settings.PartitionSettings`. Without a ``cache``,
            features are not kept.
        overwrite: replace an existing partition, and an unfinished one of other options.
        replace_cache: replace features of other images or settings in the cache.

    Raises:
        HddmError: for a partition or a shard as source, unreadable images, a cache of other images, fewer
            than `MIN_IMAGES` per shard, or a share that leaves too few on a side; for a class that is in no
            shard or in several. All but a share that by chance leaves too few are found before features are
            computed.
    """
    seed, cache, held_out = settings.seed, settings.cache, settings.held_out
    folders = [images] if isinstance(images, Path) else list(images)
    if isinstance(out, Address):
        from hddm.utils.uploading import produced

        asked = {"num_shards": num_shards, **settings.model_dump(mode="json", exclude={"cache"})}

        def make(folder: Path) -> object:
            return partition(folders, folder, num_shards, settings, replace_cache=replace_cache)

        produced(out, PARTITION_FILE, asked, folders, overwrite, make)
        return [out / f"shard_{k}" for k in range(num_shards)]
    if cache is not None:
        refuse_address(cache)
    for folder in folders:
        # A partition's pictures and held-out images would be trained on, and a shard has no class folders.
        is_shard = (
            is_file(folder / SHARD_FILE) if isinstance(folder, Address) else holds_shard(folder)
        )
        if is_shard or is_file(folder / PARTITION_FILE):
            raise HddmError(
                f"{folder}: is already a partition or a shard; name the original images"
            )
        # As `hddm data digits` writes. The two are looked for first: a folder may hold a million images.
        train = folder / "train"
        if train.exists() and (folder / HELD_OUT).exists() and len(list(folder.iterdir())) == 2:
            raise UsageError(
                f"{folder}: holds train and held_out; name {train}, and keep the rest for tests"
            )
    sources = [open_source(one, settings.caption_column, settings.label_column) for one in folders]
    source = pick(sources, settings.only.split(",") if settings.only else ())
    # Images that a shard needs to expect `MIN_IMAGES` on both sides.
    needed = MIN_IMAGES / (min(held_out, 1 - held_out) if held_out else 1)
    least = math.ceil(needed * num_shards - _ROUNDING)
    if len(source) < least:
        why = f" and `held_out` {held_out:g}, to have {MIN_IMAGES} on each side" if held_out else ""
        text = f"{len(source)} images are too few for `shards` {num_shards}{why}: it takes {least}"
        raise HddmError(f"{source.root}: {text}")
    shard_of = _shard_of_class(source, settings.classes, num_shards) if settings.classes else None
    refuse_without_tables(_most_in_a_shard(source, shard_of, num_shards))
    check_absent(out, PARTITION_FILE, overwrite)
    extractor = open_feature_extractor(settings.features, seed)
    with _feature_folder(out, cache) as place:
        # Features of an earlier call that was killed serve no other images.
        replace = replace_cache or cache is None
        found = compute_features(source, extractor, place, settings.max_bad, replace)
        fine = 0 if shard_of is not None else FINE_PER_SHARD * num_shards
        if shard_of is None:
            assignment = cluster(found, num_shards, fine, seed)
        else:
            assignment = shard_of[np.asarray(source.labels)[found.rows]]
        # The first 8 bytes of each pixel hash, in [0, 1); images below the share are held out.
        numbers = np.ascontiguousarray(found.pixels[:, :8]).view(">u8")[:, 0] / 2.0**64
        is_held_out = numbers < held_out
        sizes = np.bincount(assignment[~is_held_out], minlength=num_shards).tolist()
        held = np.bincount(assignment[is_held_out], minlength=num_shards).tolist()
        left = min(sizes)
        if left < MIN_IMAGES:
            options = f"with `shards` {num_shards}, `held_out` {held_out:g}"
            needs = f"has {counted(left, 'image')} left to train on and needs {MIN_IMAGES}"
            text = f"{options} shard {sizes.index(left)} {needs}; use a smaller `held_out`, or fewer shards"
            raise HddmError(f"{source.root}: {text}")
        division = Division(source, found, assignment, is_held_out, num_shards)
        hashes = {part: division.hash(part) for part in division.parts()}
        record = PartitionRecord(
            format=FORMAT,
            images=len(found),
            features=extractor.name,
            extractor=extractor.identity,
            fine_clusters=fine,
            seed=seed,
            sizes=sizes,
            hashes=[hashes[ShardPart(k, False)] for k in range(num_shards)],
            held_out_share=held_out,
            held_out=tuple(held) if held_out else (),
            copies=_num_copies(found),
            skipped=tuple(source.files[row] for row in found.broken),
        )
        # The hashes cover every image, label and caption.
        identity = record.model_dump(mode="json")
        for part, content in hashes.items():
            if part.is_held_out:
                identity[part.name] = content
        identity["images_at_a_time"] = WRITTEN
        with open_draft(out, PARTITION_FILE, identity, "partition", _kept, overwrite) as draft:
            write_shards(division, hashes, draft, cache)
            write_json(draft.whole / PARTITION_FILE, record.model_dump())
            write_report(draft.whole, source, found, assignment, record)
    return [out / f"shard_{k}" for k in range(num_shards)]


def _shard_of_class(
    source: ImageSource, classes: Sequence[Sequence[str]], num_shards: int
) -> Indices:
    """Shard of each class number; refuses ``classes`` that are not the source's, each once."""
    named: list[str] = []
    for names in classes:
        named += names
    are_all = sorted(named) == sorted(source.classes)
    if source.labels is None or not are_all or len(classes) != num_shards:
        raise HddmError(
            f"{source.root}: its classes are {', '.join(source.classes) or 'unknown'}; name each of them in "
            f"one of {num_shards} shards, not {[*map(list, classes)]}"
        )
    shard_of_name: dict[str, int] = {}
    for k, names in enumerate(classes):
        for name in names:
            shard_of_name[name] = k
    return np.array([shard_of_name[name] for name in source.classes])


def _most_in_a_shard(source: ImageSource, shard_of: Indices | None, num_shards: int) -> int:
    """Images of the largest shard, if all can be read and none is held out."""
    if shard_of is None:
        return -(-len(source) // num_shards)
    return int(np.bincount(shard_of[np.asarray(source.labels)]).max())


def _num_copies(features: ImageFeatures) -> int:
    """Images whose pixels all equal those of another one that is counted already."""
    digests = np.sort(np.ascontiguousarray(features.pixels).view("S32")[:, 0])
    return int((digests[1:] == digests[:-1]).sum())


def _kept() -> str:
    return "what is written is kept, and the same command continues"


@contextmanager
def _feature_folder(out: Path, cache: Path | None) -> Iterator[Path]:
    """Folder of the features: the ``cache``, else a hidden one that goes unless the call is interrupted."""
    if cache is not None:
        yield cache
        return
    folder = out.parent / f".{out.name}.features"
    try:
        yield folder
    except Exception:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


COLUMNS, SHOWN = 8, 24
"""Pictures per line, and per shard."""
_CLASSES = 12
"""Most frequent classes listed per shard."""


def write_report(
    folder: Path,
    source: ImageSource,
    features: ImageFeatures,
    shard: Indices,
    record: PartitionRecord,
) -> None:
    """Write ``report.html`` and its pictures; ``shard`` (M,) includes held-out images."""
    from hddm.utils.pages import templates

    def open_row(row: int) -> Image.Image:
        return open_image(source.read(row), source.root / source.files[row])

    num_shards = len(record.sizes)
    draws = np.random.default_rng(stream(record.seed, Use.REPORT_IMAGES))
    (folder / "pictures").mkdir(exist_ok=True)
    for k in range(num_shards):
        members = np.flatnonzero(shard == k)
        chosen = np.sort(draws.choice(members, min(SHOWN, len(members)), replace=False))
        sheet = contact_sheet(features.rows[chosen].tolist(), open_row, COLUMNS)
        sheet.save(folder / "pictures" / f"shard_{k}.png")
    template = templates(is_html=True).get_template("data/partition_report.html.j2")
    classes = _classes(source, features.rows, shard, num_shards)
    page = template.render(record=record, classes=classes, counted=counted)
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
    found: list[list[tuple[str, int, float]]] = []
    for own, most_frequent in zip(counts, order.tolist(), strict=True):
        line: list[tuple[str, int, float]] = []
        for c in most_frequent:
            if own[c]:
                line.append((source.classes[c], int(own[c]), float(own[c] / totals[c])))
        found.append(line)
    return found
