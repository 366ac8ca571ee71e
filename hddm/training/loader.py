"""The samples of each step of a training: their order, and inputs that are drawn ahead of a GPU.

The samples of step s (`Order`) and all random numbers in it depend on (seed, key, s) alone.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from hddm.utils.streams import Use, generator

Key = tuple[Use, Use, int]
"""Uses of random numbers for the order of samples and in the steps, and the part (`hddm.utils.streams`)."""


class Order:
    """Sample order, shuffled in each epoch; batches cross epochs. ``key`` separates runs of one seed."""

    def __init__(self, num_samples: int, batch_size: int, seed: int, key: Key) -> None:
        self.num_samples, self.batch_size = num_samples, batch_size
        self._seed, self._key = seed, key
        self._epochs: dict[int, Tensor] = {}

    def rows(self, step: int) -> Tensor:
        """Return indices (batch_size,) of the samples of ``step``, from 1."""
        places = torch.arange((step - 1) * self.batch_size, step * self.batch_size)
        epochs, within = places // self.num_samples, places % self.num_samples
        needed = epochs.unique().tolist()
        orders: dict[int, Tensor] = {}
        parts = []
        for epoch in needed:
            if epoch in self._epochs:
                orders[epoch] = self._epochs[epoch]
            else:
                orders[epoch] = self._shuffled(epoch)
            parts.append(orders[epoch][within[epochs == epoch]])
        self._epochs = orders
        return torch.cat(parts)

    def draws(self, step: int) -> torch.Generator:
        """Return the generator of everything random in ``step``."""
        _, use, part = self._key
        return generator(self._seed, use, step, part)

    def _shuffled(self, epoch: int) -> Tensor:
        use, _, part = self._key
        return torch.randperm(self.num_samples, generator=generator(self._seed, use, epoch, part))


StepInputs = dict[str, Tensor]
Draw = Callable[[Tensor, torch.Generator, slice], StepInputs]
"""Draws the inputs of a step; see `Task`."""
AHEAD = 2
"""Number of steps whose inputs are drawn ahead of a GPU.

On a CPU none are: beside a second thread that computes, OpenMP's threads sleep between operations instead of
waiting actively, and a step takes up to 1.6 times as long.
"""


NumberedInputs = tuple[Tensor, StepInputs, int]
"""The samples of a step, this process's inputs of it, and the seed of what the network draws itself."""


class Loader:
    """Inputs of one step after another, drawn ``ahead`` in a thread while the steps before compute.

    What a step draws depends on its number alone, so it is the same whenever it is drawn. ``draw`` is that of
    a `Task`; ``last`` is the last step, ``own`` this process's share of a batch. An error of a step is raised
    when that step is taken.
    """

    def __init__(self, order: Order, draw: Draw, last: int, own: slice, ahead: int) -> None:
        self._order, self._draw, self._last, self._own, self.ahead = order, draw, last, own, ahead
        self._coming: dict[int, Future[NumberedInputs]] = {}
        # Its few operations take one core, beside the step.
        self._thread = ThreadPoolExecutor(1, "hddm-loader", torch.set_num_threads, (1,))
        if ahead:
            threads = torch.get_num_threads()
            self._thread.submit(int).result()
            # Torch gives the number that was set last to threads that begin later.
            torch.set_num_threads(threads)

    def take(self, step: int) -> NumberedInputs:
        """Return the inputs of ``step``, and begin to draw the next ones."""
        if not self.ahead:
            return self._drawn(step)
        for one in range(step, min(step + self.ahead, self._last) + 1):
            if one not in self._coming:
                self._coming[one] = self._thread.submit(self._drawn, one)
        return self._coming.pop(step).result()

    def close(self) -> None:
        """Drop what is drawn ahead."""
        self._thread.shutdown(cancel_futures=True)

    def _drawn(self, step: int) -> NumberedInputs:
        rows, draws = self._order.rows(step), self._order.draws(step)
        inputs = self._draw(rows, draws, self._own)
        return rows, inputs, int(torch.randint(2**62, (), generator=draws))
