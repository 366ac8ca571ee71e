"""Tensors in single files of Stable Diffusion by which tools know their conventions (ComfyUI's names).

    v_pred, ztsnr                     empty: predicts v; was trained down to zero signal
    edm_mean, edm_std                 of Playground 2.5: statistics of its latents, four numbers each
    edm_vpred.sigma_max, .sigma_min   of CosXL: the ends of its noise levels; the second may be missing

What contradicts itself here is refused: half of a pair, other numbers, and markers of two conventions.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from hddm.utils.errors import HddmError, one_line

V_MARKER, ZERO_MARKER = "v_pred", "ztsnr"
EDM_MEAN, EDM_STD = "edm_mean", "edm_std"
SIGMA_MAX, SIGMA_MIN = "edm_vpred.sigma_max", "edm_vpred.sigma_min"
_CHANNELS = 4
"""Of the latents of Stable Diffusion XL."""
_LARGEST = 1e6

Statistics = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and deviation of latents by channel."""


@dataclass(frozen=True)
class Markers:
    """What the markers in a file say.

    Args:
        name: of the marker that means a convention; None where none does.
        statistics: of the latents.
        sigmas: the ends of EDM's schedule, by the keys of a scheduler's config.
        has_no_signal: true if it was trained down to zero signal.
    """

    name: str | None = None
    statistics: Statistics | None = None
    sigmas: Mapping[str, float] = field(default_factory=dict)
    has_no_signal: bool = False


def read_markers(content: Mapping[str, Tensor], origin: str) -> Markers:
    """The markers among the tensors of a file; `HddmError` for those that contradict each other."""
    for one, other in ((EDM_MEAN, EDM_STD), (EDM_STD, EDM_MEAN), (SIGMA_MIN, SIGMA_MAX)):
        if one in content and other not in content:
            raise HddmError(
                f"{origin}: holds {one} without {other}; fetch the file again, or remove {one}"
            )
    found = [name for name in (V_MARKER, EDM_MEAN, SIGMA_MAX) if name in content]
    if len(found) > 1:
        raise HddmError(
            f"{origin}: holds {' and '.join(found)}, which are of different conventions; remove what is not "
            "true"
        )
    statistics, sigmas = None, dict[str, float]()
    if EDM_MEAN in content:
        mean = _numbers(content, EDM_MEAN, _CHANNELS, -_LARGEST, origin)
        deviation = _numbers(content, EDM_STD, _CHANNELS, 1 / _LARGEST, origin)
        statistics = mean, deviation
    for name, key in ((SIGMA_MAX, "sigma_max"), (SIGMA_MIN, "sigma_min")):
        if name in content:
            (sigmas[key],) = _numbers(content, name, 1, 1 / _LARGEST, origin)
    return Markers(next(iter(found), None), statistics, sigmas, ZERO_MARKER in content)


def number_in(content: Mapping[str, Tensor], name: str, origin: str) -> float:
    """The positive number that a tensor holds; `HddmError` for any other content."""
    (found,) = _numbers(content, name, 1, 1 / _LARGEST, origin)
    return found


def _numbers(
    content: Mapping[str, Tensor], name: str, count: int, least: float, origin: str
) -> tuple[float, ...]:
    tensor = content[name]
    if tensor.numel() == count and not tensor.is_complex():
        values = tuple(tensor.double().flatten().tolist())
        if all(math.isfinite(one) and least <= one <= _LARGEST for one in values):
            return values
    held = tuple(tensor.shape) if tensor.numel() != count else tensor.flatten().tolist()
    wanted = "a number" if count == 1 else f"{count} numbers"
    raise HddmError(
        f"{origin}: {name} is {one_line(held, 60)}, and must be {wanted} from {least:g} to {_LARGEST:g}; "
        "correct or remove it"
    )
