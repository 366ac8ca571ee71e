"""LoRA files of other tools laid on an expert: as its adapter, or merged into full weights.

A file whose changes all have factors (`hddm.checkpoints.lora_changes`) becomes an adapter: every layer gets
the largest rank, by zeros, and where alpha/rank differ it is multiplied into B. Where these zeros would make
the adapter larger than the weights that it changes, it is merged into full weights. A layer of the file that
holds several of the network, such as queries, keys and values, is divided: each gets its rows of B and all of
A. LoHa, LoKr, DoRA and plain differences have no factors of small rank, so a file with any of them is merged
into a copy of the base's weights. Changes to text encoders are in `hddm.checkpoints.lora_texts`.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import ModelMixin
from torch import Tensor
from torch.nn.functional import pad

from hddm.checkpoints.convert import write_network
from hddm.checkpoints.folders import open_expert_checkpoint
from hddm.checkpoints.headers import predictions_in, read_headers
from hddm.checkpoints.lora_changes import BIAS, Change
from hddm.checkpoints.lora_files import Layers, LoraFile, lora_file, read_lora
from hddm.checkpoints.lora_names import ATTENTION, COUNTED_MODULES, LayerNames, counted_layers
from hddm.checkpoints.lora_scales import Scales
from hddm.checkpoints.lora_texts import change_texts, check_texts
from hddm.checkpoints.plan import Built
from hddm.checkpoints.sources import Checkpoint, as_planned
from hddm.experts.adapter_records import AdapterRecord, adapter_of
from hddm.experts.expert_folders import open_expert
from hddm.experts.kept import keep_component, whole_components
from hddm.experts.lora import tensor_names, write_adapter
from hddm.experts.record_folders import write_records
from hddm.experts.records import (
    EXPERT_FILE,
    EXTRAS_FILE,
    SOURCE_NAMES,
    ExpertRecord,
    SourceRecord,
    joint_licence,
)
from hddm.networks.families.family import ForeignLayer
from hddm.settings import Reading
from hddm.utils.copies import link_or_copy
from hddm.utils.errors import HddmError, UsageError, counted, shown
from hddm.utils.files import (
    check_absent,
    new_folder,
    refuse_full_disk,
    sha256_of,
    sha256_once,
)
from hddm.utils.hub import local
from hddm.utils.tensors import Planned, promoted, refuse_non_finite

TextLora = Literal["apply", "drop"]


@dataclass(frozen=True)
class Target:
    """A layer of the file, found in the network: ``parts`` are its tensors there, by part."""

    name: str
    parts: Mapping[str, str]
    layer: ForeignLayer
    change: Change

    def names(self, leaf: str = "weight") -> list[str]:
        """Names of the network's tensors ``leaf`` (weight or bias) that hold those of the file's layer."""
        return [f"{one}.{leaf}" for one in self.layer.layers]

    def whole(self, tensors: Mapping[str, Tensor], leaf: str = "weight") -> Tensor:
        """The tensor ``leaf`` of the file's layer, put together from those of the network."""
        return self._in_order(torch.cat([tensors[name] for name in self.names(leaf)]))

    def divided(
        self, whole: Tensor, tensors: Mapping[str, Tensor], leaf: str = "weight"
    ) -> dict[str, Tensor]:
        """The inverse of `whole`: the rows of each of the network's tensors, by name."""
        names = self.names(leaf)
        sizes = [len(tensors[name]) for name in names]
        return dict(zip(names, self._in_order(whole).split(sizes), strict=True))

    def _in_order(self, whole: Tensor) -> Tensor:
        return torch.cat(whole.chunk(2)[::-1]) if self.layer.swaps_halves else whole


def convert_lora(
    path: Path,
    base: Path,
    out: Path,
    licence: str | None = None,
    dry_run: bool = False,
    overwrite: bool = False,
    allow_pickle: bool = False,
    text_encoder_lora: TextLora | None = None,
) -> list[str]:
    """Lay the LoRA file ``path`` on the expert in ``base``, and return lines to print.

    The new expert in ``out`` means what its base means (schedule, prediction, conditions, VAE), and keeps the
    base's components. ``licence``, of the LoRA's weights, and the base's hold both; by default it is the one
    in the LoRA's header. A line notes where that says that it was trained on another kind of prediction.
    Where the file changes text encoders too, ``text_encoder_lora`` must say what to do: ``apply`` gives the
    expert text encoders of its own, and ``drop`` leaves the base's.

    Raises:
        UsageError: for a ``base`` that is no expert, and for ``text_encoder_lora`` without text encoders.
        HddmError: leaving nothing behind, for a pickle without ``allow_pickle``; for kinds of changes that
            are not read; for tensors of no layer of the base, and shapes that are not its layers'; for text
            encoders without ``text_encoder_lora``; for NaN and Inf.
    """
    path, base = local(path), local(base)
    if not (base / EXPERT_FILE).is_file():
        raise UsageError(
            f"`base` {base}: not an expert folder; convert its checkpoint, and name the result"
        )
    if out.resolve() == base.resolve():
        raise UsageError(
            f"`out` {out}: is the base, which the adapter needs; choose another folder"
        )
    path = lora_file(path)
    lora = read_lora(path, allow_pickle)
    expert = open_expert(base, with_calibration=False)
    if licence is not None and lora.licence not in (None, licence):
        raise HddmError(
            f"`licence` {licence}: the header of {path} states {lora.licence!r}; drop the option"
        )
    network: Any = expert.network
    scales = Scales(lora)
    text_lines = check_texts(lora, base, text_encoder_lora, scales)
    targets = _targets(lora, network, base, scales, text_encoder_lora == "apply")
    check_absent(out, EXPERT_FILE, overwrite)
    lines = [f"names of {lora.naming}, {_summary(lora)}", scales.line]
    writer: _AsAdapter | _Merged
    factors, why = None, "an adapter cannot hold them"
    if targets and all(one.change.has_factors for one in targets):
        factors = _Factors.of(lora, targets, network.state_dict())
        if factors.outgrow(network.state_dict()):
            why = f"with rank {factors.rank} for all, an adapter would be larger than these layers"
            factors = None
    if factors is not None:
        writer = _AsAdapter(factors, base, out, network)
        lines.append(f"base: {base} (SHA-256 {writer.adapter.base_sha256[:16]}…)")
    else:
        writer = _Merged(lora, targets, base)
        lines.append(f"base: {base}, merged into full weights, as {why}")
    source = SourceRecord(
        layout="lora",
        files={path.name: sha256_of(path)},
        options={"naming": lora.naming, **writer.options},
        hddm=version("hddm-diffusion"),
        before=expert.record.source,
    )
    if text_encoder_lora is not None:
        source.options["text_encoder_lora"] = text_encoder_lora
    update: dict[str, Any] = {
        "weights": "unstated",
        "shard": None,
        "training": {},
        "adapter": writer.adapter,
        "licence": joint_licence((expert.record.licence, licence or lora.licence)),
        "source": source,
    }
    record = expert.record.model_copy(update=update)
    lines += text_lines
    lines.append(f"licence: {record.licence or 'not stated (`licence` records it)'}")
    lines += _notes_on_prediction(lora, expert.record, base)
    lines += [f"note: {note}" for note in read_headers([path]).notes]
    if dry_run:
        return [*lines, f"{out}: nothing written (`dry_run`)"]
    refuse_full_disk(out, writer.size)
    with new_folder(out, EXPERT_FILE, overwrite) as draft:
        written = writer.write(draft)
        # What writing back into the layout of the base's source needs.
        for name in (EXTRAS_FILE, SOURCE_NAMES):
            if (base / name).is_file():
                link_or_copy(base / name, draft / name)
        for name, folder in whole_components(base).items():
            keep_component(draft, name, folder)
        nulls = expert.nulls
        if text_encoder_lora == "apply":
            record, nulls = change_texts(draft, lora, record, nulls, scales)
        write_records(draft, record, nulls, written)
        open_expert(draft)
    return [*lines, f"{out}: converted"]


def _summary(lora: LoraFile) -> str:
    """Numbers of layers by kind and rank."""
    kinds = lora.kinds
    text = counted(len(lora.layers), "layer")
    if set(kinds) - {"LoRA"}:
        each = [f"{number} of {kind}" for kind, number in kinds.items()]
        text += f" ({', '.join(each)})"
    if lora.ranks:
        text += f", rank {', '.join(lora.ranks)}"
    return text


def _notes_on_prediction(lora: LoraFile, record: ExpertRecord, base: Path) -> list[str]:
    lines = []
    if not record.prediction_type.prediction.is_velocity:
        for place, kind in predictions_in(lora.metadata, lora.path.name).items():
            if kind != record.prediction_type:
                own = f"{base} predicts {record.prediction_type.value}"
                lines.append(f"note: {place} says that the LoRA was trained on {kind}, and {own}")
    return lines


def _targets(
    lora: LoraFile, network: ModelMixin, base: Path, scales: Scales, may_be_none: bool
) -> list[Target]:
    """The layers of the file with those of the network; ``may_be_none`` if other changes are enough.

    Raises `HddmError` for those that are not found, or have other shapes.
    """
    layers = _named(lora, network, base)
    known = LayerNames(network)
    weights = network.state_dict()
    found: list[Target] = []
    owners = set[str]()
    broken = list[str]()
    foreign = list[str]()
    for name, parts in layers.items():
        layer = known.find(name)
        if layer is None:
            foreign.append(f"{name!r} is no layer of it")
            continue
        lacking = {"down", "up"} - parts.keys()
        if len(lacking) == 1:
            broken.append(f"{name!r} has no factor {min(lacking)!r}")
        elif again := owners.intersection(layer.layers):
            broken.append(f"{name!r} is {min(again)!r} once more")
        else:
            owners.update(layer.layers)
            change = lora.change(parts)
            target = Target(name, parts, layer, change)
            misfit = _misfit(target, weights)
            if misfit:
                foreign.append(misfit)
            else:
                scale = scales.of(parts, (name, *layer.layers))
                found.append(Target(name, parts, layer, Change(change.parts, scale)))
    if not layers and not may_be_none:
        raise HddmError(f"{lora.path}: changes no layer of a network; name another file")
    if broken:
        listed = "; ".join(shown(broken, 5))
        raise HddmError(f"{lora.path}: is not whole: {listed}; fetch it again")
    if foreign:
        number = f"{len(foreign)} of {counted(len(layers), 'layer')}"
        raise HddmError(
            f"{lora.path}: does not fit the {type(network).__name__} of {base} ({number} of "
            f"{lora.naming}): {'; '.join(shown(foreign, 5))}; pass the model that it was trained on as `base`"
        )
    names = set[str]()
    for target in found:
        names.update((target.name, *target.layer.layers))
    scales.refuse_unused(names)
    return found


def _named(lora: LoraFile, network: ModelMixin, base: Path) -> Layers:
    """The layers of the file by name, where it has numbers in their place."""
    if not lora.is_counted:
        return lora.layers
    modules = lora.modules("unet")
    options = [modules] if modules is not None else [ATTENTION, COUNTED_MODULES]
    numbers = sorted(map(int, lora.layers))
    counts = []
    for option in options:
        order = counted_layers(network, option)
        if numbers == list(range(len(order))):
            return {name: lora.layers[str(number)] for number, name in enumerate(order)}
        counts.append(f"{len(order)} ({', '.join(sorted(option))})")
    raise HddmError(
        f"{lora.path}: counts {counted(len(numbers), 'layer')} in place of names, and the "
        f"{type(network).__name__} of {base} has {' or '.join(counts)}; it is a LoRA of another base"
    )


def _misfit(target: Target, weights: Mapping[str, Tensor]) -> str:
    """Why the change is none of these weights; empty if it is."""
    own = {name: weights[name].to("meta") for name in target.names()}
    change = target.change
    parts = {part: tensor.to("meta") for part, tensor in change.parts.items()}
    weight = target.whole(own)
    fits = all(tensor.dtype.is_floating_point for tensor in parts.values())
    rank = change.rank
    if rank is not None and weight.ndim > 1:
        # A larger rank changes no more, and all layers get the largest.
        fits &= 1 <= rank <= max(len(weight), weight[0].numel())
    try:
        if fits:
            Change(parts).merged(weight)
            if BIAS in parts:
                biases = {name: weights[name].to("meta") for name in target.names("bias")}
                Change(parts).merged_bias(target.whole(biases, "bias"))
    except (ValueError, RuntimeError, IndexError, KeyError, TypeError):
        # torch raises any of these for shapes that do not belong together.
        fits = False
    if fits:
        return ""
    given = [f"{part} {tuple(one.shape)} in {one.dtype}" for part, one in change.parts.items()]
    held = " and ".join(shown(given, 4))
    return f"{target.name!r} has factors {held} for a weight {tuple(weight.shape)}"


@dataclass(frozen=True)
class _Factors:
    """A and B of the weights that a file changes, and the scale of each product."""

    pairs: Mapping[str, tuple[Tensor, Tensor]]
    scales: Mapping[str, float]

    @classmethod
    def of(
        cls, lora: LoraFile, targets: Sequence[Target], weights: Mapping[str, Tensor]
    ) -> "_Factors":
        """The factors of all ``targets``; `HddmError` for NaN and Inf."""
        pairs, scales = dict[str, tuple[Tensor, Tensor]](), dict[str, float]()
        for target in targets:
            used = {target.parts[part]: one for part, one in target.change.parts.items()}
            refuse_non_finite(lora.path, used)
            a, b = target.change.factors(target.whole(weights).shape)
            for name, rows in target.divided(b, weights).items():
                pairs[name], scales[name] = (a, rows), target.change.scale
        return cls(pairs, scales)

    @functools.cached_property
    def rank(self) -> int:
        """The largest rank, which all get."""
        return max(len(a) for a, _ in self.pairs.values())

    @functools.cached_property
    def scale(self) -> float | None:
        """The scale of all products; None where they differ, so that it is multiplied into B."""
        found = set(self.scales.values())
        return found.pop() if len(found) == 1 else None

    def dtypes(self, name: str) -> tuple[torch.dtype, torch.dtype]:
        """Those that A and B of the weight ``name`` are written in."""
        a, b = self.pairs[name]
        of_b = promoted(b.dtype) if self.scale is not None else promoted(b.dtype, torch.float32)
        return promoted(a.dtype), of_b

    @functools.cached_property
    def size(self) -> int:
        """Bytes of all factors of the largest rank."""
        total, rank = 0, self.rank
        for name, (a, b) in self.pairs.items():
            of_a, of_b = self.dtypes(name)
            total += rank * (a[0].numel() * of_a.itemsize + len(b) * of_b.itemsize)
        return total

    def outgrow(self, weights: Mapping[str, Tensor]) -> bool:
        """True if zeros for the largest rank make them larger than the ``weights`` that they change."""
        changed = [weights[name] for name in self.pairs]
        is_padded = any(len(a) < self.rank for a, _ in self.pairs.values())
        return is_padded and self.size > sum(one.numel() * one.itemsize for one in changed)


class _AsAdapter:
    """The file as an adapter of one rank and one alpha that does the same."""

    def __init__(self, factors: _Factors, base: Path, out: Path, network: Any) -> None:
        self._network, self._factors = network, factors
        scale = 1.0 if factors.scale is None else factors.scale
        self.adapter: AdapterRecord = adapter_of(
            base, out, factors.rank, factors.rank * scale, tuple(factors.pairs)
        )
        self.options: dict[str, Any] = {}
        self.size = float(factors.size)

    def write(self, draft: Path) -> str | None:
        """Write config and adapter; return None, as there is no file of weights to hash."""
        self._network.save_config(draft)
        tensors: dict[str, Tensor] = {}
        for name, (down, up) in tensor_names(self.adapter.targets).items():
            a, b = self._factors.pairs[name]
            of_a, of_b = self._factors.dtypes(name)
            a, b = a.to(of_a), b.to(of_b)
            if self._factors.scale is None:
                b = b * self._factors.scales[name]
            more, window = self.adapter.rank - len(a), [0, 0] * (a.ndim - 2)
            tensors[down] = pad(a, [*window, 0, 0, 0, more]).contiguous()
            tensors[up] = pad(b, [*window, 0, more]).contiguous()
        write_adapter(draft, self.adapter, tensors)
        return None


class _Merged:
    """The file merged into a copy of the base's weights, in their dtypes."""

    adapter = None

    def __init__(self, lora: LoraFile, targets: Sequence[Target], base: Path) -> None:
        self._base: Checkpoint = open_expert_checkpoint(base, Reading())
        weights = self._base.table.renamed(self._base.weights, str(self._base.files[0]))
        changes: dict[str, functools.partial[Tensor]] = {}
        for target in targets:
            for leaf in ("weight", "bias") if BIAS in target.change.parts else ("weight",):
                for name in target.names(leaf):
                    changes[name] = functools.partial(_merged, target, weights, name, leaf)
        self._tensors = []
        for name, tensor in weights.items():
            planned = as_planned(name, tensor)
            if name in changes:
                origin = f"{lora.path} merged into {base}"
                planned = Planned(name, planned.shape, tensor.dtype, changes[name], origin)
            self._tensors.append(planned)
        self.options: dict[str, Any] = {
            "base": base.resolve().name,
            "base_files": {path.name: sha256_once(path) for path in self._base.files},
        }
        self.size = float(sum(math.prod(one.shape) * one.dtype.itemsize for one in self._tensors))

    def write(self, draft: Path) -> str:
        """Write config and weights; return the SHA-256 of the weights."""
        return write_network(draft, Built(self._base.network, self._tensors))


def _merged(target: Target, tensors: Mapping[str, Tensor], name: str, leaf: str) -> Tensor:
    """The network's tensor ``name``, a weight or bias, with the change of its layer."""
    whole, change = target.whole(tensors, leaf), target.change
    merged = change.merged_bias(whole) if leaf == "bias" else change.merged(whole)
    rows: Tensor = target.divided(merged, tensors, leaf)[name]
    return rows.to(tensors[name].dtype).contiguous()
