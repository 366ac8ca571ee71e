"""Balanced clusters: of equal size, optimal among such, and where the data has them."""

from itertools import combinations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hddm.data.clustering import balanced_kmeans, cluster, normalise
from hddm.data.features import pixel_pca
from hddm.errors import HddmError

Array = NDArray[np.float64]


def _blobs(sizes: list[int], dim: int = 8, spread: float = 0.05, seed: int = 0) -> tuple[Array, Array]:
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
    assert _same_partition(cluster(points, k, 4 * k, seed).assignment, truth)


def test_the_same_seed_gives_the_same_clusters_and_another_seed_may_not() -> None:
    points = np.random.default_rng(0).normal(size=(120, 6))
    first, again, other = (cluster(points, 3, 12, seed).assignment for seed in (5, 5, 6))
    np.testing.assert_array_equal(first, again)
    assert not _same_partition(first, other)


# The last has 3 chunks of 84, 83 and 83 points, of which a cluster takes at most 28 each.
@pytest.mark.parametrize(
    ("num", "k", "most"), [(40, 4, 10), (41, 4, 11), (43, 4, 11), (7, 7, 1), (1, 1, 1), (250, 3, 84)]
)
def test_no_cluster_exceeds_its_capacity(num: int, k: int, most: int) -> None:
    points = normalise(np.random.default_rng(0).normal(size=(num, 5)) + 2)
    assignment, centres = balanced_kmeans(points, k, chunk=100)
    assert np.bincount(assignment, minlength=k).max() <= most
    assert len(assignment) == num
    np.testing.assert_allclose(np.linalg.norm(centres, axis=1), 1, atol=1e-9)


def test_a_catch_all_cluster_is_divided() -> None:
    """Nine tenths of the points lie together; every shard still gets its part."""
    points, _ = _blobs([360, 20, 10, 10])
    sizes = np.bincount(cluster(points, 4, 32).assignment, minlength=4)
    assert sizes.sum() == 400
    # At most 8 of the 32 fine clusters, each of at most 13 points.
    assert sizes.max() <= 8 * 13


@pytest.mark.parametrize("seed", range(5))
def test_the_assignment_is_the_best_among_balanced_ones(seed: int) -> None:
    points = normalise(np.random.default_rng(seed).normal(size=(8, 3)))
    assignment, centres = balanced_kmeans(points, 2, seed)
    similarity = points @ centres.T
    rows = range(8)
    best = max(sum(similarity[i, int(i in first)] for i in rows) for first in map(set, combinations(rows, 4)))
    assert similarity[rows, assignment].sum() == pytest.approx(best, abs=1e-9)


def test_the_two_levels_agree_with_each_other() -> None:
    points, _ = _blobs([50, 50, 50])
    hierarchy = cluster(points, 3, 15)
    assert hierarchy.fine_centres.shape == (15, 8)
    assert np.bincount(hierarchy.fine_to_coarse).tolist() == [5, 5, 5]
    nearest = (normalise(points) @ hierarchy.fine_centres.T).argmax(1)
    np.testing.assert_array_equal(hierarchy.fine_to_coarse[nearest], hierarchy.assignment)


def test_length_does_not_matter_only_direction() -> None:
    points = np.random.default_rng(0).normal(size=(80, 6))
    lengths = np.random.default_rng(1).uniform(0.1, 10, (80, 1))
    np.testing.assert_array_equal(
        cluster(points, 2, 8).assignment, cluster(points * lengths, 2, 8).assignment
    )


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_points_that_are_all_alike_are_still_divided_evenly(value: float) -> None:
    sizes = np.bincount(cluster(np.full((40, 5), value), 2, 8).assignment)
    assert sizes.tolist() == [20, 20]


@pytest.mark.parametrize(("coarse", "fine"), [(0, 2), (3, 2), (2, 11)])
def test_numbers_that_do_not_fit_are_refused(coarse: int, fine: int) -> None:
    with pytest.raises(HddmError, match="10 points"):
        cluster(np.ones((10, 3)), coarse, fine)


def test_pixel_features_are_the_principal_components() -> None:
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (50, 1, 4, 4)).astype(np.uint8))
    flat = pixels.flatten(1).double().numpy() / 255
    _, singular, _ = np.linalg.svd(flat - flat.mean(0), full_matrices=False)
    features = pixel_pca(pixels, 5)
    assert features.shape == (50, 5)
    np.testing.assert_allclose(np.linalg.norm(features, axis=0), singular[:5], rtol=1e-6)
    assert pixel_pca(pixels[:3], 5).shape == (3, 3)
