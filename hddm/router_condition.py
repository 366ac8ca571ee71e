"""The condition that a router sees beside x_t and t: a sample's class, or the tokens of its prompt.

Such a router computes p(k | x_t, t, c). Samples whose condition it does not know, and those that have none,
get the null condition, with which it was trained for a part of the images: then it is p(k | x_t, t).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hddm.condition_names import LABELS
from hddm.utils.tensors import sent, within


@dataclass(frozen=True, eq=False)
class RouterCondition:
    """What a router sees of the conditions of an ensemble's samples.

    Args:
        name: the keyword of the router: ``class_labels``, or ``encoder_hidden_states``.
        null: its value for no condition, without a batch dimension.
        classes: names of the classes, in the router's numbering; empty where it numbers them as the ensemble
            does, and for tokens.
        given_as: the ensemble's name of the condition, where it is another one: the tokens of its second text
            encoder are ``encoder_hidden_states_2``.
    """

    name: str
    null: Tensor
    classes: tuple[str, ...] = ()
    given_as: str = ""

    @property
    def source(self) -> str:
        """The ensemble's name of the condition."""
        return self.given_as or self.name

    def known(self, given: Mapping[str, Tensor], classes: Sequence[str]) -> Tensor | None:
        """Which samples (batch,) have a condition that the router knows, on the CPU; None where none has.

        ``given`` are the samples' conditions by the ensemble's names, ``classes`` the ensemble's classes.
        """
        if self.source not in given:
            return None
        value = given[self.source]
        if self.name != LABELS:
            return torch.ones(len(value), dtype=torch.bool)
        found = self._own(value.cpu(), classes) != int(self.null)
        return found if found.any() else None

    def values(self, given: Mapping[str, Tensor], classes: Sequence[str]) -> dict[str, Tensor]:
        """The condition (batch, …) by the router's keyword; the null one for samples that are not `known`."""
        value = given[self.source]
        return {self.name: self._own(value, classes) if self.name == LABELS else value}

    def nulls(self, num: int, device: torch.device) -> dict[str, Tensor]:
        """The null condition of ``num`` samples, by the router's keyword."""
        null = sent(self.null, device)
        return {self.name: null.expand(num, *null.shape)}

    def _own(self, labels: Tensor, classes: Sequence[str]) -> Tensor:
        """Labels (batch,) in the router's numbering."""
        null, numbers = int(self.null), list(range(int(self.null)))
        if self.classes and classes:
            number = {name: k for k, name in enumerate(self.classes)}
            numbers = [number.get(name, null) for name in classes]
        is_known, places = within(labels, len(numbers))
        table = sent(torch.tensor(numbers), labels.device)
        return torch.where(is_known, table[places], null)
