"""Balanced hierarchical k-means: many fine clusters, merged into few coarse ones.

Plain k-means can leave one cluster with most points, so that the other experts see too little data. Both
levels therefore assign points under a capacity. Features and centres are unit vectors, compared by cosine
distance. The two levels follow MoDE (arXiv:2404.16030), used by DDM (arXiv:2501.05450): centres are found on
random mini-batches, and all points are assigned once, at the end.
"""

import itertools
from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from hddm.utils.errors import optional
from hddm.utils.streams import Use, seed_of, stream

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

# Here, so that a missing package is reported before hours of features.
kmeans_plusplus = optional("sklearn.cluster", "hddm partition", "train").kmeans_plusplus

_TEMPERATURE = 0.02
_ROUNDS = 30
_ROUNDING = 1e-12
"""Gains below this are rounding errors of cosines; accepting them could loop forever."""


def transport(values: Array) -> Indices:
    """Clusters (n,) that maximise Σ_i values[i, cluster_i] with exactly n/k points in each of k clusters.

    ``values`` (n, k) are finite and of the size of cosines; n is a multiple of k. Prices of clusters give a
    first assignment, optimal for its cluster sizes. Points then move along the cheapest chains from clusters
    with too many points to those with too few, which preserves optimality. Source: successive shortest paths,
    in Ahuja, Magnanti and Orlin, "Network Flows" (1993), chapter 9; far faster here than the Hungarian
    method.
    """
    values = values - _prices(values)
    each = values.shape[0] // values.shape[1]
    chosen: NDArray[np.int64] = values.argmax(1)
    sizes = np.bincount(chosen, minlength=values.shape[1])
    loss = np.full((len(sizes), len(sizes)), np.inf)
    mover = np.zeros(loss.shape, dtype=np.int64)
    changed: list[int] = list(range(len(sizes)))
    while True:
        for cluster in changed:
            _update(cluster, values, chosen, loss, mover)
        if (sizes == each).all():
            return chosen
        changed = _cheapest_chain(loss, sizes > each, sizes < each)
        movers = [mover[a, b] for a, b in itertools.pairwise(changed)]
        chosen[movers] = changed[1:]
        sizes[changed[0]] -= 1
        sizes[changed[-1]] += 1


def _prices(values: Array) -> Array:
    """Prices (k,) that make clusters about equally wanted, by Sinkhorn's iteration on soft assignments."""
    num, k = values.shape
    wishes = np.exp((values - values.max(1, keepdims=True)) / _TEMPERATURE)
    scale = np.ones(k)
    for _ in range(_ROUNDS):
        scale = (num / k) / (wishes.T @ (1 / (wishes @ scale)))
    prices: Array = -_TEMPERATURE * np.log(scale)
    return prices


def _update(cluster: int, values: Array, chosen: Indices, loss: Array, mover: Indices) -> None:
    """Compute the least cost of moving a point of ``cluster`` to each other cluster, and that point."""
    members = np.flatnonzero(chosen == cluster)
    loss[cluster] = np.inf
    if len(members):
        gaps = values[members, cluster][:, None] - values[members]
        best = gaps.argmin(0)
        loss[cluster] = gaps[best, np.arange(len(best))]
        mover[cluster] = members[best]


def _cheapest_chain(loss: Array, full: NDArray[np.bool_], short: NDArray[np.bool_]) -> list[int]:
    """Cheapest chain of clusters from a full one to a short one, by Bellman and Ford."""
    distance = np.where(full, 0.0, np.inf)
    before = np.full(len(distance), -1)
    for _ in range(len(distance)):
        through = distance[:, None] + loss
        best = through.argmin(0)
        lengths = through[best, np.arange(len(best))]
        nearer = lengths < distance - _ROUNDING
        if not nearer.any():
            break
        distance = np.where(nearer, lengths, distance)
        before = np.where(nearer, best, before)
    chain = [int(np.where(short, distance, np.inf).argmin())]
    while before[chain[-1]] >= 0:
        chain.append(int(before[chain[-1]]))
    return chain[::-1]


SHARE = 0.05
"""Share of all points in one pass, as in MoDE."""
BATCH = 4096
"""Fewest points in one pass; with fewer in total, each pass takes all."""
_MANY = 128
"""Clusters up to which chains between them are faster than the Hungarian method."""
_TAIL = 256
"""Points that are assigned together with the remainder, which does not divide evenly."""
START = 16384
"""Points, drawn at random, among which the initial centres are chosen."""


class Points(Protocol):
    """Rows (N, d), in memory or on disk, such as an array."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Indices, /) -> NDArray[np.floating]:
        """Rows (n, d) at indices (n,)."""


def cluster(features: Points, coarse: int, fine: int, seed: int = 0) -> Indices:
    """Cluster (N,) of each of ``features`` (N, d), among ``coarse`` clusters of nearly equal size.

    A coarse cluster has ⌊fine/coarse⌋ or one more fine cluster, and a fine cluster ⌊N/fine⌋ or one more
    point. So with ``fine`` a multiple of ``coarse``, sizes differ by at most fine/coarse points. Only
    mini-batches are read at once; 1 ≤ ``coarse`` ≤ ``fine`` ≤ N.
    """
    fine_assignment, fine_centres = balanced_kmeans(features, fine, seed)
    fine_to_coarse, _ = balanced_kmeans(fine_centres, coarse, seed, run=1)
    assignment: Indices = fine_to_coarse[fine_assignment]
    return assignment


def normalise(features: NDArray[np.floating]) -> Array:
    """Rows scaled to unit length, in float64; zero rows stay zero."""
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
    run: int = 0,
) -> tuple[Indices, Array]:
    """Assignment (N,) and unit centres (k, d); every cluster gets ⌊N/k⌋ points or one more.

    A pass takes a random mini-batch, a share p of all points, and moves centre j to the direction of

        s_j ← (1 - p) s_j + Σ x_i over the points i of the mini-batch that are assigned to j,

    so a point's weight falls by a factor e for every N further points. At p = 1 this is Lloyd's algorithm,
    which stops when nothing moves.

    Points are assigned in random chunks of about ``chunk`` (at least 4 k), each optimally with equal counts
    per cluster, so the cost grows linearly with N. Memory holds ``batch`` points or `SHARE` of them, and a
    few numbers per point. Rows are normalised here. ``iterations`` is the most passes, ``batch`` the fewest
    points of a pass, and initial centres are chosen among ``start`` points, at least 4 k. Each number
    ``run`` has random numbers of its own.
    """
    num = len(points)
    draws = np.random.default_rng(stream(seed, Use.CLUSTERS, run))
    starts = np.random.default_rng(stream(seed, Use.CLUSTER_START_POINTS, run))
    rows = np.sort(starts.choice(num, min(num, max(start, 4 * k)), replace=False))
    first = seed_of(seed, Use.CLUSTER_STARTS, run) % 2**32
    centres: Array = kmeans_plusplus(normalise(points[rows]), k, random_state=first)[0]
    size = max(chunk, 4 * k)
    per_pass = min(num, max(batch, size, round(SHARE * num)))
    is_whole, order = per_pass == num, draws.permutation(num)
    batches = itertools.repeat(order) if is_whole else _batches(order, per_pass, draws)
    sums, assignment = np.zeros_like(centres), np.full(num, -1, dtype=np.int64)
    for rows in itertools.islice(batches, iterations):
        sums *= 1 - per_pass / num
        before = assignment.copy()
        for part in _chunks(rows, k, size):
            near = normalise(points[part])
            assignment[part] = _assign(near, centres)
            np.add.at(sums, assignment[part], near)
        if is_whole and (assignment == before).all():
            return assignment, centres
        centres = normalise(sums)
    if not is_whole:
        for part in _chunks(draws.permutation(num), k, size):
            assignment[part] = _assign(normalise(points[part]), centres)
    return assignment, centres


def _batches(order: Indices, size: int, draws: np.random.Generator) -> Iterator[Indices]:
    """Slices of ``order`` and of further random ones, so no point repeats before nearly all were used."""
    while True:
        for start in range(0, len(order) - size + 1, size):
            yield order[start : start + size]
        order = draws.permutation(len(order))


def _chunks(order: Indices, k: int, size: int) -> Iterator[Indices]:
    """Parts of at most ``size`` rows, all but the last a multiple of k, so sizes differ by at most 1."""
    spare = len(order) % k
    tail = min(len(order), spare + k * -(-_TAIL // k)) if spare else 0
    units = (len(order) - tail) // k
    number = -(-units // (size // k))
    bounds = [k * (units * i // number) for i in range(number)]
    bounds.append(len(order) - tail)
    for start, end in itertools.pairwise(bounds):
        yield order[start:end]
    if tail:
        yield order[-tail:]


def _assign(points: Array, centres: Array) -> Indices:
    """Best cluster (n,) of each point if every cluster gets ⌊n/k⌋ points or one more."""
    k = len(centres)
    each, rest = divmod(len(points), k)
    if not rest and k <= _MANY:
        return transport(points @ centres.T)
    places = np.concatenate([np.repeat(np.arange(k), each), np.arange(k if rest else 0)])
    cost = -(points @ centres.T)[:, places]
    # Moving a point from a spare place to a required one loses at most 2, the range of a cosine.
    cost[:, : k * each] -= 4
    _, taken = linear_sum_assignment(cost)
    chosen: Indices = places[taken]
    return chosen
