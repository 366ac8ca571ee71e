"""Diversity, memorising and the scores of a folder."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hddm.data.images import save_png, to_bytes, to_unit_range
from hddm.evaluation.evaluate import evaluate
from hddm.evaluation.features import (
    FEATURES,
    FeatureExtractor,
    classifier_of,
    of_classifier,
    train_classifier,
    weights_hash,
)
from hddm.evaluation.images import ImageGroup, alike, conditions, read_data, read_sampling
from hddm.evaluation.measures import (
    diversity,
    measure,
    memorisation,
    nearest_distances,
    precision_recall,
    within_conditions,
)
from hddm.evaluation.results import Evaluation
from hddm.evaluation.score_records import FeaturesRecord, Memorisation
from hddm.evaluation.scores import Scorer, Side
from hddm.utils.records import SAMPLING_FILE
from tests.artefacts import CLASSES, Command, draw, load_images, refusal, write_images


def _scorer(
    features: FeatureExtractor,
    training: torch.Tensor,
    fresh: torch.Tensor | None,
    *rest: Any,
    **options: Any,
) -> Scorer:
    sides = [Side("training", training), *([] if fresh is None else [Side("held_out", fresh)])]
    return Scorer(features, sides, *rest, **options)


NOISE = torch.Generator().manual_seed(0)
ROWS = torch.randn(60, 8, generator=NOISE)
FLAT = FeatureExtractor(
    FeaturesRecord(name="pixels", dimensions=16), lambda images: images.flatten(1)
)


def test_diversity_is_relative_to_the_reference() -> None:
    assert diversity(ROWS, ROWS) == pytest.approx(1)
    assert diversity(ROWS / 2 + 7, ROWS) == pytest.approx(0.5, rel=1e-5)
    assert diversity(torch.ones(10, 8), ROWS) == 0
    two_places = torch.tensor([[0.0], [0.0], [3.0], [3.0]])
    assert diversity(two_places, torch.tensor([[0.0], [1.0]])) == pytest.approx(3 * 4 / 6)


def _at(distance: float, num: int = 40) -> torch.Tensor:
    """Images at ``distance`` from the ``_training`` image of the same index, and far from all others."""
    images = 10 * torch.eye(num).view(num, 1, 5, -1)
    return images + distance / images[0].numel() ** 0.5


def _memory(samples: torch.Tensor, training: torch.Tensor, held_out: torch.Tensor) -> Memorisation:
    return memorisation(nearest_distances(samples, training), nearest_distances(held_out, training))


@pytest.mark.parametrize(
    ("samples", "held_out", "ratio"), [(1.0, 2.0, 0.5), (3.0, 1.0, 3.0), (1.5, 1.5, 1)]
)
def test_the_nearest_ratio_is_one_where_samples_lie_like_fresh_images(
    samples: float, held_out: float, ratio: float
) -> None:
    assert _memory(_at(samples), _at(0), _at(held_out)).ratio == pytest.approx(ratio, rel=1e-4)


def test_repeated_training_images_have_a_ratio_of_zero() -> None:
    images = torch.rand(200, 1, 8, 8, generator=NOISE)
    fresh = torch.rand(50, 1, 8, 8, generator=NOISE)
    repeated = _memory(images[50:120], images, fresh)
    assert (repeated.ratio, repeated.share_near, repeated.few_images) == (0, 1, False)
    assert (repeated.copies, _memory(fresh, images, torch.cat([fresh, images[:3]])).copies) == (
        0,
        3,
    )
    assert _memory(fresh, images, fresh).ratio == 1
    assert "hold others out" in refusal(_memory, fresh, images, images[:40])


def test_mirrored_copies_are_copies_where_mirror_images_were_trained_on() -> None:
    images, fresh = (torch.randint(0, 256, (n, 3, 8, 7), generator=NOISE).byte() for n in (200, 50))
    flat = FeatureExtractor(
        FeaturesRecord(name="pixels", dimensions=4), lambda pixels: pixels[:, 0, :2, :2].flatten(1)
    )

    def memory(samples: torch.Tensor, held_out: torch.Tensor, mirrored: bool) -> Memorisation:
        found = _scorer(flat, images, held_out, 2, mirrored=mirrored).score(samples).memorisation
        assert found is not None
        return found

    half = torch.cat([images[:30], images[30:60].flip(-1)])
    assert memory(half, fresh, mirrored=False).ratio == pytest.approx(0.5, abs=0.02)
    copied = memory(half, fresh, mirrored=True)
    assert (copied.ratio, copied.share_near, copied.mirrored) == (0, 1, True)
    # Fresh images are judged alike: one that is a mirrored training image is a copy too.
    both = [nearest_distances(fresh, seen) for seen in (images, images.flip(-1))]
    assert torch.equal(nearest_distances(fresh, images, mirrored=True), both[0].minimum(both[1]))
    spoilt = memory(fresh, torch.cat([fresh, images[:3].flip(-1)]), mirrored=True)
    assert (spoilt.copies, spoilt.ratio > 1) == (3, True)


def test_nearest_distances_are_exact_over_many_chunks() -> None:
    rows, others = (
        torch.randint(0, 256, (n, 1, 3, 3), generator=NOISE).byte() for n in (1500, 9000)
    )
    expected = [
        (others.double() - row.double()).square().sum((1, 2, 3)).min().sqrt() for row in rows[::300]
    ]
    np.testing.assert_allclose(nearest_distances(rows, others)[::300].numpy(), expected, rtol=1e-6)
    assert (nearest_distances(others[-3:], others) == 0).all()


def test_the_ratio_of_few_images_has_a_wide_interval_that_holds_the_truth() -> None:
    """Distances are drawn from one distribution, so the true ratio is 1."""
    draws = np.random.default_rng(0)
    found = [
        memorisation(*(torch.from_numpy(draws.gamma(4.0, size=20)) for _ in range(2)))
        for _ in range(400)
    ]
    inside = np.mean([abs(one.ratio - 1) <= one.half_width for one in found])
    assert 0.88 < inside < 0.98
    assert all(one.few_images and one.share_near is None for one in found)


def test_the_share_of_near_samples_is_that_of_the_nearest_held_out_images() -> None:
    fresh = torch.arange(1.0, 101.0)
    assert memorisation(fresh, fresh).share_near == pytest.approx(0.05)
    half = torch.cat([torch.zeros(50), fresh[50:]])
    assert memorisation(half, fresh).share_near == pytest.approx(0.5)


def test_diversity_within_conditions_is_the_mean_over_their_pairs() -> None:
    places, labels = (
        torch.tensor([[0.0], [1.0], [3.0], [5.0], [5.0], [9.0]]),
        torch.tensor([0, 0, 0, 4, 4, 7]),
    )
    assert within_conditions(places, labels) == {0: pytest.approx(2), 4: 0}
    few = within_conditions(places, labels, pairs=2)
    assert few.keys() == {0, 4}
    assert few[0] in [(a + b) / 2 for a in (1, 2, 3) for b in (1, 2, 3)]


def _labelled(num: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    pixels = torch.cat([draw(name, num, seed + k, side=8) for k, name in enumerate(CLASSES)])
    return to_unit_range(pixels), torch.arange(2).repeat_interleave(num)


@pytest.mark.integration
def test_the_classifier_learns_what_can_be_told_apart() -> None:
    images, labels = _labelled(128, seed=0)
    state = torch.get_rng_state()
    classifier = train_classifier(images, labels, epochs=20)
    assert torch.equal(torch.get_rng_state(), state)
    fresh, truth = _labelled(100, seed=50)
    assert (classifier(fresh).argmax(1) == truth).float().mean() >= 0.99
    features = classifier.features(fresh)
    assert features.shape == (200, FEATURES)
    torch.testing.assert_close(classifier.head(features), classifier(fresh), rtol=1e-4, atol=1e-5)
    again = train_classifier(images, labels, epochs=20)
    assert torch.equal(again.features(fresh), classifier.features(fresh))


def test_a_classifier_does_not_depend_on_the_order_of_images(many: Path) -> None:
    images, order = load_images(many), torch.randperm(160, generator=NOISE)
    assert images.labels is not None
    other = replace(images, pixels=images.pixels[order], labels=images.labels[order])
    first, second = (weights_hash(classifier_of(one).state_dict()) for one in (images, other))
    assert first == second
    assert "has no class folders" in refusal(classifier_of, load_images(many / "rows"))


def test_scores_compare_with_both_sides() -> None:
    training, held_out = draw("columns", 60, 0), draw("columns", 40, 1)
    scorer = _scorer(FLAT, training, held_out, resamples=3)
    images = (training, draw("columns", 60, 2), draw("rows", 60, 3))
    own, fresh, other = (scorer.score(pixels) for pixels in images)
    assert own.to("training").value == pytest.approx(0, abs=1e-6)
    assert (own.memorisation.ratio, own.images) == (0, 60)
    assert own.diversity == pytest.approx(1)
    assert fresh.to("held_out").value < 0.2 * other.to("held_out").value
    assert fresh.memorisation.ratio == pytest.approx(1, abs=0.1)
    alone = _scorer(FLAT, training, None, resamples=3).score(training)
    assert (alone.to("held_out"), alone.memorisation) == (None, None)


def test_a_complete_scorer_measures_more_and_the_same(home: Path) -> None:
    sides = [torch.cat([draw(name, 60, seed) for name in CLASSES]) for seed in (0, 10)]
    labels = torch.arange(2).repeat_interleave(60)
    training, held_out = Side("training", sides[0], labels), Side("held_out", sides[1])
    complete = Scorer(FLAT, [training, held_out], 3, complete=True)
    samples = torch.cat([draw("columns", 90, 20), draw("rows", 30, 21)])
    scores = complete.score(samples, torch.tensor([0] * 90 + [1] * 30))
    plain = _scorer(FLAT, *sides, 3).score(samples)
    assert scores.to("held_out") == plain.to("held_out")
    assert [one.kernel for one in plain.splits] == [None, None]
    assert all(None not in (one.kernel, one.overlap) for one in scores.splits)
    assert scores.splits[0].overlap.precision > 0.8
    # It decides whether a model has learned, so it is always measured.
    assert plain.splits[0].overlap is None
    assert plain.splits[1].overlap == scores.splits[1].overlap
    within = scores.within_conditions
    assert within.images == pytest.approx(within.reference, rel=0.1)
    # Of two classes far apart, all pairs differ more than those of one class.
    assert within.images < torch.pdist(to_unit_range(samples).flatten(1)).mean()


def test_precision_and_recall_of_real_images_are_those_of_training_images_and_as_many(
    home: Path,
) -> None:
    training, held_out = draw("columns", 300, 0), draw("columns", 200, 1)
    scorer = _scorer(FLAT, training, held_out, resamples=2)
    own, fresh = scorer.score(draw("columns", 50, 2)).splits
    assert (own.real_overlap, fresh.real_overlap.images, fresh.overlap.images) == (None, 50, 50)
    rows = [torch.from_numpy(scorer._features(one)) for one in (training, held_out)]
    assert fresh.real_overlap == precision_recall(*rows, most=50)
    assert fresh.real_overlap.precision > 0.7
    noise = scorer.score(torch.randint(0, 256, (50, 1, 4, 4), generator=NOISE).byte())
    assert noise.beside_real["precision"] == (0.0, fresh.real_overlap.precision)
    # Its balls are wide, and hold all images: one of the two figures is not enough.
    assert noise.beside_real["recall"] == (1.0, fresh.real_overlap.recall)


def test_a_domain_has_the_samples_that_a_classifier_takes_for_its_classes(home: Path) -> None:
    images, labels = _labelled(128, seed=0)
    extractor = of_classifier(train_classifier(images, labels, epochs=20))
    training = Side("training", to_bytes(images), labels)
    fresh, truth = _labelled(80, seed=50)
    scorer = Scorer(
        extractor,
        [training, Side("validation", to_bytes(fresh), truth)],
        2,
        classes=CLASSES,
        domains={"c": [0], "r": [1]},
    )
    samples, asked = (
        torch.cat([draw("columns", 90, 20, 8), draw("rows", 30, 21, 8)]),
        torch.arange(120) // 60,
    )
    scores = scorer.score(samples, asked)
    assert [(one.domain, one.images, one.share) for one in scores.domains] == [
        ("c", 90, 0.75),
        ("r", 30, 0.25),
    ]
    first, second = scores.domains
    # 30 samples are fewer than the features have dimensions.
    assert [one.distance is None for one in (*first.splits, *second.splits)] == [
        False,
        False,
        True,
        True,
    ]
    rows = extractor.features(to_unit_range(samples[:90])).double().numpy()
    assert first.splits[1].distance == measure(
        rows, extractor.features(fresh[:80]).double().numpy(), 2
    )
    assert first.splits[1].overlap.recall > 0.8
    assert scores.label_accuracy == pytest.approx(90 / 120)
    assert scores.recognised.classes == {"columns": 90, "rows": 30}
    assert scores.recognised.first == ("columns",) * 24
    assert scores.recognised.share == scores.recognised.real == 1


def test_a_folder_scores_as_its_own_training_images(images: Path, home: Path) -> None:
    scores = evaluate(images, images, allow_few=True)
    assert scores.to("training").value == pytest.approx(0, abs=1e-4)
    assert (scores.to("training").few_images, scores.to("held_out")) == (True, None)
    assert scores.diversity == pytest.approx(1)
    assert Evaluation.model_validate_json(scores.model_dump_json()) == scores
    few = "too few images: 64 features, and sides of 48, 48"
    assert (scores.comparable, scores.reasons) == (False, (few,))
    assert scores.features.choice.startswith("auto: not Inception, since its weights")
    said = re.sub(r"distance \S+", "distance 0", str(scores))
    assert said == f"<Evaluation: 48 images, distance 0 to training images, not comparable ({few})>"
    assert repr(scores) == str(scores)


def test_what_cannot_be_compared_is_refused(images: Path, home: Path, tmp_path: Path) -> None:
    larger = write_images(tmp_path / "larger", side=6)
    assert re.search(r"different shapes .*\(1, 6, 6\)", refusal(evaluate, images, larger))
    # JPEG is known by its content.
    for suffix in ("jpg", "png"):
        folder = tmp_path / suffix
        folder.mkdir()
        for name in ("1", "2", "3", "4"):
            Image.fromarray(np.zeros((4, 4), np.uint8)).save(folder / f"{name}.{suffix}", "JPEG")
        assert f"1.{suffix}: JPEG compression" in refusal(evaluate, folder, images)
        assert _side(folder).record.images == 4
    domains = {"a": ("dogs",)}
    told = "no class dogs; classes are columns, rows"
    assert told in refusal(
        evaluate, images, images, features="classifier", domain=domains, allow_few=True
    )
    assert "settings are chosen by one" in refusal(
        evaluate, images, images, validation=images, held_out=images
    )


def _side(path: Path) -> ImageGroup:
    return read_data({"reference": path})["reference"]


def _samples(folder: Path, num: int = 70, **record: object) -> Path:
    """Images by turns of the two classes, as ``hddm sample`` leaves them."""
    folder.mkdir()
    for index in range(num):
        save_png(draw(CLASSES[index % 2], 1, 100 + index)[0], folder / f"{index:05d}.png")
    sampling = {
        "format": "1.1",
        "source": "model",
        "num_images": num,
        "start": 0,
        "seed": 3,
        "steps": 20,
    }
    sampling |= {"class_labels": [0, 1], "prompts": [], "expert_use": [{"long": "table"}], **record}
    (folder / SAMPLING_FILE).write_text(json.dumps(sampling))
    return folder


def test_a_result_says_all_that_its_figures_depend_on(
    many: Path, home: Path, tmp_path: Path
) -> None:
    samples, fresh = _samples(tmp_path / "samples"), tmp_path / "fresh"
    fresh.mkdir()
    for index, image in enumerate(draw("rows", 80, 500)):
        save_png(image, fresh / f"{index}.png")
    result = evaluate(samples, many, held_out=fresh)
    assert (result.comparable, result.reasons) == (True, ())
    assert (result.features.name, len(result.features.hash)) == (
        "small classifier of the training images",
        64,
    )
    data = result.data
    assert [side.images for side in (data.images, data.reference, data.held_out)] == [70, 160, 80]
    assert data.images.shape == (1, 4, 4)
    assert result.sampling.model_dump()["steps"] == 20
    assert {"torch", "hddm-diffusion", "clean-fid"} <= result.versions.keys()
    assert (result.within_conditions.conditions, result.memorisation is None) == (2, False)
    for one in result.splits:
        assert None not in (one.distance, one.kernel, one.overlap)


def test_gray_images_are_measured_in_colour_where_others_are(many: Path, tmp_path: Path) -> None:
    for index in range(4):
        Image.new("RGB", (4, 4), (index, 0, 0)).save(tmp_path / f"{index}.png")
    groups = alike({"images": _side(many), "reference": _side(tmp_path)})
    assert groups["images"].images.pixels.shape == (160, 3, 4, 4)
    assert groups["images"].record.shape == (3, 4, 4)


def test_a_folder_that_lost_images_compares_with_nothing(
    many: Path, classifier: str, home: Path, tmp_path: Path, hddm: Command
) -> None:
    samples, out = _samples(tmp_path / "samples"), tmp_path / "out.json"
    (samples / "00003.png").unlink()
    told = hddm("evaluate", samples, "--reference", many, "--features", classifier, "--out", out)[1]
    why = "unequal counts: 70 images were sampled and there are 69"
    assert told == f"{out}: not comparable: {why}\n"
    result = json.loads(out.read_text())
    assert (result["comparable"], result["reasons"]) == (False, [why])
    # Nobody knows which of the images is missing.
    assert result["within_conditions"] is None


@pytest.mark.parametrize(
    ("record", "labels", "of_classes"),
    [
        ({"start": 1}, [1, 0, 1, 0, 1], True),
        ({"class_labels": [5]}, [5] * 5, False),
        ({"class_labels": [7, 3], "class_names": ["rows", "columns"]}, [1, 0, 1, 0, 1], True),
        ({"class_names": ["rows", "dots"]}, [0, 1, 0, 1, 0], False),
        ({"class_names": None}, [0, 1, 0, 1, 0], True),
        ({"class_labels": None, "prompts": ["a", "b", "a"]}, [0, 1, 0, 0, 1], False),
        ({"class_labels": None}, None, False),
    ],
)
def test_conditions_are_those_that_were_cycled_over_the_images(
    record: dict[str, object], labels: list[int] | None, of_classes: bool, tmp_path: Path
) -> None:
    samples = _samples(tmp_path / "samples", 5, **record)
    found, known = conditions(load_images(samples), read_sampling(samples), CLASSES)
    assert (None if found is None else found.tolist()) == labels
    assert known is of_classes


def test_conditions_in_folders_are_matched_by_name(tmp_path: Path) -> None:
    samples = load_images(write_images(tmp_path / "samples", per_class=2))
    found, known = conditions(samples, None, ("noise", "rows", "columns"))
    assert (found.tolist(), known) == ([2, 2, 1, 1], True)
    assert conditions(samples, None, ("cat", "dog"))[1] is False


@pytest.mark.integration
def test_a_classifier_is_saved_and_shared(
    many: Path, home: Path, tmp_path: Path, hddm: Command
) -> None:
    file, first, second = (
        tmp_path / name for name in ("c.safetensors", "first.json", "second.json")
    )
    options = ["evaluate", _samples(tmp_path / "samples"), "--reference", many]
    saved = [*options, "--features", "classifier", "--save-classifier", file, "--out", first]
    assert hddm(*saved)[:2] == (0, f"{first}: comparable\n")
    shared = [*options, "--features", file, "--out"]
    assert hddm(*shared, second)[0] == 0
    ours, theirs = (json.loads(path.read_text()) for path in (first, second))
    assert ours["features"]["hash"] == theirs["features"]["hash"]
    assert ours["splits"] == theirs["splits"]
    assert "exists" in hddm(*saved)[2]
    assert "--overwrite" in hddm(*shared, first)[2]
