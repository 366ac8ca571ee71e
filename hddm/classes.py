"""Classes of experts, by name: the labels that people pass, and how experts number their classes together.

Experts of different people number their classes differently. `join_classes` joins the classes by name: an
ensemble numbers each name once, and passes labels to every expert in the expert's own numbering. Names are
equal if they are equal after Unicode normalisation (NFC).
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral

import numpy as np
import torch
from torch import Tensor

from hddm.utils.errors import HddmError, did_you_mean
from hddm.utils.records import composed, joint_names
from hddm.utils.tensors import sent, within

Labels = int | str | Sequence[int | str] | Tensor | np.ndarray


def class_indices(labels: Labels, classes: Sequence[str], may_be_none: bool = False) -> Tensor:
    """Read class labels as people pass them, as indices (batch,).

    Numbers are indices; a text is a name, or an index where no name fits. Where classes have no names, every
    number is accepted, since only the networks know how many classes there are, and no text.

    Args:
        labels: one label or several.
        classes: names of the classes, in order; empty if they have none.
        may_be_none: accept the index after the last one, which stands for no class.

    Raises:
        HddmError: for an unknown class.
    """
    has_names = bool(classes)
    names = {composed(name): index for index, name in enumerate(classes)}
    largest = len(classes) - 1 + may_be_none
    indices = []
    for label in _listed(labels):
        number = _index_of(label, names)
        is_known = number <= largest if has_names else isinstance(label, Integral)
        if number < 0 or not is_known:
            raise HddmError(f"no class {label!r}; {_known(label, classes)}")
        indices.append(number)
    return torch.tensor(indices)


def _listed(labels: Labels) -> list[int | str]:
    """Labels as one list."""
    if isinstance(labels, Tensor | np.ndarray):
        return list(labels.flatten().tolist())
    if isinstance(labels, str) or not isinstance(labels, Iterable):
        return [labels]
    return list(labels)


def _index_of(label: int | str, names: Mapping[str, int]) -> int:
    """Index of a label, -1 for a text that is neither a name nor a number."""
    if isinstance(label, Integral):
        return int(label)
    text = composed(str(label))
    if text in names:
        return names[text]
    return int(text) if text.isdecimal() else -1


def _known(label: int | str, classes: Sequence[str]) -> str:
    """What the classes are, and which of them a label may stand for, in words."""
    if not classes:
        return "the model's classes are none"
    some = ", ".join(classes[:10])
    rest = ", …" if len(classes) > 10 else ""
    near = did_you_mean(label, classes) if isinstance(label, str) else ""
    return f"the model's classes are {some}{rest}{near}"


def check_label_range(labels: Tensor, classes: int, null: int | None) -> None:
    """Raise an `HddmError` for class labels (batch,) beyond the ``classes``; ``null`` stands for no class."""
    largest = max(classes - 1, -1 if null is None else null)
    if labels.is_floating_point() or not ((labels >= 0) & (labels <= largest)).all():
        some = labels.flatten().tolist()[:8]
        no_class = "" if null is None else f" ({null} is no class)"
        raise HddmError(
            f"class_labels are whole numbers from 0 to {largest} here{no_class}, not {some}"
        )


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
                raise HddmError(
                    f"expert {k} knows no class {name!r}; choose another class or expert"
                )

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
    names = joint_names(lists)
    if all(one in ((), names) for one in lists):
        return JointClasses(names)
    rows = []
    for own in lists:
        number = {name: k for k, name in enumerate(own or names)}
        rows.append([number.get(name, -1) for name in names])
    return JointClasses(names, torch.tensor(rows))
