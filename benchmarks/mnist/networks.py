"""Two published kinds of networks of MNIST, written anew from what their authors say of them.

Weights are those of the authors, with their names of tensors:

- ``mnist-x0-flow``: github.com/sofia-dominguezc/MNIST-diffusion (88bc058), MIT. A small transformer of
  classes that predicts the clean image on the path tau x_0 + (1 - tau) eps, of data in [0, 1].
- ``mnist-eps-linear``, ``-cosine``, ``-geometric``: github.com/sdaloglu/diffusion_with_entropy (6d0b2c7),
  MIT. Convolutions that predict the noise of a DDPM, on three noise schedules, of data in [-0.5, 0.5].

Each folder has ``weights.safetensors``, and ``reference.safetensors``, inputs and outputs of the authors'
code.
"""

import math
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hddm import VelocityField
from hddm.schedules import DiscreteSchedule, LinearSchedule
from hddm.utils.errors import HddmError

SHAPE = (1, 28, 28)
NONE = 10
"""Row of no class in the embedding of the transformer's classes."""
FLOW = "mnist-x0-flow"
DDPM = ("mnist-eps-linear", "mnist-eps-cosine", "mnist-eps-geometric")


class FlowTransformer(nn.Module):
    """The clean image from 16 patches, and two tokens each of the time and of the class."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(1, 64, 7, stride=7)
        self.pos_embed = nn.Parameter(torch.zeros(1, 16, 64))
        self.y_encoder = nn.Embedding(11, 128)
        layers = [
            nn.TransformerEncoderLayer(64, 4, 256, activation="gelu", batch_first=True)
            for _ in range(4)
        ]
        self.transformer = nn.ModuleList(layers)
        self.unpatch = nn.ConvTranspose2d(64, 1, 7, stride=7)

    def forward(self, x: Tensor, tau: Tensor, class_labels: Tensor) -> Tensor:
        """Clean images for states ``x`` (n, 1, 28, 28) at ``tau`` (n,), 0 for noise and 1 for images."""
        tokens = self.patch_embed(x).flatten(2).mT + self.pos_embed
        steps = torch.arange(64, device=x.device, dtype=x.dtype)
        angles = tau[:, None] * torch.exp(-steps * math.log(10_000) / 63)
        time = torch.cat([angles.sin(), angles.cos()], 1)
        more = [one.view(-1, 2, 64) for one in (time, self.y_encoder(class_labels))]
        tokens = torch.cat([tokens, *more], 1)
        for layer in self.transformer:
            tokens = layer(tokens)
        image: Tensor = self.unpatch(tokens[:, :16].mT.unflatten(2, (4, 4)))
        return image


class NoiseNetwork(nn.Module):
    """The noise, by four blocks of convolutions, the first of which knows the step."""

    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        blocks = nn.ModuleList()
        for before, after in ((1, 16), (16, 32), (32, 32), (32, 16)):
            block = nn.Module()
            block.net = nn.Sequential(
                nn.Conv2d(before, after, 7, padding=3), nn.LayerNorm((after, 28, 28)), nn.GELU()
            )
            blocks.append(block)
        blocks.append(nn.Conv2d(16, 1, 3, padding=1))
        self.blocks = blocks
        embedding: list[nn.Module] = []
        for before, after in ((32, 128), (128, 128), (128, 128), (128, 16)):
            embedding += [nn.Linear(before, after), nn.GELU()]
        self.time_embed = nn.Sequential(*embedding[:-1])
        self.register_buffer("frequencies", torch.zeros(16))

    def forward(self, y: Tensor, step: Tensor) -> Tensor:
        """Noise in states ``y`` (n, 1, 28, 28) at ``step`` (n,), 1 to 1000, fractions too."""
        angles = step[:, None] / 1000 * self.frequencies
        time = self.time_embed(torch.cat([angles.sin(), angles.cos() - 1], 1))
        first, *rest = self.blocks
        y = first.net(y) + time[:, :, None, None]
        for block in rest[:-1]:
            y = block.net(y)
        noise: Tensor = rest[-1](y)
        return noise


def _read(folder: Path, name: str) -> dict[str, Tensor]:
    path = folder / name / "weights.safetensors"
    if not path.is_file():
        raise HddmError(f"{path}: no such file; the module's text says whose weights these are")
    return load_file(path)


def flow_network(folder: Path) -> FlowTransformer:
    """The transformer with its author's weights."""
    network = FlowTransformer()
    network.load_state_dict(_read(folder, FLOW))
    return network.eval().requires_grad_(False)


def noise_network(folder: Path, name: str) -> tuple[NoiseNetwork, Tensor]:
    """The network of one schedule with its author's weights, and the betas of steps 1 to 1000."""
    tensors, network = _read(folder, name), NoiseNetwork()
    betas = tensors["beta_t"].double()
    # Step 0 is never asked for, and its noise is part of step 1's.
    first = 1 - (1 - betas[:1]) * (1 - betas[1:2])
    betas = torch.cat([first, betas[2:]])
    own = {key.removeprefix("gt."): one for key, one in tensors.items() if key.startswith("gt.")}
    network.load_state_dict(own)
    return network.eval().requires_grad_(False), betas


class _Backwards(nn.Module):
    """The transformer in hddm's time, which runs from images to noise; turned here, and nowhere else."""

    def __init__(self, network: FlowTransformer) -> None:
        super().__init__()
        self.network = network

    def forward(self, y: Tensor, timestep: Tensor, class_labels: Tensor) -> Tensor:
        image: Tensor = self.network(y, 1 - timestep, class_labels)
        return image


class _FromOne(nn.Module):
    """A network of noise with hddm's indices of steps, which begin at 0."""

    def __init__(self, network: NoiseNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, y: Tensor, timestep: Tensor) -> Tensor:
        noise: Tensor = self.network(y, timestep + 1)
        return noise


def flow_expert(folder: Path, with_units: bool = True) -> VelocityField:
    """The transformer as an expert; ``with_units=False`` reads it as if its data were in [-1, 1]."""
    units = {"data_scale": 0.5, "data_shift": 0.5} if with_units else {}
    return VelocityField(
        _Backwards(flow_network(folder)),
        LinearSchedule(),
        "sample",
        conditions=("class_labels",),
        null_conditions={"class_labels": torch.tensor(NONE)},
        sample_shape=SHAPE,
        classes=tuple(map(str, range(10))),
        **units,
    )


def noise_expert(folder: Path, name: str, with_units: bool = True) -> VelocityField:
    """The network of one noise schedule as an expert; ``with_units`` as in `flow_expert`."""
    network, betas = noise_network(folder, name)
    return VelocityField(
        _FromOne(network),
        DiscreteSchedule(betas),
        "epsilon",
        conditions=(),
        sample_shape=SHAPE,
        data_scale=0.5 if with_units else 1.0,
    )
