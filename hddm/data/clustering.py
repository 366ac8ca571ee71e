"""Balanced hierarchical k-means: many fine clusters, then few coarse ones made of them.

Plain k-means leaves a catch-all cluster (41.6 % of the data at K = 8 in one replica of Paris's
pipeline), and its expert then sees too little of everything. Both stages here assign points under a
capacity. Features and centres lie on the unit sphere, so that distance is cosine distance. Source: the
two stages of MoDE (arXiv:2404.16030), which DDM (arXiv:2501.05450) uses.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from sklearn.cluster import kmeans_plusplus

from hddm.errors import HddmError

Array = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Hierarchy:
    """Coarse cluster of every point (N,), with the fine centres (m, d) and their coarse cluster (m,)."""

    assignment: Indices
    fine_centres: Array
    fine_to_coarse: Indices


def cluster(features: Array, coarse: int, fine: int, seed: int = 0) -> Hierarchy:
    """Partition ``features`` (N, d) into ``coarse`` clusters of nearly equal size.

    Args:
        features: one row a point; rows are normalised here.
        coarse: number of final clusters.
        fine: number of fine clusters, between ``coarse`` and N.
        seed: of the initial centres and of the order in which points are assigned.

    Raises:
        HddmError: where the numbers do not fit.
    """
    if not 1 <= coarse <= fine <= len(features):
        raise HddmError(
            f"{len(features)} points cannot make {fine} fine and {coarse} coarse clusters: "
            "1 <= coarse <= fine <= points"
        )
    points = normalise(features)
    fine_assignment, fine_centres = balanced_kmeans(points, fine, seed)
    fine_to_coarse, _ = balanced_kmeans(fine_centres, coarse, seed + 1)
    return Hierarchy(fine_to_coarse[fine_assignment], fine_centres, fine_to_coarse)


def normalise(features: Array) -> Array:
    """Rows scaled to unit length; a row of zeros stays."""
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    return features / np.where(lengths > 0, lengths, 1)


def balanced_kmeans(
    points: Array, k: int, seed: int = 0, iterations: int = 50, chunk: int = 1024
) -> tuple[Indices, Array]:
    """Assignment (N,) and unit centres (k, d); no cluster gets more than ceil(n/k) of a chunk of n.

    Points are assigned in random chunks of ``chunk`` (at least 4 k), each by an optimal assignment to
    k × ceil(n/k) places, so that the cost grows linearly with N. Stops when nothing moves.
    """
    draws = np.random.default_rng(seed)
    centres, _ = kmeans_plusplus(points, k, random_state=seed)
    order = draws.permutation(len(points))
    size = max(chunk, 4 * k)
    chunks = np.array_split(order, max(1, -(-len(points) // size)))
    assignment = np.full(len(points), -1, dtype=np.int64)
    for _ in range(iterations):
        before = assignment.copy()
        for rows in chunks:
            assignment[rows] = _assign(points[rows], centres)
        if (assignment == before).all():
            break
        sums = np.zeros_like(centres)
        np.add.at(sums, assignment, points)
        occupied = np.bincount(assignment, minlength=k) > 0
        centres = np.where(occupied[:, None], normalise(sums), centres)
    return assignment, centres


def _assign(points: Array, centres: Array) -> Indices:
    places = np.repeat(np.arange(len(centres)), -(-len(points) // len(centres)))
    _, taken = linear_sum_assignment(-(points @ centres.T)[:, places])
    chosen: Indices = places[taken]
    return chosen
