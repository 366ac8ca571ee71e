"""Guidance: how far the velocity moves away from another one, and the options that say so.

Torch is imported where tensors are combined, since commands print their help without it.
"""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic.dataclasses import dataclass as checked_dataclass

from hddm.utils.errors import HddmError
from hddm.utils.records import Share

if TYPE_CHECKING:
    from torch import Tensor

GuideBy = Literal["condition", "weak"]
GuidanceNorm = Literal["rows"]


def _check_interval(interval: tuple[float, float]) -> tuple[float, float]:
    if not 0 <= interval[0] <= interval[1] <= 1:
        raise HddmError("must be two t, 0 <= low <= high <= 1")
    return interval


Interval = Annotated[tuple[float, float], AfterValidator(_check_interval)]
"""Two noise levels, 0 <= low <= high <= 1."""


def refuse_two_sizes(rescale: float, norm: GuidanceNorm | None) -> None:
    """Raise a `ValueError` for a guided velocity that is rescaled in two ways."""
    if rescale and norm:
        raise ValueError("`guidance_rescale` has no effect with `guidance_norm`; drop one")


OPTIONS = {
    "scale": "guidance_scale",
    "by": "guide_by",
    "channels": "cfg_channels",
    "interval": "guidance_interval",
    "rescale": "guidance_rescale",
    "norm": "guidance_norm",
}
"""Fields of `Guidance`, and the options that set them (`hddm.settings.SamplingMethod`)."""


@checked_dataclass(frozen=True)
class Guidance:
    """Guidance moves the velocity v_c away from another one, v_n.

        v = v_n + scale (v_c - v_n)                                (arXiv:2207.12598)
        v = [rescale std(v_c)/std(v) + 1 - rescale] v              (arXiv:2305.08891, section 3.4)
        v = |v_c|/|v| v                                            (with ``norm``)

    Args:
        scale: 1 for none; with any other v_n is computed too.
        by: ``condition`` takes v_n under the negative conditions (classifier-free guidance); ``weak`` takes
            the velocity of the expert's weak model under the same conditions (arXiv:2406.02507).
        channels: guide this many channels from the first, and leave the others as v_c; None for all. DiT's
            own code guides 3 of 4, and DiT's published figures were computed so.
        interval: (low, high) in t, where guidance acts; outside v = v_c (arXiv:2404.07724).
        rescale: share of the way back to the standard deviation of v_c, taken over a sample's guided
            numbers; 0 for none. Where v is constant over a sample the result is NaN.
        norm: the numbers that keep the norm of v_c: each of the ``rows`` of a channel, as in the pipeline of
            Lumina 2; None for none. Where v is zero along a row the result is NaN.

    Raises:
        pydantic.ValidationError: for numbers outside their ranges, and for both ``rescale`` and ``norm``.
    """

    scale: Annotated[float, Field(allow_inf_nan=False)]
    channels: Annotated[int, Field(ge=1)] | None = None
    interval: Interval = (0.0, 1.0)
    rescale: Share = 0.0
    by: GuideBy = "condition"
    norm: GuidanceNorm | None = None

    @model_validator(mode="after")
    def _has_one_size(self) -> "Guidance":
        refuse_two_sizes(self.rescale, self.norm)
        return self

    @classmethod
    def of(cls, scale: "float | Guidance") -> "Guidance":
        """``scale`` itself, or plain guidance of that scale."""
        return scale if isinstance(scale, Guidance) else cls(float(scale))

    @property
    def by_condition(self) -> bool:
        """True where the velocity under the negative conditions is needed."""
        return self.scale != 1.0 and self.by == "condition"

    @property
    def by_weak(self) -> bool:
        """True where the weak model's velocity is needed."""
        return self.scale != 1.0 and self.by == "weak"

    def acts(self, t: "Tensor") -> "Tensor":
        """True (batch,) where there is guidance at t (batch,)."""
        low, high = self.interval
        return (t >= low) & (t <= high) & (self.scale != 1.0)

    def combine(self, conditional: "Tensor", negative: "Tensor", acts: "Tensor") -> "Tensor":
        """The guided velocity (batch, C, …) where ``acts`` (batch,), the conditional one elsewhere."""
        import torch

        from hddm.utils.tensors import append_dims, sent

        count = conditional.shape[1] if self.channels is None else self.channels
        v_c, v_n = conditional[:, :count], negative[:, :count]
        guided = v_n + self.scale * (v_c - v_n)
        if self.rescale:
            ratio = append_dims(v_c.flatten(1).std(1) / guided.flatten(1).std(1), guided.ndim)
            guided = (self.rescale * ratio + 1 - self.rescale) * guided
        if self.norm == "rows":
            guided = guided * (v_c.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))
        rows = append_dims(sent(acts, guided.device), guided.ndim)
        return torch.cat([torch.where(rows, guided, v_c), conditional[:, count:]], dim=1)
