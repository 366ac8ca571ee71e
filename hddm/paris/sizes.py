"""From the shapes of a Paris file to the arguments of its network, and from these to what must be there."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffusers import ModelMixin
from torch import Tensor

from hddm.errors import HddmError
from hddm.network_configs import differences, empty_network

EXPERT_HEAD, ROUTER_HEAD = 72, 64
"""Width of an attention head."""

Shapes = Mapping[str, Tensor]


def expert_arguments(tensors: Shapes, path: Path) -> dict[str, Any]:
    """Those of `ExpertTransformer`.

    Raises:
        HddmError: where a tensor that tells a size is missing, or sizes make no square of patches or no
            whole number of heads.
    """
    text = _shape(tensors, "text_proj.weight", 2, path)[1]
    return _sizes(tensors, EXPERT_HEAD, "scale_shift_table", path) | {"text_dim": text}


def router_arguments(tensors: Shapes, path: Path) -> dict[str, Any]:
    """Those of `RouterTransformer`; raises as `expert_arguments`."""
    num_experts = _shape(tensors, "head.4.weight", 2, path)[0]
    sizes = _sizes(tensors, ROUTER_HEAD, "adaLN_modulation.1.weight", path)
    return {"num_experts": num_experts} | sizes


def expected(kind: type[ModelMixin], arguments: Mapping[str, Any], found: Shapes, path: Path) -> Shapes:
    """The shapes of a network with these arguments."""
    shapes: Shapes = empty_network(kind, arguments, len(found), str(path)).state_dict()
    return shapes


def check_same(wanted: Shapes, found: Shapes, path: Path) -> None:
    """Refuse a file with any tensor missing, left over or of another shape; all are listed."""
    problems = differences(wanted, found)
    if problems:
        raise HddmError(f"{path}: is no network of Paris: {'; '.join(problems)}")


def unlike(arguments: Mapping[str, Any], others: Mapping[str, Any]) -> str:
    """Where ``arguments`` differ from ``others``, as part of a sentence; empty where they do not."""
    pairs = [(key, value, others[key]) for key, value in arguments.items() if value != others[key]]
    return " and ".join(f"{key} {value} beside {other}" for key, value, other in pairs)


def _sizes(tensors: Shapes, head: int, in_every_block: str, path: Path) -> dict[str, Any]:
    """The arguments that expert and router have in common."""
    _, channels, patch, across = _shape(tensors, "patch_embed.weight", 4, path)
    _, tokens, width = _shape(tensors, "pos_embed", 3, path)
    _shape(tensors, f"layers.0.{in_every_block}", 2, path)
    side = math.isqrt(tokens)
    if side**2 != tokens or patch != across:
        raise HddmError(
            f"{path}: {tokens} positions of {patch} × {across} patches make no square, as Paris's images are"
        )
    if width % head:
        raise HddmError(f"{path}: a width of {width} does not divide into heads of {head}, which Paris has")
    layers = [re.match(r"layers\.(\d{1,6})\.", name, re.ASCII) for name in tensors]
    return {
        "sample_size": side * patch,
        "in_channels": channels,
        "patch_size": patch,
        "hidden_size": width,
        "depth": 1 + max(int(match[1]) for match in layers if match),
        "num_heads": width // head,
    }


def _shape(tensors: Shapes, name: str, ndim: int, path: Path) -> tuple[int, ...]:
    if name not in tensors:
        raise HddmError(f"{path}: lacks {name}, which this network of Paris has; fetch it again")
    shape = tuple(tensors[name].shape)
    if len(shape) != ndim:
        raise HddmError(f"{path}: {name} is {shape}, and has {ndim} dimensions in Paris; fetch it again")
    return shape
