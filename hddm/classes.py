"""Class labels: names and numbers of classes, and the numbering that several experts share.

Experts of different people count their classes differently. `join_classes` joins them by name: an ensemble
numbers each name once, and asks every expert in its own numbering. Names are equal if they are after Unicode
normalisation (NFC).
"""

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral

import numpy as np
import torch
from torch import Tensor

from hddm.utils.errors import HddmError, did_you_mean, one_line
from hddm.utils.records import composed
from hddm.utils.tensors import sent

LABELS = "class_labels"
"""Keyword of the networks' class labels."""
Labels = int | str | Sequence[int | str] | Tensor | np.ndarray


def flat_labels(labels: Labels) -> list[int | str]:
    """Class labels as one list of names and whole numbers; `HddmError` for others, and for nested lists."""
    if isinstance(labels, Tensor | np.ndarray):
        labels = labels.flatten().tolist()
    flat = [labels] if isinstance(labels, str) or not isinstance(labels, Iterable) else list(labels)
    if others := [one for one in flat if not isinstance(one, Integral | str)]:
        wrong = one_line(others[0], 40)
        raise HddmError(
            f"class_labels hold {wrong}: pass names or whole numbers of classes, in one flat list"
        )
    return flat


def class_indices(labels: Labels, classes: Sequence[str]) -> Tensor:
    """Indices (batch,) of classes; numbers are indices, texts are names, or indices where no name fits.

    Raises `HddmError` as `flat_labels`, for an unknown class, or an ensemble without classes.
    """
    labels = flat_labels(labels)
    if not classes:
        raise HddmError(f"class_labels {labels}: this model has no classes; leave them out")
    names = {composed(name): index for index, name in enumerate(classes)}
    indices = []
    for label in labels:
        text = composed(str(label))
        is_number = isinstance(label, Integral)
        number = int(label) if is_number else names.get(text, int(text) if text.isdecimal() else -1)
        if not 0 <= number < len(classes):
            some = ", ".join(classes[:10]) + (", …" if len(classes) > 10 else "")
            near = did_you_mean(label, classes) if isinstance(label, str) else ""
            raise HddmError(f"no class {label!r}; the model's classes are {some}{near}")
        indices.append(number)
    return torch.tensor(indices)


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

    def own(self, labels: Tensor, expert: int, null: int) -> Tensor:
        """The labels (N,) in an expert's numbering; ``null`` for no class, and for one unknown to it."""
        if self.numbers is None:
            return labels
        is_class, indices = within(labels, len(self.names))
        own = sent(self.numbers[expert], labels.device)[indices]
        return own.where(is_class & (own >= 0), null)


def within(labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Whether each label is a class in 0 … ``num_classes`` - 1, and the labels, 0 where it is none."""
    is_class = (labels >= 0) & (labels < num_classes)
    return is_class, labels.long().where(is_class, 0)


@functools.lru_cache(64)
def join_classes(lists: tuple[tuple[str, ...], ...]) -> JointClasses:
    """Join the classes of several experts by name.

    A list is empty for an expert that takes no class, or numbers without names: it may be asked for any.
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
