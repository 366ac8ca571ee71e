"""The weight of a model by noise level, as text: ``1``, or ``1: 0, 0.5: 1`` with straight lines between."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hddm.utils.errors import HddmError

FORMS = "a number such as 1, or LEVEL: WEIGHT pairs such as 0.7: 1, 0.4: 0"


@dataclass(frozen=True)
class WeightCurve:
    """A weight by noise level t, from 1 (noise) to 0 (picture); beyond the outer levels it is constant."""

    levels: tuple[float, ...]
    """Ascending."""
    weights: tuple[float, ...]

    @classmethod
    def parse(cls, text: str, name: str) -> "WeightCurve":
        """Read one number, or pairs LEVEL: WEIGHT in any order.

        Raises:
            HddmError: for another form, a level outside [0, 1] or stated twice, or a weight below 0.
        """
        if ":" not in text:
            return cls((0.0,), (_number(text, name, text),))
        found = dict[float, float]()
        for pair in text.split(","):
            level_text, colon, weight_text = pair.partition(":")
            if not colon:
                raise HddmError(f"{name} {text!r}: {pair.strip()!r} is no pair; it must be {FORMS}")
            level = _number(level_text, name, text)
            if level > 1:
                raise HddmError(
                    f"{name} {text!r}: {level:g} is no noise level, which is from 0 to 1; a sigma of SD 1.5 "
                    f"or SDXL is the level sigma/(1 + sigma), here {level / (1 + level):.2g}"
                )
            if level in found:
                raise HddmError(f"{name} {text!r}: level {level:g} is there twice; leave out one")
            found[level] = _number(weight_text, name, text)
        levels = sorted(found)
        return cls(tuple(levels), tuple(found[level] for level in levels))

    @property
    def is_constant(self) -> bool:
        """True if it is the same at every level."""
        return len(set(self.weights)) == 1

    def at(self, t: Tensor) -> Tensor:
        """The weight at noise levels ``t`` (n,), in float64 on the CPU."""
        at = t.double().cpu()
        weight = torch.full_like(at, self.weights[0])
        for k in range(1, len(self.levels)):
            low, high = self.levels[k - 1], self.levels[k]
            share = ((at - low) / (high - low)).clamp(0, 1)
            weight += share * (self.weights[k] - self.weights[k - 1])
        return weight


def levels_of(curves: Sequence[WeightCurve]) -> list[float]:
    """The noise levels at which some curve bends, and both ends, ascending.

    Between neighbouring ones weights are straight lines, none below 0, so that a sum of them is 0 inside only
    if it is at both.
    """
    levels = {0.0, 1.0}
    for curve in curves:
        levels.update(curve.levels)
    return sorted(levels)


def check_sum(curves: Sequence[WeightCurve]) -> None:
    """Raise an `HddmError` if all weights are 0 at some level."""
    levels, empty = levels_of(curves), list[float]()
    for level in levels:
        at = torch.tensor([level])
        if sum(float(curve.at(at)) for curve in curves) <= 0:
            empty.append(level)
    if empty == levels:
        raise HddmError("the weights of all models are 0; give one of them a weight above 0")
    if empty:
        which = " and ".join(f"{level:g}" for level in empty)
        raise HddmError(
            f"the weights of all models are 0 at noise level {which}; give one of them a weight there"
        )


def _number(text: str, name: str, whole: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 <= value <= 1e6:
        raise HddmError(
            f"{name} {whole!r}: {text.strip()!r} is no number from 0 up; it must be {FORMS}"
        )
    return value
