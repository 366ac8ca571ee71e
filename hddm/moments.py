"""Mean and covariance of images, and the velocity of the Gaussian that has them.

With mean m, covariance U diag(c) U^T and z = U^T (x - (1 - t) m), the velocity E[eps - x_0 | x_t] is

    v_gauss = -m + U [ (t - (1 - t) c) / ((1 - t)² c + t²) z ]

It is that of the best linear denoiser of any data with these moments, and exact at both ends: v = -x at
t = 0, v = x - m at t = 1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hddm.errors import HddmError
from hddm.tensors import to_float64

MAX_DIRECTIONS = 256


@dataclass(frozen=True)
class Moments:
    """Mean and covariance of a shard's images, flattened to D numbers.

    ``basis`` (D, r) holds orthonormal directions, ``variances`` (r + 1,) the variance along each, and
    last the mean variance along the rest.
    """

    mean: Tensor
    basis: Tensor
    variances: Tensor

    @classmethod
    def of(cls, images: Tensor) -> "Moments":
        """Moments of ``images`` (N, C, H, W), up to `MAX_DIRECTIONS` principal directions.

        Raises:
            HddmError: for fewer than 2 images.
        """
        if len(images) < 2:
            raise HddmError(f"moments need at least 2 images, not {len(images)}")
        flat = to_float64(images.flatten(1))
        mean = flat.mean(0)
        centred = flat - mean
        _, singular, directions = torch.linalg.svd(centred, full_matrices=False)
        variances = singular**2 / (len(flat) - 1)
        rank = min(MAX_DIRECTIONS, len(flat) - 1, flat.shape[1])
        rest = (variances.sum() - variances[:rank].sum()) / max(flat.shape[1] - rank, 1)
        # A direction without any variance would make the Gaussian velocity 0/0 at t = 0.
        floor = 1e-6 * variances.mean().clamp_min(1e-12)
        kept = torch.cat([variances[:rank], rest[None]]).clamp_min(floor)
        return cls(mean.float(), directions[:rank].T.float().contiguous(), kept.float())

    def to(self, like: Tensor) -> "Moments":
        """The same moments in the dtype and on the device of ``like``."""
        return Moments(self.mean.to(like), self.basis.to(like), self.variances.to(like))

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Coordinates (N, r) of ``x`` (N, D) along the basis, and what is left of it (N, D)."""
        along = x @ self.basis
        return along, x - along @ self.basis.T

    def velocity(self, x_t: Tensor, t: Tensor) -> Tensor:
        """v_gauss (N, D) of the module's head, for ``x_t`` (N, D) at ``t`` (N,)."""
        t = t[:, None]
        gain = (t - (1 - t) * self.variances) / ((1 - t) ** 2 * self.variances + t**2)
        along, rest = self.split(x_t - (1 - t) * self.mean)
        return (gain[:, :-1] * along) @ self.basis.T + gain[:, -1:] * rest - self.mean
