"""The best way to put points into places, with equally many places in every cluster."""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
Indices = NDArray[np.int64]

_TEMPERATURE = 0.02
_ROUNDS = 30
_ROUNDING = 1e-12
"""Gains below this are rounding errors of cosines; taking them could turn in circles."""


def transport(values: Values) -> Indices:
    """Clusters (n,) that maximise Σ_i values[i, cluster_i] where each of k clusters gets n/k points, exactly.

    Prices of clusters, near those at which all are asked for alike, give a first assignment, the best one
    for the sizes that it has. Points then move along the cheapest chains from clusters with too many to those
    with too few, which keeps it the best one for its sizes. The chains are on the k clusters alone; places of
    one cluster, all alike, make the Hungarian method far slower. Source: successive shortest paths, in
    Ahuja, Magnanti and Orlin, "Network Flows" (1993), chapter 9.

    Args:
        values: (n, k), finite and of the size of cosines; n is a multiple of k.
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
        movers = [mover[a, b] for a, b in pairwise(changed)]
        chosen[movers] = changed[1:]
        sizes[changed[0]] -= 1
        sizes[changed[-1]] += 1


def _prices(values: Values) -> Values:
    """Prices (k,) at which clusters are asked for about alike, by Sinkhorn's iteration on soft wishes."""
    num, k = values.shape
    wishes = np.exp((values - values.max(1, keepdims=True)) / _TEMPERATURE)
    scale = np.ones(k)
    for _ in range(_ROUNDS):
        scale = (num / k) / (wishes.T @ (1 / (wishes @ scale)))
    prices: Values = -_TEMPERATURE * np.log(scale)
    return prices


def _update(cluster: int, values: Values, chosen: Indices, loss: Values, mover: Indices) -> None:
    """What it costs at least to move a point of ``cluster`` to each other one, and which point that is."""
    members = np.flatnonzero(chosen == cluster)
    loss[cluster] = np.inf
    if len(members):
        gaps = values[members, cluster][:, None] - values[members]
        best = gaps.argmin(0)
        loss[cluster] = gaps[best, np.arange(len(best))]
        mover[cluster] = members[best]


def _cheapest_chain(loss: Values, full: NDArray[np.bool_], short: NDArray[np.bool_]) -> list[int]:
    """Clusters from a full one to a short one, by Bellman and Ford."""
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
