"""The networks that an expert may be, under one call: ``network(x, timestep, **conditions) -> Tensor``.

Architectures that diffusers has are diffusers' own classes. Which class a folder names is held to this
list; nothing else is ever built.
"""

from collections.abc import Mapping

import torch
from diffusers import ModelMixin
from torch import Tensor, nn

from hddm.interfaces import FLUX, has_variance_head
from hddm.interfaces import OPTIONAL_CONDITIONS as OPTIONAL_CONDITIONS
from hddm.interfaces import Interface as Interface
from hddm.interfaces import interface_of as interface_of
from hddm.models.packing import pack, positions, unpack
from hddm.models.transformer import ExpertTransformer
from hddm.network_configs import Imported

EXPERT_NETWORKS = Imported(
    [ExpertTransformer],
    [
        "DiTTransformer2DModel",
        "PixArtTransformer2DModel",
        "SD3Transformer2DModel",
        FLUX,
        "UNet2DModel",
        "UNet2DConditionModel",
    ],
)


class Adapter(nn.Module):
    """A network of `EXPERT_NETWORKS` that returns a tensor of its input's shape.

    Args:
        model: the network.
        round_time: feed whole timesteps, to the nearest (the recipe of arXiv:2603.06741).
    """

    def __init__(self, model: ModelMixin, round_time: bool = False) -> None:
        super().__init__()
        self.model = model
        self.round_time = round_time

    @property
    def config(self) -> object:
        """The network's own."""
        return self.model.config

    def forward(self, x: Tensor, timestep: Tensor, **conditions: Tensor) -> Tensor:
        """The prediction (batch, C, H, W), without a variance half.

        Args:
            x: state (batch, C, H, W).
            timestep: (batch,).
            conditions: those of the interface; what diffusers nests in ``added_cond_kwargs`` is flat here.
        """
        if self.round_time:
            timestep = timestep.round()
        # Text alone is multiplied as it is; sizes are embedded in float32, as times are.
        text = {name: conditions[name].to(x.dtype) for name in _TEXT if name in conditions}
        return call(self.model, x, timestep, {**conditions, **text})[:, : x.shape[1]]


_TEXT = ("encoder_hidden_states", "pooled_projections")
_ADDED = ("text_embeds", "time_ids", "resolution", "aspect_ratio")


def call(model: ModelMixin, x: Tensor, timestep: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
    """All that a network of `EXPERT_NETWORKS` gives, the variance half included.

    Flux casts times to its own dtype before it embeds them, and was trained so.
    """
    if isinstance(model, ExpertTransformer):
        output: Tensor = model(x, timestep, **conditions)
        return output
    if type(model).__name__ == FLUX:
        return _call_packed(model, x, timestep, conditions)
    plain = {name: value for name, value in conditions.items() if name not in _ADDED}
    added = {name: value for name, value in conditions.items() if name in _ADDED}
    nested = {"added_cond_kwargs": added} if added else {}
    result: Tensor = model(x, timestep=timestep, return_dict=False, **plain, **nested)[0]
    return result


def _call_packed(model: ModelMixin, x: Tensor, timestep: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
    height, width = x.shape[-2:]
    text = conditions.get("encoder_hidden_states")
    rows: Tensor = model(
        pack(x),
        timestep=timestep,
        img_ids=positions(height, width, x.device),
        # Text has no place: all of it lies at (0, 0, 0).
        txt_ids=torch.zeros(0 if text is None else text.shape[1], 3, device=x.device),
        return_dict=False,
        **conditions,
    )[0]
    return unpack(rows, height, width)


def adapted(model: ModelMixin, round_time: bool = False) -> nn.Module:
    """``model`` under the common call; itself where it already is."""
    has_variance = has_variance_head(type(model).__name__, model.config)
    if isinstance(model, ExpertTransformer) and not round_time and not has_variance:
        own: nn.Module = model
        return own
    return Adapter(model, round_time)
