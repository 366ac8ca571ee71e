"""A Paris release with tiny networks of random weights, under the release's file and tensor names."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from diffusers import ModelMixin
from safetensors.torch import load_file, save_file
from torch import Tensor

from hddm.experts.paris import paris_experts, paris_router
from hddm.networks.transformers import ExpertTransformer, RouterTransformer
from hddm.routers import Router
from tests.checkpoint_files import randomised

NUM_EXPERTS = 3
TEXT = 16
EXPERT = {"sample_size": 8, "hidden_size": 144, "depth": 2, "num_heads": 2, "text_dim": TEXT}
ROUTER = {"sample_size": 8, "hidden_size": 128, "depth": 2, "num_heads": 2}
SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "num_train_timesteps": 1000,
    "shift": 1.0,
}
EXPERT_FILE = "diffusion_pytorch_model.safetensors"
ROUTER_FILE = "pytorch_model.safetensors"


def write_paris(
    folder: Path, num_experts: int = NUM_EXPERTS
) -> tuple[list[ModelMixin], ModelMixin]:
    """Write a release; its networks are returned."""
    experts = [randomised(ExpertTransformer(**EXPERT), seed) for seed in range(num_experts)]
    router = randomised(RouterTransformer(num_experts, **ROUTER), seed=100)
    for index, network in enumerate(experts):
        _write(network, folder / f"expert_{index}" / EXPERT_FILE)
    _write(router, folder / "router" / ROUTER_FILE)
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(SCHEDULER))
    return experts, router


def edit(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Apply ``change`` to the tensors in a file."""
    tensors = {name: value.clone() for name, value in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


def router(folder: Path) -> Router:
    """The router of a release."""
    network, record = paris_router(folder, paris_experts(folder))
    return Router(network.load(torch.float32), record.time_scale)


def _write(network: ModelMixin, path: Path) -> None:
    path.parent.mkdir(parents=True)
    save_file(network.state_dict(), path)
    # The keys of the release's own are not known, and nothing may depend on them.
    (path.parent / "config.json").write_text('{"hidden_size": 7}')
