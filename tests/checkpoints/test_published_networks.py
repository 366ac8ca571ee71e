"""Published networks of MNIST, which two authors trained on data of their own."""

import os
from pathlib import Path

import pytest
import torch

from benchmarks.mnist.__main__ import (
    LARGEST_DIFFERENCE,
    differences,
    disagreement,
    ensemble,
    experts,
)
from benchmarks.mnist.networks import DDPM, FLOW, SHAPE
from hddm import sample


@pytest.fixture(scope="module")
def weights() -> Path:
    """Folders of the authors' weights; the tests are skipped where there are none."""
    default = Path(__file__).parents[3] / "shared" / "real" / "networks"
    folder = Path(os.environ.get("HDDM_PUBLISHED_NETWORKS", default))
    if not folder.is_dir():
        pytest.skip(f"{folder}: no such folder")
    return folder


def test_the_networks_give_the_outputs_of_their_authors_code(weights: Path) -> None:
    found = differences(weights)
    assert found.keys() == {FLOW, *DDPM}
    assert max(found.values()) < LARGEST_DIFFERENCE


@pytest.mark.integration
def test_networks_of_unlike_data_agree_and_mix_into_digits(weights: Path) -> None:
    """Where each is read with the data that it was trained on, and not where all are read alike."""
    images = sample(ensemble(weights), 8, steps=10, shape=SHAPE)
    # The background of a digit is black, and its strokes are white.
    assert 0.6 < (images < -0.9).float().mean() < 0.95
    assert 0.02 < (images > 0.5).float().mean() < 0.3
    own, common = (
        disagreement(experts(weights, with_units), images) for with_units in (True, False)
    )
    assert max(own[t] for t in (0.2, 0.3, 0.5, 0.7)) < 0.25
    assert all(own[t] < 0.4 * common[t] for t in (0.2, 0.3, 0.5, 0.7))


@pytest.mark.integration
@pytest.mark.parametrize("name", [FLOW, *DDPM])
def test_each_of_them_makes_digits_alone(name: str, weights: Path) -> None:
    given = {"class_labels": torch.arange(4)} if name == FLOW else {}
    images = sample(experts(weights)[name], 4, steps=10, **given)
    assert 0.6 < (images < -0.9).float().mean() < 0.97
    assert (images > 0.5).any()
