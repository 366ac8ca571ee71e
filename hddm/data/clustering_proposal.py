"""A proposal for the number of shards: where clusters are tightest for their distance."""

import math

import numpy as np

from hddm.data.clustering import Array, Points, balanced_kmeans, normalise
from hddm.errors import HddmError
from hddm.facts import Facts

LARGEST = 16
FINE = 240
"""Fine clusters from which shards are tried; a multiple of most numbers up to 16."""
SAMPLE = 8192
"""Points that the criterion is measured on."""
STARTS = 3


class Candidate(Facts):
    """A number of shards and the mean silhouette of images under it."""

    shards: int
    silhouette: float


def propose(points: Points, least: float, seed: int = 0) -> tuple[Candidate, ...]:
    """Mean simplified silhouettes for 2, 3, … up to `LARGEST` clusters.

    The silhouette of a point is (b - a) / max(a, b), with a its cosine distance to the centre of its own
    cluster and b that to the nearest other; 1 where clusters are points, 0 or less where they are arbitrary.
    Fine clusters are made once; coarse ones of them for each number, from `STARTS` starts, of which the one
    with the nearest centres counts. Source: Vendramin, Campello and Hruschka, "Relative clustering validity
    criteria" (2010), which measures distances to centres in place of those to all points.

    Args:
        points: (N, d), as in `hddm.data.clustering.cluster`.
        least: points that a cluster needs, on average.
        seed: of the clusters and of the points that are measured.

    Raises:
        HddmError: where N allows no two clusters.
    """
    num = len(points)
    most = min(LARGEST, math.floor(num / least + 1e-9))
    if most < 2:
        raise HddmError(
            f"--shards auto: {num} images make no two shards of {math.ceil(least)}; pass --shards 1"
        )
    assignment, centres = balanced_kmeans(points, min(FINE, num // 2), seed)
    draws = np.random.default_rng([seed, 2])
    rows = np.sort(draws.choice(num, min(SAMPLE, num), replace=False))
    near = normalise(points[rows])
    candidates = []
    for k in range(2, most + 1):
        tries = [balanced_kmeans(centres, k, seed + start) for start in range(STARTS)]
        coarse, of_coarse = max(tries, key=lambda one: float((centres * one[1][one[0]]).sum()))
        value = silhouette(near, coarse[assignment[rows]], of_coarse)
        candidates.append(Candidate(shards=k, silhouette=round(value, 4)))
    return tuple(candidates)


def best(candidates: tuple[Candidate, ...]) -> int:
    """The number of shards with the largest silhouette, the smaller of equals."""
    return max(candidates, key=lambda one: (one.silhouette, -one.shards)).shards


def silhouette(points: Array, assignment: np.ndarray, centres: Array) -> float:
    """Mean simplified silhouette of unit ``points`` (N, d) under unit ``centres`` (k, d), k ≥ 2."""
    distances = 1 - points @ centres.T
    rows = np.arange(len(points))
    own = distances[rows, assignment]
    distances[rows, assignment] = np.inf
    other = distances.min(1)
    larger = np.maximum(own, other)
    return float(np.mean(np.divide(other - own, larger, out=np.zeros_like(own), where=larger > 0)))
