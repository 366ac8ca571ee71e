"""Offload methods of a pipeline: which parts wait in main memory, and when they move to the device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

        ``gpu_id`` is the number of a CUDA device, ``device`` replaces it; the default is the current
        accelerator, else the CPU.
        """
        self._offload_to(gpu_id, device, budget=None)

    def enable_sequential_cpu_offload(
        self, gpu_id: int | None = None, device: torch.device | str | None = None
    ) -> None:
        """As `enable_model_cpu_offload`, with one expert at a time."""
        largest = max((network.size for network in self.experts.stored), default=None)
        self._offload_to(gpu_id, device, budget=largest)

    def enable_expert_offload(self, mode: Offload = "disk", max_memory: int | None = None) -> None:
        """Offload experts by ``mode`` (see `hddm.networks.offload`); other parts stay where they are.

        ``max_memory`` limits the bytes of experts' weights on the device.
        """
        self.experts.offload(mode, max_memory)

    def _offload_to(self, gpu_id: int | None, device: torch.device | str | None, budget: int | None) -> None:
        if device is None and torch.accelerator.is_available():
            current = torch.accelerator.current_accelerator()
            device = None if current is None else torch.device(current.type, gpu_id or 0)
        self.experts.offload("ram", budget)
        self._visits = torch.device(device or "cpu")
        self.experts.to(self._visits)
        if isinstance(self.router, nn.Module):
            self.router.to(self._visits)
        for part in (getattr(self, name, None) for name in COMPONENTS):
            if isinstance(part, nn.Module):
                part.to("cpu")

    @contextmanager
    def present(self, part: nn.Module) -> Iterator[Any]:
        """Open a block in which ``part`` is on its device; an offloaded part then returns to the CPU."""
        if self._visits is None:
            yield part
            return
        try:
            yield part.to(self._visits)
        finally:
            part.to("cpu")
