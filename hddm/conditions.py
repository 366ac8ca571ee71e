"""Conditions: what samples are to show, by class or by other inputs of the networks."""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hddm.guidance import Guidance
from hddm.networks.families import sample_settings
from hddm.utils.errors import HddmError, did_you_mean


def check_names(
    names: Iterable[str],
    declared: Collection[str] | None,
    call: Callable[..., object] | None = None,
) -> None:
    """Raise an `HddmError` for conditions that are not ``declared``; None declares all.

    If they are further keywords of a ``call``, one may be meant for another of its arguments.
    """
    for name in names:
        if declared is not None and name not in declared:
            known = [*declared]
            if call is not None:
                arguments = inspect.signature(call).parameters.values()
                known += [one.name for one in arguments if one.kind is not one.VAR_KEYWORD]
            near = did_you_mean(name, known)
            raise HddmError(
                f"this model takes no condition {name!r}; it declares: {', '.join(declared) or 'none'}{near}"
            )


def check_rows(num: int, conditions: Mapping[str, Tensor]) -> None:
    """Raise an `HddmError` for a condition that does not have one row for each of ``num`` samples."""
    for name, value in conditions.items():
        if value.ndim == 0 or len(value) != num:
            rows = len(value) if value.ndim else "no"
            raise HddmError(
                f"condition {name!r} has {rows} rows for {num} samples; pass one row per sample"
            )


def can_guide(conditions: Mapping[str, Tensor], negative: Mapping[str, Tensor]) -> bool:
    """True where conditions differ from those of a negative branch by more than `sample_settings`."""
    return bool(conditions) and (bool(negative) or not sample_settings().issuperset(conditions))


@dataclass(frozen=True)
class Conditions:
    """Conditions of samples, conditions to guide away from, and p(k | prompt), one row per sample."""

    given: dict[str, Tensor] = field(default_factory=dict)
    negative: dict[str, Tensor] = field(default_factory=dict)
    prior: Tensor | None = None
    """(num, K) distribution of the expert of each sample, where a prompt provides it."""

    def map(self, change: Callable[[Tensor], Tensor]) -> "Conditions":
        """The same conditions with every tensor changed."""
        given = {name: change(one) for name, one in self.given.items()}
        negative = {name: change(one) for name, one in self.negative.items()}
        return Conditions(given, negative, None if self.prior is None else change(self.prior))

    def rows(self, rows: Tensor, device: torch.device | None = None) -> "Conditions":
        """The conditions of these samples, on ``device`` or where they are."""
        return self.map(lambda value: value[rows.to(value.device)].to(device or value.device))

    def cycled(self, numbers: Sequence[int]) -> "Conditions":
        """The conditions of the samples ``numbers``; the rows repeat where there are more samples."""
        return self.map(lambda value: value[torch.tensor(numbers) % len(value)])


def check_negative(guidance: Guidance, negative: Collection[str]) -> None:
    """Raise an `HddmError` for ``negative`` conditions that no guidance by condition moves away from."""
    if negative and not guidance.by_condition:
        by_weak = "with `guide_by` weak; guide by condition, or drop it"
        remedy = by_weak if guidance.by_weak else "at `guidance_scale` 1; set a scale, or drop it"
        raise HddmError(f"`negative_prompt`, or negative conditions: no effect {remedy}")


@dataclass(frozen=True)
class Inputs:
    """Checked inputs of a field: guidance, and the conditions of both branches, each (batch, …)."""

    guidance: Guidance
    conditions: Mapping[str, Tensor]
    negative: Mapping[str, Tensor]
    """Empty without guidance by condition."""

    def rows(self, rows: Tensor) -> "Inputs":
        """The inputs of these rows of the batch."""
        conditions = {name: one[rows] for name, one in self.conditions.items()}
        negative = {name: one[rows] for name, one in self.negative.items()}
        return Inputs(self.guidance, conditions, negative)
