"""Balanced clusters: of equal size, optimal among such, and where the data has them."""

from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from hddm.data.clustering import Indices, balanced_kmeans, cluster, normalise, transport

Array = NDArray[np.float64]


def _blobs(
    sizes: list[int], dim: int = 8, spread: float = 0.05, seed: int = 0
) -> tuple[Array, Array]:
    """Points around orthogonal directions, shuffled, with the blob of each."""
    draws = np.random.default_rng(seed)
    truth = draws.permutation(np.repeat(np.arange(len(sizes)), sizes))
    return np.eye(dim)[truth] + spread * draws.normal(size=(len(truth), dim)), truth


def _same_partition(a: Array, b: Array) -> bool:
    """Whether two labellings group alike, whatever the names of the groups."""
    pairs = set(zip(a.tolist(), b.tolist(), strict=True))
    return len(pairs) == len(set(a.tolist())) == len(set(b.tolist()))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("k", [2, 4])
def test_well_separated_clusters_are_found(k: int, seed: int) -> None:
    points, truth = _blobs([60] * k, seed=seed)
    assert _same_partition(cluster(points, k, 4 * k, seed), truth)


def test_a_catch_all_cluster_is_divided() -> None:
    """Nine tenths of the points lie together; sizes differ by the 8 fine clusters of each at most."""
    points, _ = _blobs([360, 20, 10, 10])
    assert np.ptp(np.bincount(cluster(points, 4, 32), minlength=4)) <= 8


@pytest.mark.parametrize("seed", range(5))
def test_the_assignment_is_the_best_among_balanced_ones(seed: int) -> None:
    points = normalise(np.random.default_rng(seed).normal(size=(8, 3)))
    assignment, centres = balanced_kmeans(points, 2, seed)
    similarity = points @ centres.T
    rows = range(8)
    best = max(
        sum(similarity[i, int(i in first)] for i in rows)
        for first in map(set, combinations(rows, 4))
    )
    assert similarity[rows, assignment].sum() == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_points_that_are_all_alike_are_still_divided_evenly(value: float) -> None:
    sizes = np.bincount(cluster(np.full((40, 5), value), 2, 8))
    assert sizes.tolist() == [20, 20]


@pytest.mark.parametrize("batch", [50, 4096])
@pytest.mark.parametrize(
    ("num", "k"), [(40, 4), (43, 4), (7, 7), (1, 1), (250, 3), (1003, 7), (999, 32), (64, 8)]
)
def test_sizes_differ_by_one_at_most_in_chunks_and_mini_batches(
    num: int, k: int, batch: int
) -> None:
    points = np.random.default_rng(0).normal(size=(num, 6)) + 1
    assignment, centres = balanced_kmeans(points, k, chunk=100, batch=batch)
    sizes = np.bincount(assignment, minlength=k)
    assert sizes.sum() == num
    assert {*sizes.tolist()} <= {num // k, num // k + 1}
    np.testing.assert_allclose(np.linalg.norm(centres, axis=1), 1, atol=1e-9)


def _similarity(points: Array, assignment: Array, centres: Array) -> float:
    return float((normalise(points) * centres[assignment]).sum(1).mean())


@pytest.mark.parametrize("seed", range(2))
def test_mini_batches_find_centres_as_good_as_all_points_do(seed: int) -> None:
    draws = np.random.default_rng(seed)
    points = draws.normal(size=(3000, 8)) * np.geomspace(3, 0.5, 8)
    whole = _similarity(points, *balanced_kmeans(points, 16, seed, batch=3000))
    drawn = _similarity(points, *balanced_kmeans(points, 16, seed, batch=600))
    single = balanced_kmeans(points, 16, seed, iterations=1, batch=600)
    assert drawn > 0.99 * whole
    assert drawn > _similarity(points, *single)


@pytest.mark.parametrize(("num", "k"), [(60, 2), (60, 5), (128, 32), (90, 90)])
def test_chains_of_moves_find_what_the_hungarian_method_finds(num: int, k: int) -> None:
    values = np.random.default_rng(0).normal(size=(num, k)) * 0.3
    values[:, 0] += 0.5
    chosen = transport(values)
    assert np.bincount(chosen, minlength=k).tolist() == [num // k] * k
    rows, places = linear_sum_assignment(-np.repeat(values, num // k, axis=1))
    best = np.repeat(values, num // k, axis=1)[rows, places].sum()
    assert values[np.arange(num), chosen].sum() == pytest.approx(best, abs=1e-9)


def test_a_pass_reads_no_more_points_than_a_mini_batch() -> None:
    class Watched:
        """Points as they lie on disk: only rows that are asked for are there."""

        shape = (5000, 4)
        largest = 0

        def __len__(self) -> int:
            return 5000

        def __getitem__(self, rows: Indices, /) -> Array:
            Watched.largest = max(Watched.largest, len(rows))
            return np.random.default_rng(0).normal(size=self.shape)[rows]

    balanced_kmeans(Watched(), 5, batch=500, chunk=500, iterations=3, start=1000)
    assert Watched.largest <= 1000
