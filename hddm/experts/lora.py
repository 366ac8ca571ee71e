"""Low-rank changes to another expert's weights (LoRA, arXiv:2106.09685), in peft's format.

An adapter's folder holds ``adapter_config.json`` and ``adapter_model.safetensors``, which peft can open;
``expert.json`` has the SHA-256 of the base weights, which lie elsewhere, once for all adapters that share
them. Before a run, a target weight W (out, in) becomes

    W + alpha/rank · B A,   A (rank, in),  B (out, rank),

computed in float32 at least and then cast, so that an adapted network is like any other. Of a convolution W
is (out, in, h, w), A (rank, in, h, w) and B (out, rank, 1, 1). Several adapters of one base in an ensemble
are not merged, and share it (`hddm.experts.sharing`).
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from diffusers import ModelMixin
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor

from hddm.networks.folders import (
    WEIGHTS,
    WeightsReader,
    cast,
    fitting,
    of_experts,
    parse_config,
    refuse_other_tensors,
    sha256_once,
)
from hddm.utils.errors import HddmError
from hddm.utils.files import inside, read_json, sha256_of, write_json
from hddm.utils.records import (
    MANIFEST,
    AboveZero,
    Record,
    Sha256,
    ensemble_around,
    read_folder_manifest,
)
from hddm.utils.tensors import promoted, read_header, refuse_non_finite

BASES = "bases"
"""Folder of an ensemble for weights that adapters change."""
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_FILES = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
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


class AdapterRecord(Record):
    """The weights changed by the adapter beside an ``expert.json``, and their base."""

    rank: Annotated[int, Field(ge=1, le=2**16)]
    alpha: AboveZero
    targets: Annotated[tuple[str, ...], Field(min_length=1)]
    """Names of the changed weights."""
    base: str
    """The base's folder at training, relative to this one; an ensemble keeps bases of its own."""
    base_sha256: Sha256
    """SHA-256 of the base's weights file."""

    @property
    def base_name(self) -> str:
        """The base's name in messages."""
        return f"{Path(self.base).name} (SHA-256 {self.base_sha256[:16]}…)"


def adapter_of(
    base: Path, out: Path, rank: int, alpha: float, targets: Sequence[str]
) -> AdapterRecord:
    """Make the record of an adapter in ``out`` for the expert in ``base``, which must not be an adapter."""
    if not (base / WEIGHTS).is_file():
        remedy = "name its base, or merge them by hddm convert"
        raise HddmError(f"{base}: holds no {WEIGHTS} that could be adapted; {remedy}")
    return AdapterRecord(
        rank=rank,
        alpha=alpha,
        targets=tuple(targets),
        base=Path(os.path.relpath(base.resolve(), out.resolve())).as_posix(),
        base_sha256=sha256_of(base / WEIGHTS),
    )


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


def base_of(folder: Path, adapter: AdapterRecord, bases: Mapping[str, Path] | None = None) -> Path:
    """Find the folder of the weights that the adapter in ``folder`` changes.

    It is looked up in ``bases`` by SHA-256; else it is where the ensemble around the folder keeps it, or the
    place at training. Raises `HddmError` where it is missing or the place is no relative path.
    """
    if bases is not None and adapter.base_sha256 in bases:
        return bases[adapter.base_sha256]
    if Path(adapter.base).is_absolute() or any(letter in adapter.base for letter in "\\\0\n\r"):
        raise HddmError(
            f"{folder}: its base is at {adapter.base!r}, which is no relative path; refused"
        )
    base, place = (folder.resolve() / adapter.base).resolve(), folder / adapter.base
    whole = ensemble_around(folder.resolve())
    if whole is not None:
        base = place = _base_within(whole, adapter.base_sha256)
    if not (base / WEIGHTS).is_file():
        problem = f"is an adapter of {adapter.base_name}, and {place} holds no {WEIGHTS}"
        raise HddmError(
            f"{folder}: {problem}; name its base: hddm.load(…, base=…), hddm assemble --base"
        )
    return base


def _base_within(ensemble: Path, sha256: str) -> Path:
    """Folder of the weights with this hash in an ensemble: in ``bases/``, or an expert with its own."""
    for manifest in ensemble.glob(f"*/*/{MANIFEST}"):
        if read_folder_manifest(manifest.parent).files.get(WEIGHTS) == sha256:
            return manifest.parent
    return inside(ensemble, f"{BASES}/{sha256[:16]}")


def bases_in(folders: Sequence[Path]) -> dict[str, Path]:
    """``folders`` by the SHA-256 of their weights; `HddmError` for one without."""
    for folder in folders:
        if not (folder / WEIGHTS).is_file():
            raise HddmError(f"{folder}: holds no {WEIGHTS}; a base is an expert that has its own")
    return {sha256_once(folder / WEIGHTS): folder for folder in folders}


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


def check_base(folder: Path, adapter: AdapterRecord, weights: Path) -> None:
    """Check the file ``weights`` against the base's hash in the adapter's record."""
    found = sha256_once(weights)
    if found != adapter.base_sha256:
        theirs = f"{folder} is an adapter of {adapter.base_name}"
        raise HddmError(f"{weights}: has SHA-256 {found[:16]}…, and {theirs}; use its own base")


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
