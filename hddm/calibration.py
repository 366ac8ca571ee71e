r"""Moments of a shard, and how far a velocity near t = 1 is theirs instead of the network's.

**The Gaussian of the data.** With mean m, covariance U diag(c) U^T and z = U^T (x - (1 - t) m), the velocity
E[eps - x_0 | x_t] is

    v_gauss = -m + U [ (t - (1 - t) c) / ((1 - t)² c + t²) z ]

This is the velocity of the best linear denoiser of any data with these moments. It is exact at both ends:
v = -x at t = 0, v = x - m at t = 1. Where the class c of an image is known, the class mean m_c replaces m,
and the velocity is exact at t = 1 given the class as well. The covariance remains that of all images: it is
at least the covariance within a class, and the error is at most the error with one mean. A class of n_c
images has

    m_c = m + n_c/(n_c + rho) (mean of its images - m),     rho = variance within/variance between classes,

since the mean of a few images has an error of its own (James and Stein's estimate).

**The fitted blend** (`hddm.training.calibrate`). Near t = 1 an epsilon network's velocity (eps - x)/(1 - t)
multiplies its error by 1/(1 - t). A calibrated expert mixes the two velocities along the principal
directions U:

    v = v_net + U diag(w(t)) U^T (v_gauss - v_net)

where w_i(t) minimises the squared error of the velocity over the shard's own images, in closed form and
cross-fitted: the weights are measured on images that the moments have not seen, half against half, since on
its own images even a Gaussian looks better than the truth. The final moments are computed from all images.

    w_i(t) = E[(v* - v_net)_i (v_gauss - v_net)_i] / E[(v_gauss - v_net)_i²],  clipped to [0, 1],

v* = eps - x_0 being an unbiased target. No knowledge of the network's error is needed. An estimate w with
standard error s counts as w (1 - s²/w²), or 0 below s, so that a good network is left alone. At t = 1 the
weight is 1, where v = x - m is exact; only a network that is given more than a class keeps its share there.
Directions outside U share one variance and one weight. Up to t = `START` the weight is 0: there the blend
gains little and costs diversity.

From the last measured level on, the share 1 - w of the network falls as (1 - t)² to 0, faster than its factor
1/(1 - t) grows. A table that does not end at 1, as one that was fitted with text or by an older version,
leaves a network of noise at most K(t) = min(1, G (1 - t))², G = `MAX_GAIN`, so that its output counts G times
at most. Either way v is continuous up to t = 1 and x - m there, although the error of a network may grow
towards t = 1.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from scipy.linalg import eigh
from torch import Tensor

from hddm.calibration_records import FILE_NAME, RECORD_KEY, calibration_record
from hddm.utils.errors import HddmError
from hddm.utils.tensors import (
    read_safetensors,
    refuse_non_finite,
    sent,
    to_float64,
    within,
)

START = 0.5
"""Time from which the blend acts; below, it would lower the squared error of digits by about 1 %."""
LEVELS = 15
STATES = 512
POOL = (1.0, 2.0, 3.0, 2.0, 1.0)
FADE = 13
"""Steps in which the network's share falls from the last measured one to 0, to a quarter in each."""
MAX_GAIN = 20.0
"""Largest factor of an output of noise; its own gain 1/(1 - t) reaches it at t = 0.95."""
MAX_DIRECTIONS = 256


@dataclass(frozen=True)
class Moments:
    """Mean and covariance of a shard's images, flattened to D numbers.

    ``basis`` (D, r) holds orthonormal directions, ``variances`` (r + 1,) the variance along each, and
    last the mean variance along the rest. ``class_means`` (classes, D) has one row per class label; None for
    images without classes.
    """

    mean: Tensor
    basis: Tensor
    variances: Tensor
    class_means: Tensor | None = None
    _sent: dict[Any, "Moments"] = field(init=False, default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, images: Tensor, labels: Tensor | None = None) -> "Moments":
        """Moments of ``images`` (N, C, H, W), 2 or more, up to `MAX_DIRECTIONS` principal directions.

        ``labels`` (N,) are their classes, from 0.
        """
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
        """The same moments in the dtype and on the device of ``like``, sent there once."""
        key = (like.device, like.dtype)
        if key not in self._sent:
            means = None if self.class_means is None else self.class_means.to(like)
            self._sent[key] = Moments(
                self.mean.to(like), self.basis.to(like), self.variances.to(like), means
            )
        return self._sent[key]

    def mean_of(self, labels: Tensor | None) -> Tensor:
        """The mean (N, D) of each class in ``labels`` (N,); the mean (D,) of all images without labels.

        A label beyond the classes, such as the null class, has the mean of all images.
        """
        if labels is None or self.class_means is None:
            return self.mean
        is_class, rows = within(labels.to(self.mean.device), len(self.class_means))
        return torch.where(is_class[:, None], self.class_means[rows], self.mean)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Coordinates (N, r) of ``x`` (N, D) along the basis, and what is left of it (N, D)."""
        along = x @ self.basis
        return along, x - along @ self.basis.T

    def velocity(self, x_t: Tensor, t: Tensor, labels: Tensor | None = None) -> Tensor:
        """v_gauss (N, D) for ``x_t`` (N, D) at ``t`` (N,) and their ``labels`` (N,)."""
        t, mean = t[:, None], self.mean_of(labels)
        gain = (t - (1 - t) * self.variances) / ((1 - t) ** 2 * self.variances + t**2)
        along, rest = self.split(x_t - (1 - t) * mean)
        return (gain[:, :-1] * along) @ self.basis.T + gain[:, -1:] * rest - mean

    def flow(self, x_s: Tensor, s: float, t: float, labels: Tensor | None = None) -> Tensor:
        """States (N, D) at time t, to which states ``x_s`` (N, D) at time s flow along `velocity`.

        x_t = (1 - t) m + U sqrt(((1 - t)² c + t²) / ((1 - s)² c + s²)) U^T (x_s - (1 - s) m)
        """
        mean = self.mean_of(labels)
        before = (1 - s) ** 2 * self.variances + s**2
        gain = (((1 - t) ** 2 * self.variances + t**2) / before).sqrt()
        along, rest = self.split(x_s - (1 - s) * mean)
        return (gain[:-1] * along) @ self.basis.T + gain[-1] * rest + (1 - t) * mean

    def log_likelihood(self, x_t: Tensor, t: Tensor, labels: Tensor | None = None) -> Tensor:
        """Log N(x_t; (1 - t) m, (1 - t)² C + t² I), (N,), without its constant D/2 log(2 pi).

        m is that of the classes in ``labels`` (N,), as in `mean_of`.
        """
        t = t[:, None]
        variances = (1 - t) ** 2 * self.variances + t**2
        along, rest = self.split(x_t - (1 - t) * self.mean_of(labels))
        squares = (along.square() / variances[:, :-1]).sum(1) + rest.square().sum(1) / variances[
            :, -1
        ]
        others = len(self.mean) - self.basis.shape[1]
        return -(squares + variances[:, :-1].log().sum(1) + others * variances[:, -1].log()) / 2

    def directions(self, t: Tensor) -> Tensor:
        """Number of directions (N,) in which data exceed noise: the sum of (1 - t)² C / ((1 - t)² C + t²)."""
        t = t[:, None]
        shares = (1 - t) ** 2 * self.variances / ((1 - t) ** 2 * self.variances + t**2)
        return shares[:, :-1].sum(1) + (len(self.mean) - self.basis.shape[1]) * shares[:, -1]


def _class_means(flat: Tensor, mean: Tensor, labels: Tensor) -> Tensor | None:
    """The class means m_c; None where all images are of one class."""
    seen, index = labels.unique(return_inverse=True)
    if len(seen) < 2:
        return None
    counts = index.bincount().to(flat)
    offsets = torch.zeros(len(seen), flat.shape[1], dtype=flat.dtype).index_add_(
        0, index, flat - mean
    )
    offsets = offsets / counts[:, None]
    within = (flat - mean - offsets[index]).square().sum() / max(len(flat) - len(seen), 1)
    between = ((counts[:, None] * offsets.square()).sum() - (len(seen) - 1) * within) / len(flat)
    share = (
        counts * between.clamp_min(0) / (counts * between.clamp_min(0) + within).clamp_min(1e-12)
    )
    means = mean.repeat(int(seen.max()) + 1, 1)
    means[seen] += share[:, None] * offsets
    return means.float()


def _principal(centred: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The ``rank`` largest variances of ``centred`` (N, D), their directions (D, rank), the sum of all.

    From the smaller of the two Gram matrices, which takes seconds where the full decomposition takes minutes.
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


@dataclass(frozen=True)
class Calibration:
    """Moments of a shard and the table of weights w: ``weights`` (times, r + 1) at ``times``.

    ``times`` rise from 0 to 1; between them the weights are linear in t. ``record`` names the data that it
    was fitted to, as `calibration_record` returns it.
    """

    moments: Moments
    times: Tensor
    weights: Tensor
    record: Mapping[str, str] | None = None
    _sent: dict[Any, "Calibration"] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )

    def apply(
        self,
        velocity: Tensor,
        x_t: Tensor,
        t: Tensor,
        labels: Tensor | None = None,
        max_gain: float | None = None,
    ) -> Tensor:
        """The calibrated velocity (N, C, H, W).

        Args:
            velocity: the network's, (N, C, H, W).
            x_t: state, (N, C, H, W).
            t: (N,) in [0, 1].
            labels: (N,) classes, whose means replace the mean of all images.
            max_gain: where the table does not end at 1, the network's share is held to (max_gain (1 - t))²;
                None for one whose velocity has no factor 1/(1 - t).
        """
        here, t = self._on(x_t), sent(t, x_t.device, x_t.dtype)
        moments, net = here.moments, velocity.flatten(1)
        gauss = moments.velocity(x_t.flatten(1), t, labels)
        times, table = here.times, here.weights
        index = torch.searchsorted(times, t.contiguous()).clamp(1, len(times) - 1)
        fraction = (t - times[index - 1]) / (times[index] - times[index - 1])
        weights = torch.lerp(table[index - 1], table[index], fraction[:, None])
        if max_gain is not None:
            least = 1 - (max_gain * (1 - t)[:, None]).square()
            weights = torch.where(table[-1] < 1, torch.maximum(weights, least), weights)
        # As (1 - w) net + w gauss, since net is large where w is 1.
        net_along, net_rest = moments.split(net)
        gauss_along, gauss_rest = moments.split(gauss)
        along = (1 - weights[:, :-1]) * net_along + weights[:, :-1] * gauss_along
        rest = (1 - weights[:, -1:]) * net_rest + weights[:, -1:] * gauss_rest
        return (along @ moments.basis.T + rest).view_as(velocity)

    def save(self, folder: Path) -> None:
        """Write ``calibration.safetensors`` into an expert folder."""
        moments = self.moments
        tensors = {"mean": moments.mean, "basis": moments.basis, "variances": moments.variances}
        tensors |= {"times": self.times, "weights": self.weights}
        if moments.class_means is not None:
            tensors["class_means"] = moments.class_means
        # One key, since safetensors writes several in an order that changes from call to call.
        metadata = None
        if self.record:
            metadata = {RECORD_KEY: json.dumps(dict(self.record), sort_keys=True)}
        tensors = {key: value.contiguous() for key, value in tensors.items()}
        save_file(tensors, folder / FILE_NAME, metadata)

    @classmethod
    def load(cls, folder: Path) -> "Calibration | None":
        """The calibration in an expert folder, None where there is none; `HddmError` for a spoiled file."""
        path = folder / FILE_NAME
        if not path.exists():
            return None
        tensors = read_safetensors(path)
        refuse_non_finite(path, tensors)
        found = {name: (value.dtype, tuple(value.shape)) for name, value in tensors.items()}
        numbers, directions = _rows(tensors, "mean"), _rows(tensors, "variances")
        levels, classes = _rows(tensors, "times"), _rows(tensors, "class_means")
        shapes: dict[str, tuple[int, ...]] = {
            "mean": (numbers,),
            "basis": (numbers, directions - 1),
            "variances": (directions,),
            "times": (levels,),
            "weights": (levels, directions),
        }
        if classes:
            shapes["class_means"] = (classes, numbers)
        wanted = {name: (torch.float32, shape) for name, shape in shapes.items()}
        fits = levels > 1 and found == wanted
        if not fits or not _is_possible(tensors["variances"], tensors["times"], tensors["weights"]):
            raise HddmError(f"{path}: is not what was written; delete it and run hddm calibrate")
        moments = Moments(*map(tensors.get, ("mean", "basis", "variances", "class_means")))  # type: ignore[arg-type]
        return cls(moments, tensors["times"], tensors["weights"], calibration_record(folder))

    def _on(self, x: Tensor) -> "Calibration":
        """The same calibration in the dtype and on the device of ``x``, sent there once."""
        key = (x.device, x.dtype)
        if key not in self._sent:
            self._sent[key] = Calibration(self.moments.to(x), self.times.to(x), self.weights.to(x))
        return self._sent[key]


def _rows(tensors: Mapping[str, Tensor], name: str) -> int:
    """Length of a tensor; 0 if it is missing or a single number."""
    return len(tensors[name]) if name in tensors and tensors[name].ndim else 0


def _is_possible(variances: Tensor, times: Tensor, weights: Tensor) -> bool:
    """True for numbers that a fit can have as its result."""
    is_grid = bool(times[0] == 0 and times[-1] == 1 and (times.diff() > 0).all())
    return is_grid and bool((variances > 0).all() and ((weights >= 0) & (weights <= 1)).all())
