"""Diversity, memorising and the scores of a folder."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hddm.data.images import load_images, save_png, to_unit_range
from hddm.errors import HddmError
from hddm.evaluation.classifier import FEATURES, train_classifier
from hddm.evaluation.diversity import diversity, nearest_ratio
from hddm.evaluation.extractors import INCEPTION_FILE, Extractor, choose_extractor
from hddm.evaluation.folders import evaluate_folder
from hddm.evaluation.scores import Scorer
from tests.artefacts import CLASSES, draw, write_images

NOISE = torch.Generator().manual_seed(0)
ROWS = torch.randn(60, 8, generator=NOISE)


def test_diversity_is_relative_to_the_reference() -> None:
    assert diversity(ROWS, ROWS) == pytest.approx(1)
    assert diversity(ROWS / 2 + 7, ROWS) == pytest.approx(0.5, rel=1e-5)
    assert diversity(torch.ones(10, 8), ROWS) == 0
    two_places = torch.tensor([[0.0], [0.0], [3.0], [3.0]])
    assert diversity(two_places, torch.tensor([[0.0], [1.0]])) == pytest.approx(3 * 4 / 6)


def test_diversity_without_a_scale_is_refused() -> None:
    with pytest.raises(HddmError, match="no scale"):
        diversity(ROWS, torch.ones(5, 8))
    with pytest.raises(HddmError, match="at least 2 images, not 1"):
        diversity(ROWS[:1], ROWS)


def _at(distance: float, num: int = 40) -> torch.Tensor:
    """Images at ``distance`` from the ``_training`` image of the same index, and far from all others."""
    images = 10 * torch.eye(num).view(num, 1, 5, -1)
    return images + distance / images[0].numel() ** 0.5


@pytest.mark.parametrize(("samples", "held_out", "ratio"), [(1.0, 2.0, 0.5), (3.0, 1.0, 3.0), (1.5, 1.5, 1)])
def test_nearest_ratio_is_one_where_samples_lie_like_fresh_images(
    samples: float, held_out: float, ratio: float
) -> None:
    assert nearest_ratio(_at(samples), _at(0), _at(held_out)) == pytest.approx(ratio, rel=1e-4)


def test_repeated_training_images_have_a_ratio_of_zero() -> None:
    images = torch.rand(200, 1, 8, 8, generator=NOISE)
    fresh = torch.rand(50, 1, 8, 8, generator=NOISE)
    assert nearest_ratio(images[50:120], images, fresh) == 0
    assert nearest_ratio(fresh, images, fresh) == 1
    with pytest.raises(HddmError, match="hold others out"):
        nearest_ratio(fresh, images, images[:40])


def _labelled(num: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    pixels = torch.cat([draw(name, num, seed + k, side=8) for k, name in enumerate(CLASSES)])
    return to_unit_range(pixels), torch.arange(2).repeat_interleave(num)


def test_the_classifier_learns_what_can_be_told_apart() -> None:
    images, labels = _labelled(128, seed=0)
    state = torch.get_rng_state()
    classifier = train_classifier(images, labels, epochs=20)
    assert torch.equal(torch.get_rng_state(), state)
    fresh, truth = _labelled(100, seed=50)
    assert (classifier(fresh).argmax(1) == truth).float().mean() >= 0.99
    features = classifier.features(fresh, batch_size=30)
    assert features.shape == (200, FEATURES)
    torch.testing.assert_close(classifier.head(features), classifier(fresh), rtol=1e-4, atol=1e-5)
    again = train_classifier(images, labels, epochs=20)
    assert torch.equal(again.features(fresh), classifier.features(fresh))


def test_one_class_makes_no_classifier() -> None:
    with pytest.raises(HddmError, match="two classes"):
        train_classifier(torch.zeros(8, 1, 4, 4), torch.zeros(8, dtype=torch.long))


def test_scores_compare_with_both_sides() -> None:
    flat = Extractor("pixels", 16, lambda images: images.flatten(1))
    training, held_out = draw("columns", 60, 0), draw("columns", 40, 1)
    scorer = Scorer(flat, training, held_out, resamples=3)
    own, fresh, other = (scorer.score(p) for p in (training, draw("columns", 60, 2), draw("rows", 60, 3)))
    assert own.to_training.value == pytest.approx(0, abs=1e-6)
    assert (own.nearest_ratio, own.extractor, own.images) == (0, "pixels", 60)
    assert own.diversity == pytest.approx(1)
    assert fresh.to_held_out is not None
    assert other.to_held_out is not None
    assert fresh.to_held_out.value < 0.2 * other.to_held_out.value
    assert fresh.nearest_ratio == pytest.approx(1, abs=0.1)
    alone = Scorer(flat, training, None, resamples=3).score(training)
    assert (alone.to_held_out, alone.nearest_ratio) == (None, None)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without Inception's weights, unless they lie in the system's own folder."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HDDM_INCEPTION", raising=False)
    return tmp_path / "home"


def test_a_folder_scores_as_its_own_training_images(images: Path, home: Path) -> None:
    scores = evaluate_folder(images, images, allow_few=True)
    assert scores["to_training"]["value"] == pytest.approx(0, abs=1e-4)
    assert scores["to_training"]["few_images"] is True
    assert scores["diversity"] == pytest.approx(1)
    assert scores["extractor"] == "small classifier of the training images"
    assert scores["to_held_out"] is None
    assert json.loads(json.dumps(scores)) == scores


def test_few_images_need_a_word(images: Path, home: Path) -> None:
    with pytest.raises(HddmError, match="64 features needs more images a side than 48 and 48"):
        evaluate_folder(images, images)


def test_what_cannot_be_compared_is_refused(images: Path, home: Path, tmp_path: Path) -> None:
    larger = write_images(tmp_path / "larger", side=6)
    with pytest.raises(HddmError, match=r"different shapes .*\(1, 6, 6\)"):
        evaluate_folder(images, larger)
    (tmp_path / "jpeg").mkdir()
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(tmp_path / "jpeg" / "1.jpg")
    with pytest.raises(HddmError, match=r"1\.jpg: JPEG compression"):
        evaluate_folder(tmp_path / "jpeg", images)


def test_without_classes_and_inception_there_are_no_features(images: Path, home: Path) -> None:
    with pytest.raises(HddmError, match=f"no features to measure on: {INCEPTION_FILE}"):
        choose_extractor(load_images(images / "rows"), 5000)


def test_single_images_have_no_distance(images: Path, home: Path, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    save_png(draw("rows", 1, 0)[0], tmp_path / "one" / "1.png")
    with pytest.raises(HddmError, match=r"n >= 2|at least 2"):
        evaluate_folder(tmp_path / "one", images, allow_few=True)
