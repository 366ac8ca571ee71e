"""Distributions whose optimal experts are known in closed form. Everything is float64.

A state is y = a x_0 + s eps for any signal scale a and noise scale s; the common path has
a = 1 - t and s = t. Nothing here uses the code under test.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

AlphaSigma = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class GaussianMixture:
    """Data of one shard: mode m with probability ``weights[m]``, N(means[m], covariances[m]).

    States may have any shape (N, …) whose rest flattens to the dimension D; a, s and t are (N,).
    """

    weights: Tensor
    means: Tensor
    covariances: Tensor

    @classmethod
    def random(cls, seed: int, modes: int, dim: int, spread: float = 1.0) -> "GaussianMixture":
        """Modes of unlike weights at distance about ``spread``, with full covariances."""
        noise = torch.Generator().manual_seed(seed)
        weights = 0.5 + torch.rand(modes, generator=noise, dtype=torch.float64)
        means = spread * torch.randn(modes, dim, generator=noise, dtype=torch.float64)
        factors = torch.randn(modes, dim, dim, generator=noise, dtype=torch.float64) / dim**0.5
        floor = 0.05 * torch.eye(dim, dtype=torch.float64)
        return cls(weights / weights.sum(), means, 0.3 * factors @ factors.mT + floor)

    @classmethod
    def union(
        cls, shards: Sequence["GaussianMixture"], prior: Sequence[float]
    ) -> "GaussianMixture":
        """The whole data: shard k with probability ``prior[k]``."""
        weights = [share * shard.weights for share, shard in zip(prior, shards, strict=True)]
        return cls(
            torch.cat(weights),
            torch.cat([shard.means for shard in shards]),
            torch.cat([shard.covariances for shard in shards]),
        )

    @cached_property
    def mean(self) -> Tensor:
        """(D,)."""
        return self.weights @ self.means

    @cached_property
    def covariance(self) -> Tensor:
        """(D, D)."""
        centred = self.means - self.mean
        between = torch.einsum("m,mi,mj->ij", self.weights, centred, centred)
        return between + torch.einsum("m,mij->ij", self.weights, self.covariances)

    def sample(self, num: int, seed: int, shape: tuple[int, ...] | None = None) -> Tensor:
        """Data (num, *shape), by default (num, D)."""
        noise = torch.Generator().manual_seed(seed)
        mode = torch.multinomial(self.weights, num, replacement=True, generator=noise)
        unit = torch.randn(num, self.means.shape[1], generator=noise, dtype=torch.float64)
        factors = torch.linalg.cholesky(self.covariances)
        data = self.means[mode] + torch.einsum("nij,nj->ni", factors[mode], unit)
        return data.view(num, *(shape or data.shape[1:]))

    def states(self, t: Tensor, seed: int, shape: tuple[int, ...] | None = None) -> Tensor:
        """States (N, *shape) of the common path at ``t`` (N,), each of its own data and noise."""
        x_0 = self.sample(len(t), seed, shape)
        noise = torch.Generator().manual_seed(seed + 1)
        eps = torch.randn(x_0.shape, generator=noise, dtype=torch.float64)
        t = t.double().view(-1, *[1] * (x_0.ndim - 1))
        return (1 - t) * x_0 + t * eps

    def states_at(
        self, t: float, num: int, seed: int, shape: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """`states` (num, *shape) of one time, and the times (num,)."""
        times = torch.full((num,), t, dtype=torch.float64)
        return self.states(times, seed, shape), times

    def x_0_and_eps(self, y: Tensor, a: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        """(E[x_0 | y], E[eps | y]), both in y's shape; neither is singular at a = 0 or s = 0."""
        along, variance, log_share = self._modes(y, a, s)
        share = log_share.softmax(1)
        a, s = a.double()[:, None, None], s.double()[:, None, None]
        values, axes, _ = self._principal
        pull = share[:, :, None] * along / variance
        x_0 = share @ self.means + (a * values * pull).flatten(1) @ axes.T
        eps = (s * pull).flatten(1) @ axes.T
        return x_0.view(y.shape), eps.view(y.shape)

    def log_density(self, y: Tensor, a: Tensor, s: Tensor) -> Tensor:
        """log p(y) (N,), up to one constant that depends on D alone."""
        return self._modes(y, a, s)[2].logsumexp(1)

    def velocity(self, x: Tensor, t: Tensor) -> Tensor:
        """E[eps - x_0 | x_t] of the common path."""
        x_0, eps = self.x_0_and_eps(x, 1 - t.double(), t)
        return eps - x_0

    @cached_property
    def _principal(self) -> tuple[Tensor, Tensor, Tensor]:
        """Variances (M, D), axes (D, M D) and the means along them (M, D) of every mode."""
        values, vectors = torch.linalg.eigh(self.covariances)
        places = torch.einsum("mji,mj->mi", vectors, self.means)
        return values, vectors.transpose(0, 1).flatten(1), places

    def _modes(self, y: Tensor, a: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Per mode: y along its axes (N, M, D), the variance there, the log share (N, M)."""
        a, s = a.double()[:, None, None], s.double()[:, None, None]
        values, axes, places = self._principal
        along = (y.double().flatten(1) @ axes).unflatten(1, values.shape) - a * places
        variance = a**2 * values + s**2
        log_share = self.weights.log() - 0.5 * (variance.log() + along**2 / variance).sum(-1)
        return along, variance, log_share


def exact_router(
    shards: Sequence[GaussianMixture], prior: Sequence[float]
) -> Callable[[Tensor, Tensor], Tensor]:
    """``router(x_t, t)``: the posterior p(k | x_t) over the shards."""
    log_prior = torch.tensor(prior, dtype=torch.float64).log()

    def router(x_t: Tensor, t: Tensor) -> Tensor:
        densities = [shard.log_density(x_t, 1 - t.double(), t) for shard in shards]
        return (log_prior + torch.stack(densities, 1)).softmax(1)

    return router


def predicted(
    prediction_type: str,
    x_0: Tensor,
    eps: Tensor,
    a: Tensor,
    s: Tensor,
    by_time: Callable[[], tuple[Tensor, Tensor]] | None = None,
) -> Tensor:
    """What a perfect network gives for y = a x_0 + s eps, by the definition of each type.

    ``by_time`` gives the derivatives of ``a`` and ``s``, which a velocity needs.
    """
    match prediction_type:
        case "epsilon":
            return eps
        case "sample":
            return x_0
        case "v_prediction":
            return a * eps - s * x_0
        case "flow_prediction":
            assert by_time is not None
            d_a, d_s = by_time()
            return d_a * x_0 + d_s * eps
    raise AssertionError(prediction_type)


def solved(
    prediction_type: str, output: Tensor, y: Tensor, a: Tensor, s: Tensor
) -> tuple[Tensor, Tensor]:
    """x_0 and eps, by Cramer's rule from y = a x_0 + s eps and the definition of the ``output``."""
    one, zero = torch.ones_like(output), torch.zeros_like(output)
    by_x_0 = predicted(prediction_type, one, zero, a, s)
    by_eps = predicted(prediction_type, zero, one, a, s)
    determinant = a * by_eps - s * by_x_0
    return (by_eps * y - s * output) / determinant, (a * output - by_x_0 * y) / determinant


class OracleNetwork:
    """The optimal network for a shard on a schedule; it keeps what it was fed in ``fed``.

    Args:
        alpha_sigma: (a, s) of native time, written without the code under test.
        prediction_type: what it predicts, by the definition of each.
    """

    def __init__(
        self,
        shard: GaussianMixture,
        alpha_sigma: AlphaSigma,
        prediction_type: str,
        time_scale: float = 1.0,
    ) -> None:
        self.shard = shard
        self.alpha_sigma = alpha_sigma
        self.prediction_type = prediction_type
        self.time_scale = time_scale
        self.fed: list[tuple[Tensor, Tensor]] = []

    def __call__(self, y: Tensor, timestep: Tensor) -> Tensor:
        self.fed.append((y, timestep))
        time = timestep.double() / self.time_scale
        a, s = self.alpha_sigma(time)
        x_0, eps = self.shard.x_0_and_eps(y, a, s)
        ones = [1] * (y.ndim - 1)
        a, s = a.view(-1, *ones), s.view(-1, *ones)

        def by_time() -> tuple[Tensor, Tensor]:
            d_a, d_s = slopes(self.alpha_sigma, time)
            return d_a.view(-1, *ones), d_s.view(-1, *ones)

        return predicted(self.prediction_type, x_0, eps, a, s, by_time)


class NoisyEpsilon(OracleNetwork):
    """The exact noise of 16 numbers with a 2 % error, nearly white, a fixed function of state and time."""

    def __call__(self, y: Tensor, timestep: Tensor) -> Tensor:
        noise = torch.Generator().manual_seed(9)
        mix = 20 * torch.randn(16, 16, generator=noise, dtype=torch.float64)
        error = torch.sin(y.double().flatten(1) @ mix + 100 * timestep.double()[:, None])
        return super().__call__(y, timestep) + 0.02 * 2**0.5 * error.view(y.shape)


class BoundedNetwork:
    """Any network: smooth, wrong, with outputs in [-1, 1]; it keeps what it was fed and gave."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def __call__(self, y: Tensor, timestep: Tensor) -> Tensor:
        flat = y.flatten(1)
        noise = torch.Generator().manual_seed(self.seed)
        mix = torch.randn(flat.shape[1], flat.shape[1], generator=noise).to(y)
        phase = (timestep * 0.01).to(y)[:, None]
        output = torch.sin(flat @ mix + phase).view(y.shape)
        self.calls.append((y, timestep, output))
        return output


class Recorder(nn.Module):
    """A network of one parameter, so that it has a dtype; it gives its state, and keeps what it was fed."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones((), dtype=dtype))
        self.fed: list[tuple[Tensor, Tensor]] = []

    def forward(self, y: Tensor, timestep: Tensor) -> Tensor:
        self.fed.append((y, timestep))
        return self.gain * y


def slopes(alpha_sigma: AlphaSigma, time: Tensor) -> tuple[Tensor, Tensor]:
    """(da/du, ds/du) at ``time`` (N,) by automatic differentiation."""
    with torch.enable_grad():
        time = time.detach().clone().requires_grad_()
        a, s = alpha_sigma(time)
        return torch.autograd.grad(a.sum(), time)[0], torch.autograd.grad(s.sum(), time)[0]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The largest over the batch of |actual - expected| / |expected|, norms over a sample."""
    difference = (actual.double() - expected.double()).flatten(1).norm(dim=1)
    return (difference / expected.double().flatten(1).norm(dim=1)).max().item()


def rms_error(actual: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference over that of ``expected``, over the whole batch."""
    return ((actual - expected).double().norm() / expected.double().norm()).item()
