"""Sizes, and class-conditional networks of them: hddm's expert and diffusers' DiT."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from diffusers import DiTTransformer2DModel
from torch import Tensor, nn

from hddm.networks.transformers import ExpertTransformer

Network = TypeVar("Network", bound=nn.Module)
Call = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]
"""(network, x, times in [0, 1000], labels) to an output like x."""


@dataclass(frozen=True)
class Settings:
    """Of networks and steps; the same for every way."""

    name: str = "training"
    hidden_size: int = 384
    depth: int = 12
    num_heads: int = 6
    channels: int = 3
    side: int = 32
    patch: int = 4
    classes: int = 10
    batch: int = 32
    rounds: int = 15
    steps: int = 2
    """Timed steps of each way in a round, after one that is not."""

    @property
    def tokens(self) -> int:
        """Of an image."""
        return (self.side // self.patch) ** 2

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of an image."""
        return self.channels, self.side, self.side


CPU = Settings()
"""DiT-S/4 on images of CIFAR-10's size."""
CUDA = Settings(
    hidden_size=768, num_heads=12, channels=4, patch=2, classes=1000, batch=128, steps=8
)
"""DiT-B/2 on the latents of ImageNet at 256 pixels."""
QUICK = Settings(
    name="training-quick", hidden_size=32, depth=2, num_heads=2, side=8, batch=4, rounds=2, steps=1
)


def settings_for(device: str, quick: bool) -> Settings:
    """Those of a device."""
    if quick:
        return QUICK
    return CPU if torch.device(device).type == "cpu" else CUDA


def expert(settings: Settings, modulation: str) -> ExpertTransformer:
    """Ours, with `modulation` as in `ExpertTransformer`."""
    torch.manual_seed(0)
    return ExpertTransformer(  # type: ignore[no-any-return]
        sample_size=settings.side,
        in_channels=settings.channels,
        patch_size=settings.patch,
        hidden_size=settings.hidden_size,
        depth=settings.depth,
        num_heads=settings.num_heads,
        num_classes=settings.classes,
        modulation=modulation,
    )


def diffusers_dit(settings: Settings) -> DiTTransformer2DModel:
    """The DiT of diffusers; its time is a whole number and every block embeds time and label anew."""
    torch.manual_seed(0)
    return DiTTransformer2DModel(
        num_attention_heads=settings.num_heads,
        attention_head_dim=settings.hidden_size // settings.num_heads,
        in_channels=settings.channels,
        num_layers=settings.depth,
        sample_size=settings.side,
        patch_size=settings.patch,
        num_embeds_ada_norm=settings.classes,
    )


def call_expert(network: nn.Module, x: Tensor, times: Tensor, labels: Tensor) -> Tensor:
    """Ours."""
    output: Tensor = network(x, times, labels)
    return output


def call_dit(network: nn.Module, x: Tensor, times: Tensor, labels: Tensor) -> Tensor:
    """That of diffusers."""
    output: Tensor = network(x, timestep=times.long(), class_labels=labels, return_dict=False)[0]
    return output


def awake(network: Network) -> Network:
    """``network`` with numbers where layers begin at zero: products with zeros may be cheaper."""
    for parameter in network.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.02)
    return network


def millions(network: nn.Module) -> float:
    """Trained parameters, in millions."""
    return sum(p.numel() for p in network.parameters() if p.requires_grad) / 1e6
