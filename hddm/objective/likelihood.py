"""Likelihood of held-out data, along the flow of a velocity: a proper score that needs no features.

The flow dx/dt = v(x, t) carries data to noise, and along it (Chen et al., arXiv:1806.07366)

    log p_s(x_s) = log p_T(x_T) + ∫ from s to T of div v(x_t, t) dt.

T is the time at which networks begin to make samples (`hddm.times`), at most 0.999, and 0.95 for experts of
noise without a calibration, whose errors count 1/(1 - t) times. Samples come there by the flow of a Gaussian
N(m, C), so p_T = N((1 - T) m, (1 - T)² C + T² I), with m and C of the expert's calibration; without one,
m = 0 and C = 0. Where experts are mixed, p_T is the mixture of theirs.

p_s is the model's density of data with noise of the smallest time s, a proper score of held-out images with
that noise. Bits per dimension are those of x_s/(1 - s) = x_0 + s/(1 - s) eps, whose units are the data's:

    bits = -log2((1 - s)^D p_s(x_s)) / D,    + log2(127.5) for pixels, whose 8-bit values are 1/127.5 apart.

Under ``draw`` each sample has one expert, so p = sum over k of p(k) p_k. Other strategies have one flow.

The flow is integrated over log t by the classical Runge-Kutta method. The integral of the divergence takes
two points of Gauss per step, at states between those of the steps (cubic Hermite), so both are of order 4 and
a divergence, which costs as much as many velocities, is computed twice per step.

The divergence is a trace, exact for samples of few dimensions; else Hutchinson's estimate by random signs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hddm.calibration import Moments
from hddm.objective.errors import Velocity, noise_of
from hddm.utils.errors import HddmError
from hddm.utils.streams import Use

EXACT_DIMENSIONS = 256
"""Most dimensions of a sample for which the trace is exact."""
GAUSS_POINTS = (0.5 - 12**-0.5, 0.5 + 12**-0.5)
"""Places in a step where the divergence is computed, each with half of the step's weight."""
ROWS = 4096
"""Most derivatives of one image's velocity in one direction that an exact trace computes at once."""
LARGEST = 0.999
"""Largest time T: experts of noise have no velocity at t = 1 itself."""


@dataclass(frozen=True)
class LikelihoodSettings:
    """How the flow is integrated."""

    smallest: float = 0.02
    """The time s, above 0 and below 1."""
    steps: int = 20
    """Steps of the classical Runge-Kutta method, of equal ratios of t."""
    probes: int = 4
    """Random signs by which a trace is estimated, where it is not exact."""
    exact_dimensions: int = EXACT_DIMENSIONS

    def probes_of(self, dimensions: int) -> int:
        """Rows of a likelihood of samples of so many dimensions: one for an exact trace."""
        return self.probes if dimensions > self.exact_dimensions else 1

    def __post_init__(self) -> None:
        if not 0 < self.smallest < LARGEST:
            text = f"must be above 0 and below {LARGEST}"
            raise HddmError(f"`smallest_noise` {self.smallest:g}: {text}")


@dataclass(frozen=True)
class Flow:
    """A velocity, and the density of its states at the time T where samples begin to follow it."""

    velocity: Velocity
    end: float = LARGEST
    """T."""
    gaussians: Sequence[Moments | None] = (None,)
    """Of the data of each expert that is mixed; None for one point, at 0."""
    shares: Tensor = field(default_factory=lambda: torch.ones(1, 1))
    """Of the experts, for each image, (experts, n), or (experts, 1) for all."""
    labels: Tensor | None = None
    """Classes of the images (n,)."""

    def log_density_at_end(self, x: Tensor) -> Tensor:
        """Log p_T of states x (n, …), in float64 on the CPU."""
        flat = x.double().cpu().flatten(1)
        times = torch.full((len(flat),), self.end, dtype=torch.float64)
        rows = []
        for one in self.gaussians:
            if one is None:
                squares = flat.square().sum(1) / self.end**2
                rows.append(-squares / 2 - flat.shape[1] * math.log(self.end))
            else:
                rows.append(one.to(flat).log_likelihood(flat, times, self.labels))
        constant = flat.shape[1] / 2 * math.log(2 * math.pi)
        return (torch.stack(rows) + self.shares.double().log()).logsumexp(0) - constant


def log_likelihood(
    flow: Flow,
    x_0: Tensor,
    numbers: Sequence[int],
    seed: int,
    settings: LikelihoodSettings = LikelihoodSettings(),
) -> Tensor:
    """Log of the density of x_0 + s/(1 - s) eps under a flow, in float64, by probe and image (probes, n).

    An exact trace has one row. Rows of estimates differ by their probes alone; each is unbiased.

    Args:
        flow: whose velocity has a gradient with respect to the states.
        x_0: data (n, …) in float32 or float64.
        numbers: of the images (n,), which decide their noise and probes.
        seed: of noise and probes.
        settings: the smallest time, the steps, and the trace.
    """
    s, shape = settings.smallest, x_0.shape[1:]
    dimensions = shape.numel()
    eps = noise_of(numbers, shape, seed, Use.LIKELIHOOD).to(x_0)
    x = (1 - s) * x_0 + s * eps
    probes = None
    if dimensions > settings.exact_dimensions:
        signs = []
        for probe in range(settings.probes):
            normal = noise_of(numbers, shape, seed, Use.PROBES, probe)
            signs.append(normal.sign().to(x_0))
        probes = torch.stack(signs)
    rows = 1 if probes is None else len(probes)
    total = torch.zeros(rows, len(x), dtype=torch.float64)

    def time_of(place: float) -> tuple[float, Tensor]:
        """The time at a place in [0, 1] between log s and log T, and as one per image."""
        t = s * (flow.end / s) ** place
        return t, torch.full((len(x_0),), t, dtype=torch.float64)

    def slope(x: Tensor, place: float) -> Tensor:
        """Derivative of the states with respect to log t."""
        t, times = time_of(place)
        with torch.no_grad():
            return t * flow.velocity(x, times)

    width = math.log(flow.end / s) / settings.steps
    first = slope(x, 0)
    for step in range(settings.steps):
        middle, end = ((step + part) / settings.steps for part in (0.5, 1))
        second = slope(x + width / 2 * first, middle)
        third = slope(x + width / 2 * second, middle)
        last = slope(x + width * third, end)
        after = x + width / 6 * (first + 2 * second + 2 * third + last)
        first_after = slope(after, end)
        for part in GAUSS_POINTS:
            between = _hermite(part, x, width * first, after, width * first_after)
            t, times = time_of((step + part) / settings.steps)
            total += width / 2 * t * divergence(flow.velocity, between, times, probes)
        x, first = after, first_after
    return flow.log_density_at_end(x) + total + dimensions * math.log(1 - s)


def _hermite(
    part: float, left: Tensor, from_left: Tensor, right: Tensor, from_right: Tensor
) -> Tensor:
    """The cubic between two states, with these slopes there, at a part in [0, 1] of the way."""
    rest = 1 - part
    ends = (1 + 2 * part) * rest**2 * left + part**2 * (3 - 2 * part) * right
    return ends + part * rest**2 * from_left - part**2 * rest * from_right


def divergence(velocity: Velocity, x: Tensor, t: Tensor, probes: Tensor | None) -> Tensor:
    """The divergence (probes, n) of a velocity at states x (n, …) and times (n,), in float64 on the CPU.

    Without ``probes`` (probes, n, …) of mean 0 and variance 1, the trace is exact, in one row.
    """
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        v = velocity(x, t)
        if probes is None:
            return _exact_trace(v, x)[None].cpu()
        products = _products(v, x, probes.to(v), is_kept=False)
        return (products * probes.to(products)).double().flatten(2).sum(2).cpu()


def _exact_trace(v: Tensor, x: Tensor) -> Tensor:
    """Sum over dimensions d of the derivatives of v_d with respect to x_d (n,), in float64."""
    dimensions = x[0].numel()
    total = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    at_once = max(ROWS // len(x), 1)
    directions = torch.eye(dimensions, dtype=v.dtype, device=v.device)
    for begin in range(0, dimensions, at_once):
        end = min(begin + at_once, dimensions)
        weights = directions[begin:end, None].expand(-1, len(v), -1).unflatten(2, v.shape[1:])
        products = _products(v, x, weights, is_kept=end < dimensions).flatten(2)
        total += products[..., begin:end].diagonal(dim1=0, dim2=2).double().sum(1)
    return total


def _products(v: Tensor, x: Tensor, weights: Tensor, is_kept: bool) -> Tensor:
    """Derivatives by x of the sum of v × each row of ``weights``, (rows, n, …)."""
    (found,) = torch.autograd.grad(v, x, weights, retain_graph=is_kept, is_grads_batched=True)
    return found


def bits_per_dimension(log_density: Tensor, dimensions: int, is_pixels: bool) -> Tensor:
    """Bits per dimension of log densities; for pixels in [-1, 1] those of their 8-bit values."""
    bits = -log_density / (math.log(2) * dimensions)
    return bits + math.log2(127.5) if is_pixels else bits
