"""Flow matching with a curve: a constant learning rate, averaged weights measured at given steps."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hddm.schedules import LinearSchedule
from hddm.training.objectives import TIME_SCALE, Objective
from hddm.training.settings import LoopSettings, Recipe, resolve
from hddm.training.state import Ema
from hddm.utils.errors import HddmError
from hddm.utils.streams import generator
from hddm.utils.tensors import append_dims
from hddm.velocity import PredictionType, VelocityField

TRAINING, VALIDATION = 1002, 1007
"""Uses of random numbers beyond the library's own (`hddm.utils.streams.Use`)."""
BINS = 5


def train_flow(
    field: VelocityField,
    images: Tensor,
    settings: LoopSettings,
    at: Sequence[int],
    measure: Callable[[int], None],
    report: Callable[[int], None],
) -> float:
    """Train as `hddm.training.continuation` does, but for the learning rate; return the seconds of it.

    `hddm.training.loop.fit` lets the rate fall to 0 at the last step, so that the step at which it reaches a
    loss depends on where it will end. Here the rate is constant after the warm-up.

    Args:
        field: as it starts; its calibration is what it is trained in.
        images: (n, C, H, W).
        settings: of the optimiser; the rate is ``learning_rate`` throughout.
        at: steps at which ``measure`` is called, with averaged weights in the network.
        measure: of the step.
        report: called with the images of each step.
    """
    recipe, network = resolve(Recipe, settings), field.network
    assert isinstance(network, nn.Module)
    network.eval().requires_grad_(True)
    parameters = list(network.parameters())
    optimizer = torch.optim.AdamW(
        parameters, lr=recipe.learning_rate, weight_decay=settings.weight_decay, fused=True
    )
    objective, draws = (
        Objective("flow", LinearSchedule(), PredictionType.FLOW_PREDICTION, "prediction", "uniform"),
        generator(settings.seed, TRAINING),
    )
    ema, seconds = Ema(network, settings.ema_decay), 0.0

    def predict(x: Tensor, timestep: Tensor) -> Tensor:
        return field.velocity(x, timestep.double() / TIME_SCALE)

    if 0 in at:
        measure(0)
    for step in range(1, settings.steps + 1):
        started = time.perf_counter()
        warm = min(1.0, step / max(recipe.warmup, 1))
        optimizer.param_groups[0]["lr"] = recipe.learning_rate * warm
        rows = torch.randint(len(images), (settings.batch_size,), generator=draws)
        x_0, times = images[rows], objective.sample_times(len(rows), draws)
        eps = torch.randn(x_0.shape, generator=draws)
        loss = objective.errors(predict, x_0, eps, times, {}).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(parameters, settings.max_grad_norm)
        if not (loss.isfinite() and norm.isfinite()):
            raise HddmError(f"step {step}: loss {loss.item()}, gradient norm {norm.item()}")
        optimizer.step()
        ema.update()
        seconds += time.perf_counter() - started
        report(settings.batch_size)
        if step in at:
            with averaged(parameters, ema):
                measure(step)
    return seconds


@contextmanager
def averaged(parameters: Sequence[Tensor], ema: Ema) -> Iterator[None]:
    """The averaged weights in the network while the block runs."""
    live = [parameter.detach().clone() for parameter in parameters]
    ema.copy_to_network()
    yield
    with torch.no_grad():
        for parameter, value in zip(parameters, live, strict=True):
            parameter.copy_(value)


class Validation:
    """The flow-matching loss ||v - (eps - x_0)||² a number, over held-out images, noise and times fixed.

    Every image is met ``repeats`` times; the times of all are spread evenly over [0, 1].
    """

    def __init__(self, images: Tensor, repeats: int, seed: int = 0) -> None:
        draws = generator(seed, VALIDATION)
        self._x_0 = images.repeat(repeats, 1, 1, 1)
        count = len(self._x_0)
        places = torch.randperm(count, generator=draws).double()
        self._t = (places + torch.rand(count, generator=draws, dtype=torch.float64)) / count
        self._eps = torch.randn(self._x_0.shape, generator=draws)

    @torch.no_grad()
    def loss(self, field: VelocityField, batch_size: int = 512) -> tuple[float, list[float]]:
        """The mean, and means over `BINS` equal intervals of t."""
        errors = []
        rows = zip(*(one.split(batch_size) for one in (self._x_0, self._eps, self._t)), strict=True)
        for x_0, eps, t in rows:
            wide = append_dims(t, x_0.ndim).to(x_0)
            v = field.velocity((1 - wide) * x_0 + wide * eps, t)
            errors.append((v - (eps - x_0)).square().flatten(1).mean(1).double())
        each = torch.cat(errors)
        place = (self._t * BINS).long().clamp(max=BINS - 1)
        return each.mean().item(), [each[place == k].mean().item() for k in range(BINS)]
