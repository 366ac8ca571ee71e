"""Balanced hierarchical k-means: many fine clusters, then few coarse ones made of them.

Plain k-means leaves a catch-all cluster (41.6 % of the data at K = 8 in one replica of Paris's
pipeline), and its expert then sees too little of everything. Both stages here assign points under a
capacity. Features and centres lie on the unit sphere, so that distance is cosine distance. Source: the
two stages of MoDE (arXiv:2404.16030), which DDM (arXiv:2501.05450) uses; as there, centres are found on
random mini-batches, and all points are assigned once, at the end.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from sklearn.cluster import kmeans_plusplus

from hddm.data.transport import transport
from hddm.errors import HddmError

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

SHARE = 0.05
"""Of all points that a pass looks at, as in MoDE."""
BATCH = 4096
"""Points that a pass looks at, at least: with fewer than this each pass takes all of them."""
_MANY = 128
"""Clusters up to which chains between them are faster than the Hungarian method."""
_TAIL = 256
"""Points that are assigned together with those that do not divide evenly."""
START = 16384
"""Points, drawn at random, among which the initial centres are chosen."""


class Points(Protocol):
    """Rows (N, d), in memory or on disk; an array is one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, d)."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Indices, /) -> NDArray[np.floating]:
        """Rows (n, d) by number (n,)."""


@dataclass(frozen=True)
class Hierarchy:
    """Coarse cluster of every point (N,), with the fine centres (m, d) and their coarse cluster (m,)."""

    assignment: Indices
    fine_centres: Array
    fine_to_coarse: Indices


def cluster(features: Points, coarse: int, fine: int, seed: int = 0) -> Hierarchy:
    """Partition ``features`` (N, d) into ``coarse`` clusters of nearly equal size.

    A coarse cluster has ⌊fine/coarse⌋ or one more fine cluster, and a fine cluster ⌊N/fine⌋ or one more
    point. So with ``fine`` a multiple of ``coarse``, sizes differ by at most fine/coarse points.

    Args:
        features: one row a point; rows are normalised here. Only mini-batches are read at once.
        coarse: number of final clusters.
        fine: number of fine clusters, between ``coarse`` and N.
        seed: of the initial centres and of the order in which points are taken.

    Raises:
        HddmError: where the numbers do not fit.
    """
    if not 1 <= coarse <= fine <= len(features):
        raise HddmError(
            f"{len(features)} points cannot make {fine} fine and {coarse} coarse clusters: "
            "1 <= coarse <= fine <= points"
        )
    fine_assignment, fine_centres = balanced_kmeans(features, fine, seed)
    fine_to_coarse, _ = balanced_kmeans(fine_centres, coarse, seed + 1)
    return Hierarchy(fine_to_coarse[fine_assignment], fine_centres, fine_to_coarse)


def normalise(features: NDArray[np.floating]) -> Array:
    """Rows scaled to unit length, in float64; a row of zeros stays."""
    rows = np.asarray(features, dtype=np.float64)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(lengths > 0, lengths, 1)


def balanced_kmeans(
    points: Points,
    k: int,
    seed: int = 0,
    iterations: int = 50,
    chunk: int = 4096,
    batch: int = BATCH,
    start: int = START,
) -> tuple[Indices, Array]:
    """Assignment (N,) and unit centres (k, d); every cluster gets ⌊N/k⌋ points or one more.

    A pass takes a random mini-batch, a share p of all points, and moves centre j to the direction of

        s_j ← (1 - p) s_j + Σ x_i over the points i of the mini-batch that are assigned to j,

    so that a point weighs e times less after N more have been seen. At p = 1 this is Lloyd's algorithm, which
    stops when nothing moves. At last all points are assigned to the centres.

    Points are assigned in random chunks of about ``chunk`` (at least 4 k), each by an optimal assignment in
    which every cluster gets its equal part, so that the cost grows linearly with N. Memory holds ``batch``
    points or `SHARE` of them, and a few numbers for each point.

    Args:
        points: one row a point; rows are normalised here.
        k: number of clusters, 1 ≤ k ≤ N.
        seed: of the initial centres and of the order in which points are taken.
        iterations: passes at most.
        chunk: points that are assigned at once.
        batch: points of a pass, at least.
        start: points among which the initial centres are chosen, at least 4 k.
    """
    num = len(points)
    draws = np.random.default_rng(seed)
    centres = _start(points, k, seed, max(start, 4 * k))
    size = max(chunk, 4 * k)
    per_pass = max(batch, size, round(SHARE * num))
    if per_pass >= num:
        return _lloyd(points, centres, draws.permutation(num), iterations, size)
    sums = np.zeros_like(centres)
    batches = _batches(num, per_pass, draws)
    for _ in range(iterations):
        rows = next(batches)
        sums *= 1 - per_pass / num
        for part in _chunks(rows, k, size):
            near = normalise(points[part])
            np.add.at(sums, _assign(near, centres), near)
        centres = normalise(sums)
    assignment = np.empty(num, dtype=np.int64)
    for part in _chunks(draws.permutation(num), k, size):
        assignment[part] = _assign(normalise(points[part]), centres)
    return assignment, centres


def _start(points: Points, k: int, seed: int, most: int) -> Array:
    num = len(points)
    rows = np.arange(num)
    if num > most:
        rows = np.sort(np.random.default_rng([seed, 1]).choice(num, most, replace=False))
    centres: Array = kmeans_plusplus(normalise(points[rows]), k, random_state=seed)[0]
    return centres


def _lloyd(
    points: Points, centres: Array, order: Indices, iterations: int, size: int
) -> tuple[Indices, Array]:
    k = len(centres)
    near = normalise(points[np.arange(len(points))])
    assignment = np.full(len(near), -1, dtype=np.int64)
    for _ in range(iterations):
        before = assignment.copy()
        for part in _chunks(order, k, size):
            assignment[part] = _assign(near[part], centres)
        if (assignment == before).all():
            break
        sums = np.zeros_like(centres)
        np.add.at(sums, assignment, near)
        centres = normalise(sums)
    return assignment, centres


def _batches(num: int, size: int, draws: np.random.Generator) -> Iterator[Indices]:
    """Slices of random orders, so that no point is seen again before nearly all have been."""
    while True:
        order = draws.permutation(num)
        for start in range(0, num - size + 1, size):
            yield order[start : start + size]


def _chunks(order: Indices, k: int, size: int) -> Iterator[Indices]:
    """Parts of ``size`` rows at most, all but the last a multiple of k: so clusters differ by one at most."""
    spare = len(order) % k
    tail = min(len(order), spare + k * -(-_TAIL // k)) if spare else 0
    units = (len(order) - tail) // k
    number = -(-units // (size // k))
    bounds = [k * (units * i // number) for i in range(number)] + [len(order) - tail]
    for start, end in pairwise(bounds):
        yield order[start:end]
    if tail:
        yield order[-tail:]


def _assign(points: Array, centres: Array) -> Indices:
    """The best cluster (n,) of each point where every cluster gets ⌊n/k⌋ of them or one more."""
    k = len(centres)
    each, rest = divmod(len(points), k)
    if not rest and k <= _MANY:
        return transport(points @ centres.T)
    places = np.concatenate([np.repeat(np.arange(k), each), np.arange(k if rest else 0)])
    cost = -(points @ centres.T)[:, places]
    # A step from a spare place into one that must be filled loses at most 2, the range of a cosine.
    cost[:, : k * each] -= 4
    _, taken = linear_sum_assignment(cost)
    chosen: Indices = places[taken]
    return chosen
