"""Mixtures of Gaussians with diagonal covariances: the optimal prediction in closed form, in float64."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DiagonalMixture:
    """Mode m with probability ``weights[m]``: N(means[m], diag(variances[m])); all (M,) or (M, D)."""

    weights: Tensor
    means: Tensor
    variances: Tensor

    @classmethod
    def random(cls, seed: int, modes: int, dimension: int) -> "DiagonalMixture":
        """Modes of unlike weights at distance about 1, with variances from 0.05 to 0.65."""
        noise = torch.Generator().manual_seed(seed)
        weights = 0.5 + torch.rand(modes, generator=noise, dtype=torch.float64)
        means = torch.randn(modes, dimension, generator=noise, dtype=torch.float64)
        variances = 0.05 + 0.6 * torch.rand(modes, dimension, generator=noise, dtype=torch.float64)
        return cls(weights / weights.sum(), means, variances)

    def states(self, num: int, t: float, seed: int) -> tuple[Tensor, Tensor]:
        """``num`` states (num, D) of the common path at ``t``, and the times (num,)."""
        noise = torch.Generator().manual_seed(seed)
        mode = torch.multinomial(self.weights, num, replacement=True, generator=noise)
        unit, eps = torch.randn(2, num, self.means.shape[1], generator=noise, dtype=torch.float64)
        x_0 = self.means[mode] + self.variances[mode].sqrt() * unit
        return (1 - t) * x_0 + t * eps, torch.full((num,), t, dtype=torch.float64)

    def x_0_and_eps(self, y: Tensor, a: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        """(E[x_0 | y], E[eps | y]) for y = a x_0 + s eps; y is (n, D), a and s (n,)."""
        a, s = a[:, None, None], s[:, None, None]
        along = y[:, None] - a * self.means
        variance = a**2 * self.variances + s**2
        log_share = self.weights.log() - 0.5 * (variance.log() + along**2 / variance).sum(-1)
        share = log_share.softmax(1)[..., None]
        x_0 = (share * (self.means + a * self.variances * along / variance)).sum(1)
        return x_0, (share * s * along / variance).sum(1)
