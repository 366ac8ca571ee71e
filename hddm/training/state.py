"""The state of a training between two steps, as tensors and plain values, with the average of its weights."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hddm.utils.errors import HddmError


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
        """Take over averages that `tensors` gave after so many ``updates``."""
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


WEIGHTS, EMA, OPTIMIZER, LOSSES = "weights", "ema", "optimizer", "losses"


@dataclass
class TrainingState:
    """Weights as the optimiser left them, their averages, its moments, and what was counted.

    ``losses`` holds that of every step, so ``step`` is their number; a skipped step left NaN or Inf there.
    """

    network: nn.Module
    ema: Ema
    optimizer: torch.optim.Optimizer
    scaler: "torch.amp.GradScaler | None" = None
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    """Of all steps, without what comes between them."""
    non_finite: int = 0
    """Steps in a row that were skipped, up to now."""
    notes: dict[str, Any] = field(default_factory=dict)
    """Values that watchers keep from step to step, by their name, in plain JSON."""

    @property
    def step(self) -> int:
        """Steps done."""
        return len(self.losses)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """The network has its averaged weights within the block."""
        with self.ema.averaged():
            yield

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """All tensors by file and name; a parameter under two names is there once."""
        moments = {
            f"{key}.{name}": value
            for name, parameter in self._trained().items()
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }
        return {
            WEIGHTS: {name: p.detach() for name, p in self._trained().items()} | self._buffers(),
            EMA: self.ema.tensors(),
            OPTIMIZER: moments,
            LOSSES: {"losses": torch.tensor(self.losses, dtype=torch.float64)},
        }

    def values(self) -> dict[str, Any]:
        """All plain values."""
        return {
            "step": self.step,
            "ema_updates": self.ema.updates,
            "seconds": self.seconds,
            "non_finite": self.non_finite,
            "notes": self.notes,
            "scaler": self.scaler.state_dict() if self.scaler is not None else None,
        }

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Mapping[str, Tensor]], values: Mapping[str, Any], name: str) -> None:
        """Become what `tensors` and `values` gave.

        Args:
            tensors: by file and name.
            values: plain values.
            name: of their source, for messages.

        Raises:
            HddmError: for tensors that are missing, left over or of another shape.
        """
        live = {n: p.detach() for n, p in self._trained().items()} | self._buffers()
        _check({key: value.shape for key, value in live.items()}, tensors[WEIGHTS], f"{name}, {WEIGHTS}")
        shadow = self.ema.tensors()
        _check({key: value.shape for key, value in shadow.items()}, tensors[EMA], f"{name}, {EMA}")
        for key, value in live.items():
            value.copy_(tensors[WEIGHTS][key])
        self.ema.load(tensors[EMA], values["ema_updates"])
        trained = self._trained()
        for key, value in tensors[OPTIMIZER].items():
            moment, _, of = key.partition(".")
            self.optimizer.state[trained[of]][moment] = _as_kept(value, trained[of])
        self.losses = tensors[LOSSES]["losses"].tolist()
        self.seconds, self.non_finite = values["seconds"], values["non_finite"]
        self.notes = dict(values.get("notes", {}))
        if self.scaler is not None:
            self.scaler.load_state_dict(values["scaler"])

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.network.named_parameters() if p.requires_grad}

    def _buffers(self) -> dict[str, Tensor]:
        held = self.network.state_dict()
        return {name: buffer for name, buffer in self.network.named_buffers() if name in held}


def _as_kept(value: Tensor, parameter: Tensor) -> Tensor:
    # A copy: rounding may depend on where in memory a tensor begins, and a mapped one begins anywhere. The
    # step count goes along, since the fused optimiser reads it on the device.
    return value.to(parameter.device).clone()


def _check(expected: Mapping[str, torch.Size], found: Mapping[str, Tensor], name: str) -> None:
    lines = [f"missing: {key} {tuple(shape)}" for key, shape in expected.items() if key not in found]
    lines += [f"left over: {key}" for key in found if key not in expected]
    lines += [
        f"{key}: {tuple(found[key].shape)}, the network has {tuple(shape)}"
        for key, shape in expected.items()
        if key in found and found[key].shape != shape
    ]
    if lines:
        raise HddmError(f"{name}: is of another network", lines)
