"""Offload methods of a pipeline: which parts wait in main memory, and when they are brought to the device."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hddm.experts.expert_set import ExpertSet
from hddm.experts.model_index import COMPONENTS
from hddm.networks.offload import Offload


class Offloading:
    """Offload methods of a diffusers pipeline whose experts run in any order.

    Diffusers moves models in one fixed order, but here the router decides at each step.
    """

    experts: ExpertSet
    router: Callable[..., Tensor] | None
    _visits: torch.device | None = None

    def enable_model_cpu_offload(
        self, gpu_id: int | None = None, device: torch.device | str | None = None
    ) -> None:
        """Keep all weights in main memory; at most two chosen experts are on ``device``.

        ``gpu_id`` is a CUDA device, ``device`` replaces it; the default is the current accelerator, or else
        the CPU.
        """
        self._offload_to(_device(gpu_id, device), budget=None)

    def enable_sequential_cpu_offload(
        self, gpu_id: int | None = None, device: torch.device | str | None = None
    ) -> None:
        """Do as `enable_model_cpu_offload`, with one expert at a time."""
        largest = max((network.size for network in self.experts.stored), default=None)
        self._offload_to(_device(gpu_id, device), budget=largest)

    def enable_expert_offload(self, mode: Offload = "disk", max_memory: int | None = None) -> None:
        """Offload experts by ``mode`` (see `hddm.networks.offload`); other parts stay where they are.

        ``max_memory`` limits the bytes of experts' weights on the device.
        """
        self.experts.offload(mode, max_memory)

    def _offload_to(self, device: torch.device, budget: int | None) -> None:
        self.experts.offload("ram", budget)
        self.experts.to(device)
        if isinstance(self.router, nn.Module):
            self.router.to(device)
        for part in (getattr(self, name, None) for name in COMPONENTS):
            if isinstance(part, nn.Module):
                part.to("cpu")
        self._visits = device

    def present(self, part: nn.Module) -> "Visit":
        """Context in which ``part`` is on its device; an offloaded part then returns to the CPU."""
        return nullcontext(part) if self._visits is None else _visit(part, self._visits)


Visit = AbstractContextManager[Any]


@contextmanager
def _visit(part: nn.Module, device: torch.device) -> Iterator[Any]:
    try:
        yield part.to(device)
    finally:
        part.to("cpu")


def _device(gpu_id: int | None, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if found is None else torch.device(found.type, gpu_id or 0)
