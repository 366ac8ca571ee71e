"""The networks that an expert may be, under one call: ``network(x, timestep, **conditions) -> Tensor``.

Architectures that diffusers has are diffusers' own classes. Which class a folder names is held to this
list; nothing else is ever built.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from diffusers import (
    DiTTransformer2DModel,
    ModelMixin,
    PixArtTransformer2DModel,
    UNet2DConditionModel,
    UNet2DModel,
)
from torch import Tensor, nn

from hddm.errors import HddmError
from hddm.models.transformer import ExpertTransformer

EXPERT_NETWORKS: tuple[type[ModelMixin], ...] = (
    ExpertTransformer,
    DiTTransformer2DModel,
    PixArtTransformer2DModel,
    UNet2DModel,
    UNet2DConditionModel,
)
# Conditions that a network does without.
OPTIONAL_CONDITIONS = frozenset({"encoder_attention_mask"})


LARGEST_SIDE = 4096
"""Of a sample. A UNet has no tensor that would bound what its config declares."""


@dataclass(frozen=True)
class Interface:
    """What a network takes and gives, read off its config.

    ``sample_shape`` is (C, H, W); ``variance_head`` says that the output has 2 C channels, of which the
    last C are a learned variance (arXiv:2102.09672) and no part of the prediction. ``null_class`` is the
    label that stands for no class.
    """

    sample_shape: tuple[int, int, int]
    variance_head: bool
    conditions: tuple[str, ...] = ()
    num_classes: int | None = None
    null_class: int | None = None


class Adapter(nn.Module):
    """A network of `EXPERT_NETWORKS` that returns a tensor of its input's shape.

    Args:
        model: the network.
        interface: see `Interface`.
        round_time: feed whole timesteps, to the nearest (the recipe of arXiv:2603.06741).
    """

    def __init__(self, model: ModelMixin, interface: Interface, round_time: bool = False) -> None:
        super().__init__()
        self.model = model
        self.interface = interface
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
        if "encoder_hidden_states" in conditions:
            text = conditions["encoder_hidden_states"].to(x.dtype)
            conditions = {**conditions, "encoder_hidden_states": text}
        return call(self.model, x, timestep, conditions)[:, : x.shape[1]]


_ADDED = ("text_embeds", "time_ids", "resolution", "aspect_ratio")


def call(model: ModelMixin, x: Tensor, timestep: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
    """All that a network of `EXPERT_NETWORKS` gives, the variance half included."""
    if isinstance(model, ExpertTransformer):
        output: Tensor = model(x, timestep, **conditions)
        return output
    plain = {name: value for name, value in conditions.items() if name not in _ADDED}
    added = {name: value for name, value in conditions.items() if name in _ADDED}
    nested = {"added_cond_kwargs": added} if added else {}
    result: Tensor = model(x, timestep=timestep, return_dict=False, **plain, **nested)[0]
    return result


def adapted(model: ModelMixin, round_time: bool = False) -> nn.Module:
    """``model`` under the common call; itself where it already is.

    Raises:
        HddmError: as `interface_of`.
    """
    interface = interface_of(type(model).__name__, model.config)
    if isinstance(model, ExpertTransformer) and not round_time and not interface.variance_head:
        own: nn.Module = model
        return own
    return Adapter(model, interface, round_time)


def interface_of(name: str, config: Mapping[str, object]) -> Interface:
    """What the network of class ``name`` with this ``config`` takes and gives.

    Raises:
        HddmError: for a config without a sample size, an output that is neither C nor 2 C channels, or
            a condition that has no place here.
    """
    channels, out_channels = _count(config, "in_channels"), config.get("out_channels")
    if channels is None:
        raise HddmError(f"the config of {name} has no in_channels")
    if out_channels not in (None, channels, 2 * channels):
        raise HddmError(
            f"{name} takes {channels} channels and gives {out_channels}: that is no plain denoiser "
            "(an inpainting or upscaling model?)"
        )
    conditions, num_classes, null_class = _CONDITIONS[name](config)
    return Interface(
        sample_shape=(channels, *_sides(name, config.get("sample_size"))),
        variance_head=out_channels == 2 * channels,
        conditions=conditions,
        num_classes=num_classes,
        null_class=null_class,
    )


def _sides(name: str, size: object) -> tuple[int, int]:
    if size is None:
        raise HddmError(f"the config of {name} has no sample_size: pass --sample-size, the side of its input")
    sides = (size, size) if isinstance(size, int) else size
    if (
        not isinstance(sides, Sequence)
        or len(sides) != 2
        or not all(isinstance(side, int) and 1 <= side <= LARGEST_SIDE for side in sides)
    ):
        raise HddmError(
            f"the config of {name} has sample_size {str(size)[:40]}: it is a side, or a pair of sides, "
            f"of 1 to {LARGEST_SIDE}; pass --sample-size"
        )
    return sides[0], sides[1]


def _count(config: Mapping[str, object], key: str) -> int | None:
    value = config.get(key)
    if value is not None and (not isinstance(value, int) or value < 1):
        raise HddmError(f"{key} is {str(value)[:40]}, and must be a whole number from 1")
    return value


_Conditions = tuple[tuple[str, ...], int | None, int | None]


def _expert(config: Mapping[str, object]) -> _Conditions:
    classes = _count(config, "num_classes")
    names = (("class_labels",) if classes else ()) + (
        ("encoder_hidden_states",) if config.get("text_dim") else ()
    )
    return names, classes, classes


def _dit(config: Mapping[str, object]) -> _Conditions:
    classes = _count(config, "num_embeds_ada_norm")
    return ("class_labels",), classes, classes


def _pixart(config: Mapping[str, object]) -> _Conditions:
    names: tuple[str, ...] = ("encoder_hidden_states", "encoder_attention_mask")
    extra = config.get("use_additional_conditions")
    if extra or (extra is None and config.get("sample_size") == 128):
        names += ("resolution", "aspect_ratio")
    return names, None, None


def _unet(config: Mapping[str, object]) -> _Conditions:
    if config.get("class_embed_type") is not None:
        raise HddmError(
            f"class_embed_type {config['class_embed_type']!r} is not supported; only num_class_embeds is"
        )
    classes = _count(config, "num_class_embeds")
    # Nothing in the config says whether the last class stands for none.
    return ("class_labels",) if classes else (), classes, None


def _text_unet(config: Mapping[str, object]) -> _Conditions:
    for key, allowed in (
        ("addition_embed_type", (None, "text_time")),
        ("encoder_hid_dim_type", (None,)),
        ("time_cond_proj_dim", (None,)),
    ):
        if config.get(key) not in allowed:
            raise HddmError(f"{key} {config[key]!r} of UNet2DConditionModel is not supported")
    labels, classes, null = _unet(config)
    added = ("text_embeds", "time_ids") if config.get("addition_embed_type") else ()
    return ("encoder_hidden_states", *labels, *added), classes, null


_CONDITIONS = {
    "ExpertTransformer": _expert,
    "DiTTransformer2DModel": _dit,
    "PixArtTransformer2DModel": _pixart,
    "UNet2DModel": _unet,
    "UNet2DConditionModel": _text_unet,
}
