"""HTML report of a partition: a picture grid of each shard, sizes, classes and distances."""

from importlib.resources import files
from pathlib import Path

import numpy as np
from PIL import Image

from hddm.data.clustering import Array, Indices, Points, normalise
from hddm.data.features import ImageFeatures
from hddm.data.images import contact_sheet, lines_of, open_image
from hddm.data.shard_records import PartitionRecord
from hddm.data.sources.base import ImageSource
from hddm.utils.errors import counted, shown
from hddm.utils.streams import Use, stream

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
    from jinja2 import Environment, StrictUndefined

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
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(
        (files("hddm.data") / "partition_report.html.j2").read_text(encoding="utf-8")
    )
    page = template.render(
        record=record,
        distances=distances,
        largest=distances.max(),
        classes=_classes(source, features.rows, shard, num_shards),
        pictures=PICTURES,
        counted=counted,
        shown=shown,
        most_skipped=_SKIPPED,
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
