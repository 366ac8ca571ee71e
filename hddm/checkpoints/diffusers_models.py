"""Networks of diffusers, and expert folders, as checkpoints: tensor names, and networks that the check runs.

`open_expert` reads our own folders, to be folded, re-initialised or written back to another layout.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    DiTTransformer2DModel,
    FluxTransformer2DModel,
    ModelMixin,
    PixArtTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
    UNet2DModel,
)
from torch import Tensor, nn

from hddm.checkpoints.keys import KeyTable, same
from hddm.checkpoints.layouts import Forward, Weights
from hddm.checkpoints.sources import Checkpoint, Declared, Reading
from hddm.experts.lora import ADAPTER_WEIGHTS, base_of, open_adapted
from hddm.experts.records import (
    EXPERT_FILE,
    EXTRAS_FILE,
    FILES,
    FORMAT,
    ExpertRecord,
    read_nulls,
    remedy,
    without_adapter,
)
from hddm.networks.folders import WEIGHTS, empty_network, fill, open_network
from hddm.networks.layers import TimeEmbedding
from hddm.networks.transformers import ExpertBlock
from hddm.networks.vae import stored_names
from hddm.networks.wrappers import EXPERT_NETWORKS, call
from hddm.utils.errors import HddmError
from hddm.utils.records import read_record, refuse_damaged
from hddm.utils.tensors import read_safetensors

LAYOUT = "hddm"
DIFFUSERS_LAYOUTS: Mapping[str, type[ModelMixin]] = {
    "diffusers-dit": DiTTransformer2DModel,
    "diffusers-pixart": PixArtTransformer2DModel,
    "diffusers-sd3": SD3Transformer2DModel,
    "diffusers-flux": FluxTransformer2DModel,
    "diffusers-unet2d": UNet2DModel,
    "diffusers-unet2d-condition": UNet2DConditionModel,
}


def own_table(
    kind: type[ModelMixin], arguments: Mapping[str, Any], weights: Weights, origin: str
) -> KeyTable:
    """Names of a file of ``kind`` against those of the class, the same but for former names."""
    names = empty_network(kind, arguments, len(weights), origin).state_dict()
    pairs = [same(old, name) for name, old in stored_names(names, weights).items()]
    benign = {"pos_embed.pos_embed": "computed anew"} if "pos_embed.pos_embed" not in names else {}
    return KeyTable(pairs, benign)


def class_forward(
    kind: type[ModelMixin], arguments: Mapping[str, Any], weights: Weights, origin: str
) -> Forward:
    """The class itself, filled with ``weights`` under its names, in float32."""
    network = streamed(kind, arguments, weights, origin)

    @torch.no_grad()
    def run(x: Tensor, timestep: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        with named_failure(origin, kind.__name__):
            return call(network, x, timestep, conditions)

    return run


@contextmanager
def named_failure(origin: str, name: str) -> Iterator[None]:
    """Turn whatever a network makes of sizes that do not go together into one line that names its source."""
    try:
        yield
    except HddmError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        raise HddmError(
            f"{origin}: its {name} does not run ({type(error).__name__}: {text}); correct its config"
        ) from error


def streamed(
    kind: type[ModelMixin], arguments: Mapping[str, Any], weights: Weights, origin: str
) -> ModelMixin:
    """A network of ``weights`` that runs in float32.

    Weights of another dtype are cast where they are used, a module at a time, so that a large network never
    lies in memory as a whole.
    """
    network = empty_network(kind, arguments, len(weights), origin)
    fill(network, weights, arguments, origin)
    if kind is UNet2DModel:
        # It asks its parameters for its dtype in the middle of a call.
        network.float()
    _cast_in_use(network)
    return network


def _cast_in_use(network: nn.Module) -> None:
    for module in network.modules():
        # These two look at their children's parameters before, or instead of, calling them.
        reach = list(module.modules()) if isinstance(module, (TimeEmbedding, ExpertBlock)) else [module]
        stored = [
            (owner, name, parameter)
            for owner in reach
            for name, parameter in owner._parameters.items()
            if parameter is not None and parameter.dtype != torch.float32
        ]
        if stored:
            module.register_forward_pre_hook(_Put(stored, torch.float32))
            module.register_forward_hook(_Put(stored, None))


class _Put:
    """A hook that puts parameters in place, cast to ``dtype`` or as they are stored."""

    def __init__(
        self, stored: Sequence[tuple[nn.Module, str, nn.Parameter]], dtype: torch.dtype | None
    ) -> None:
        self._stored, self._dtype = stored, dtype

    def __call__(self, *_: object) -> None:
        for owner, name, parameter in self._stored:
            value = parameter if self._dtype is None else nn.Parameter(parameter.to(self._dtype), False)
            owner._parameters[name] = value


def open_expert(folder: Path, reading: Reading) -> Checkpoint:
    """An expert folder; an adapter is merged into its base.

    Raises:
        HddmError: as `hddm.experts.records.read_expert`, or for options that only foreign sources have.
    """
    facts = read_record(folder / EXPERT_FILE, ExpertRecord, FORMAT)
    files: tuple[Path, ...] = (folder / WEIGHTS,)
    if facts.adapter is None:
        network, weights, arguments = open_network(folder, EXPERT_NETWORKS)
    else:
        base = base_of(folder, facts.adapter)
        files = (folder / ADAPTER_WEIGHTS, base / WEIGHTS)
        network, weights, arguments = open_adapted(folder, facts.adapter, base, EXPERT_NETWORKS)
        facts = without_adapter(facts)
    if reading.layout not in (None, LAYOUT):
        raise HddmError(f"--layout {reading.layout}: {folder} is an expert folder")
    if reading.weights not in (None, facts.weights):
        raise HddmError(f"--weights {reading.weights}: {folder} holds {facts.weights} weights")
    refuse_damaged(folder, EXPERT_FILE, FILES, remedy=remedy(folder))
    path = str(files[0])
    kind = type(network)
    return Checkpoint(
        path=folder,
        layout=LAYOUT,
        files=files,
        weights=weights,
        network=kind,
        arguments=arguments,
        table=own_table(kind, arguments, weights, path),
        forward=lambda: class_forward(kind, arguments, weights, path),
        declared=Declared(facts.schedule, str(folder / EXPERT_FILE), prediction_type=facts.prediction_type),
        sets=(facts.weights,),
        chosen=facts.weights,
        nulls={},
        is_latent=facts.space == "latents",
        latent_scale=facts.latent_scale,
        licence=facts.licence,
        facts=facts,
        kept=read_safetensors(folder / EXTRAS_FILE) if (folder / EXTRAS_FILE).exists() else {},
        null_tensors=read_nulls(folder),
    )
