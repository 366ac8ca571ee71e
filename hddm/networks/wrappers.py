"""Networks that an expert may have, with one call: ``network(x, timestep, **conditions) -> Tensor``.

A folder's class must be in `EXPERT_NETWORKS`; all but our transformer are diffusers' own. `interface_of`
reads inputs and outputs from the config alone. Flux takes and returns patches of 2×2 as rows:

    (batch, C, H, W)  ↔  (batch, HW/4, 4C)      row y W/2 + x holds patch (y, x), channel 4c + 2 dy + dx
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import ModelMixin
from einops import rearrange
from torch import Tensor, nn

from hddm.networks.transformers import ExpertTransformer
from hddm.utils.errors import HddmError, Unstated

# Conditions that a network can do without.
OPTIONAL_CONDITIONS = frozenset({"encoder_attention_mask"})
TEXT_CONDITIONS = ("encoder_hidden_states", "encoder_attention_mask", "pooled_projections", "text_embeds")
"""Conditions that a text encoder makes."""
LARGEST_SIDE = 4096
"""Of a sample. A UNet has no tensor that would bound what its config declares."""
FLUX = "FluxTransformer2DModel"
IN_LATENTS = "(in latents: 128 for pictures of 1024 pixels)"
_TEXT_WIDTHS = ("caption_channels", "text_dim", "joint_attention_dim", "cross_attention_dim")


@dataclass(frozen=True)
class Interface:
    """Inputs and outputs of a network, read from its config.

    ``sample_shape`` is (C, H, W). With ``variance_head``, the last C of 2 C output channels are a learned
    variance (arXiv:2102.09672), not part of the prediction. ``num_patches`` is None for a UNet.
    """

    sample_shape: tuple[int, int, int]
    variance_head: bool
    conditions: tuple[str, ...] = ()
    num_classes: int | None = None
    null_class: int | None = None
    num_patches: int | None = None


def interface_of(name: str, config: Mapping[str, object], size: tuple[int, int] | None = None) -> Interface:
    """Inputs and outputs of the network of class ``name`` with ``config``, defaults of the class included.

    ``size`` is a sample's height and width where the config states none, as Flux's. Raises `HddmError` where
    neither states a size, for an output that has neither C nor 2 C channels, and for an unsupported
    condition.
    """
    channels = _channels(name, config)
    patch = 2 if name == FLUX else _count(config, "patch_size")
    stated = config.get("sample_size")
    height, width = _sides(name, size if stated is None else stated)
    if patch and (height % patch or width % patch):
        text = f"a sample of {height}×{width} cannot be divided into them"
        raise HddmError(f"{name} has patches of side {patch}, and {text}")
    conditions, num_classes, null_class = _CONDITIONS[name](config)
    num_patches = height * width // patch**2 if patch else None
    shape, variance_head = (channels, height, width), has_variance_head(name, config)
    return Interface(shape, variance_head, conditions, num_classes, null_class, num_patches)


def has_variance_head(name: str, config: Mapping[str, object]) -> bool:
    """True if a network also outputs a learned variance; raises as `interface_of`."""
    taken, given = _count(config, "in_channels"), config.get("out_channels")
    return name != FLUX and taken is not None and given == 2 * taken


def own_time_factor(name: str) -> float:
    """Factor by which a network of class ``name`` multiplies its time before embedding it."""
    return 1000.0 if name == FLUX else 1.0


def text_width(config: Mapping[str, object]) -> int | None:
    """Width of the text tokens that the network takes, None without text."""
    stated = next((config[key] for key in _TEXT_WIDTHS if config.get(key)), None)
    # A UNet may state it for each of its levels.
    width = stated[0] if isinstance(stated, Sequence) else stated
    return width if isinstance(width, int) else None


def pooled_width(config: Mapping[str, Any]) -> int:
    """Width of the vector ``text_embeds`` of a UNet that also takes ``time_ids``, six numbers."""
    width: int = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
    return width


def _channels(name: str, config: Mapping[str, object]) -> int:
    taken, given = _count(config, "in_channels") or 0, config.get("out_channels")
    if given not in (None, taken) and not has_variance_head(name, config):
        text = "that is not a plain denoiser (an inpainting or upscaling model?)"
        raise HddmError(f"{name} takes {taken} channels and gives {given}: {text}")
    return taken // 4 if name == FLUX else taken


def _sides(name: str, size: Any) -> tuple[int, int]:
    if size is None:
        text = f"has no sample_size: pass `sample_size`, the side of its input {IN_LATENTS}"
        raise Unstated(f"the config of {name}", text, "sample_size")
    sides = (size, size) if isinstance(size, int) else size
    is_pair = isinstance(sides, Sequence) and len(sides) == 2
    if not is_pair or not all(isinstance(side, int) and 1 <= side <= LARGEST_SIDE for side in sides):
        text = f"it is a side, or a pair of sides, of 1 to {LARGEST_SIDE}; pass `sample_size`"
        raise HddmError(f"the config of {name} has sample_size {str(size)[:40]}: {text}")
    return sides[0], sides[1]


def _count(config: Mapping[str, object], key: str) -> int | None:
    value = config.get(key)
    if not isinstance(value, int | None):
        raise HddmError(f"{key} is {str(value)[:40]}, and must be a whole number")
    return value


_Conditions = tuple[tuple[str, ...], int | None, int | None]


def _expert(config: Mapping[str, object]) -> _Conditions:
    classes = _count(config, "num_classes")
    text = ("encoder_hidden_states",) if config.get("text_dim") else ()
    return (*(("class_labels",) if classes else ()), *text), classes, classes


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
    if (kind := config.get("class_embed_type")) is not None:
        raise HddmError(f"class_embed_type {kind!r} is not supported; only num_class_embeds is")
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


_TEXT = ("encoder_hidden_states", "pooled_projections")


def _sd3(config: Mapping[str, object]) -> _Conditions:
    # The tensor of positions has the largest side; a sample takes its middle.
    patch, most = _count(config, "patch_size"), _count(config, "pos_embed_max_size")
    side, most = config.get("sample_size"), (most or 0) * (patch or 0)
    if isinstance(side, int) and side > most:
        raise HddmError(f"sample_size is {side}, and SD3Transformer2DModel has positions for {most}")
    return _TEXT, None, None


def _flux(config: Mapping[str, object]) -> _Conditions:
    if (patch := config.get("patch_size")) != 1:
        raise HddmError(f"patch_size {str(patch)[:40]} of {FLUX} is not supported; its rows are packed")
    # No tensor bounds these, and they take memory once the network runs.
    axes, width = config.get("axes_dims_rope"), config.get("attention_head_dim")
    given = axes if isinstance(axes, Sequence) and len(axes) == 3 else ()
    are_even = all(isinstance(one, int) and one >= 2 and one % 2 == 0 for one in given)
    if not given or not are_even or sum(given) != width:
        text = f"it is three even numbers that sum to attention_head_dim, {str(width)[:40]}"
        raise HddmError(f"axes_dims_rope is {str(axes)[:40]}: {text}")
    return (*_TEXT, *(("guidance",) if config.get("guidance_embeds") else ())), None, None


_CONDITIONS = {
    "ExpertTransformer": _expert,
    "DiTTransformer2DModel": _dit,
    "PixArtTransformer2DModel": _pixart,
    "SD3Transformer2DModel": _sd3,
    FLUX: _flux,
    "UNet2DModel": _unet,
    "UNet2DConditionModel": _text_unet,
}


EXPERT_NETWORKS = (ExpertTransformer, *(name for name in _CONDITIONS if name != ExpertTransformer.__name__))


# Classes whose many instances in a network share one compiled graph.
_REPEATED = {
    *("ExpertBlock", "BasicTransformerBlock", "JointTransformerBlock"),
    *("FluxTransformerBlock", "FluxSingleTransformerBlock"),
}


def compile_blocks(network: nn.Module, **options: Any) -> None:
    """Let ``torch.compile``, with these ``options``, compile the repeated blocks of ``network``.

    All blocks of a class share one graph, so that the first run takes a fraction of the time that compiling
    the network takes. A network without such blocks, as diffusers' UNet without text, is compiled whole. With
    ``dynamic=True`` one graph serves batches of any size from 2, and another single samples.
    """
    if options.get("dynamic"):
        # Else sizes that happen to be equal, as of batch and tokens, must stay equal, or it compiles again.
        torch.fx.experimental._config.use_duck_shape = False
    blocks = [module for module in network.modules() if type(module).__name__ in _REPEATED]
    for block in blocks or [network]:
        block.compile(**options)


class NetworkWrapper(nn.Module):
    """A network of `EXPERT_NETWORKS` that returns a tensor of its input's shape."""

    def __init__(self, model: ModelMixin) -> None:
        super().__init__()
        self.model = model

    @property
    def config(self) -> object:
        return self.model.config

    def forward(self, x: Tensor, timestep: Tensor, **conditions: Tensor) -> Tensor:
        """The prediction (batch, C, H, W) for states ``x`` of that shape, without a variance half.

        ``timestep`` is (batch,); ``conditions`` are the interface's, including those that diffusers nests in
        ``added_cond_kwargs``.
        """
        # Text alone is multiplied as it is; sizes are embedded in float32, as times are.
        text = {name: conditions[name].to(x.dtype) for name in _TEXT if name in conditions}
        return call(self.model, x, timestep, {**conditions, **text})[:, : x.shape[1]]


ADDED = ("text_embeds", "time_ids", "resolution", "aspect_ratio")
"""Conditions that diffusers nests in ``added_cond_kwargs``."""


def call(model: ModelMixin, x: Tensor, timestep: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
    """Full output of a network of `EXPERT_NETWORKS`, including a variance half.

    Flux casts times to its own dtype before embedding them, and was trained that way.
    """
    if isinstance(model, ExpertTransformer):
        output: Tensor = model(x, timestep, **conditions)
        return output
    given: dict[str, Any] = {name: value for name, value in conditions.items() if name not in ADDED}
    if added := {name: value for name, value in conditions.items() if name in ADDED}:
        given["added_cond_kwargs"] = added
    is_packed = type(model).__name__ == FLUX
    if is_packed:
        text = conditions.get("encoder_hidden_states")
        given["img_ids"] = positions(x.shape[-2], x.shape[-1], x.device)
        # Text has no place: all of it lies at (0, 0, 0).
        given["txt_ids"] = torch.zeros(0 if text is None else text.shape[1], 3, device=x.device)
    result: Tensor = model(pack(x) if is_packed else x, timestep=timestep, return_dict=False, **given)[0]
    return unpack(result, x.shape[-2]) if is_packed else result


def pack(x: Tensor) -> Tensor:
    """Rows (batch, HW/4, 4C) of a state (batch, C, H, W) of even sides."""
    return rearrange(x, "b c (h p) (w q) -> b (h w) (c p q)", p=2, q=2)


def unpack(rows: Tensor, height: int) -> Tensor:
    """The state (batch, C, H, W) of rows (batch, HW/4, 4C), H = ``height``."""
    return rearrange(rows, "b (h w) (c p q) -> b c (h p) (w q)", h=height // 2, p=2, q=2)


def positions(height: int, width: int, device: torch.device) -> Tensor:
    """Position (0, y, x) of every row, (HW/4, 3); float32, since half types round large numbers."""
    sides = [torch.arange(size, device=device, dtype=torch.float32) for size in (1, height // 2, width // 2)]
    return torch.cartesian_prod(*sides)


def missing_from(given: Collection[str], declared: Sequence[str]) -> list[str]:
    """Conditions that the network needs beside the ``given`` ones."""
    return [name for name in declared if name not in given and name not in OPTIONAL_CONDITIONS]


def declared_shape(network: object) -> tuple[int, ...] | None:
    """Shape (C, H, W) of a sample by the config of a network, None where that has none."""
    config = getattr(network, "config", None)
    side, channels = getattr(config, "sample_size", None), getattr(config, "in_channels", None)
    if side is None or channels is None:
        return None
    height, width = (side, side) if isinstance(side, int) else side
    return (channels, height, width)
