"""What an expert or a router is on disk: a network folder and the facts that give it a meaning."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import ModelMixin
from pydantic import Field

from hddm.calibration import FILE_NAME as CALIBRATION
from hddm.calibration import Calibration
from hddm.errors import HddmError
from hddm.facts import Facts, read_facts
from hddm.files import write_json
from hddm.model_folders import read_network
from hddm.models.router import RouterTransformer
from hddm.models.transformer import ExpertTransformer
from hddm.predictions import PredictionType

FORMAT = "1.0"
EXPERT_FILE = "expert.json"
ROUTER_FILE = "router.json"


class ShardFacts(Facts):
    """The shard that an expert was trained on."""

    index: int
    num_shards: int
    hash: str
    images: int


class ExpertFacts(Facts):
    """``expert.json``: the conventions under which the weights beside it mean something."""

    format: str = FORMAT
    objective: Literal["ddpm", "flow"]
    prediction_type: PredictionType
    schedule: dict[str, Any]
    schedule_source: str
    time_scale: float
    sample_shape: tuple[int, int, int]
    space: Literal["pixels", "latents"] = "pixels"
    latent_scale: float = 1.0
    """Samples are data × this factor; 1 for pixels in [-1, 1]."""
    conditions: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    null_class: int | None = None
    weights: Literal["ema", "raw"] = "ema"
    shard: ShardFacts | None = None
    training: dict[str, Any] = Field(default_factory=dict)
    source: str | None = None
    licence: str | None = None


class RouterFacts(Facts):
    """``router.json``: what a router tells apart, and how it counts time."""

    format: str = FORMAT
    time_scale: float
    sample_shape: tuple[int, int, int]
    shard_hashes: tuple[str, ...]
    """One a shard, in the order of the router's outputs."""
    shard_images: tuple[int, ...]
    training: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True)
class Expert:
    """An expert as it lies on disk."""

    network: ModelMixin
    facts: ExpertFacts
    calibration: Calibration | None


def null_conditions(null_class: int | None) -> dict[str, torch.Tensor]:
    """What stands for no condition, by keyword of the network."""
    return {} if null_class is None else {"class_labels": torch.tensor(null_class)}


def save_expert(folder: Path, expert: Expert) -> None:
    """Write an expert into an existing, empty ``folder``."""
    expert.network.save_pretrained(folder)
    if expert.calibration is not None:
        expert.calibration.save(folder)
    write_json(folder / EXPERT_FILE, expert.facts.model_dump(mode="json"))


def read_expert(folder: Path, dtype: torch.dtype = torch.float32) -> Expert:
    """Read an expert folder.

    Raises:
        HddmError: as `hddm.facts.read_facts` and `hddm.model_folders.read_network`.
    """
    facts = read_facts(folder / EXPERT_FILE, ExpertFacts, FORMAT)
    network = read_network(folder, ExpertTransformer, dtype)
    config = network.config
    shape = (config.in_channels, config.sample_size, config.sample_size)
    if facts.sample_shape != shape:
        raise HddmError(f"{folder}: expert.json says samples of {facts.sample_shape}, config.json {shape}")
    calibration = Calibration.load(folder)
    if calibration is not None and len(calibration.moments.mean) != math.prod(shape):
        raise HddmError(
            f"{folder / CALIBRATION}: is of samples of {len(calibration.moments.mean)} numbers, not of "
            f"{shape}; delete it and calibrate anew"
        )
    return Expert(network, facts, calibration)


def save_router(folder: Path, network: RouterTransformer, facts: RouterFacts) -> None:
    """Write a router into an existing, empty ``folder``."""
    network.save_pretrained(folder)
    write_json(folder / ROUTER_FILE, facts.model_dump(mode="json"))


def read_router(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[RouterTransformer, RouterFacts]:
    """Read a router folder; raises as `read_expert`."""
    facts = read_facts(folder / ROUTER_FILE, RouterFacts, FORMAT)
    network = read_network(folder, RouterTransformer, dtype)
    if network.config.num_experts != len(facts.shard_hashes):
        raise HddmError(
            f"{folder}: router.json names {len(facts.shard_hashes)} shards, config.json "
            f"{network.config.num_experts} experts"
        )
    return network, facts
