"""A network whose weights are not in memory yet."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    import torch
    from diffusers import ModelMixin
    from torch import Tensor

Network = TypeVar("Network", bound="ModelMixin")


@dataclass(frozen=True)
class Unread(Generic[Network]):
    """A network in evaluation mode with weights on disk: on the meta device, except for positions.

    ``read(dtype)`` returns tensors by name, cast; those already of that dtype stay mapped from the file.
    """

    network: Network
    read: "Callable[[torch.dtype], dict[str, Tensor]]"

    def load(self, dtype: "torch.dtype") -> Network:
        """The network with its weights in ``dtype``."""
        self.network.load_state_dict(self.read(dtype), assign=True)
        self.network.requires_grad_(False)
        return self.network
