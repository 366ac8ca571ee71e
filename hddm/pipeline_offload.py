"""Where a pipeline's weights wait while they are not needed."""

from typing import Any

import torch
from torch import nn

from hddm.expert_set import ExpertSet
from hddm.models.router import RouterTransformer
from hddm.offload import Offload


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
        """Let experts come and go; see `hddm.offload`. The other parts stay where they are.

        Args:
            mode: ``none``, ``ram`` or ``disk``.
            max_memory: bytes of experts' weights on the device at most.

        Raises:
            HddmError: as `ExpertSet.offload`.
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
        """A context in which ``part`` is where it can run."""
        return Visit(part, self._visits)


class Visit:
    """A part that is on a device inside a ``with`` block, and back on the CPU afterwards."""

    def __init__(self, part: nn.Module, device: torch.device | None) -> None:
        self._part, self._device = part, device

    def __enter__(self) -> Any:
        return self._part if self._device is None else self._part.to(self._device)

    def __exit__(self, *_: object) -> None:
        if self._device is not None:
            self._part.to("cpu")


def _device(gpu_id: int | None, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if found is None else torch.device(found.type, gpu_id or 0)
