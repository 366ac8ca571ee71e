"""The classifier of digits that comes with hddm: what it is, and which images it is for."""

from pathlib import Path

import pytest
import torch

from hddm.data.images import to_unit_range, write_digits
from hddm.evaluation.features import (
    DIGITS,
    DIGITS_HASH,
    classifier_of,
    open_extractor,
    weights_hash,
)
from hddm.evaluation.images import read_data
from hddm.evaluation.measures import Gaussian, frechet_distance
from tests.artefacts import refusal


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    write_digits(folder / "digits")
    return folder / "digits"


def test_it_recognises_digits_that_it_was_not_trained_on(digits: Path) -> None:
    groups = read_data({"reference": digits / "train", "held_out": digits / "held_out"})
    found = open_extractor(DIGITS, groups["reference"].images, 359)
    assert (found.record.dimensions, found.record.hash) == (64, DIGITS_HASH)
    assert found.classifier is not None
    fresh = groups["held_out"].images
    assert fresh.labels is not None
    guessed = found.classifier(to_unit_range(fresh.pixels)).argmax(1)
    assert (guessed == fresh.labels).float().mean() > 0.95


@pytest.mark.slow
def test_one_that_is_trained_in_the_same_way_measures_nearly_the_same(digits: Path) -> None:
    """Weights depend on the processor and on versions; distances agree within the spread over seeds."""
    groups = read_data({"reference": digits / "train", "held_out": digits / "held_out"})
    images, fresh = groups["reference"].images, groups["held_out"].images
    known = open_extractor(DIGITS, images, 359).classifier
    assert known is not None
    distances = []
    for one in (known, classifier_of(images)):
        sides = []
        for pixels in (images.pixels, fresh.pixels):
            sides.append(Gaussian.of(one.features(to_unit_range(pixels)).double().numpy()))
        distances.append(frechet_distance(*sides))
    assert distances[1] == pytest.approx(distances[0], rel=0.4)
    assert weights_hash(known.state_dict()) == DIGITS_HASH


def test_other_images_are_refused(digits: Path) -> None:
    training = read_data({"reference": digits / "train"})["reference"].images
    object.__setattr__(training, "pixels", torch.zeros(4, 3, 8, 8, dtype=torch.uint8))
    assert "is for the digits of hddm data digits" in refusal(open_extractor, DIGITS, training, 359)
