"""Conditions: what samples are to show, by class or by other inputs of the networks, and how to guide to it.

Experts of different people number their classes differently. `join_classes` joins the classes by name: an
ensemble numbers each name once, and passes labels to every expert in the expert's own numbering. Names are
equal if they are equal after Unicode normalisation (NFC).
"""

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor

from hddm.condition_names import LABELS as LABELS
from hddm.networks.families import sample_settings
from hddm.settings import GuideBy, Interval, Share
from hddm.utils.errors import HddmError, did_you_mean
from hddm.utils.records import composed
from hddm.utils.tensors import append_dims, sent
from hddm.utils.tensors import within as within

Labels = int | str | Sequence[int | str] | Tensor | np.ndarray


def flat_labels(labels: Labels) -> list[int | str]:
    """Class labels as one list of names and whole numbers."""
    if isinstance(labels, Tensor | np.ndarray):
        labels = labels.flatten().tolist()
    return [labels] if isinstance(labels, str) or not isinstance(labels, Iterable) else list(labels)


def class_indices(labels: Labels, classes: Sequence[str]) -> Tensor:
    """Indices (batch,) of classes; numbers are indices, texts are names, or indices where no name fits.

    Raises `HddmError` for an unknown class.
    """
    names = {composed(name): index for index, name in enumerate(classes)}
    indices = []
    for label in flat_labels(labels):
        text = composed(str(label))
        is_number = isinstance(label, Integral)
        number = int(label) if is_number else names.get(text, int(text) if text.isdecimal() else -1)
        if not 0 <= number < len(classes):
            some = ", ".join([*classes[:10], *(["…"] if len(classes) > 10 else [])]) or "none"
            near = did_you_mean(label, classes) if isinstance(label, str) else ""
            raise HddmError(f"no class {label!r}; the model's classes are {some}{near}")
        indices.append(number)
    return torch.tensor(indices)


def check_labels(conditions: Mapping[str, Any], classes: Sequence[str]) -> None:
    """Raise an `HddmError` for class labels that are none of ``classes``, where there are any."""
    if classes and LABELS in conditions:
        class_indices(conditions[LABELS], classes)


def check_label_range(labels: Tensor, classes: int, null: int | None) -> None:
    """Raise an `HddmError` for class labels (batch,) beyond the ``classes``; ``null`` stands for no class."""
    largest = max(classes - 1, -1 if null is None else null)
    if labels.is_floating_point() or not ((labels >= 0) & (labels <= largest)).all():
        some = labels.flatten().tolist()[:8]
        no_class = "" if null is None else f" ({null} is no class)"
        raise HddmError(f"class_labels are whole numbers from 0 to {largest} here{no_class}, not {some}")


@dataclass(frozen=True)
class JointClasses:
    """Classes of K experts, numbered together.

    ``names`` are in the order of their first appearance. ``numbers`` (K, names) has each expert's own number
    of a class, -1 for one that it does not know; None where all experts number them like this, or by numbers
    alone.
    """

    names: tuple[str, ...]
    numbers: Tensor | None = None

    def known(self, labels: Tensor) -> Tensor | None:
        """Whether each expert knows the class of each label (N,), as (N, K); None where all know all.

        A label beyond the names stands for no class, which everyone knows.
        """
        if self.numbers is None:
            return None
        is_class, indices = within(labels.cpu(), len(self.names))
        return (self.numbers.T[indices] >= 0) | ~is_class[:, None]

    def check(self, weights: Tensor, labels: Tensor | None) -> None:
        """Raise an `HddmError` where an expert of weight (N, K) above 0 does not know a label (N,)."""
        if labels is not None and (known := self.known(labels)) is not None:
            for row, k in ((weights != 0) & ~known).nonzero()[:1].tolist():
                name = self.names[int(labels[row])]
                raise HddmError(f"expert {k} knows no class {name!r}; choose another class or expert")

    def own(self, labels: Tensor, expert: int, null: int) -> Tensor:
        """The labels (N,) in an expert's numbering; ``null`` for no class, and for one unknown to it."""
        if self.numbers is None:
            return labels
        is_class, indices = within(labels, len(self.names))
        own = sent(self.numbers[expert], labels.device)[indices]
        return own.where(is_class & (own >= 0), null)


@functools.lru_cache(64)
def join_classes(lists: tuple[tuple[str, ...], ...]) -> JointClasses:
    """Join the classes of several experts by name.

    A list is empty for an expert that takes no class, or numbers without names: it takes any class.
    """
    lists = tuple(tuple(map(composed, one)) for one in lists)
    names = tuple(dict.fromkeys(itertools.chain.from_iterable(lists)))
    if all(one in ((), names) for one in lists):
        return JointClasses(names)
    rows = []
    for own in lists:
        number = {name: k for k, name in enumerate(own or names)}
        rows.append([number.get(name, -1) for name in names])
    return JointClasses(names, torch.tensor(rows))


def check_names(names: Iterable[str], declared: Collection[str] | None) -> None:
    """Raise an `HddmError` for conditions that are not ``declared``; None declares all."""
    for name in names:
        if declared is not None and name not in declared:
            known, near = ", ".join(declared) or "none", did_you_mean(name, declared)
            raise HddmError(f"this model takes no condition {name!r}; it declares: {known}{near}")


def check_rows(num: int, conditions: Mapping[str, Tensor]) -> None:
    """Raise an `HddmError` for a condition that does not have one row for each of ``num`` samples."""
    for name, value in conditions.items():
        if value.ndim == 0 or len(value) != num:
            rows = len(value) if value.ndim else "no"
            raise HddmError(f"condition {name!r} has {rows} rows for {num} samples; pass one row per sample")


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
        branches = (self.given, self.negative)
        given, negative = ({name: change(one) for name, one in branch.items()} for branch in branches)
        return Conditions(given, negative, None if self.prior is None else change(self.prior))

    def rows(self, rows: Tensor, device: torch.device | None = None) -> "Conditions":
        """The conditions of these samples, on ``device`` or where they are."""
        return self.map(lambda value: value[rows.to(value.device)].to(device or value.device))

    def cycled(self, numbers: Sequence[int]) -> "Conditions":
        """The conditions of the samples ``numbers``; the rows repeat where there are more samples."""
        return self.map(lambda value: value[torch.tensor(numbers) % len(value)])


@checked_dataclass(frozen=True)
class Guidance:
    """Guidance moves the velocity v_c away from another one, v_n.

        v = v_n + scale (v_c - v_n)                                (arXiv:2207.12598)
        v = [rescale std(v_c)/std(v) + 1 - rescale] v              (arXiv:2305.08891, section 3.4)

    Args:
        scale: 1 for none; with any other v_n is computed too.
        by: ``condition`` takes v_n under the negative conditions (classifier-free guidance); ``weak`` takes
            the velocity of the expert's weak model under the same conditions (arXiv:2406.02507).
        channels: guide this many channels from the first, and leave the others as v_c; None for all. DiT's
            own code guides 3 of 4, and DiT's published figures were computed so.
        interval: (low, high) in t, where guidance acts; outside v = v_c (arXiv:2404.07724).
        rescale: share of the way back to the standard deviation of v_c, taken over a sample's guided
            numbers; 0 for none. Where v is constant over a sample the result is NaN.

    Raises:
        pydantic.ValidationError: for numbers outside their ranges.
    """

    scale: Annotated[float, Field(allow_inf_nan=False)]
    channels: Annotated[int, Field(ge=1)] | None = None
    interval: Interval = (0.0, 1.0)
    rescale: Share = 0.0
    by: GuideBy = "condition"

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

    def acts(self, t: Tensor) -> Tensor:
        """True (batch,) where there is guidance at t (batch,)."""
        low, high = self.interval
        return (t >= low) & (t <= high) & (self.scale != 1.0)

    def combine(self, conditional: Tensor, negative: Tensor, acts: Tensor) -> Tensor:
        """The guided velocity (batch, C, …) where ``acts`` (batch,), the conditional one elsewhere."""
        count = conditional.shape[1] if self.channels is None else self.channels
        v_c, v_n = conditional[:, :count], negative[:, :count]
        guided = v_n + self.scale * (v_c - v_n)
        if self.rescale:
            ratio = append_dims(v_c.flatten(1).std(1) / guided.flatten(1).std(1), guided.ndim)
            guided = (self.rescale * ratio + 1 - self.rescale) * guided
        rows = append_dims(sent(acts, guided.device), guided.ndim)
        return torch.cat([torch.where(rows, guided, v_c), conditional[:, count:]], dim=1)


@dataclass(frozen=True)
class Inputs:
    """Checked inputs of a field: guidance, and the conditions of both branches, each (batch, …)."""

    guidance: Guidance
    conditions: Mapping[str, Tensor]
    negative: Mapping[str, Tensor]
    """Empty without guidance by condition."""

    def rows(self, rows: Tensor) -> "Inputs":
        """The inputs of these rows of the batch."""
        branches = (self.conditions, self.negative)
        return Inputs(self.guidance, *({name: one[rows] for name, one in own.items()} for own in branches))
