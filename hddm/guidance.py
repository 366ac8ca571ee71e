"""Classifier-free guidance of one expert, on its velocity."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hddm.errors import HddmError


@dataclass(frozen=True)
class Guidance:
    """How far to go from the negative velocity v_n through the conditional one, v_c.

        v = v_n + scale (v_c - v_n)                                (arXiv:2207.12598)
        v = [rescale std(v_c)/std(v) + 1 - rescale] v              (arXiv:2305.08891, section 3.4)

    Args:
        scale: 1 for none; with any other the negative branch runs too.
        channels: guide this many channels from the first, and leave the others as v_c. DiT's own code
            does so with 3 of 4, and its published figures are of that; None for all.
        interval: (low, high) in t, where guidance acts; outside v = v_c (arXiv:2404.07724).
        rescale: share of the way back to the standard deviation of v_c, taken over a sample's guided
            numbers; 0 for none. It is singular where v is constant over a sample, and that gives NaN.

    Raises:
        HddmError: for numbers outside their ranges.
    """

    scale: float
    channels: int | None = None
    interval: tuple[float, float] = (0.0, 1.0)
    rescale: float = 0.0

    def __post_init__(self) -> None:
        low, high = self.interval
        if not math.isfinite(self.scale):
            raise HddmError(f"guidance scale must be finite, not {self.scale}")
        if self.channels is not None and self.channels < 1:
            raise HddmError(f"guided channels start at 1, not {self.channels}")
        if not 0 <= low <= high <= 1:
            raise HddmError(f"a guidance interval is 0 <= low <= high <= 1 in t, not {low} to {high}")
        if not 0 <= self.rescale <= 1:
            raise HddmError(f"guidance rescale lies in [0, 1], not {self.rescale}")

    @classmethod
    def of(cls, scale: "float | Guidance") -> "Guidance":
        """``scale`` itself, or plain guidance of that scale."""
        return scale if isinstance(scale, Guidance) else cls(float(scale))

    def acts(self, t: Tensor) -> Tensor:
        """Whether there is guidance at t (batch,)."""
        low, high = self.interval
        return (t >= low) & (t <= high) & (self.scale != 1.0)

    def combine(self, conditional: Tensor, negative: Tensor, acts: Tensor) -> Tensor:
        """The guided velocity (batch, C, …) in rows where ``acts`` (batch,), the conditional one elsewhere.

        Raises:
            HddmError: for more guided channels than there are.
        """
        count = conditional.shape[1] if self.channels is None else self.channels
        if count > conditional.shape[1]:
            raise HddmError(f"{count} guided channels asked for, and samples have {conditional.shape[1]}")
        v_c, v_n = conditional[:, :count], negative[:, :count]
        guided = v_n + self.scale * (v_c - v_n)
        if self.rescale:
            ratio = _deviation(v_c) / _deviation(guided)
            guided = (self.rescale * ratio + 1 - self.rescale) * guided
        rows = acts.to(guided.device).view(-1, *[1] * (guided.ndim - 1))
        return torch.cat([torch.where(rows, guided, v_c), conditional[:, count:]], dim=1)


def _deviation(v: Tensor) -> Tensor:
    return v.flatten(1).std(1).view(-1, *[1] * (v.ndim - 1))
