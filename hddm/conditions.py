"""What a velocity field is asked with: times and conditions, checked before any network runs."""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from hddm.errors import HddmError
from hddm.interfaces import OPTIONAL_CONDITIONS
from hddm.tensors import to_float64

SETTINGS = frozenset({"time_ids", "resolution", "aspect_ratio", "guidance"})
"""Conditions that say how a sample is made, and not what it shows: a negative branch has the same ones."""


def check_times(x_t: Tensor, t: Tensor) -> Tensor:
    """``t`` as (batch,) in float64.

    Raises:
        HddmError: for a shape other than (batch,) or (), or a value outside [0, 1], NaN included.
    """
    times = to_float64(torch.as_tensor(t))
    if times.ndim == 0:
        times = times.expand(len(x_t))
    if times.shape != x_t.shape[:1]:
        raise HddmError(f"t has shape {tuple(times.shape)} for a batch of {len(x_t)} states")
    if not ((times >= 0) & (times <= 1)).all():
        raise HddmError(f"t lies in [0, 1] (0 data, 1 noise), not at {times.tolist()[:8]}")
    return times


def check_conditions(x_t: Tensor, conditions: Mapping[str, Tensor]) -> None:
    """Refuse a condition that has not one row for each state."""
    for name, value in conditions.items():
        if value.ndim == 0 or len(value) != len(x_t):
            raise HddmError(f"condition {name!r} has shape {tuple(value.shape)} for {len(x_t)} states")


def check_labels(conditions: Mapping[str, Tensor], num_classes: int, null: Tensor | None) -> None:
    """Refuse ``class_labels`` that are neither a class nor ``null``; anything goes where none are known."""
    labels = conditions.get("class_labels")
    if labels is None or not num_classes:
        return
    largest = max(num_classes - 1, -1 if null is None else int(null))
    if labels.is_floating_point() or not ((labels >= 0) & (labels <= largest)).all():
        some = labels.flatten().tolist()[:8]
        raise HddmError(f"class_labels are whole numbers from 0 to {largest} here, not {some}")


def refuse_undeclared(declared: Sequence[str], conditions: Mapping[str, Tensor]) -> None:
    """Refuse a condition that the network does not take."""
    for name in conditions:
        if name not in declared:
            known = ", ".join(declared) or "none"
            raise HddmError(f"this expert takes no condition {name!r}; it declares: {known}")


def can_guide(conditions: Mapping[str, Tensor], negative: Mapping[str, Tensor]) -> bool:
    """Whether these conditions say anything that a negative branch does not: more than `SETTINGS`."""
    return bool(conditions) and (bool(negative) or not SETTINGS.issuperset(conditions))


def missing_from(given: Collection[str], declared: Sequence[str]) -> list[str]:
    """Conditions that the network needs beside the ``given`` ones."""
    return [name for name in declared if name not in given and name not in OPTIONAL_CONDITIONS]


def refuse_missing(declared: Sequence[str], given: Mapping[str, Tensor]) -> None:
    """Refuse to do without a condition that the network needs."""
    missing = missing_from(given, declared)
    if missing:
        raise HddmError(
            f"this expert needs {' and '.join(missing)}, and knows no value that stands for none; pass it"
        )
