"""Changes to a network during its conversion, on request: its modulation, text, and the paper's recipe.

`fold` and `add_text` work on the weights of an `ExpertTransformer`, a block at a time.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from diffusers import DiTTransformer2DModel, ModelMixin
from torch import Tensor
from torch.nn import functional as F

from hddm.checkpoints.sources import Checkpoint, KeyTable, Pair, Weights, as_planned, module
from hddm.networks.folders import empty_network
from hddm.networks.layers import Attention, TimeEmbedding, linear
from hddm.networks.transformers import ExpertTransformer, check_modulation
from hddm.utils.errors import HddmError
from hddm.utils.streams import Use, generator, seed_of
from hddm.utils.tensors import Planned

PAPER_STEPS = 999.0
FOLD_TIMES = 1000
# Parts that the recipe of arXiv:2603.06741 reinitialises: the head and the text projection.
_REINITIALISED: Mapping[str, tuple[str, ...]] = {
    "ExpertTransformer": ("final_layer.", "text_proj."),
    "DiTTransformer2DModel": ("proj_out_",),
    "PixArtTransformer2DModel": ("proj_out.", "scale_shift_table", "caption_projection."),
}
# Options of `DiTTransformer2DModel` that are fixed in `ExpertTransformer`.
_AS_OURS = {"attention_bias": True, "norm_elementwise_affine": False, "activation_fn": "gelu-approximate"}
PAIRS = 4096
NULL_SHARE = 0.1
# Below this share of the largest variance, a direction is only rounding error of the others.
VARIANCE_FLOOR = 1e-12


@dataclass(frozen=True)
class Built:
    """A network to write: class, arguments and tensors; ``modulation_error`` is that of `fold`, or None."""

    network: type[ModelMixin]
    arguments: dict[str, Any]
    tensors: list[Planned]
    modulation_error: float | None = None


def restart(built: Built, channels: int) -> Built:
    """Give the network a fresh head of ``channels`` outputs and a fresh text projection; keep all else."""
    prefixes = _REINITIALISED.get(built.network.__name__)
    if prefixes is None:
        raise HddmError(f"`recipe` paper is for transformers ({', '.join(_REINITIALISED)})")
    arguments = {**built.arguments, "out_channels": channels}
    depth = "depth" if built.network is ExpertTransformer else "num_layers"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(0, Use.FRESH_WEIGHTS))
        fresh = built.network(**{**arguments, depth: 0}).state_dict()
    tensors = [one for one in built.tensors if not one.name.startswith(prefixes)]
    tensors += [as_planned(name, value) for name, value in fresh.items() if name.startswith(prefixes)]
    return Built(built.network, arguments, tensors, built.modulation_error)


def as_expert_transformer(
    source: Checkpoint, tensors: list[Planned]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights and arguments of the `ExpertTransformer` that computes the function of a source's DiT."""
    weights = {one.name: one.read() for one in tensors}
    if source.network is ExpertTransformer:
        return weights, dict(source.arguments)
    if source.network is not DiTTransformer2DModel:
        kinds = "facebook-dit, diffusers-dit or an expert folder of hddm's own transformer"
        raise HddmError(f"{source.path}: only a DiT can change its architecture ({kinds})")
    # Includes the class's defaults, which a config may omit.
    given = empty_network(source.network, source.arguments, len(weights), str(source.path)).config
    alike = ("sample_size", "in_channels", "out_channels", "patch_size")
    config = {
        **{key: given[key] for key in alike},
        "hidden_size": given["num_attention_heads"] * given["attention_head_dim"],
        "depth": given["num_layers"],
        "num_heads": given["num_attention_heads"],
        "num_classes": given["num_embeds_ada_norm"],
        "modulation": "zero",
        "norm_eps": 1e-6,
        "mlp_norm_eps": given["norm_eps"],
        "frequency_shift": 1,
    }
    for key, usual in _AS_OURS.items():
        if given[key] != usual:
            raise HddmError(
                f"{source.path}: {key} is {str(given[key])[:40]!r}, and a DiT can change its architecture "
                f"with {usual!r} only; convert without `architecture` and `text_dim`"
            )
    renamed = _diffusers_dit_table(config["depth"]).renamed(weights, str(source.path))
    # The class computes its positions; ours are a parameter.
    shallow = DiTTransformer2DModel(**{**source.arguments, "num_layers": 0})
    return {**renamed, "pos_embed": shallow.pos_embed.pos_embed.clone()}, config


def _diffusers_dit_table(depth: int) -> KeyTable:
    """Map names of `DiTTransformer2DModel` to ours; each of its blocks holds a copy of the embedders."""
    pairs = [
        *module("pos_embed.proj", "patch_embed"),
        *module("proj_out_1", "final_layer.modulation"),
        *module("proj_out_2", "final_layer.linear"),
    ]
    copies = {"class_embedder.embedding_table.weight": "class_embed.weight"}
    for leaf in ("weight", "bias"):
        copies[f"timestep_embedder.linear_1.{leaf}"] = f"time_embed.mlp.0.{leaf}"
        copies[f"timestep_embedder.linear_2.{leaf}"] = f"time_embed.mlp.2.{leaf}"
    for theirs, ours in copies.items():
        names = tuple(f"transformer_blocks.{n}.norm1.emb.{theirs}" for n in range(depth))
        pairs.append(Pair(names, (ours,), copies=True))
    for n in range(depth):
        theirs, ours = f"transformer_blocks.{n}", f"layers.{n}"
        for leaf in ("weight", "bias"):
            fused = tuple(f"{theirs}.attn1.to_{one}.{leaf}" for one in "qkv")
            pairs.append(Pair(fused, (f"{ours}.attn.in_proj_{leaf}",)))
        pairs += [
            *module(f"{theirs}.attn1.to_out.0", f"{ours}.attn.out_proj"),
            *module(f"{theirs}.ff.net.0.proj", f"{ours}.mlp.0"),
            *module(f"{theirs}.ff.net.2", f"{ours}.mlp.2"),
            *module(f"{theirs}.norm1.linear", f"{ours}.modulation"),
        ]
    return KeyTable(pairs)


class Folded(NamedTuple):
    """A network whose blocks share their modulation: weights, in the source's dtypes, and arguments.

    ``modulation_error`` is the root mean square error of all six vectors of all blocks, over times and
    classes, divided by the root mean square of the vectors.
    """

    weights: dict[str, Tensor]
    config: dict[str, Any]
    modulation_error: float


def fold(weights: Weights, config: Mapping[str, Any], times: Tensor, rank: int) -> Folded:
    """Find the AdaLN-Single with residuals of rank ``rank`` that is closest to adaLN-Zero.

    With h = SiLU(time_embed(t) + class_embed(c)) it minimises

        sum_i E_h ||W_i h + b_i - (W + R_i) h - b - E_i||²  over W, b, E_i and R_i of rank ``rank``.

    The means give b + E_i = b_i + (W_i - W - R_i) E h. At rank 0, W = mean_i W_i for any Cov(h). Given W, R_i
    = U Uᵀ (W_i - W) with U the first ``rank`` left singular vectors of (W_i - W) Cov(h)^(1/2) (Eckart-Young);
    given R_i, W = mean_i (W_i - R_i). The two alternate once, which lowers the error but need not reach the
    global minimum. At full rank nothing is shared, and outputs equal the source's bit for bit. The final
    layer keeps its own map.

    ``weights`` and the constructor's ``config`` are those of an `ExpertTransformer` with
    ``modulation="zero"``. ``times`` (n,) are the finite values fed as ``timestep``, equally probable; so are
    the classes, except that the null class has the share ``NULL_SHARE``. ``rank`` is between 0 and the width;
    raises `HddmError` for another.
    """
    width = int(config["hidden_size"])
    check_modulation("single", rank, "linear", width)
    blocks = range(int(config["depth"]))
    kept = {key: weights[key] for key in weights if not re.match(r"layers\..*\.modulation\.", key)}
    arguments = {**config, "modulation": "single", "modulation_rank": rank, "final_modulation": "linear"}
    if rank == width:
        return Folded(kept | _unshared(weights, blocks, width), arguments, 0.0)
    mean, root = _moments(weights, config, times)
    shared = _shared(weights, blocks, root, rank)
    bias = sum((_bias(weights, i) for i in blocks), torch.zeros(6 * width, dtype=torch.float64))
    bias /= max(len(blocks), 1)
    dtype = weights["time_embed.mlp.0.weight"].dtype
    folded = {"t_block.1.weight": shared.to(dtype), "t_block.1.bias": bias.to(dtype)}
    error, power = 0.0, 0.0
    for i in blocks:
        own = _matrix(weights, i)
        power += ((own @ root).square().sum() + (own @ mean + _bias(weights, i)).square().sum()).item()
        difference = own - shared
        left, tail = _leading(difference, root, rank)
        right = left.T @ difference
        if rank:
            folded[f"layers.{i}.residual.0.weight"] = right.to(dtype)
            folded[f"layers.{i}.residual.1.weight"] = left.to(dtype)
        table = _bias(weights, i) - bias + difference @ mean - left @ (right @ mean)
        folded[f"layers.{i}.scale_shift_table"] = table.view(6, width).to(dtype)
        error += tail
    return Folded(kept | folded, arguments, float((error / power) ** 0.5) if power else 0.0)


def add_text(
    weights: Weights, config: Mapping[str, Any], text_dim: int
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return weights and config with cross-attention to text tokens of width ``text_dim``.

    Output projections are zero, so that outputs keep their bits with any text until training changes that;
    the rest starts as in a fresh `ExpertTransformer`. Raises `HddmError` where the network takes text.
    """
    if config.get("text_dim") is not None:
        raise HddmError(f"text_dim is {config['text_dim']}: the network already takes text")
    width, heads = int(config["hidden_size"]), int(config["num_heads"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(0, Use.FRESH_WEIGHTS, 1))
        modules = {"text_proj": linear(text_dim, width).state_dict()}
        for i in range(int(config["depth"])):
            modules[f"layers.{i}.cross_attn"] = Attention(width, heads, silent=True).state_dict()
    like = weights["patch_embed.weight"]
    added = {f"{name}.{key}": one.to(like) for name, own in modules.items() for key, one in own.items()}
    return {**weights, **added}, {**config, "text_dim": text_dim}


def _matrix(weights: Weights, block: int) -> Tensor:
    return weights[f"layers.{block}.modulation.weight"].double()


def _bias(weights: Weights, block: int) -> Tensor:
    return weights[f"layers.{block}.modulation.bias"].double()


def _unshared(weights: Weights, blocks: range, width: int) -> dict[str, Tensor]:
    like = weights["time_embed.mlp.0.weight"]
    folded = {
        "t_block.1.weight": like.new_zeros(6 * width, width),
        "t_block.1.bias": like.new_zeros(6 * width),
    }
    for i in blocks:
        folded[f"layers.{i}.scale_shift_table"] = weights[f"layers.{i}.modulation.bias"].reshape(6, width)
        folded[f"layers.{i}.residual.weight"] = weights[f"layers.{i}.modulation.weight"]
    return folded


def _shared(weights: Weights, blocks: range, root: Tensor, rank: int) -> Tensor:
    """W (6 width, width): the mean of the blocks' matrices, refined once by their residuals' mean."""
    width = len(root)
    mean = torch.zeros(6 * width, width, dtype=torch.float64)
    for i in blocks:
        mean += _matrix(weights, i) / len(blocks)
    residuals = torch.zeros_like(mean)
    for i in blocks if rank else ():
        difference = _matrix(weights, i) - mean
        left, _ = _leading(difference, root, rank)
        residuals += left @ (left.T @ difference) / len(blocks)
    return mean - residuals


def _leading(matrix: Tensor, root: Tensor, rank: int) -> tuple[Tensor, float]:
    """The first ``rank`` left singular vectors (m, rank) of matrix root, and the sum of the other squares.

    Where ``rank`` exceeds the number of singular values, more orthonormal vectors are added.
    """
    gram = root.T @ (matrix.T @ matrix) @ root
    if not rank:
        return matrix[:, :0], gram.trace().item()
    squares, vectors = torch.linalg.eigh(gram)
    images = matrix @ (root @ vectors.flip(1)[:, :rank])
    padded = F.pad(images, (0, rank - images.shape[1]))
    return torch.linalg.qr(padded).Q, squares.flip(0)[rank:].clamp(min=0).sum().item()


def _moments(weights: Weights, config: Mapping[str, Any], times: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (d,) of h and a root (d, k) with root rootᵀ = Cov(h), float64."""
    table = weights.get("class_embed.weight")
    time_of, class_of, shares = _pairs(len(times), 0 if table is None else len(table))
    with torch.device("meta"):
        embed = TimeEmbedding(int(config["hidden_size"]), int(config.get("frequency_shift", 0)))
    names = [name for name, _ in embed.named_parameters()]
    embed.load_state_dict({name: weights[f"time_embed.{name}"].double() for name in names}, assign=True)
    with torch.no_grad():
        embedded = embed(times.to("cpu", torch.float64))[time_of]
    if table is not None:
        embedded += table.double()[class_of]
    h = F.silu(embedded)
    mean = shares @ h
    h = (h - mean) * shares.sqrt()[:, None]
    variances, directions = torch.linalg.eigh(h.T @ h)
    real = variances > VARIANCE_FLOOR * variances[-1]
    return mean, directions[:, real] * variances[real].sqrt()


def _pairs(times: int, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Time indices, class indices and shares of pairs: all of them, or ``PAIRS`` stratified ones.

    The last class is the null class.
    """
    if times * max(classes, 1) <= PAIRS:
        chances = torch.ones(1, dtype=torch.float64)
        if classes > 1:
            chances = torch.full((classes,), (1 - NULL_SHARE) / (classes - 1), dtype=torch.float64)
            chances[-1] = NULL_SHARE
        grid = torch.cartesian_prod(torch.arange(times), torch.arange(len(chances)))
        return grid[:, 0], grid[:, 1], chances[grid[:, 1]] / times
    time_of = torch.arange(PAIRS) * times // PAIRS
    shuffled = torch.randperm(PAIRS, generator=generator(0, Use.MODULATION_PAIRS))
    quantiles = (shuffled.double() + 0.5) / PAIRS / (1 - NULL_SHARE)
    class_of = (quantiles * (classes - 1)).long().clamp(max=classes - 1)
    return time_of, class_of, torch.full((PAIRS,), 1 / PAIRS, dtype=torch.float64)
