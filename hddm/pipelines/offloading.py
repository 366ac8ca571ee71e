"""The offload methods of a pipeline: which parts wait in main memory, and when they come to the device."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from hddm.experts.loading import ExpertSet
from hddm.networks.offload import Offload
from hddm.networks.transformers import RouterTransformer


class Offloading:
    """The offload methods of a diffusers pipeline, for one whose experts take turns in any order.

    Diffusers moves models in one fixed order; here the router decides at each step.
    """

    experts: ExpertSet
    router: RouterTransformer | None
    vae: nn.Module | None
    text_encoder: nn.Module | None
    _visits: torch.device | None = None

    def enable_model_cpu_offload(
        self, gpu_id: int | None = None, device: torch.device | str | None = None
    ) -> None:
        """Keep all weights in main memory; experts come to ``device`` as they are chosen, two at most.

        Args:
            gpu_id: of the CUDA device.
            device: instead; by default the current accelerator, or the CPU where there is none.
        """
        self._offload_to(_device(gpu_id, device), budget=None)

    def enable_sequential_cpu_offload(
        self, gpu_id: int | None = None, device: torch.device | str | None = None
    ) -> None:
        """As `enable_model_cpu_offload`, with one expert at a time."""
        largest = max(network.size for network in self.experts.stored)
        self._offload_to(_device(gpu_id, device), budget=largest)

    def enable_expert_offload(self, mode: Offload = "disk", max_memory: int | None = None) -> None:
        """Let experts come and go; the other parts stay where they are.

        Args:
            mode: ``none``, ``ram`` or ``disk``; see `hddm.networks.offload`.
            max_memory: bytes of experts' weights on the device at most.
        """
        self.experts.offload(mode, max_memory)

    def _offload_to(self, device: torch.device, budget: int | None) -> None:
        self.experts.offload("ram", budget)
        self.experts.to(device)
        if self.router is not None:
            self.router.to(device)
        for part in (self.text_encoder, self.vae):
            if part is not None:
                part.to("cpu")
        self._visits = device

    def present(self, part: nn.Module) -> "Visit":
        """A context in which ``part`` is where it can run; one that waits goes back to the CPU."""
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
