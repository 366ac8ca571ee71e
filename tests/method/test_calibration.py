"""Calibration near t = 1: noisy experts, with classes and without, held-out states and the exact velocity."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hddm.calibration import LEVELS, MAX_DIRECTIONS, STATES, Calibration, Moments
from hddm.training.bounded_gain import KAPPA, bounded_gain
from hddm.training.calibrate import calibrate
from hddm.utils.errors import HddmError
from hddm.velocity import PredictionType, VelocityField
from tests.cases import LINEAR, case_named, oracle_field
from tests.oracles import BoundedNetwork, GaussianMixture, NoisyEpsilon, OracleNetwork, rms_error

DIM, SHAPE = 16, (1, 4, 4)
SHARD = GaussianMixture.random(seed=0, modes=6, dim=DIM, spread=0.8)
HELD_OUT: dict[str, Any] = {"num": 2048, "seed": 77, "shape": SHAPE}
COSINE = case_named("cosine")
HIGH_NOISE = [0.85, 0.93, 0.97, 0.99, 0.999, 1.0]
ALL_NOISE = [0.0, 0.05, 0.2, 0.5, 0.65, 0.75, *HIGH_NOISE]


def _expert(calibration: Calibration | None = None) -> VelocityField:
    network = NoisyEpsilon(SHARD, COSINE.alpha_sigma, "epsilon")
    return VelocityField(network, COSINE.schedule, "epsilon", calibration=calibration)


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return calibrate(_expert().velocity, SHARD.sample(4096, seed=1, shape=SHAPE))


def _clamped(x_t: Tensor, t: Tensor) -> Tensor:
    """The rule that the calibration replaces: alpha held at 0.01 or more, x_0 clamped to ±20."""
    t_ = t.view(-1, 1, 1, 1)
    a, s = 1 - t_, t_
    norm = (a**2 + s**2).sqrt()
    eps = _expert().network(x_t / norm, COSINE.schedule.match(t))
    x_0 = ((x_t - s * eps) / a.clamp_min(0.01)).clamp(-20, 20)
    return eps - x_0


@pytest.mark.parametrize("t", HIGH_NOISE)
def test_calibrated_beats_the_clamps_at_high_noise(calibration: Calibration, t: float) -> None:
    x_t, times = SHARD.states_at(t, **HELD_OUT)
    truth = SHARD.velocity(x_t, times)
    error = rms_error(_expert(calibration).velocity(x_t, times), truth)
    assert error < 0.8 * rms_error(_clamped(x_t, times), truth)
    assert error < 0.1


def test_calibrated_is_exact_at_full_noise(calibration: Calibration) -> None:
    x_t, times = SHARD.states_at(1.0, **HELD_OUT)
    v = _expert(calibration).velocity(x_t, times)
    mean = SHARD.sample(4096, seed=1).mean(0).view(SHAPE)
    torch.testing.assert_close(v, x_t - mean, atol=1e-5, rtol=0)
    assert rms_error(v, SHARD.velocity(x_t, times)) < 0.02


@pytest.mark.parametrize("t", ALL_NOISE)
def test_calibrated_is_worse_than_raw_by_sampling_error_at_most(
    calibration: Calibration, t: float
) -> None:
    x_t, times = SHARD.states_at(t, **HELD_OUT)
    truth = SHARD.velocity(x_t, times)
    error = rms_error(_expert(calibration).velocity(x_t, times), truth)
    raw = rms_error(_expert().velocity(x_t, times), truth)
    # n states fix a weight so far that the velocity has about 1/sqrt(n) of its size as error.
    assert error**2 < (1.03 * raw) ** 2 + 1.5**2 / STATES


@pytest.mark.parametrize("part", [(0.6, 1.0), (0.0, 0.8), (0.7, 0.9), (0.0, 0.4)], ids=str)
def test_a_part_of_t_is_calibrated_within_it(part: tuple[float, float]) -> None:
    low, high = part
    images = SHARD.sample(4096, seed=1, shape=SHAPE)
    asked = set[float]()
    field = _expert()
    field.noise_range = part

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        asked.add(t[0].item())
        return field.velocity(x, t)

    field.calibration = calibrate(velocity, images, noise_range=part)
    weights = field.calibration.weights
    assert len(asked) == (0 if high <= 0.5 else LEVELS)
    assert (weights[-1] == 1).all() == (high == 1)
    assert (weights == 0).all() == (high <= 0.5)
    raw = _expert()
    for t in (low, low + 0.07, (low + high) / 2, high - 0.01, high):
        x_t, times = SHARD.states_at(t, **HELD_OUT)
        truth = SHARD.velocity(x_t, times)
        error = rms_error(field.velocity(x_t, times), truth)
        assert error**2 < (1.03 * rms_error(raw.velocity(x_t, times), truth)) ** 2 + 1.5**2 / STATES
        assert t < 0.9 or error < 0.1


def test_each_direction_has_its_own_weight() -> None:
    # The network knows half of the axes exactly and nothing of the others, on Gaussian data.
    variances = torch.logspace(0.8, -1.6, DIM, dtype=torch.float64)
    gaussian = GaussianMixture(
        torch.ones(1).double(), torch.full((1, DIM), 0.3).double(), variances.diag()[None]
    )
    oracle = OracleNetwork(gaussian, LINEAR.alpha_sigma, "flow_prediction")
    known = (torch.arange(DIM) % 2 == 0).double().view(SHAPE)
    bounded = BoundedNetwork()
    field = VelocityField(
        lambda y, u: known * oracle(y, u) + (1 - known) * bounded(y, u),
        LINEAR.schedule,
        "flow_prediction",
    )
    found = calibrate(field.velocity, gaussian.sample(4096, seed=2, shape=SHAPE))
    t = torch.full((1024,), 0.75, dtype=torch.float64)
    x_t = gaussian.states(t, seed=3, shape=SHAPE)
    calibrated = found.apply(field.velocity(x_t, t), x_t, t)
    assert rms_error(calibrated, gaussian.velocity(x_t, t)) < 0.06
    assert rms_error(field.velocity(x_t, t), gaussian.velocity(x_t, t)) > 0.5


@pytest.mark.parametrize("name", ["linear", "sd-scaled-linear"])
def test_an_exact_expert_of_many_modes_stays_nearly_exact(name: str) -> None:
    field = oracle_field(
        SHARD, case_named(name), "flow_prediction" if name == "linear" else "epsilon"
    )
    field.calibration = calibrate(field.velocity, SHARD.sample(2048, seed=1, shape=SHAPE))
    for t in (0.1, 0.3, 0.5, 0.7, 0.9, 0.97, 1.0):
        x_t, times = SHARD.states_at(t, **HELD_OUT)
        assert rms_error(field.velocity(x_t, times), SHARD.velocity(x_t, times)) < 1.5 / STATES**0.5


def test_moments_are_mean_and_principal_variances() -> None:
    images = SHARD.sample(500, seed=4, shape=SHAPE)
    moments = Moments.of(images)
    flat = images.flatten(1)
    torch.testing.assert_close(moments.mean.double(), flat.mean(0), atol=1e-6, rtol=0)
    basis = moments.basis.double()
    torch.testing.assert_close(basis.T @ basis, torch.eye(DIM).double(), atol=1e-5, rtol=0)
    covariance = basis * moments.variances[:-1] @ basis.T
    torch.testing.assert_close(covariance, flat.T.cov(), atol=1e-5, rtol=1e-4)


def test_directions_beyond_the_images_share_what_is_left() -> None:
    few = SHARD.sample(5, seed=4, shape=SHAPE)
    moments = Moments.of(few)
    assert moments.basis.shape == (DIM, 4)
    assert (moments.variances > 0).all()
    for t in (0.0, 0.5, 1.0):
        times = torch.full((5,), t, dtype=torch.float64)
        assert moments.to(few).velocity(few.flatten(1), times).isfinite().all()


@pytest.mark.parametrize("num_images", [6, 400], ids=["few directions", "all directions"])
def test_velocity_is_mixed_with_the_gaussian_denoiser_direction_by_direction(
    num_images: int,
) -> None:
    moments = Moments.of(SHARD.sample(num_images, seed=6, shape=SHAPE))
    basis, variances = moments.basis.double(), moments.variances.double()
    rest = torch.eye(DIM).double() - basis @ basis.T
    covariance = basis * variances[:-1] @ basis.T + variances[-1] * rest
    noise = torch.Generator().manual_seed(0)
    table = torch.rand(3, len(variances), generator=noise)
    calibration = Calibration(moments, torch.tensor([0.0, 0.4, 1.0]), table)
    # Between two times of the table the weights are in proportion to the distance.
    at = {
        0.0: table[0],
        0.1: 0.75 * table[0] + 0.25 * table[1],
        0.7: (table[1] + table[2]) / 2,
        1.0: table[2],
    }
    for t, weights in at.items():
        x_t, net = torch.randn(2, 5, *SHAPE, generator=noise, dtype=torch.float64)
        found = calibration.apply(net, x_t, torch.full((5,), t, dtype=torch.float64))
        flat, mean = x_t.flatten(1), moments.mean.double()
        spread = (1 - t) ** 2 * covariance + t**2 * torch.eye(DIM).double()
        pull = torch.linalg.solve(spread, (flat - (1 - t) * mean).T).T
        gauss = t * pull - (mean + (1 - t) * pull @ covariance)
        mix = basis * weights[:-1].double() @ basis.T + weights[-1].double() * rest
        expected = net.flatten(1) + (gauss - net.flatten(1)) @ mix
        torch.testing.assert_close(found.flatten(1), expected, rtol=1e-5, atol=1e-5)


def test_the_more_a_condition_says_the_less_the_moments_count() -> None:
    # Two far-apart classes: with its label an image's mean is known, which the joint moments do not tell.
    noise = torch.Generator().manual_seed(0)
    labels = torch.arange(256) % 2
    images = (6.0 * labels - 3).view(-1, 1, 1, 1) + 0.1 * torch.randn(256, *SHAPE, generator=noise)

    def velocity(x: Tensor, t: Tensor, class_labels: Tensor | None = None) -> Tensor:
        mean = torch.zeros(len(x)) if class_labels is None else 6.0 * class_labels - 3
        return (x - mean.view(-1, 1, 1, 1)) / t.view(-1, 1, 1, 1)

    told = calibrate(velocity, images, {"class_labels": labels})
    untold = calibrate(velocity, images)
    level = int((told.times - 0.8).abs().argmin())
    assert told.weights[level, 0] < 0.1
    assert untold.weights[level, 0] > 0.5


def _images(num: int, variances: Tensor, seed: int) -> Tensor:
    noise = torch.randn(num, len(variances), generator=torch.Generator().manual_seed(seed))
    return (noise * variances.sqrt()).view(num, 1, 8, -1)


@pytest.mark.integration
# More images than pixels, fewer, and more pixels than directions are kept.
@pytest.mark.parametrize(("dim", "num"), [(64, 360), (256, 128), (2 * MAX_DIRECTIONS, 600)])
def test_an_exact_network_is_left_alone_on_images_it_was_not_fitted_on(dim: int, num: int) -> None:
    variances = torch.logspace(1, -2, dim)

    def exact(x_t: Tensor, t: Tensor) -> Tensor:
        """Velocity of centred Gaussian data with independent pixels."""
        t = t[:, None]
        gain = (t - (1 - t) * variances) / ((1 - t) ** 2 * variances + t**2)
        return (gain * x_t.flatten(1)).view_as(x_t)

    calibration = calibrate(exact, _images(num, variances, seed=0))
    x_0, eps = _images(1000, variances, seed=1), _images(1000, torch.ones(dim), seed=2)
    # At t = 1 the mean of the images is all that counts, and its own sampling error is variance/num.
    mean_error = variances.mean().item() / num
    for t in (0.55, 0.6, 0.8, 0.95, 1.0):
        x_t, times = (1 - t) * x_0 + t * eps, torch.full((1000,), t)
        v = exact(x_t, times)
        assert rms_error(calibration.apply(v, x_t, times), v) ** 2 < 0.004 + 1.5 * mean_error


CLASSES = 4
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
    mix = 20 * torch.randn(
        DIM, DIM, generator=torch.Generator().manual_seed(9), dtype=torch.float64
    )
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
def by_class() -> Calibration:
    images = torch.cat(
        [shard.sample(512, seed=3 + k, shape=SHAPE) for k, shard in enumerate(SHARDS)]
    )
    labels = torch.arange(CLASSES).repeat_interleave(512)
    return calibrate(_field(None).velocity, images, {"class_labels": labels})


def _times(t: float, num: int = 256) -> Tensor:
    return torch.full((num,), t, dtype=torch.float64)


def _noise(num: int) -> Tensor:
    return torch.randn(num, *SHAPE, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def _ratio(
    field: VelocityField, t: float, scale: float = 1.0, labels: Tensor | None = None
) -> float:
    x, given = _noise(256), {} if labels is None else {"class_labels": labels}
    v = field.velocity(x, _times(t), scale, **given)
    return float(v.norm() / x.norm())


LABELS = torch.arange(256) % CLASSES


@pytest.mark.parametrize("t", LATE)
def test_velocity_of_unit_noise_is_bounded_with_labels_and_guided(
    by_class: Calibration, t: float
) -> None:
    field = _field(by_class)
    assert t < 0.9999 or t == 1 or _ratio(_field(None), t, labels=LABELS) > 100
    assert _ratio(field, t) < 4
    assert _ratio(field, t, labels=LABELS) < 4
    assert _ratio(field, t, 3.0, LABELS) < 4


@pytest.mark.parametrize("label", [*range(CLASSES), None])
def test_the_error_falls_towards_full_noise(by_class: Calibration, label: int | None) -> None:
    field, truth = _field(by_class), UNION if label is None else SHARDS[label]
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


def test_guided_velocity_is_that_of_the_exact_classes_at_full_noise(by_class: Calibration) -> None:
    x = _noise(4)
    v = _field(by_class).velocity(x, _times(1.0, 4), 3.0, class_labels=torch.arange(4))
    means = torch.stack([shard.mean for shard in SHARDS]).view(4, *SHAPE)
    expected = x - (UNION.mean.view(SHAPE) + 3 * (means - UNION.mean.view(SHAPE)))
    assert rms_error(v, expected) < 0.2 * rms_error(x, expected)


def test_velocity_is_continuous_up_to_full_noise(by_class: Calibration) -> None:
    field, times = _field(by_class), 1 - torch.logspace(-1, -6, 200, dtype=torch.float64)
    found = [
        field.velocity(_noise(64), _times(t, 64), class_labels=LABELS[:64]) for t in [*times, 1.0]
    ]
    steps = [rms_error(later, earlier) for earlier, later in itertools.pairwise(found)]
    assert max(steps) < 0.03


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


def test_a_saved_calibration_gives_the_identical_velocity(
    by_class: Calibration, tmp_path: Path
) -> None:
    assert Calibration.load(tmp_path) is None
    by_class.save(tmp_path)
    again = Calibration.load(tmp_path)
    assert again is not None
    for t in LATE:
        before, after = (
            _field(one).velocity(_noise(8), _times(t, 8), class_labels=LABELS[:8])
            for one in (by_class, again)
        )
        assert torch.equal(after, before)
    (file,) = tmp_path.iterdir()
    tensors = load_file(file)
    del tensors["weights"]
    save_file(tensors, file)
    with pytest.raises(HddmError, match="is not what was written"):
        Calibration.load(tmp_path)


GAUSSIAN = GaussianMixture.random(seed=0, modes=1, dim=DIM)
TIMES = [0.0, 0.1, 0.3, 0.5, 0.7, 0.75, 0.8, 0.9, 0.97, 0.99, 0.999, 1 - 1e-6, 1.0]


def _moments(gaussian: GaussianMixture) -> Moments:
    """The exact ones, all directions kept."""
    variances, basis = torch.linalg.eigh(gaussian.covariances[0])
    return Moments(gaussian.mean, basis, torch.cat([variances, variances[:1]]))


def _blended(network: Any, case: str, kind: str, kappa: float | None = KAPPA) -> VelocityField:
    schedule = case_named(case).schedule
    field = VelocityField(network, schedule, kind, sample_shape=SHAPE)
    if kappa is not None:
        field.calibration = bounded_gain(
            field.prediction_type, field.range[1], _moments(GAUSSIAN), kappa
        )
    return field


@pytest.mark.parametrize("t", TIMES[1:])
@pytest.mark.parametrize("kind", ["epsilon", "sample"])
@pytest.mark.parametrize("kappa", [2.0, 8.0])
def test_the_velocity_is_the_hand_written_blend(kind: str, kappa: float, t: float) -> None:
    x, times = GAUSSIAN.states_at(t, 64, 3, SHAPE)
    network = BoundedNetwork()
    found = _blended(network, "linear", kind, kappa).velocity(x, times)
    output = network.calls[-1][2]
    share = min(1.0, kappa * (1 - t if kind == "epsilon" else t))
    # As K · gain · (output - x), which no division by 0 spoils; the margin of the range is 1e-6.
    if kind == "epsilon":
        net = min(1 / max(1 - t, 1e-9), kappa) * (output - x) if t < 1 else 0 * x
    else:
        net = min(1 / t, kappa) * (x - output)
    expected = net + (1 - share) * GAUSSIAN.velocity(x, times)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["epsilon", "sample", "v_prediction"])
@pytest.mark.parametrize("case", ["cosine", "sd-scaled-linear", "ddpm-linear-ztsnr"])
@pytest.mark.parametrize("kappa", [2.0, 8.0])
def test_no_output_of_the_network_counts_more_than_the_bound(
    case: str, kind: str, kappa: float
) -> None:
    output = torch.zeros(1, *SHAPE, dtype=torch.float64)

    def gain(t: float) -> float:
        """By automatic differentiation: the norm of dv/d output."""
        x, times = GAUSSIAN.states_at(t, 1, 3, SHAPE)

        def velocity(value: Tensor) -> Tensor:
            return _blended(lambda y, u: value, case, kind, kappa).velocity(x, times)

        jacobian = torch.autograd.functional.jacobian(velocity, output).view(DIM, DIM)
        return torch.linalg.matrix_norm(jacobian, 2).item()

    t_max = _blended(None, case, kind, None).range[1]
    for t in [*TIMES, t_max]:
        assert gain(t) <= max(kappa, 2**0.5) * (1 + 1e-6)
        if kind == "epsilon" and 0.01 < t < t_max:
            assert gain(t) == pytest.approx(min(1 / (1 - t), kappa), rel=1e-4)


@pytest.mark.parametrize("kind", ["epsilon", "sample"])
@pytest.mark.parametrize("case", ["cosine", "linear"])
def test_an_exact_network_stays_exact_on_gaussian_data(case: str, kind: str) -> None:
    oracle = OracleNetwork(GAUSSIAN, case_named(case).alpha_sigma, kind)
    for t in TIMES:
        x, times = GAUSSIAN.states_at(t, 64, 3, SHAPE)
        assert (
            rms_error(_blended(oracle, case, kind).velocity(x, times), GAUSSIAN.velocity(x, times))
            < 1e-6
        )


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction"])
def test_beyond_the_trained_range_the_gaussian_takes_over(kind: str) -> None:
    oracle = OracleNetwork(GAUSSIAN, case_named("sd-scaled-linear").alpha_sigma, kind)
    raw, blended = (_blended(oracle, "sd-scaled-linear", kind, kappa) for kappa in (None, 16.0))
    for t in (0.94, 0.96, 0.99, 1.0):
        x, times = GAUSSIAN.states_at(t, 64, 3, SHAPE)
        truth = GAUSSIAN.velocity(x, times)
        assert rms_error(blended.velocity(x, times), truth) <= rms_error(
            raw.velocity(x, times), truth
        )
    assert rms_error(blended.velocity(x, times), truth) < 1e-6


def test_a_bounded_gain_needs_no_blend() -> None:
    for kind in (PredictionType.FLOW_PREDICTION, PredictionType.V_PREDICTION):
        assert bounded_gain(kind, 1.0, _moments(GAUSSIAN)) is None
