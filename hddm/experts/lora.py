"""Low-rank changes to another expert's weights (LoRA, arXiv:2106.09685), in peft's format.

An adapter's folder holds ``adapter_config.json`` and ``adapter_model.safetensors``, which peft can open;
``expert.json`` has the SHA-256 of the base weights, which lie elsewhere, once for all adapters that share
them. Before a run, a target weight W (out, in) becomes

    W + alpha/rank · B A,   A (rank, in),  B (out, rank),

computed in float32 at least and then cast, so that an adapted network is like any other. Of a convolution W
is (out, in, h, w), A (rank, in, h, w) and B (out, rank, 1, 1). Several adapters of one base in an ensemble
are not merged, and share it (`hddm.experts.sharing`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import ModelMixin
from safetensors.torch import save_file
from torch import Tensor

from hddm.experts.adapter_records import ADAPTER_CONFIG, ADAPTER_WEIGHTS, AdapterRecord, check_base
from hddm.networks.folders import (
    WeightsReader,
    cast,
    fitting,
    of_experts,
    parse_config,
    refuse_other_tensors,
)
from hddm.utils.errors import HddmError
from hddm.utils.files import read_json, write_json
from hddm.utils.records import (
    WEIGHTS,
)
from hddm.utils.tensors import promoted, read_header, refuse_non_finite

PREFIX = "base_model.model."
"""The prefix that peft puts before the name of every tensor."""

# Keys that can change peft's formula.
_VARIANTS = (
    "use_dora",
    "use_rslora",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "fan_in_fan_out",
    "layer_replication",
    "modules_to_save",
    "trainable_token_indices",
)
_READ_TYPES = (None, "LORA", "LOHA", "LOKR")
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
"""Values of ``init_lora_weights`` that leave the base's weights as they are."""


def peft_config(adapter: AdapterRecord) -> dict[str, Any]:
    """Arguments of the peft config with the adapter's formula."""
    layers, parameters = [], []
    for target in adapter.targets:
        if target.endswith(".weight"):
            layers.append(target.removesuffix(".weight"))
        else:
            parameters.append(target)
    return {
        "r": adapter.rank,
        # An integer where possible, as in peft's own scripts.
        "lora_alpha": int(adapter.alpha) if adapter.alpha.is_integer() else adapter.alpha,
        "target_modules": layers,
        "target_parameters": parameters or None,
        "base_model_name_or_path": adapter.base,
    }


def write_adapter(folder: Path, adapter: AdapterRecord, tensors: Mapping[str, Tensor]) -> None:
    """Write the factors of an adapter, by the names of `tensor_names`, and their config for peft."""
    save_file(dict(tensors), folder / ADAPTER_WEIGHTS, {"format": "pt"})
    of_kind = {"peft_type": "LORA", "bias": "none", "inference_mode": True}
    write_json(folder / ADAPTER_CONFIG, of_kind | peft_config(adapter))


def open_adapted(
    folder: Path, adapter: AdapterRecord, base: Path
) -> tuple[ModelMixin, dict[str, Tensor], dict[str, Any]]:
    """An adapter folder's empty network, its weights in the base's dtypes, and its config."""
    path = folder / "config.json"
    kind, arguments = parse_config(read_json(path), of_experts(), str(path))
    weights = Merged(folder, adapter, base)()
    return fitting(kind, arguments, weights, base / WEIGHTS, str(path)), weights, arguments


class Merged:
    """Reader of an adapted network's weights; see `hddm.networks.folders.WeightsReader`.

    Raises `HddmError` for an adapter that does not fit its record or its base; when weights are read, for
    another base and for NaN and Inf.
    """

    def __init__(self, folder: Path, adapter: AdapterRecord, base: Path) -> None:
        self._names = _factors(folder / ADAPTER_WEIGHTS, adapter, base / WEIGHTS)
        self._factors = WeightsReader(folder / ADAPTER_WEIGHTS)
        self.adapter, self.base = adapter, WeightsReader(base / WEIGHTS)
        self._folder = folder

    @property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """Shapes of A and B by the name of the weight that they change."""
        weights = read_header(self.base.path)[0]
        return {
            name: factor_shapes(weights[name].shape, self.adapter.rank)
            for name in self.adapter.targets
        }

    def factors(self, dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
        """A and alpha/rank B in ``dtype``, by the name of the weight that they change."""
        factors, found = self._factors.stored(), {}
        check_base(self._folder, self.adapter, self.base.path)
        for name, (down, up) in self._names.items():
            wide = factors[up].to(promoted(factors[up].dtype, torch.float32))
            scaled = (self._scale * wide).to(dtype)
            of_name = f"{up} times alpha/rank, {self._scale:g},"
            refuse_non_finite(self._folder / ADAPTER_WEIGHTS, {of_name: scaled})
            found[name] = factors[down].to(dtype), scaled
        return found

    @property
    def _scale(self) -> float:
        return self.adapter.alpha / self.adapter.rank

    def __call__(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """All weights in ``dtype``, by default the base's own."""
        weights, factors = self.base.stored(), self._factors.stored()
        check_base(self._folder, self.adapter, self.base.path)
        for name, (down, up) in self._names.items():
            weight = weights[name]
            weights[name] = merged_weight(weight, factors[down], factors[up], self._scale).to(
                dtype or weight.dtype
            )
            merged = f"{name} merged with alpha {self.adapter.alpha:g}"
            refuse_non_finite(self._folder / ADAPTER_WEIGHTS, {merged: weights[name]})
        return weights if dtype is None else cast(weights, dtype)


def merged_weight(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Compute ``weight + scale · up @ down`` (out, …) in the widest dtype of float32 and the operands.

    ``down`` is A (rank, …), ``up`` is B (out, rank) or (out, rank, 1, 1), and ``scale`` is alpha/rank.
    """
    wide = promoted(weight.dtype, torch.float32)
    flat = weight.to(wide).flatten(1)
    down, up = down.to(wide).flatten(1), up.to(wide).flatten(1)
    return torch.addmm(flat, up, down, alpha=scale).view(weight.shape)


def tensor_names(targets: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Names of A and B in peft's file for each of the weights ``targets``.

    A parameter that is adapted as such, and is not a linear layer's weight, has one more wrapper around its
    module.
    """
    owners = [target.rpartition(".")[0] for target in targets]
    wrapped = set()
    for owner, target in zip(owners, targets, strict=True):
        if not target.endswith(".weight"):
            wrapped.add(owner)
    names = {}
    for target, owner in zip(targets, owners, strict=True):
        modules, path = owner.split("."), PREFIX
        for depth in range(1, len(modules)):
            path += modules[depth - 1] + (
                ".base_layer." if ".".join(modules[:depth]) in wrapped else "."
            )
        names[target] = f"{path}{modules[-1]}.lora_A.weight", f"{path}{modules[-1]}.lora_B.weight"
    return names


def factor_shapes(weight: Sequence[int], rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of A and B for a weight of a linear layer (out, in) or a convolution (out, in, h, w)."""
    out, width, *window = weight
    return (rank, width, *window), (out, rank, *[1] * len(window))


def refuse_variants(config: Mapping[str, Any], origin: str) -> None:
    """Raise an `HddmError` for a peft config of another formula than this module's."""
    found = [f"{key} is {str(config[key])[:40]}" for key in _VARIANTS if config.get(key)]
    if config.get("bias") and config["bias"] != "none":
        found.append(f"bias is {str(config['bias'])[:40]}")
    if config.get("peft_type") not in _READ_TYPES:
        found.append(f"peft_type is {str(config['peft_type'])[:40]}")
    if config.get("init_lora_weights") not in _PLAIN_STARTS:
        # peft took the factors out of the base, so the plain base has them twice.
        found.append(f"init_lora_weights is {str(config['init_lora_weights'])[:40]}")
    if found:
        variant = f"{' and '.join(found)}, a variant of LoRA that is not read"
        raise HddmError(f"{origin}: {variant}; merge it with peft first")


def _factors(path: Path, adapter: AdapterRecord, base: Path) -> dict[str, tuple[str, str]]:
    """Names of A and B by the name of their weight, checked against the headers."""
    header, weights = read_header(path)[0], read_header(base)[0]
    names, expected = tensor_names(adapter.targets), dict[str, Tensor]()
    for target, pair in names.items():
        weight = weights.get(target)
        if weight is None or len(weight.shape) not in (2, 4) or not weight.dtype.is_floating_point:
            raise HddmError(f"{path}: {target!r} is no matrix or convolution of its base {base}")
        for name, shape in zip(pair, factor_shapes(weight.shape, adapter.rank), strict=True):
            expected[name] = torch.empty(shape, device="meta")
    found = {}
    for name, one in header.items():
        found[name] = torch.empty(one.shape, dtype=one.dtype, device="meta")
    refuse_other_tensors(expected, found, path, "expert.json")
    return names
