"""Whether a model has learned, on the digits: noise and constants have not, a short training has."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import hddm
from hddm.benchmark.results import Row
from hddm.data.images import to_bytes, to_unit_range, write_digits
from hddm.data.partition import partition
from hddm.evaluation.features import of_classifier, train_classifier
from hddm.evaluation.images import read_data
from hddm.evaluation.score_records import Recognised
from hddm.evaluation.scores import Scorer, Side
from hddm.networks.sizes import size_config
from hddm.networks.transformers import ExpertTransformer
from hddm.schedules import LinearSchedule
from hddm.training.expert import train_expert
from tests.artefacts import expert_settings
from tests.benchmark_files import Finished
from tests.checkpoint_files import randomised

pytestmark = pytest.mark.integration

DRAWS = torch.Generator().manual_seed(0)
NUM = 500


class Digits(NamedTuple):
    """The folder of training images, these in bytes, their labels, and what measures samples."""

    folder: Path
    training: Tensor
    labels: Tensor
    scorer: Scorer


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Digits:
    folder, held_out = write_digits(tmp_path_factory.mktemp("digits"))
    groups = read_data({"reference": folder, "held_out": held_out})
    training, fresh = (groups[role].images for role in ("reference", "held_out"))
    assert training.labels is not None
    classifier = train_classifier(to_unit_range(training.pixels), training.labels)
    sides = [Side("training", training.pixels), Side("held_out", fresh.pixels)]
    scorer = Scorer(of_classifier(classifier), sides, resamples=2)
    return Digits(folder, training.pixels, training.labels, scorer)


def _row(samples: Tensor, digits: Digits, miniature: Finished, certain: bool = False) -> Row:
    """A row of these samples; ``certain``: of a classifier that recognises anything."""
    scores = digits.scorer.score(samples)
    if certain:
        scores = scores.model_copy(update={"recognised": Recognised(share=1.0, real=1.0)})
    one = miniature.results.scored[0]
    evaluation = one.evaluation.model_copy(update=dict(scores))
    return Row((one.model_copy(update={"evaluation": evaluation}),), ())


def _repeated(image: Tensor) -> Tensor:
    return image.expand(NUM, 1, 8, 8).contiguous()


def _none_of_them_real(training: Tensor) -> dict[str, Tensor]:
    """Samples of models that did not learn."""
    real = to_unit_range(training[torch.randint(len(training), (NUM,), generator=DRAWS)])
    normal = torch.randn(NUM, 1, 8, 8, generator=DRAWS)
    uniform = torch.rand(NUM, 1, 8, 8, generator=DRAWS) * 2 - 1
    shuffled = torch.randint(len(training), (NUM, 64), generator=DRAWS)
    return {
        "uniform noise": to_bytes(uniform),
        "Gaussian noise": to_bytes(normal),
        "Gaussian noise of half the width": to_bytes(normal / 2),
        "half an image and half Gaussian noise": to_bytes((real + normal) / 2),
        "half an image and half uniform noise": to_bytes((real + uniform) / 2),
        "an image under strong noise": to_bytes(real + normal),
        "pixels of different images": training.flatten(1).gather(0, shuffled).view(NUM, 1, 8, 8),
        "gray": _repeated(torch.tensor(128).byte()),
        "black": _repeated(torch.tensor(0).byte()),
        "white": _repeated(torch.tensor(255).byte()),
        "one image": _repeated(training[3]),
        "two images": training[torch.arange(NUM) % 2 * 700],
        "the mean image": _repeated(training.float().mean(0).round().byte()),
    }


@pytest.mark.slow
def test_noise_constants_and_repeated_images_count_as_not_learned(
    digits: Digits, miniature: Finished
) -> None:
    """Even if the classifier is certain of all of them."""
    for name, samples in _none_of_them_real(digits.training).items():
        row = _row(samples, digits, miniature, certain=True)
        assert not row.has_learned, name
        assert "a classifier" not in row.why_not_learned, name
    gray = _row(_repeated(torch.tensor(128).byte()), digits, miniature, certain=True)
    assert (
        "its samples look like too few of the real images (recall 0.00, real images 0."
        in gray.why_not_learned
    )


@pytest.mark.slow
@pytest.mark.parametrize("prediction", ["sample", "flow_prediction"])
def test_networks_of_random_weights_count_as_not_learned(
    prediction: str, digits: Digits, miniature: Finished
) -> None:
    for seed in range(4):
        network = ExpertTransformer(sample_size=8, in_channels=1, **size_config("tiny"))
        randomised(network, seed)
        field = hddm.VelocityField(
            network, schedule=LinearSchedule(), prediction_type=prediction, time_scale=1000.0
        )
        samples = to_bytes(hddm.sample(field, NUM, steps=5, shape=(1, 8, 8)))
        assert not _row(samples, digits, miniature, certain=True).has_learned


@pytest.mark.slow
def test_real_images_of_half_the_classes_and_a_short_training_count_as_learned(
    digits: Digits, miniature: Finished, tmp_path: Path
) -> None:
    for half in (digits.labels < 5, digits.labels >= 5):
        assert _row(digits.training[half], digits, miniature).why_not_learned is None
    partition(digits.folder, tmp_path / "shards", 1)
    settings = expert_settings(
        "flow", steps=300, batch_size=64, size="mini", learning_rate=8e-3, ema_decay=0.99
    )
    train_expert(tmp_path / "shards" / "shard_0", tmp_path / "expert", settings)
    samples = to_bytes(hddm.sample(hddm.load(tmp_path / "expert"), NUM))
    assert _row(samples, digits, miniature).why_not_learned is None
