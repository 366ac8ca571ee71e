"""Samples that begin with a picture: image to image, inpainting, and edits from one prompt to another.

On the common path a picture x_0 at t = s is x_s = (1 - s) x_0 + s eps, whatever an expert was trained with,
so sampling goes on from there with any expert, router and solver. The strength s says how much is new: at 0
the picture stays, at 1 nothing is left of it (SDEdit, arXiv:2108.01073).
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hddm.conditions import Conditions
from hddm.solvers import OnStep, Solver, Velocity, unchanged
from hddm.utils.errors import HddmError

DEFAULT_RESAMPLING = 10
SAME = 1e-9
"""Times that differ by less are one."""


@dataclass(frozen=True)
class Picture:
    """Pictures that samples begin with, one per sample, or one for all.

    Args:
        x_0: (num or 1, C, H, W), in the units that the experts were trained in.
        strength: s in [0, 1].
        mask: (num or 1, 1, H, W), True where a sample is new and False where the picture stays; None for new
            all over.
        resampling: with a mask, how often each step is taken, by default `DEFAULT_RESAMPLING`; see
            `inpainting`.
        pixels: (num or 1, C, H, W) in [-1, 1], where ``x_0`` are latents of them.
        pixel_mask: the mask of ``pixels``.
        source: conditions that describe the pictures, (num or 1, …); sampling then edits the pictures to the
            samples' own conditions, see `edit`.

    Raises:
        HddmError: for a strength outside [0, 1], a ``resampling`` below 1 or without a mask, a mask of
            another size, and a mask together with ``source``.
    """

    x_0: Tensor
    strength: float
    mask: Tensor | None = None
    resampling: int | None = None
    pixels: Tensor | None = None
    pixel_mask: Tensor | None = None
    source: Conditions | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.strength <= 1:
            raise HddmError(
                f"`strength` {self.strength}: must be from 0 (the picture) to 1 (all new)"
            )
        if self.resampling is not None and self.resampling < 1:
            raise HddmError(f"`resampling_steps` {self.resampling}: must be 1 or more")
        if self.resampling is not None and self.mask is None:
            raise HddmError(
                "`resampling_steps` repeats steps inside a `mask`, and there is none; drop it"
            )
        if self.mask is not None and self.source is not None:
            raise HddmError("`edit_from` changes the whole picture; drop it or the `mask`")
        for picture, mask in ((self.x_0, self.mask), (self.pixels, self.pixel_mask)):
            if mask is None or picture is None:
                continue
            if mask.shape[1:] != (1, *picture.shape[2:]):
                raise HddmError(
                    f"the mask is {tuple(mask.shape)}, and the picture {tuple(picture.shape)}"
                )

    @property
    def one_step_at_a_time(self) -> bool:
        """True if each step is a solver's first, which has no memory, as inside a mask and in an edit."""
        return self.mask is not None or self.source is not None

    @property
    def repeats(self) -> int:
        """How often each step is taken with a mask."""
        return DEFAULT_RESAMPLING if self.resampling is None else self.resampling

    def rows(self, rows: Tensor) -> "Picture":
        """The pictures of these samples."""

        def own(value: Tensor) -> Tensor:
            return value if len(value) == 1 else value[rows]

        each: dict[str, Any] = {}
        for name in ("x_0", "mask", "pixels", "pixel_mask"):
            value = getattr(self, name)
            if value is not None:
                each[name] = own(value)
        if self.source is not None:
            each["source"] = self.source.map(lambda one: own(one).expand(len(rows), *one.shape[1:]))
        return replace(self, **each)

    def check(self, num: int, shape: Sequence[int]) -> None:
        """Raise `HddmError` unless there is one picture, or ``num`` of them, of the shape (C, H, W)."""
        for name, one, own in (("picture", self.x_0, shape), ("mask", self.mask, (1, *shape[1:]))):
            if one is None:
                continue
            if len(one) not in (1, num) or one.shape[1:] != tuple(own):
                wanted = (num, *own)
                raise HddmError(
                    f"the {name} is {tuple(one.shape)}, and {num} samples need {wanted}"
                )

    def noised(self, noise: Tensor) -> Tensor:
        """x_s for eps = ``noise`` (n, C, H, W)."""
        return (1 - self.strength) * self.x_0.to(noise) + self.strength * noise

    def times(self, times: Tensor) -> Tensor:
        """The part of a time grid, from 1 to 0, that is below the strength, which it begins with.

        A first step of less than half the next one is joined with it.
        """
        below = times[times < self.strength - SAME]
        is_cut = not ((times - self.strength).abs() <= SAME).any()
        # Solvers with a memory divide by the last step, and so would enlarge what the velocity is rounded by.
        if is_cut and len(below) > 1 and self.strength - below[0] < (below[0] - below[1]) / 2:
            below = below[1:]
        return torch.cat([times.new_tensor([self.strength]), below])

    def solver(self, solver: Solver, fresh: Callable[[], Tensor]) -> Solver:
        """The solver that leaves what the mask keeps; without a mask, ``solver`` itself."""
        if self.mask is None:
            return solver
        return inpainting(solver, self.x_0, self.mask, self.repeats, fresh)

    def kept_in(self, images: Tensor) -> Tensor:
        """``images`` (n, C, H, W) with the picture's own pixels where it stays."""
        if self.pixels is None:
            return images
        if self.strength == 0:
            return self.pixels.to(images).expand_as(images)
        if self.pixel_mask is None:
            return images
        return torch.where(self.pixel_mask.to(images.device), images, self.pixels.to(images))


def inpainting(
    solver: Solver, x_0: Tensor, mask: Tensor, resampling: int, fresh: Callable[[], Tensor]
) -> Solver:
    """A solver that samples the masked part, conditioned on the rest (RePaint, arXiv:2201.09865).

    Before each step the part that stays is set to (1 - t) x_0 + t eps, with new noise. A step from t down to
    t' is taken ``resampling`` times; between, new noise brings x back up to t:

        x_t = (1 - t)/(1 - t') x_t' + sqrt(t^2 - ((1 - t)/(1 - t'))^2 t'^2) eps

    so that the open part comes to agree with the rest. As ``resampling`` grows, samples approach samples of
    p(open part | rest), up to the solver's own error, which every step adds again: Euler's method narrows the
    distribution, Heun's much less. Each step is a solver's first, so a solver with a memory takes Euler's.

    Args:
        solver: takes each step.
        x_0: (batch or 1, C, H, W) the picture.
        mask: (batch or 1, 1, H, W) True where x is open.
        resampling: at least 1.
        fresh: new noise (batch, C, H, W).
    """

    def solve(velocity: Velocity, x: Tensor, times: Tensor, on_step: OnStep = unchanged) -> Tensor:
        is_open, clean = mask.to(x.device), x_0.to(x)
        for index, (now, then) in enumerate(itertools.pairwise(times.tolist())):
            # At t = 1 nothing of the picture is in x.
            repeats = resampling if now < 1 else 1
            for left in reversed(range(repeats)):
                x = torch.where(is_open, x, (1 - now) * clean + now * fresh().to(x))
                x = solver(velocity, x, times[index : index + 2])
                if left:
                    back = (1 - now) / (1 - then)
                    x = back * x + math.sqrt(now**2 - (back * then) ** 2) * fresh().to(x)
            x = on_step(index, x if then else torch.where(is_open, x, clean))
        return x

    return solve


def edit(solver: Solver, x_0: Tensor, source: Velocity, fresh: Callable[[], Tensor]) -> Solver:
    """A solver that moves pictures from one condition to another (FlowEdit, arXiv:2412.08629).

    The picture z starts as x_0 and follows the difference of two velocities, both at noised pictures that
    share their noise:

        dz/dt = v(z + x_t - x_0, t | new condition) - v(x_t, t | source),    x_t = (1 - t) x_0 + t eps

    eps is drawn anew for each step. What both conditions would keep cancels, so it stays in the picture. Each
    step is a solver's first, so a solver with a memory takes Euler's.

    Args:
        solver: takes each step, under the velocity of the new condition.
        x_0: (batch or 1, C, H, W) the picture.
        source: the velocity under the condition that describes the picture.
        fresh: new noise (batch, C, H, W).
    """

    def solve(velocity: Velocity, x: Tensor, times: Tensor, on_step: OnStep = unchanged) -> Tensor:
        clean = x_0.to(x)
        for index in range(len(times) - 1):
            noise = fresh().to(x)

            def difference(z: Tensor, now: Tensor, then: Tensor, noise: Tensor = noise) -> Tensor:
                t = float(now)
                x_t = (1 - t) * clean + t * noise
                return velocity(z + x_t - clean, now, then) - source(x_t, now, then)

            x = on_step(index, solver(difference, x, times[index : index + 2]))
        return x

    return solve
