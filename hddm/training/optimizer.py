"""Optimisers: AdamW for all parameters, or Muon for the matrices of a network and AdamW for the rest."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hddm.training.device import split_like
from hddm.training.settings import Recipe

# Layers that make the output of our networks and diffusers': their matrices are AdamW's, as in Muon's recipe.
ENDS = ("final_layer", "head", "proj_out", "proj_out_1", "proj_out_2", "norm_out")


def optimizer_of(network: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """Return the optimizer of the parameters that require gradients; each group holds its peak rate.

    Muon makes the momentum of a matrix orthogonal by Newton and Schulz's iteration and scales it by
    max(1, rows/columns)^½ (K. Jordan, "Muon: an optimizer for hidden layers in neural networks", 2024).
    Packed matrices of queries, keys and values are one matrix to it.
    """
    trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
    matrices = set[str]() if recipe.muon_learning_rate is None else _matrices(network)
    inner = [p for name, p in trained.items() if name in matrices]
    rest = [p for name, p in trained.items() if name not in matrices]
    decay = recipe.weight_decay
    optimizers: list[torch.optim.Optimizer] = []
    if rest:
        optimizers.append(torch.optim.AdamW(rest, lr=recipe.learning_rate, weight_decay=decay, fused=True))
    if inner and recipe.muon_learning_rate is not None:
        kind = _SplitMuon if isinstance(inner[0], DTensor) else _Muon
        rate = recipe.muon_learning_rate
        optimizers.append(kind(inner, lr=rate, weight_decay=decay, adjust_lr_fn="original"))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return optimizers[0] if len(optimizers) == 1 else _Together(optimizers)


def _matrices(network: nn.Module) -> set[str]:
    """Names of the matrices that map features to features: of linear layers and of packed attention."""
    return {
        name
        for place, module in network.named_modules()
        if place.partition(".")[0] not in ENDS
        for name, parameter in module.named_parameters(place, recurse=False)
        if parameter.ndim == 2 and (name.endswith("in_proj_weight") or isinstance(module, nn.Linear))
    }


class _Muon(torch.optim.Muon):
    """Muon that changes nothing where the tensor ``found_inf`` is 1, as torch's fused AdamW does.

    So a GPU decides by itself whether a step is skipped, and Python need not wait for it.
    """

    found_inf: Tensor | None = None
    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.found_inf is None:
            self._take_step()
            return
        is_skipped, kept = self.found_inf > 0, []
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            momentum = self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter.grad))
            own, gradient, average = (_own(each) for each in (parameter, parameter.grad, momentum))
            # The average with itself is the average itself.
            gradient.copy_(torch.where(is_skipped, average, gradient))
            kept.append((own, own.clone()))
        self._take_step()
        for own, before in kept:
            own.copy_(torch.where(is_skipped, before, own))

    def _take_step(self) -> None:
        super().step()  # type: ignore[no-untyped-call]


def _own(value: Tensor) -> Tensor:
    """The part of ``value`` that this process holds."""
    return value.to_local() if isinstance(value, DTensor) else value


class _SplitMuon(_Muon):
    """Muon of matrices that are split over processes, each of which computes a whole step and keeps its part.

    On such matrices torch's own sums in bfloat16 part by part, which is another step.
    """

    def _take_step(self) -> None:
        for group in self.param_groups:
            rate, beta = group["lr"], group["momentum"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                momentum = self.state[parameter].setdefault(
                    "momentum_buffer", torch.zeros_like(parameter.grad)
                )
                momentum.lerp_(parameter.grad, 1 - beta)
                update = parameter.grad.lerp(momentum, beta).full_tensor()
                change = torch.zeros_like(update, requires_grad=True)
                change.grad = update
                torch.optim.Muon(
                    [change], rate, weight_decay=0, momentum=0, nesterov=False, adjust_lr_fn="original"
                ).step()
                parameter.mul_(1 - rate * group["weight_decay"]).add_(split_like(change, parameter))


class _Together(torch.optim.Optimizer):
    """Optimizers of different parameters as one, with one state and one ``found_inf``."""

    found_inf: Tensor | None = None
    _step_supports_amp_scaling = True

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        groups = [group for one in optimizers for group in one.param_groups]
        super().__init__([{"params": group["params"]} for group in groups], {})
        self.param_groups = groups
        self._optimizers = optimizers
        for one in optimizers:
            one.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self._optimizers:
            one.found_inf = self.found_inf  # type: ignore[attr-defined]
            one.step()
