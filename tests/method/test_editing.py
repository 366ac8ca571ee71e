"""Samples that begin with a picture, against what Gaussians and their mixtures give in closed form."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hddm.condition_names import LABELS
from hddm.conditions import Conditions
from hddm.editing import DEFAULT_RESAMPLING, Picture
from hddm.ensemble import Ensemble
from hddm.expert_use import ExpertUse
from hddm.noise import Seeded
from hddm.sampling import sample, time_grid
from hddm.schedules import CosineSchedule
from hddm.solvers import SOLVERS
from hddm.utils.errors import HddmError
from hddm.utils.tensors import append_dims
from hddm.velocity import VelocityField
from tests.cases import LINEAR, case_named, oracle_field
from tests.oracles import GaussianMixture, exact_router

PRIOR = [0.3, 0.5, 0.2]
SHARDS = [GaussianMixture.random(seed=20 + k, modes=2, dim=4, spread=0.3) for k in range(3)]
WHOLE = GaussianMixture.union(SHARDS, PRIOR)
SHAPE = (1, 2, 2)
MASK = torch.tensor([[False, False], [True, True]]).view(1, 1, 2, 2)
OPTIONS = {"shape": SHAPE, "batch_size": 5}


def _ensemble(strategy: str) -> Ensemble:
    kinds = [(LINEAR, "flow_prediction"), (case_named("cosine"), "epsilon"), (LINEAR, "epsilon")]
    experts = [oracle_field(shard, *kind) for shard, kind in zip(SHARDS, kinds, strict=True)]
    return Ensemble(experts, exact_router(SHARDS, PRIOR), strategy, prior=PRIOR)


@pytest.mark.parametrize("strategy", ["full", "top-2", "draw"])
@pytest.mark.parametrize("solver", SOLVERS)
def test_at_strength_0_it_is_the_picture_and_at_1_the_plain_sample(
    strategy: str, solver: str
) -> None:
    ensemble, pictures = _ensemble(strategy), WHOLE.sample(7, 1, SHAPE).float()
    how = {"seed": 3, "steps": 6, "solver": solver, **OPTIONS}
    assert torch.equal(sample(ensemble, 7, picture=Picture(pictures, 0), **how), pictures)
    assert torch.equal(
        sample(ensemble, 7, picture=Picture(pictures, 1), **how), sample(ensemble, 7, **how)
    )


@pytest.mark.parametrize("strength", [0.3, 0.8])
def test_between_it_is_the_flow_of_a_gaussian(strength: float) -> None:
    """Of one Gaussian, of variance c: (x_0 - m) / sqrt(c) = (x_s - (1 - s) m) / sqrt((1 - s)^2 c + s^2)."""
    c, mean = 0.3, torch.tensor([0.5, -1.0, 0.2, 2.0], dtype=torch.float64)
    shard = GaussianMixture(torch.ones(1).double(), mean[None], c * torch.eye(4).double()[None])
    pictures = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 1, 2, 2)
    picture, how = Picture(pictures, strength), {"seed": 5, "shape": SHAPE}
    made = sample(oracle_field(shard), 3, steps=100, solver="adams-moulton", picture=picture, **how)
    # At strength 1 the flow of pure noise tells which noise these samples have.
    plain = sample(oracle_field(shard), 3, steps=100, solver="adams-moulton", **how)
    noise = (plain - mean.view(SHAPE)) / c**0.5
    state = (1 - strength) * (pictures - mean.view(SHAPE)) + strength * noise
    exact = mean.view(SHAPE) + state * (c / ((1 - strength) ** 2 * c + strength**2)) ** 0.5
    assert (made - exact).abs().max() < 1e-3
    assert (made - plain).abs().max() > 0.1


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_strength_just_above_a_time_of_the_grid_enlarges_no_rounding(solver: str) -> None:
    """Networks in bfloat16 are wrong by about 2^-8, in another way at every time."""
    picture, errors = WHOLE.sample(4, 1, SHAPE).float(), torch.Generator().manual_seed(0)

    def rounded(x: Tensor, t: Tensor, then: Tensor) -> Tensor:
        return WHOLE.velocity(x, t.expand(len(x))) + torch.randn(x.shape, generator=errors) / 256

    ends = []
    for strength in (0.6, 0.6 + 1e-5):
        start = Picture(picture, strength)
        noised = start.noised(Seeded(0).initial(range(4), SHAPE))
        ends.append(SOLVERS[solver](rounded, noised, start.times(time_grid(25))))
    assert (ends[1] - ends[0]).abs().max() < 0.1


def test_draw_asks_the_router_whose_picture_it_is() -> None:
    apart = [GaussianMixture.random(seed=30 + k, modes=1, dim=4, spread=8.0) for k in range(3)]
    experts = [oracle_field(shard) for shard in apart]
    ensemble = Ensemble(experts, exact_router(apart, PRIOR), "draw", prior=PRIOR)
    pictures = torch.cat([shard.sample(4, k, SHAPE) for k, shard in enumerate(apart)])
    for strength, shares in ((0.4, [1 / 3] * 3), (1.0, None)):
        use = ExpertUse(3)
        sample(ensemble, 12, steps=3, use=use, picture=Picture(pictures, strength), **OPTIONS)
        drawn = use.shares.tolist()
        assert drawn == pytest.approx(shares) if shares else drawn != pytest.approx([1 / 3] * 3)


def _conditional(known: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation (2,) of the open pixels, the last two, given the first two."""
    covariances, residual = WHOLE.covariances, known - WHOLE.means[:, :2]
    inverse = torch.linalg.inv(covariances[:, :2, :2])
    gain = covariances[:, 2:, :2] @ inverse
    means = WHOLE.means[:, 2:] + (gain @ residual[:, :, None])[:, :, 0]
    within = covariances[:, 2:, 2:] - gain @ covariances[:, :2, 2:]
    distance = torch.einsum("mi,mij,mj->m", residual, inverse, residual)
    share = (WHOLE.weights.log() + 0.5 * inverse.logdet() - 0.5 * distance).softmax(0)
    mean = share @ means
    second = share @ (within.diagonal(dim1=1, dim2=2) + means**2)
    return mean, (second - mean**2).sqrt()


def _errors(resampling: int, solver: str = "euler", pictures: int = 6) -> tuple[float, float]:
    """Of the open pixels: how far the mean is from the exact one in deviations, and how wide over the exact.

    Averaged over pictures, of which each gets 400 samples.
    """
    errors, widths = [], []
    for index, picture in enumerate(WHOLE.sample(pictures, 2, SHAPE).float()):
        start = Picture(picture[None], 1, MASK, resampling)
        how = {"shape": SHAPE, "batch_size": 400, "solver": solver}
        made = sample(_ensemble("full"), 400, index, picture=start, **how)
        assert torch.equal(made[:, :, 0], picture[:, 0].expand(400, 1, 2))
        mean, deviation = _conditional(picture.flatten()[:2].double())
        new = made.flatten(1)[:, 2:]
        errors.append(((new.mean(0) - mean) / deviation).abs().mean())
        widths.append((new.std(0) / deviation).mean())
    return float(torch.stack(errors).mean()), float(torch.stack(widths).mean())


@pytest.mark.slow
def test_inpainting_approaches_the_posterior_as_steps_are_taken_again() -> None:
    (once, _), (error, width) = [_errors(resampling) for resampling in (1, DEFAULT_RESAMPLING)]
    assert error < 0.1
    assert error < 0.6 * once
    assert 0.88 < width < 1
    assert _errors(DEFAULT_RESAMPLING, "heun", 2)[1] == pytest.approx(1, abs=0.06)


def _gaussians(spread: float, means: Tensor) -> Callable[..., Tensor]:
    """Predicts x_0 of x ~ N(means[k], spread^2) for class k, on the cosine schedule."""
    schedule = CosineSchedule()

    def predict(x: Tensor, time: Tensor, class_labels: Tensor) -> Tensor:
        alpha, sigma = (
            append_dims(value, x.ndim) for value in (schedule.alpha(time), schedule.sigma(time))
        )
        mean = means[class_labels].view(len(x), *SHAPE)
        return mean + alpha * spread**2 * (x - alpha * mean) / (alpha**2 * spread**2 + sigma**2)

    return predict


@pytest.mark.parametrize("strategy", ["draw", "full"])
@pytest.mark.parametrize(
    ("strength", "solver", "error"), [(1.0, "euler", 1e-5), (0.5, "heun", 1e-3)]
)
def test_an_edit_maps_one_gaussian_onto_the_other(
    strategy: str, strength: float, solver: str, error: float
) -> None:
    """For any noise, of one variance c and means D apart: z - x_0 = [1 - (1 - s) sqrt(c / C_s)] D.

    C_t = (1 - t)^2 c + t^2 is the variance at t. With A = d/dt log sqrt(C_t), d = z - x_0 follows
    d' = A (d - (1 - t) D) - D, so e = d - (1 - t) D follows e' = A e. From s = 1 Euler's steps are exact.
    """
    means = torch.tensor([[0.5, -1.0, 0.2, 2.0], [-0.4, 0.3, 1.0, -1.5]], dtype=torch.float64)
    network = _gaussians(0.6, means)
    field = VelocityField(network, schedule=CosineSchedule(), prediction_type="sample")
    pictures = torch.randn(
        5, *SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    picture = Picture(pictures, strength, source=Conditions({LABELS: torch.tensor([0])}))
    ensemble = Ensemble(
        [field, field], lambda x, t: torch.full((len(x), 2), 0.5), strategy, prior=[0.5, 0.5]
    )
    how = {"shape": SHAPE, "steps": 80, "solver": solver, "batch_size": 2}
    prior, labels = torch.full((5, 2), 0.5), torch.ones(5, dtype=torch.long)
    made = sample(ensemble, 5, picture=picture, prior=prior, class_labels=labels, **how)
    kept = (1 - strength) * (0.36 / ((1 - strength) ** 2 * 0.36 + strength**2)) ** 0.5
    exact = pictures + (1 - kept) * (means[1] - means[0]).view(SHAPE)
    assert (made - exact).abs().max() < error


def test_an_edit_cannot_commit_or_take_a_mask() -> None:
    source = Conditions({LABELS: torch.tensor([0])})
    with pytest.raises(HddmError, match="cannot edit a picture; choose draw or full"):
        sample(
            _ensemble("commit-0.8"),
            1,
            picture=Picture(torch.zeros(1, *SHAPE), 1, source=source),
            **OPTIONS,
        )
    with pytest.raises(HddmError, match="drop it or the `mask`"):
        Picture(torch.zeros(1, *SHAPE), 1, MASK, source=source)
