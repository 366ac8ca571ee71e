"""Mean and covariance of images, and the velocity of the Gaussian that has them.

With mean m, covariance U diag(c) U^T and z = U^T (x - (1 - t) m), the velocity E[eps - x_0 | x_t] is

    v_gauss = -m + U [ (t - (1 - t) c) / ((1 - t)² c + t²) z ]

It is that of the best linear denoiser of any data with these moments, and exact at both ends: v = -x at
t = 0, v = x - m at t = 1.
"""

from dataclasses import dataclass

import torch
from scipy.linalg import eigh
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
        flat = to_float64(images.flatten(1)).cpu()
        mean = flat.mean(0)
        rank = min(MAX_DIRECTIONS, len(flat) - 1, flat.shape[1])
        variances, directions, total = _principal(flat - mean, rank)
        rest = (total - variances.sum()) / max(flat.shape[1] - rank, 1)
        # A direction without any variance would make the Gaussian velocity 0/0 at t = 0.
        floor = 1e-6 * (total / min(flat.shape)).clamp_min(1e-12).item()
        kept = torch.cat([variances, rest[None]]).clamp_min(floor)
        return cls(mean.float(), directions.float().contiguous(), kept.float())

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


def _principal(centred: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The ``rank`` largest variances of ``centred`` (N, D), their directions (D, rank), the sum of all.

    From the smaller of the two Gram matrices: a decomposition of the whole takes minutes for a few thousand
    images of a few thousand numbers.
    """
    wide = centred.shape[1] > len(centred)
    gram = (centred @ centred.T if wide else centred.T @ centred) / (len(centred) - 1)
    total = gram.diagonal().sum()
    last = len(gram) - 1
    found, vectors = eigh(gram.numpy(), subset_by_index=(last - rank + 1, last))
    variances = torch.from_numpy(found).flip(0).clamp_min(0)
    directions = torch.from_numpy(vectors).flip(1)
    if wide:
        # Rounding spoils what is orthogonal in theory where a variance is next to nothing.
        directions = torch.linalg.qr(centred.T @ directions).Q
    return variances, directions, total
