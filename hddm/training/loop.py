"""The training loop that experts and routers share."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from hddm.errors import HddmError
from hddm.facts import Facts
from hddm.training.ema import Ema

OnStep = Callable[[int, float], None]
# Keeps training apart from sampling, whose streams are (seed, i) and (seed, i, 1).
TRAINING_STREAM = 2
Positive = Annotated[int, Field(ge=1)]


class LoopSettings(Facts):
    """How to optimise: AdamW, linear warm-up, then cosine decay to zero, and a float32 EMA."""

    steps: Positive
    batch_size: Positive = 128
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    warmup: Annotated[int, Field(ge=0)] = 100
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = 0.999
    seed: int = 0


@dataclass(frozen=True)
class Fitted:
    """What a training left: the loss of every step, and how long it took."""

    losses: list[float]
    seconds: float

    def record(self, settings: LoopSettings) -> dict[str, Any]:
        """Plain values for the record beside the weights."""
        tail = self.losses[-max(len(self.losses) // 20, 1) :]
        return {
            **settings.model_dump(mode="json"),
            "images_seen": settings.steps * settings.batch_size,
            "final_loss": sum(tail) / len(tail),
            "seconds": round(self.seconds, 1),
        }


def fit(
    network: nn.Module,
    loss: Callable[[], Tensor],
    settings: LoopSettings,
    on_step: OnStep | None = None,
) -> Fitted:
    """Minimise ``loss`` and leave the averaged weights in ``network``.

    Args:
        network: trained in place.
        loss: draws a batch and returns its scalar loss.
        settings: see `LoopSettings`.
        on_step: called after each step with its number, from 1, and its loss.

    Raises:
        HddmError: at the first loss or gradient that is not finite.
    """
    parameters = [p for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, settings))
    ema = Ema(network, settings.ema_decay)
    losses: list[float] = []
    started = time.perf_counter()
    network.train()
    for step in range(1, settings.steps + 1):
        value = loss()
        optimizer.zero_grad(set_to_none=True)
        value.backward()
        norm = nn.utils.clip_grad_norm_(parameters, settings.max_grad_norm)
        losses.append(value.item())
        if not math.isfinite(losses[-1]) or not math.isfinite(norm.item()):
            raise HddmError(
                f"step {step}: loss {losses[-1]}, gradient norm {norm.item()}; "
                "nothing was written; try a lower --learning-rate"
            )
        optimizer.step()
        schedule.step()
        ema.update()
        if on_step is not None:
            on_step(step, losses[-1])
    ema.copy_to_network()
    network.eval()
    return Fitted(losses, time.perf_counter() - started)


def _rate(step: int, settings: LoopSettings) -> float:
    """Factor on the learning rate at ``step``, from 0."""
    warm = min(1.0, (step + 1) / max(settings.warmup, 1))
    return warm * 0.5 * (1 + math.cos(math.pi * min(step / settings.steps, 1)))
