"""Weights that are split over processes, by FSDP2 (`torch.distributed.fsdp.fully_shard`).

Each parameter of n rows is cut along its first axis into parts of ceil(n / processes) rows, and process k
holds the k-th. It is whole only while its block computes. Gradients, averages and the optimizer's state are
split alike, and checkpoints hold one file for each part (`hddm.training.state`).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hddm.networks.wrappers import repeated_blocks, without_weights
from hddm.utils.errors import HddmError


class Shards:
    """A network whose parameters are split, in place; all processes call its methods together."""

    def __init__(self, network: nn.Module, device: torch.device, processes: int) -> None:
        self._network = network
        self._empty = without_weights(network)
        mesh = init_device_mesh(device.type, (processes,))
        # A block within a block is cut before it.
        for module in (*reversed(repeated_blocks(network)), network):
            try:
                fully_shard(module, mesh=mesh)
            except (ValueError, NotImplementedError) as error:
                text = f"{type(network).__name__} cannot be split, says torch ({error})"
                raise HddmError(f"`shard_weights`: {text}; drop the option") from error
        # Buffers of a module that was not cut itself.
        network.to(device)

    def whole(self) -> nn.Module:
        """Return an unsplit copy of the network, on the CPU; only the first process has its weights."""
        parts = self._network.state_dict()
        self._empty.load_state_dict(self.gathered(parts), assign=True)
        return self._empty

    def gathered(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors of the network's state, by name, whole on the CPU; on meta but in the first process.

        ``parts`` are this process's, or split tensors. One after the other is whole on the device.
        """
        state = self._network.state_dict()
        found: dict[str, Tensor] = {}
        for name, part in parts.items():
            whole = split_as(part, state[name])
            if isinstance(whole, DTensor):
                whole = whole.full_tensor()
            is_first = torch.distributed.get_rank() == 0
            found[name] = whole.to("cpu" if is_first else "meta")
        return found


def own_part(value: Tensor) -> Tensor:
    """Return what this process holds of a tensor: its part of a split one, or the tensor itself."""
    return value.to_local() if isinstance(value, DTensor) else value


def split_as(part: Tensor, like: Tensor) -> Tensor:
    """Return a tensor that is split as ``like`` is, of which this process holds ``part``."""
    if isinstance(part, DTensor) or not isinstance(like, DTensor):
        return part
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(
        part.to(like.device), mesh, placements, shape=like.shape, stride=like.stride()
    )


def own_rows(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return the rows that this process holds of a tensor that is split as ``like`` is.

    ``parts`` are the tensor, cut along its first axis in any way; only rows of this process are read.
    """
    if parts[0].ndim == 0:
        return parts[0]
    own = own_part(like)
    start = 0
    if isinstance(like, DTensor):
        most = math.ceil(len(like) / like.device_mesh.size())
        start = min(like.device_mesh.get_local_rank() * most, len(like))
    end = start + len(own)
    rows: list[Tensor] = []
    first = 0
    for part in parts:
        rows.append(part[max(start - first, 0) : max(end - first, 0)])
        first += len(part)
    return torch.cat(rows)


class MuonOfParts(torch.optim.Muon):
    """Muon, which takes the step of a split matrix on the whole matrix, in each process.

    torch's own step on parts sums them in bfloat16, so it would depend on the number of processes.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not isinstance(group["params"][0], DTensor):
                super().step(closure)  # type: ignore[no-untyped-call]
                return
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_whole(parameter, own_part(parameter.grad), group)

    def momentum_of(self, parameter: Tensor) -> Tensor:
        """Return what this process holds of the average of gradients, which is zero before the first step."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            zero = torch.zeros_like(own_part(parameter.detach()))
            state["momentum_buffer"] = split_as(zero, parameter)
        return own_part(state["momentum_buffer"])

    def _step_whole(
        self, parameter: nn.Parameter, gradient: Tensor, group: Mapping[str, Any]
    ) -> None:
        momentum, rate = group["momentum"], group["lr"]
        average = self.momentum_of(parameter)
        average.lerp_(gradient, 1 - momentum)
        update: Any = split_as(gradient.lerp(average, momentum), parameter)
        whole = update.full_tensor()
        change = nn.Parameter(torch.zeros_like(whole))
        change.grad = whole
        adjust = group["adjust_lr_fn"]
        without_decay: dict[str, Any] = {"weight_decay": 0, "momentum": 0, "nesterov": False}
        torch.optim.Muon([change], rate, adjust_lr_fn=adjust, **without_decay).step()
        own = own_part(parameter.detach())
        own.mul_(1 - rate * group["weight_decay"]).add_(own_rows([change], parameter))
