"""Units of data: an expert's own data are ``scale * x_0 + shift``, and x_0 those that all experts share.

Published models differ in how their data are scaled: images in [-1, 1], [0, 1] or [-0.5, 0.5], latents by one
factor. A network sees states a z + s eps of its own data z = d x_0 + b. On the common path of x_0 they are at

    t = s/(a d + s),    x = (y - a b)/(a d + s)

d is one number: with several, as deviations per channel, the parts of a state would be at several times at
once, which no network can be asked for. b may differ between channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from hddm.utils.errors import HddmError, one_line
from hddm.utils.records import LARGEST_UNIT

# Records have units, and are read without torch.
if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Units:
    """An expert's own data z = ``scale`` * x_0 + ``shift``.

    The shift is a number, or one for each channel as a tensor (C, 1, 1).

    Raises:
        HddmError: for a scale that is no positive number, and a shift of another shape, or not finite.
    """

    scale: float = 1.0
    shift: "float | Tensor" = 0.0

    def __post_init__(self) -> None:
        scale, shift = self.scale, self.shift
        is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
        if not is_number or not 1 / LARGEST_UNIT <= scale <= LARGEST_UNIT:
            raise HddmError(
                f"`data_scale` {one_line(scale, 60)}: must be one number from {1 / LARGEST_UNIT:g} to "
                f"{LARGEST_UNIT:g}; experts with a scale for each channel can be drawn, and not mixed"
            )
        if isinstance(shift, int | float):
            fits, shown = abs(shift) <= LARGEST_UNIT, one_line(shift, 60)
        else:
            fits, shown = _is_of_channels(shift)
        if not fits:
            raise HddmError(
                f"`data_shift` {shown}: must be a number, or a tensor (C, 1, 1), of at most {LARGEST_UNIT:g}"
            )

    @classmethod
    def of_range(cls, low: float, high: float) -> "Units":
        """The units of pixels from ``low`` to ``high``."""
        return cls((high - low) / 2, (high + low) / 2)

    @classmethod
    def of_channels(cls, scale: float, shifts: Sequence[float]) -> "Units":
        """As a record has them: no shift, one, or one for each channel."""
        if len(shifts) < 2:
            return cls(scale, *shifts)
        import torch

        return cls(scale, torch.tensor(shifts, dtype=torch.float64)[:, None, None])

    @cached_property
    def shifts(self) -> tuple[float, ...]:
        """The shift for a record: none where it is 0, and one number where it is one."""
        if isinstance(self.shift, int | float):
            return (float(self.shift),) if self.shift else ()
        listed = self.shift.double().flatten().tolist()
        if len(set(listed)) == 1:
            return tuple(listed[:1]) if listed[0] else ()
        return tuple(listed)

    @cached_property
    def is_common(self) -> bool:
        """True where the expert's own data are x_0 itself."""
        return self.scale == 1 and not self.shifts

    def check_channels(self, sample_shape: Sequence[int] | None) -> None:
        """Raise an `HddmError` for a shift of another number of channels than a sample (C, H, W) has."""
        channels = len(self.shifts)
        if sample_shape is not None and channels > 1 and channels != sample_shape[0]:
            raise HddmError(
                f"`data_shift`: has {channels} channels, and a sample {sample_shape[0]}"
            )

    def times(self, factor: float) -> "Units":
        """The units of ``factor`` times the expert's own data."""
        return self if factor == 1 else Units(self.scale * factor, self.shift * factor)

    def shift_like(self, x: "Tensor") -> "float | Tensor":
        """The shift for states like ``x`` (batch, C, H, W)."""
        if isinstance(self.shift, int | float):
            return self.shift
        from hddm.utils.tensors import sent

        return sent(self.shift, x.device, x.dtype)

    def own(self, x_0: "Tensor") -> "Tensor":
        """The expert's own data of ``x_0``."""
        return x_0 if self.is_common else self.scale * x_0 + self.shift_like(x_0)

    def common(self, own: "Tensor") -> "Tensor":
        """x_0 of the expert's ``own`` data."""
        return own if self.is_common else (own - self.shift_like(own)) / self.scale


def _is_of_channels(shift: object) -> tuple[bool, str]:
    """Whether ``shift`` is a tensor of one number, or of one for each channel; and what to call it."""
    from torch import Tensor

    if not isinstance(shift, Tensor):
        return False, one_line(shift, 60)
    fits = shift.ndim == 0 or (shift.ndim == 3 and shift.shape[1:] == (1, 1))
    fits = fits and shift.is_floating_point() and bool((shift.abs() <= LARGEST_UNIT).all())
    return fits, f"of shape {tuple(shift.shape)}"
