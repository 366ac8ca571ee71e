"""Kernel distance, precision and recall: against clean-fid, scikit-learn, brute force and closed forms."""

import numpy as np
import pytest
import torch
from cleanfid import fid
from numpy.typing import NDArray
from sklearn.metrics.pairwise import polynomial_kernel
from sklearn.neighbors import NearestNeighbors

from hddm.evaluation.distances import kernel_distance, precision_recall, squared_mmd
from hddm.evaluation.diversity import lpips_distance, why_not_lpips
from tests.artefacts import refusal

Array = NDArray[np.float64]


def _rows(seed: int, num: int, dim: int = 8, shift: float = 0.0, scale: float = 1.0) -> Array:
    return np.random.default_rng(seed).normal(size=(num, dim)) * scale + shift


def test_the_kernel_is_the_cubic_one_of_scikit_learn_without_its_diagonal() -> None:
    x, y = _rows(0, 30), _rows(1, 40, shift=0.3)
    within = [polynomial_kernel(a, degree=3, coef0=1) for a in (x, y)]
    means = [k[~np.eye(len(k), dtype=bool)].mean() for k in within]
    expected = sum(means) - 2 * polynomial_kernel(x, y, degree=3, coef0=1).mean()
    assert squared_mmd(x, y) == pytest.approx(expected, rel=1e-10)


def test_it_agrees_with_clean_fid() -> None:
    x, y = _rows(0, 200, 16), _rows(1, 200, 16, 0.4)
    found = kernel_distance(x, y)
    # Subsets are all there is.
    assert found.value == pytest.approx(fid.kernel_distance(x, y, num_subsets=1), rel=1e-9)
    x, y = _rows(0, 300, 8), _rows(1, 500, 8, 0.4)
    np.random.seed(0)
    theirs = fid.kernel_distance(x, y, num_subsets=400, max_subset_size=100)
    ours = kernel_distance(x, y, subsets=400, subset_size=100)
    assert ours.value == pytest.approx(theirs, rel=0.05)
    assert (found.subset_size, ours.subset_size) == (200, 100)
    assert "at least 4 images a side, not 3" in refusal(kernel_distance, x[:3], y)


def test_its_mean_is_the_same_at_any_number_of_images() -> None:
    """One dimension: with N(0, 1) and N(1, 1), E(ab + 1)³ = 1 + 3 E ab + 3 E a²b² + E a³b³."""

    def expected(moments: tuple[int, int, int], others: tuple[int, int, int]) -> int:
        weights = (3, 3, 1)
        return 1 + sum(w * m * n for w, m, n in zip(weights, moments, others, strict=True))

    zero, one = (0, 1, 0), (1, 2, 4)
    truth = expected(zero, zero) + expected(one, one) - 2 * expected(zero, one)
    for num, draws in ((5, 5000), (50, 1000)):
        values = [squared_mmd(_rows(2 * s, num, 1), _rows(2 * s + 1, num, 1, 1.0)) for s in range(draws)]
        assert abs(np.mean(values) - truth) < 4 * np.std(values) / draws**0.5


@pytest.mark.slow
def test_its_standard_error_is_how_far_other_samples_would_move_it() -> None:
    reference = _rows(10**6, 300, shift=0.3)
    others = [kernel_distance(_rows(s, 400), reference, subsets=20) for s in range(160)]
    truth = np.std([one.value for one in others])
    said = np.mean([one.standard_error for one in others])
    # The deviation of 160 numbers is itself known to 6 % or 7 %; these are four times that, and more above.
    assert truth * 0.72 < said < truth * 1.5


def _by_brute_force(rows: Array, centres: Array, neighbours: int) -> float:
    """Share of rows that lie in the ball of a centre to its k-th nearest other centre."""
    nearest = NearestNeighbors(n_neighbors=neighbours + 1).fit(centres)
    radii = nearest.kneighbors(centres)[0][:, -1]
    return float(np.mean([(np.linalg.norm(centres - row, axis=1) <= radii).any() for row in rows]))


@pytest.mark.parametrize("neighbours", [1, 3, 5])
@pytest.mark.parametrize(
    ("num", "shift", "scale"),
    # The last are more than a chunk.
    [(150, 0.0, 1.0), (150, 1.0, 0.5), (150, 0.5, 3.0), (1100, 0.8, 1.0)],
)
def test_precision_and_recall_are_those_of_brute_force(
    num: int, shift: float, scale: float, neighbours: int
) -> None:
    fake, real = _rows(0, num, 3, shift + 100, scale), _rows(1, num, 3, 100)
    found = precision_recall(torch.from_numpy(fake), torch.from_numpy(real), neighbours)
    assert found.precision == pytest.approx(_by_brute_force(fake, real, neighbours))
    assert found.recall == pytest.approx(_by_brute_force(real, fake, neighbours))
    assert found.images == num


def test_both_sides_are_cut_to_one_number() -> None:
    fake, real = torch.from_numpy(_rows(0, 90)), torch.from_numpy(_rows(1, 300))
    assert precision_recall(fake, real).images == 90
    assert precision_recall(fake, real, most=50).images == 50
    assert precision_recall(fake, real, most=50) == precision_recall(fake, real, most=50)
    assert "more than 3 images a side, not 3" in refusal(precision_recall, fake[:3], real)


def test_why_there_is_no_lpips_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not_lpips(8) == "LPIPS needs images of 32 pixels a side, and these have 8"
    monkeypatch.setattr("hddm.evaluation.diversity.find_spec", lambda name: None)
    assert why_not_lpips(64) == "the package lpips is not installed"
    monkeypatch.setattr("hddm.evaluation.diversity.find_spec", lambda name: object())
    monkeypatch.setattr("torch.hub.get_dir", lambda: "/nowhere")
    assert why_not_lpips(64) == "alexnet-owt-7be5be79.pth is not in /nowhere/checkpoints"


@pytest.mark.slow
def test_lpips_is_that_of_its_package(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    lpips = pytest.importorskip("lpips")
    torchvision = pytest.importorskip("torchvision")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    torch.manual_seed(0)
    from hddm.evaluation.diversity import _trunk

    _trunk().parent.mkdir(parents=True)
    torch.save(torchvision.models.alexnet().state_dict(), _trunk())
    assert why_not_lpips(32) is None
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (40, 1, 32, 32)).astype(np.uint8))
    first, second = torch.arange(40), torch.arange(39, -1, -1)
    found = lpips_distance(pixels)(first, second)
    network = lpips.LPIPS(net="alex", verbose=False)
    one = [pixels[k].float().expand(1, 3, -1, -1) / 127.5 - 1 for k in (3, 36)]
    assert found.shape == (40,)
    assert found[3].item() == pytest.approx(network(*one).item(), rel=1e-4)
    assert (lpips_distance(pixels)(first, first) == 0).all()
