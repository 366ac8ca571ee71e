"""Single-file latent diffusion (CompVis, Stability): a Stable Diffusion checkpoint with everything in it.

Names are mapped by diffusers' own conversion, run once over the tensors to learn the table. The network's
sizes are read from shapes. The file brings its betas and latent scale as buffers, but says nowhere whether
it predicts noise or v; that has to be said (``--prediction-type``).
"""

import re
from collections.abc import Mapping
from typing import Any

from diffusers import UNet2DConditionModel
from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint
from torch import Tensor

from hddm.checkpoints.keys import KeyTable, same
from hddm.checkpoints.layouts import Hints, Weights, count_blocks, shape_of
from hddm.errors import HddmError

UNET = "model.diffusion_model."
EMA = "model_ema."
MARKERS = (f"{UNET}input_blocks.0.0.weight", f"{UNET}time_embed.0.weight")
# Parts of such a file that a velocity field has no use for.
OTHER_PARTS = ("first_stage_model.", "cond_stage_model.", "conditioner.")
NETWORK = UNet2DConditionModel
_BUFFERS = re.compile(
    r"betas|alphas_cumprod(_prev)?|(sqrt_|log_)\w+|posterior_\w+|lvlb_weights|logvar|scale_factor|"
    r"denoiser\.sigmas|v_pred|ztsnr"
)


def weight_sets(weights: Weights) -> dict[str, dict[str, Tensor]]:
    """The UNet's tensors by set: averaged copies have flattened names under ``model_ema``."""
    raw = {name: tensor for name, tensor in weights.items() if name.startswith(UNET)}
    averaged = {name: weights.get(EMA + "".join(name.split(".")[1:])) for name in raw}
    present = {name: tensor for name, tensor in averaged.items() if tensor is not None}
    if not present:
        return {"unstated": raw}
    return {"raw": raw, "ema": present}


def arguments(weights: Weights, hints: Hints, origin: str) -> dict[str, Any]:
    """Arguments of the `UNet2DConditionModel` with the same function, read from shapes.

    Raises:
        HddmError: for a network without text conditions, or one whose blocks are not regular.
    """
    unet = {name.removeprefix(UNET): tensor for name, tensor in weights.items()}
    inputs = count_blocks(unet, "input_blocks")
    kinds = [_kind(unet, f"input_blocks.{n}") for n in range(inputs)]
    levels: list[list[int]] = [[]]
    for n, kind in enumerate(kinds[1:], 1):
        if kind == "down":
            levels.append([])
        else:
            levels[-1].append(n)
    channels = [
        shape_of(unet, f"input_blocks.{level[0]}.0.out_layers.3.weight", 4, origin)[0] for level in levels
    ]
    depths = [_depth(unet, f"input_blocks.{level[0]}.1") for level in levels]
    if len({len(level) for level in levels}) > 1:
        raise HddmError(
            f"{origin}: levels of {[len(level) for level in levels]} layers; no UNet of SD's kind"
        )
    middle = _depth(unet, "middle_block.1")
    prefix = next((f"input_blocks.{n}.1" for n, kind in enumerate(kinds) if kind == "attention"), None)
    if prefix is None:
        raise HddmError(f"{origin}: no attention to text was found; only text-conditional UNets are known")
    context = shape_of(unet, f"{prefix}.transformer_blocks.0.attn2.to_k.weight", 2, origin)[1]
    is_linear = unet[f"{prefix}.proj_in.weight"].ndim == 2
    types = ["CrossAttnDownBlock2D" if depth else "DownBlock2D" for depth in depths]
    layers = [max(depth, 1) for depth in depths]
    if depths[-1] == 0 and middle:
        layers[-1] = middle
    result: dict[str, Any] = {
        "sample_size": hints.sample_size or (128 if "label_emb.0.0.weight" in unet else 64),
        "in_channels": shape_of(unet, "input_blocks.0.0.weight", 4, origin)[1],
        "out_channels": shape_of(unet, "out.2.weight", 4, origin)[0],
        "block_out_channels": channels,
        "down_block_types": types,
        "up_block_types": [name.replace("Down", "Up") for name in reversed(types)],
        "layers_per_block": len(levels[0]),
        "transformer_layers_per_block": layers[0] if len(set(layers)) == 1 else layers,
        "cross_attention_dim": context,
        "use_linear_projection": is_linear,
        "attention_head_dim": _heads(channels, is_linear, hints),
    }
    if "label_emb.0.0.weight" in unet:
        width = shape_of(unet, "label_emb.0.0.weight", 2, origin)[1]
        result |= {
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": width,
        }
    return result


def _heads(channels: list[int], is_linear: bool, hints: Hints) -> int | list[int]:
    """What diffusers misnames attention_head_dim: the number of heads.

    Stable Diffusion 1 has 8 at every width; 2 and XL, which project linearly, have heads of 64 channels.
    """
    if hints.num_heads is not None:
        return hints.num_heads
    return [width // 64 for width in channels] if is_linear else 8


def table(config: Mapping[str, Any], weights: Weights) -> KeyTable:
    """Names of the file against those of the class, learnt from diffusers' own conversion."""
    names = {id(tensor): name for name, tensor in weights.items()}
    mapped = convert_ldm_unet_checkpoint(dict(weights), {"class_embed_type": None, **config})
    return KeyTable([same(names[id(tensor)], ours) for ours, tensor in mapped.items() if tensor is not None])


def betas(everything: Weights) -> list[float] | None:
    """The training betas that the file carries as a buffer."""
    found = everything.get("betas")
    return None if found is None else [float(beta) for beta in found.double()]


def latent_scale(everything: Weights) -> float | None:
    """The VAE's scale where the file carries it."""
    found = everything.get("scale_factor")
    return None if found is None else float(found)


def _kind(unet: Weights, block: str) -> str:
    if f"{block}.0.op.weight" in unet:
        return "down"
    return "attention" if f"{block}.1.proj_in.weight" in unet else "plain"


def _depth(unet: Weights, prefix: str) -> int:
    pattern = re.compile(rf"{re.escape(prefix)}\.transformer_blocks\.(\d+)\.")
    found = [int(match[1]) for match in map(pattern.match, unet) if match]
    return 1 + max(found, default=-1)


def prediction_type(everything: Weights) -> str | None:
    """``v_prediction`` where the file carries the marker that trainers of such models leave."""
    return "v_prediction" if "v_pred" in everything else None


def strangers(everything: Weights) -> list[str]:
    """Names that belong to none of the parts of such a file."""
    known = (UNET, EMA, *OTHER_PARTS)
    return [name for name in everything if not name.startswith(known) and not _BUFFERS.fullmatch(name)]


def table_of_class(config: Mapping[str, Any], weights: Weights) -> KeyTable:
    """As `table`, given the tensors under the names of the class."""
    raise NotImplementedError
