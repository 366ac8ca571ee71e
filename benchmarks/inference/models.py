"""Sizes, experts of random weights, a router that shares samples out evenly, and diffusers' DiT."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from diffusers import DDIMScheduler, DiTTransformer2DModel, ModelMixin
from torch import Tensor, nn

from hddm.experts.expert import Expert
from hddm.experts.expert_set import ExpertSet
from hddm.experts.records import ExpertRecord, ShardRecord
from hddm.networks.transformers import ExpertTransformer, RouterTransformer
from hddm.predictions import PredictionType
from hddm.routers import Router
from hddm.schedules import CosineSchedule, LinearSchedule, Schedule
from hddm.velocity import TIME_SCALE

NULL_CLASS = 1000
Step = Callable[[], object]
Network = TypeVar("Network", bound=ModelMixin)


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


class EvenRouter(nn.Module):
    """A router that runs, and whose decision is replaced: sample i gets expert i mod K.

    Args:
        router: the one that runs.
    """

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.router = router

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        """Logits (batch, K): 0 for expert i mod K, -2 for the next, and so on."""
        logits: Tensor = self.router(x, timestep)
        rows, experts = (torch.arange(size, device=logits.device) for size in logits.shape)
        # The product keeps the router's logits in the graph, so that nothing finds them unused.
        return 0 * logits - 2 * ((experts[None] - rows[:, None]) % logits.shape[1])


def random_expert(
    size: Size, shape: tuple[int, int, int], patch: int, index: int = 0, experts: int = 1
) -> Expert:
    """Expert ``index`` of ``experts``: the even ones flow, the odd ones DDPM on the cosine schedule."""
    torch.manual_seed(index)
    network = ExpertTransformer(
        sample_size=shape[-1],
        in_channels=shape[0],
        patch_size=patch,
        hidden_size=size.hidden_size,
        depth=size.depth,
        num_heads=size.num_heads,
    )
    flow = index % 2 == 0
    schedule: Schedule = LinearSchedule() if flow else CosineSchedule()
    record = ExpertRecord(
        objective="flow" if flow else "ddpm",
        prediction_type=PredictionType.FLOW_PREDICTION if flow else PredictionType.EPSILON,
        schedule=schedule.config,
        schedule_source="benchmark",
        time_scale=TIME_SCALE,
        sample_shape=shape,
        shard=ShardRecord(index=index, num_shards=experts, hash=f"shard {index}", images=1000),
    )
    return Expert(randomised(network), record, None)


def random_router(
    size: Size, shape: tuple[int, int, int], patch: int, experts: int
) -> RouterTransformer:
    """A router of ``experts`` shards."""
    torch.manual_seed(experts)
    network: RouterTransformer = RouterTransformer(
        experts, shape[-1], shape[0], patch, size.hidden_size, size.depth, size.num_heads
    )
    randomised(network)
    return network


def randomised(network: Network) -> Network:
    """``network`` for inference, with weights where layers begin at zero."""
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.02)
    network.requires_grad_(False).eval()
    return network


class Models:
    """All that is timed, on one device in one dtype.

    Args:
        settings: sizes.
        device, dtype: where and in what networks run.
        compiled: whether ``torch.compile`` compiles each network.
    """

    def __init__(
        self, settings: Settings, device: str, dtype: torch.dtype, compiled: bool = False
    ) -> None:
        shape, count = settings.sample_shape, settings.experts
        experts = [
            random_expert(settings.size, shape, settings.patch, k, count) for k in range(count)
        ]
        self.experts = ExpertSet([expert for expert in experts], dtype, device)
        network = random_router(settings.router, shape, settings.patch, count)
        self.router_network = network.to(device, dtype)
        self.router = Router(EvenRouter(self.router_network), TIME_SCALE)
        self.dit = diffusers_dit(settings).to(device, dtype)
        if compiled:
            for compilable in (self.experts, self.router_network, self.dit):
                compilable.compile()


def diffusers_dit(settings: Settings) -> DiTTransformer2DModel:
    """The DiT of diffusers, of the experts' depth, width, heads and patch size."""
    size = settings.size
    torch.manual_seed(0)
    network = DiTTransformer2DModel(
        num_attention_heads=size.num_heads,
        attention_head_dim=size.hidden_size // size.num_heads,
        in_channels=settings.channels,
        num_layers=size.depth,
        sample_size=settings.side,
        patch_size=settings.patch,
    )
    return randomised(network)


def diffusers_step(dit: DiTTransformer2DModel, x: Tensor) -> Step:
    """What the loop of diffusers' DiTPipeline does a step at guidance_scale 1, every label the null class."""
    scheduler = DDIMScheduler(beta_schedule="linear")
    scheduler.set_timesteps(50)
    t = scheduler.timesteps[len(scheduler.timesteps) // 2]
    labels = torch.full((len(x),), NULL_CLASS, device=x.device)
    x = x.to(dit.dtype)

    def step() -> Tensor:
        scaled = scheduler.scale_model_input(x, t)
        timesteps = t[None].to(scaled.device).expand(len(scaled))
        noise = dit(scaled, timestep=timesteps, class_labels=labels).sample
        stepped: Tensor = scheduler.step(noise, t, scaled).prev_sample
        return stepped

    return step
