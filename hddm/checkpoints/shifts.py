"""The shift of the time grid that a flow-match scheduler's config asks for.

It is the pipeline's, applied once, by `hddm.sampling.time_grid`; no training schedule depends on it.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hddm.checkpoints.conventions import Conventions
from hddm.checkpoints.sources import Source
from hddm.errors import HddmError
from hddm.interfaces import Interface
from hddm.schedules import LinearSchedule

LARGEST_SHIFT = 1e3
# Of diffusers' flow-match schedulers, and of its pipelines of Flux and SD3.
_DEFAULTS = {"base_image_seq_len": 256, "max_image_seq_len": 4096, "base_shift": 0.5, "max_shift": 1.15}
_OTHER_GRIDS = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "shift_terminal")


def with_shift(conventions: Conventions, source: Source, interface: Interface) -> Conventions:
    """``conventions`` with the shift that the scheduler config states, or means at the size of a sample.

    With ``use_dynamic_shifting`` it grows with the number n of patches, as diffusers' pipelines have it:

        mu = base_shift + (max_shift - base_shift) (n - n_base)/(n_max - n_base),   shift = exp(mu)

    (mu itself where ``time_shift_type`` is ``linear``); a note says so. An expert keeps its own.

    Raises:
        HddmError: for values that give no positive shift.
    """
    if source.facts is not None:
        return replace(conventions, shift=source.facts.shift)
    if not isinstance(conventions.schedule, LinearSchedule):
        return conventions
    config, origin = conventions.scheduler, conventions.schedule_source
    notes = [
        f"{origin}: {key} is {str(config[key])[:40]}; the sampler's time grid is kept without it"
        for key in _OTHER_GRIDS
        if config.get(key)
    ]
    if not config.get("use_dynamic_shifting"):
        key = "flow_shift" if config.get("use_flow_sigmas") else "shift"
        shift = _number(config, key, 1.0, origin)
    elif interface.num_patches is None:
        shift = 1.0
        notes.append(f"{origin}: use_dynamic_shifting counts patches, and a UNet has none; no shift is kept")
    else:
        shift = _dynamic(config, origin, interface.num_patches)
        size = "×".join(map(str, interface.sample_shape[1:]))
        notes.append(
            f"{origin}: use_dynamic_shifting, so the shift is {shift:.4g} at {size}, of "
            f"{interface.num_patches} patches; at another size it is another"
        )
    if not 1 / LARGEST_SHIFT <= shift <= LARGEST_SHIFT:
        raise HddmError(
            f"{origin}: shifts times by {shift:.4g}; a shift is from {1 / LARGEST_SHIFT:g} to "
            f"{LARGEST_SHIFT:g}: correct the config"
        )
    return replace(conventions, shift=shift, notes=(*conventions.notes, *notes))


def _dynamic(config: Mapping[str, Any], origin: str, num_patches: int) -> float:
    base, most, base_shift, max_shift = (
        _number(config, key, usual, origin) for key, usual in _DEFAULTS.items()
    )
    kind = config.get("time_shift_type", "exponential")
    if base == most or kind not in ("exponential", "linear"):
        raise HddmError(
            f"{origin}: no shift comes of base_image_seq_len {base:g}, max_image_seq_len {most:g} and "
            f"time_shift_type {str(kind)[:40]!r}: correct the config"
        )
    mu = base_shift + (max_shift - base_shift) * (num_patches - base) / (most - base)
    # Beyond what is refused in any case exp would overflow.
    return mu if kind == "linear" else math.exp(max(-50.0, min(mu, 50.0)))


def _number(config: Mapping[str, Any], key: str, usual: float, origin: str) -> float:
    value = config.get(key, usual)
    if not isinstance(value, int | float) or abs(value) > 1e9 or not math.isfinite(value):
        raise HddmError(f"{origin}: {key} is {str(value)[:40]}, and must be a number: correct the config")
    return float(value)
