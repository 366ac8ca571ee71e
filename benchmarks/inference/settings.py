"""Sizes of what is timed and of what is loaded."""

from dataclasses import dataclass, replace

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Size:
    """Of a transformer."""

    hidden_size: int
    depth: int
    num_heads: int


@dataclass(frozen=True)
class Settings:
    """Of both questions."""

    name: str = "inference"
    experts: int = 8
    batch: int = 64
    channels: int = 4
    side: int = 32
    patch: int = 2
    size: Size = Size(384, 12, 6)
    """Of an expert that is timed: DiT-S."""
    router: Size = Size(192, 3, 3)
    """At most 8 % of an expert's operations."""
    repeats: int = 5
    solver_steps: int = 4
    """Of the runs that ask the router rarely."""
    router_every: tuple[int, ...] = (1, 4)
    stored: Size = Size(512, 12, 8)
    """Of an expert on disk: 163 MB in float32, of which a step touches every byte."""
    few: int = 3
    """Experts of the smaller ensemble on disk."""
    memory_batch: int = 16
    memory_side: int = 16
    memory_steps: int = 3

    @property
    def sample_shape(self) -> tuple[int, int, int]:
        """Of what is timed."""
        return self.channels, self.side, self.side

    @property
    def tokens(self) -> int:
        """Of a sample that is timed."""
        return (self.side // self.patch) ** 2


CUDA = Settings()
CPU = replace(CUDA, side=16)
QUICK = Settings(
    name="inference-quick",
    batch=8,
    side=8,
    size=Size(32, 2, 2),
    router=Size(16, 1, 2),
    repeats=2,
    stored=Size(64, 2, 2),
    memory_batch=8,
    memory_side=8,
    memory_steps=1,
)


def settings_for(device: str, quick: bool) -> Settings:
    """Those of a device."""
    if quick:
        return QUICK
    return CPU if torch.device(device).type == "cpu" else CUDA
