"""A checkpoint in the layout of facebookresearch/DiT with random weights, written as a stream."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from hddm.utils.tensors import Planned, read_safetensors, write_safetensors

XL = {"width": 1152, "depth": 28, "side": 32, "patch": 2, "channels": 4, "classes": 1000}
SMALL = XL | {"width": 384, "depth": 12}


def shapes(size: dict[str, int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all tensors, written down from the original's code."""
    width, patch, channels = size["width"], size["patch"], size["channels"]

    def linear(name: str, outputs: int, inputs: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (outputs, inputs)
        yield f"{name}.bias", (outputs,)

    yield "pos_embed", (1, (size["side"] // patch) ** 2, width)
    yield "x_embedder.proj.weight", (width, channels, patch, patch)
    yield "x_embedder.proj.bias", (width,)
    yield "y_embedder.embedding_table.weight", (size["classes"] + 1, width)
    yield from linear("t_embedder.mlp.0", width, 256)
    yield from linear("t_embedder.mlp.2", width, width)
    for n in range(size["depth"]):
        yield from linear(f"blocks.{n}.attn.qkv", 3 * width, width)
        yield from linear(f"blocks.{n}.attn.proj", width, width)
        yield from linear(f"blocks.{n}.mlp.fc1", 4 * width, width)
        yield from linear(f"blocks.{n}.mlp.fc2", width, 4 * width)
        yield from linear(f"blocks.{n}.adaLN_modulation.1", 6 * width, width)
    yield from linear("final_layer.linear", patch**2 * 2 * channels, width)
    yield from linear("final_layer.adaLN_modulation.1", 2 * width, width)


def write_checkpoints(folder: Path, size: dict[str, int]) -> tuple[Path, Path, int]:
    """``source.safetensors``, ``source.pt`` and the number of weights."""

    def planned(name: str, shape: tuple[int, ...]) -> Planned:
        def read() -> Tensor:
            return 0.02 * torch.randn(shape)

        return Planned(name, shape, torch.float32, read)

    torch.manual_seed(0)
    tensors = [planned(name, shape) for name, shape in shapes(size)]
    path = folder / "source.safetensors"
    write_safetensors(path, tensors, {"format": "pt"})
    # Mapped from the file, so that both are written without holding them.
    pickle = folder / "source.pt"
    torch.save(dict(read_safetensors(path)), pickle)
    return path, pickle, sum(torch.Size(one.shape).numel() for one in tensors)
