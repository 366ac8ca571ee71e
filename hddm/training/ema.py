"""Exponential moving average of weights, in float32 whatever the training dtype."""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn


class Ema:
    """Shadow of a network's trained parameters: shadow += (1 - d) (parameter - shadow).

    The decay d rises as (1 + n)/(10 + n) over updates n up to ``decay``, so that the first steps do not
    linger. The shadow is float32, since in bfloat16 an update of 1e-3 rounds to nothing.
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        self.decay = decay
        self.updates = 0
        trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
        self._names, self._live = list(trained), list(trained.values())
        self._shadow = [p.detach().float().clone() for p in self._live]

    @torch.no_grad()
    def update(self) -> None:
        """Take in the parameters as they are now."""
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        current: list[Tensor] = [p.detach().float() for p in self._live]
        torch._foreach_lerp_(self._shadow, current, 1 - decay)
        self.updates += 1

    def tensors(self) -> dict[str, Tensor]:
        """The averages, by the names of the parameters."""
        return dict(zip(self._names, self._shadow, strict=True))

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], updates: int) -> None:
        """Go on from averages as `tensors` gave them, after so many ``updates``."""
        for name, shadow in zip(self._names, self._shadow, strict=True):
            shadow.copy_(tensors[name])
        self.updates = updates

    @torch.no_grad()
    def copy_to_network(self) -> None:
        """Replace the parameters by their averages."""
        for parameter, average in zip(self._live, self._shadow, strict=True):
            parameter.copy_(average)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """The network has its averages within the block, and its own parameters again after it."""
        kept = [p.detach().clone() for p in self._live]
        self.copy_to_network()
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, own in zip(self._live, kept, strict=True):
                    parameter.copy_(own)
