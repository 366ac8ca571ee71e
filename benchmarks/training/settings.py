"""Sizes of what is trained."""

from dataclasses import dataclass

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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
CUDA = Settings(hidden_size=768, num_heads=12, channels=4, patch=2, classes=1000, batch=128, steps=8)
"""DiT-B/2 on the latents of ImageNet at 256 pixels."""
QUICK = Settings(
    name="training-quick", hidden_size=32, depth=2, num_heads=2, side=8, batch=4, rounds=2, steps=1
)


def settings_for(device: str, quick: bool) -> Settings:
    """Those of a device."""
    if quick:
        return QUICK
    return CPU if torch.device(device).type == "cpu" else CUDA
