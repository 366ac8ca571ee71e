"""Which samples a step sees, and what it draws: a function of (seed, key, step) and of nothing else.

So nothing random has a state that a checkpoint would have to hold, and a resumed training goes on exactly.
"""

import torch
from torch import Tensor

from hddm.tensors import generator

# Keeps training apart from sampling, whose streams are (seed, i) and (seed, i, 1).
TRAINING_STREAM = 2
_EPOCHS, _STEPS = 0, 1


class Order:
    """Every sample once an epoch, in an order of its own in each; batches run on over its end.

    Args:
        num_samples: samples in all.
        batch_size: samples a step.
        seed: of all orders.
        key: tells apart trainings of one seed.
    """

    def __init__(self, num_samples: int, batch_size: int, seed: int, key: tuple[int, ...]) -> None:
        self.num_samples, self.batch_size = num_samples, batch_size
        self._seed, self._key = seed, key
        self._epochs: dict[int, Tensor] = {}

    def rows(self, step: int) -> Tensor:
        """Indices (batch_size,) of the samples of ``step``, from 1."""
        places = torch.arange((step - 1) * self.batch_size, step * self.batch_size)
        epochs, within = places // self.num_samples, places % self.num_samples
        needed = epochs.unique().tolist()
        self._epochs = {e: self._epochs[e] if e in self._epochs else self._shuffled(e) for e in needed}
        return torch.cat([self._epochs[e][within[epochs == e]] for e in needed])

    def draws(self, step: int) -> torch.Generator:
        """What everything random in ``step`` is drawn from."""
        return generator(self._seed, *self._key, TRAINING_STREAM, _STEPS, step)

    def _shuffled(self, epoch: int) -> Tensor:
        draws = generator(self._seed, *self._key, TRAINING_STREAM, _EPOCHS, epoch)
        return torch.randperm(self.num_samples, generator=draws)
