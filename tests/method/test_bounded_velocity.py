"""Experts of noise that carry moments have a bounded velocity up to t = 1, whatever they are told."""

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hddm import VelocityField, load
from hddm.calibration import FILE_NAME, Calibration, Moments
from hddm.training.calibrate import calibrate, recalibrate
from hddm.training.expert import train_expert
from tests.artefacts import expert_settings
from tests.cases import case_named
from tests.oracles import GaussianMixture, rms_error

DIM, SHAPE, CLASSES = 16, (1, 4, 4), 4
COSINE = case_named("cosine")
LATE = [0.9, 0.92, 0.94, 0.96, 0.97, 0.98, 0.99, 0.995, 0.999, 0.9999, 0.99999, 1.0]
SHARDS = [GaussianMixture.random(seed=k, modes=2, dim=DIM, spread=0.6) for k in range(CLASSES)]
UNION = GaussianMixture.union(SHARDS, [1 / CLASSES] * CLASSES)


def _noisy(y: Tensor, timestep: Tensor, class_labels: Tensor) -> Tensor:
    """The exact noise of each row's class, of all for label 4; 2 % off, and more towards the end."""
    alpha, sigma = COSINE.alpha_sigma(timestep.double())
    eps = UNION.x_0_and_eps(y, alpha, sigma)[1]
    for k, shard in enumerate(SHARDS):
        rows = class_labels == k
        eps[rows] = shard.x_0_and_eps(y[rows], alpha[rows], sigma[rows])[1]
    mix = 20 * torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    error = torch.sin(y.double().flatten(1) @ mix + 7 * class_labels[:, None]).view(y.shape)
    return eps + (0.02 + 0.2 * timestep.double().view(-1, 1, 1, 1) ** 8) * error


def _field(calibration: Calibration | None) -> VelocityField:
    return VelocityField(
        _noisy,
        COSINE.schedule,
        "epsilon",
        calibration=calibration,
        conditions=("class_labels",),
        null_conditions={"class_labels": torch.tensor(CLASSES)},
    )


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    images = torch.cat([shard.sample(512, seed=3 + k, shape=SHAPE) for k, shard in enumerate(SHARDS)])
    labels = torch.arange(CLASSES).repeat_interleave(512)
    return calibrate(_field(None).velocity, images, {"class_labels": labels})


def _times(t: float, num: int = 256) -> Tensor:
    return torch.full((num,), t, dtype=torch.float64)


def _noise(num: int) -> Tensor:
    return torch.randn(num, *SHAPE, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def _ratio(
    field: VelocityField,
    t: float,
    scale: float = 1.0,
    labels: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> float:
    x = _noise(256).to(dtype)
    given = {} if labels is None else {"class_labels": labels}
    v = field.velocity(x, _times(t).to(dtype), scale, **given)
    return float(v.norm() / x.norm())


LABELS = torch.arange(256) % CLASSES


@pytest.mark.parametrize("t", LATE)
def test_velocity_of_unit_noise_is_bounded_with_labels_and_guided(calibration: Calibration, t: float) -> None:
    field = _field(calibration)
    assert _ratio(field, t) < 4
    assert _ratio(field, t, labels=LABELS) < 4
    assert _ratio(field, t, 3.0, LABELS) < 4


def test_the_bare_conversion_is_not_bounded_and_stays_exact() -> None:
    assert _ratio(_field(None), 0.9999, labels=LABELS) > 100


@pytest.mark.parametrize("label", [*range(CLASSES), None])
def test_the_error_falls_towards_full_noise(calibration: Calibration, label: int | None) -> None:
    field, truth = _field(calibration), UNION if label is None else SHARDS[label]
    given = {} if label is None else {"class_labels": torch.full((256,), label)}
    errors = []
    for t in LATE:
        x_t = truth.states(_times(t), seed=11, shape=SHAPE)
        v = field.velocity(x_t, _times(t), **given)
        errors.append(rms_error(v, truth.velocity(x_t, _times(t))))
    # At t = 1 what is left is that a mean of 512 images is off by sqrt(variance/512).
    assert all(later < earlier + 0.01 for earlier, later in itertools.pairwise(errors))
    assert errors[-1] < 0.07
    assert max(errors) < 0.2


def test_guided_velocity_is_that_of_the_exact_classes_at_full_noise(calibration: Calibration) -> None:
    x = _noise(4)
    v = _field(calibration).velocity(x, _times(1.0, 4), 3.0, class_labels=torch.arange(4))
    means = torch.stack([shard.mean for shard in SHARDS]).view(4, *SHAPE)
    expected = x - (UNION.mean.view(SHAPE) + 3 * (means - UNION.mean.view(SHAPE)))
    assert rms_error(v, expected) < 0.2 * rms_error(x, expected)


def test_velocity_is_continuous_up_to_full_noise(calibration: Calibration) -> None:
    field, times = _field(calibration), 1 - torch.logspace(-1, -6, 200, dtype=torch.float64)
    found = [field.velocity(_noise(64), _times(t, 64), class_labels=LABELS[:64]) for t in [*times, 1.0]]
    steps = [rms_error(later, earlier) for earlier, later in itertools.pairwise(found)]
    assert max(steps) < 0.03


@pytest.mark.parametrize("last", [0.0, 0.3], ids=["no weight", "little weight"])
def test_a_table_of_an_older_version_is_bounded_too(calibration: Calibration, last: float) -> None:
    """It ended below 1 where there were conditions, and knew no classes; at t = 0.9 it means what it did."""
    moments = Moments(calibration.moments.mean, calibration.moments.basis, calibration.moments.variances)
    weights = calibration.weights.clone()
    weights[-8:] = last
    field = _field(Calibration(moments, calibration.times, weights))
    for t in LATE[6:]:
        assert _ratio(field, t, scale=3.0, labels=LABELS) < 4
    for t in (0.3, 0.6, 0.85, 0.9):
        x, times, labels = _noise(8), _times(t, 8), LABELS[:8]
        raw, v = (one.velocity(x, times, class_labels=labels) for one in (_field(None), field))
        assert torch.equal(v, field.calibration.apply(raw, x, times))  # type: ignore[union-attr]


def test_class_means_are_shrunk_towards_the_mean_by_their_error() -> None:
    """Rare classes of data without classes share its mean; those of real ones keep their own."""
    noise = torch.Generator().manual_seed(0)
    images = torch.randn(400, *SHAPE, generator=noise, dtype=torch.float64)
    labels = torch.randint(100, (400,), generator=noise)
    none = Moments.of(images, labels)
    assert none.class_means is not None
    assert (none.class_means - none.mean).abs().max() < 0.2
    far = images + 10 * torch.randn(100, *SHAPE, generator=noise, dtype=torch.float64)[labels]
    found = Moments.of(far, labels)
    assert found.class_means is not None
    own = far[labels == 7].mean(0).flatten()
    assert (found.class_means[7] - own).abs().max() < 0.2


def test_a_label_beyond_the_classes_has_the_mean_of_all() -> None:
    images = torch.cat([torch.zeros(8, *SHAPE), 2 * torch.ones(8, *SHAPE)])
    images += 0.01 * torch.randn(16, *SHAPE, generator=torch.Generator().manual_seed(0))
    moments = Moments.of(images, torch.arange(16) // 8 + 1)
    means = moments.mean_of(torch.tensor([0, 1, 2, 3, 1000])).mean(1)
    torch.testing.assert_close(means, torch.tensor([1.0, 0.0, 2.0, 1.0, 1.0]), atol=0.02, rtol=0)


@pytest.mark.slow
def test_a_trained_class_expert_of_noise_is_bounded_and_stays_so(whole: Path, tmp_path: Path) -> None:
    settings = expert_settings("ddpm", steps=60, batch_size=64, class_conditional=True)
    train_expert(whole, tmp_path / "expert", settings)
    labels = LABELS % 2
    for _ in range(2):
        field = load(tmp_path / "expert")
        assert isinstance(field, VelocityField)
        for t in LATE:
            for scale, given in ((1.0, None), (1.0, labels), (3.0, labels)):
                assert _ratio(field, t, scale, given, torch.float32) < 4
        recalibrate(tmp_path / "expert", whole)


def test_a_saved_calibration_gives_the_identical_velocity(calibration: Calibration, tmp_path: Path) -> None:
    calibration.save(tmp_path)
    again = Calibration.load(tmp_path)
    assert again is not None
    for t in LATE:
        before, after = (
            _field(one).velocity(_noise(8), _times(t, 8), class_labels=LABELS[:8])
            for one in (calibration, again)
        )
        assert torch.equal(after, before)
    tensors = load_file(tmp_path / FILE_NAME)
    del tensors["class_means"]
    save_file(tensors, tmp_path / FILE_NAME)
    older = Calibration.load(tmp_path)
    assert older is not None
    assert older.moments.class_means is None
