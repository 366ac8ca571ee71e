"""Mean and covariance of images, and the velocity of the Gaussian that has them.

With mean m, covariance U diag(c) U^T and z = U^T (x - (1 - t) m), the velocity E[eps - x_0 | x_t] is

    v_gauss = -m + U [ (t - (1 - t) c) / ((1 - t)² c + t²) z ]

It is that of the best linear denoiser of any data with these moments, and exact at both ends: v = -x at
t = 0, v = x - m at t = 1.

Where the class c of an image is known, its mean m_c stands for m, and the velocity is exact at t = 1 given
the class as well. The covariance stays that of all images: it is at least the one within a class, and the
error is at most that of the one mean. A class of n_c images has

    m_c = m + n_c/(n_c + rho) (mean of its images - m),     rho = variance within/variance between classes,

since the mean of a few images is off by its own share of the variance (James and Stein's estimate).
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
    last the mean variance along the rest. ``class_means`` (classes, D) holds a row a class label, None where
    the images have no classes.
    """

    mean: Tensor
    basis: Tensor
    variances: Tensor
    class_means: Tensor | None = None

    @classmethod
    def of(cls, images: Tensor, labels: Tensor | None = None) -> "Moments":
        """Moments of ``images`` (N, C, H, W), up to `MAX_DIRECTIONS` principal directions.

        Args:
            images: (N, C, H, W).
            labels: (N,) the class of each, from 0; None where there are none.

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
        means = None if labels is None else _class_means(flat, mean, labels.cpu())
        return cls(mean.float(), directions.float().contiguous(), kept.float(), means)

    def to(self, like: Tensor) -> "Moments":
        """The same moments in the dtype and on the device of ``like``; class means stay where they are."""
        return Moments(self.mean.to(like), self.basis.to(like), self.variances.to(like), self.class_means)

    def mean_of(self, labels: Tensor | None) -> Tensor:
        """The mean (N, D) of each class in ``labels`` (N,); that of all images (D,) where there are none.

        A label beyond the classes, as the one that stands for no class, has the mean of all images.
        """
        if labels is None or self.class_means is None:
            return self.mean
        rows = labels.to(self.class_means.device)
        known = (rows >= 0) & (rows < len(self.class_means))
        means = self.class_means[torch.where(known, rows, 0)].to(self.mean)
        return torch.where(known[:, None].to(self.mean.device), means, self.mean)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Coordinates (N, r) of ``x`` (N, D) along the basis, and what is left of it (N, D)."""
        along = x @ self.basis
        return along, x - along @ self.basis.T

    def velocity(self, x_t: Tensor, t: Tensor, labels: Tensor | None = None) -> Tensor:
        """v_gauss (N, D) of the module's head, for ``x_t`` (N, D) at ``t`` (N,) and their ``labels`` (N,)."""
        t, mean = t[:, None], self.mean_of(labels)
        gain = (t - (1 - t) * self.variances) / ((1 - t) ** 2 * self.variances + t**2)
        along, rest = self.split(x_t - (1 - t) * mean)
        return (gain[:, :-1] * along) @ self.basis.T + gain[:, -1:] * rest - mean


def _class_means(flat: Tensor, mean: Tensor, labels: Tensor) -> Tensor | None:
    """The means m_c of the module's head; None where the images are of one class, whose mean is theirs."""
    seen, index = labels.unique(return_inverse=True)
    if len(seen) < 2:
        return None
    counts = index.bincount().to(flat)
    offsets = torch.zeros(len(seen), flat.shape[1], dtype=flat.dtype).index_add_(0, index, flat - mean)
    offsets = offsets / counts[:, None]
    within = (flat - mean - offsets[index]).square().sum() / max(len(flat) - len(seen), 1)
    between = ((counts[:, None] * offsets.square()).sum() - (len(seen) - 1) * within) / len(flat)
    share = counts * between.clamp_min(0) / (counts * between.clamp_min(0) + within).clamp_min(1e-12)
    means = mean.repeat(int(seen.max()) + 1, 1)
    means[seen] += share[:, None] * offsets
    return means.float()


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
