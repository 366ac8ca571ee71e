"""LoRA files of other tools as adapters of an expert: by kohya's names, or diffusers'.

    lora_unet_PATH.lora_down.weight, ….lora_up.weight, ….alpha    kohya; PATH has _ for its dots
    unet.PATH.lora_A.weight, ….lora_B.weight                      diffusers, or transformer.PATH…

Each layer has a rank, the width of its factors, and an alpha: in a tensor of the file, else in the metadata
that diffusers writes, else its rank. Kohya's names are ambiguous, so they are looked up among those of the
base's layers, under diffusers' names and those of latent diffusion (``input_blocks_4_1_…``).
"""

import contextlib
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from diffusers import ModelMixin
from torch import Tensor, nn
from torch.nn.functional import pad

from hddm.checkpoints import ldm
from hddm.checkpoints.headers import licence_in, predictions_in
from hddm.experts.ensemble_folders import keep_component, whole_components
from hddm.experts.expert import open_expert
from hddm.experts.lora import (
    AdapterRecord,
    adapter_of,
    factor_shapes,
    refuse_variants,
    tensor_names,
    write_adapter,
)
from hddm.experts.records import EXPERT_FILE, SourceRecord, joint_licence, write_records
from hddm.networks.families import family_of
from hddm.utils.documents import parse_object
from hddm.utils.errors import HddmError, UsageError, counted, one_line, shown
from hddm.utils.files import check_absent, new_folder, sha256_of
from hddm.utils.records import LARGEST
from hddm.utils.tensors import (
    TensorInfo,
    promoted,
    read_header,
    read_safetensors,
    refuse_non_finite,
)

_FACTOR = re.compile(r"(.+)\.lora_(down|up|A|B)\.weight")
_UNREAD = re.compile(r".+[._]lora\.(down|up)\.weight|(unet|text_encoder):\d+:(up|down)")
"""Names of diffusers' own training scripts, of its processors of 2023, and of cloneofsimo's tool."""
_ALPHA = re.compile(r"(.+)\.(alpha)")
_PARTS = {"A": "down", "B": "up"}
_NETWORK = re.compile(r"^(lora_unet_|lora_transformer_|unet\.|transformer\.)")
_TEXT = re.compile(r"lora_te\d?_|text_encoder(_\d)?\.")
_OTHER = re.compile(r"\.(hada_|lokr_|dora_scale|lora_magnitude_vector|lora_mid)")
_METADATA = "lora_adapter_metadata"


@dataclass(frozen=True)
class LoraFile:
    """Header of a LoRA file: names of ``down``, ``up`` and ``alpha`` by layer, and those of text encoders."""

    path: Path
    header: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    layers: dict[str, dict[str, str]] = field(default_factory=dict)
    text: list[str] = field(default_factory=list)

    @property
    def licence(self) -> str | None:
        """The licence that the header states."""
        return licence_in(self.metadata)

    @property
    def naming(self) -> str:
        """The tool whose names these are."""
        return "kohya" if any(name.startswith("lora_") for name in self.header) else "diffusers"

    @property
    def ranks(self) -> dict[str, int]:
        """Number of layers by rank."""
        found = Counter[int]()
        for parts in self.layers.values():
            shape = self.header[parts["down"]].shape if "down" in parts else ()
            if shape:
                found[shape[0]] += 1
        return {str(rank): found[rank] for rank in sorted(found)}


def is_lora(names: Collection[str]) -> bool:
    """True for tensor names of a LoRA file, or of a similar small change to a network."""
    return any(map(_is_of_lora, names))


def _is_of_lora(name: str) -> bool:
    return bool(_FACTOR.fullmatch(name) or _UNREAD.fullmatch(name) or _OTHER.search(name))


def read_lora(path: Path) -> LoraFile:
    """Read the header of a LoRA file; `HddmError` for a pickle, another kind, and tensors of no LoRA."""
    found = LoraFile(path, *read_header(path))
    if unread := [name for name in found.header if _UNREAD.fullmatch(name)]:
        text = f"has names of diffusers' training scripts or of an older tool ({unread[0]!r}, …)"
        remedy = (
            "merge it into its base with diffusers or the tool that made it, and convert the result"
        )
        raise HddmError(f"{path}: {text}, which hddm does not read yet; {remedy}")
    for name in found.header:
        match = _FACTOR.fullmatch(name) or _ALPHA.fullmatch(name)
        if _TEXT.match(name):
            found.text.append(name)
        elif match is None:
            raise HddmError(
                f"{path}: holds {name!r}, which is no factor of a plain LoRA; LoHa, LoKr, DoRA and LoCon's "
                "lora_mid are not read: merge it with the tool that made it"
            )
        else:
            parts = found.layers.setdefault(_NETWORK.sub("", match[1], 1), {})
            if (other := parts.setdefault(_PARTS.get(match[2], match[2]), name)) != name:
                raise HddmError(
                    f"{path}: holds one factor twice, as {other!r} and {name!r}; remove one"
                )
    return found


def convert_lora(
    path: Path,
    base: Path,
    out: Path,
    licence: str | None = None,
    dry_run: bool = False,
    overwrite: bool = False,
) -> list[str]:
    """Write the LoRA file ``path`` as an adapter of the expert in ``base``; return lines to print.

    The new expert means what its base means (schedule, prediction, conditions, VAE, text encoder), and keeps
    the base's components. All layers get the largest rank, by zeros, and where their alpha/rank differ it is
    multiplied into B. ``licence``, of the LoRA's weights, and the base's hold both; by default it is the one
    in the LoRA's header. A line notes where that says that it was trained on another kind of prediction.

    Raises:
        UsageError: for a ``base`` that is no expert.
        HddmError: leaving nothing behind, for a pickle; for LoHa, LoKr, DoRA and LoCon's ``lora_mid``; for
            tensors of a text encoder or of no layer of the base, and shapes that are not its layers'; for NaN
            and Inf; for a base that is itself an adapter.
    """
    if not (base / EXPERT_FILE).is_file():
        raise UsageError(
            f"`base` {base}: not an expert folder; convert its checkpoint, and name the result"
        )
    if out.resolve() == base.resolve():
        raise UsageError(
            f"`out` {out}: is the base, which the adapter needs; choose another folder"
        )
    lora, expert = read_lora(path), open_expert(base, with_calibration=False)
    if lora.text:
        raise HddmError(
            f"{path}: {counted(len(lora.text), 'tensor')} in it change a text encoder "
            f"({lora.text[0]!r}, …), but an adapter changes only the expert's network; use a LoRA "
            f"without them"
        )
    if licence is not None and lora.licence not in (None, licence):
        raise HddmError(
            f"`licence` {licence}: the header of {path} states {lora.licence!r}; drop the option"
        )
    network: Any = expert.network
    targets = _targets(lora, network, base)
    adapter, tensors = _adapter(lora, targets, base, out)
    check_absent(out, EXPERT_FILE, overwrite)
    update: dict[str, Any] = {
        "weights": "unstated",
        "shard": None,
        "training": {},
        "adapter": adapter,
        "licence": joint_licence((expert.record.licence, licence or lora.licence)),
        "source": SourceRecord(
            layout="lora",
            files={path.name: sha256_of(path)},
            options={"naming": lora.naming},
            hddm=version("hddm-diffusion"),
            before=expert.record.source,
        ),
    }
    record = expert.record.model_copy(update=update)
    lines = [
        f"names of {lora.naming}, {counted(len(targets), 'layer')}, rank {', '.join(lora.ranks)}",
        f"base: {base} (SHA-256 {adapter.base_sha256[:16]}…)",
        f"licence: {record.licence or 'not stated (`licence` records it)'}",
    ]
    if not expert.record.prediction_type.prediction.is_velocity:
        for place, kind in predictions_in(lora.metadata, path.name).items():
            if kind != expert.record.prediction_type:
                own = f"{base} predicts {expert.record.prediction_type.value}"
                lines.append(f"note: {place} says that the LoRA was trained on {kind}, and {own}")
    if dry_run:
        return [*lines, f"{out}: nothing written (`dry_run`)"]
    with new_folder(out, EXPERT_FILE, overwrite) as draft:
        network.save_config(draft)
        write_adapter(draft, adapter, tensors)
        write_records(draft, record, expert.nulls)
        for name, folder in whole_components(base).items():
            keep_component(draft, name, folder)
        open_expert(draft)
    return [*lines, f"{out}: converted"]


def _targets(lora: LoraFile, network: ModelMixin, base: Path) -> dict[str, dict[str, str]]:
    """Names in the file of ``down``, ``up`` and ``alpha``, by the base's weight that they change."""
    known, weights = _layers_of(network), network.state_dict()
    found: dict[str, dict[str, str]] = {}
    problems = [] if lora.layers else ["it changes no layer"]
    for layer, parts in lora.layers.items():
        if lacking := {"down", "up"} - parts.keys():
            problems.append(f"{layer!r} has no factor {min(lacking)!r}")
        elif layer not in known:
            problems.append(f"{layer!r} is not a linear layer or convolution of it")
        elif (target := f"{known[layer]}.weight") in found:
            problems.append(f"{layer!r} is {known[layer]!r} once more")
        else:
            found[target] = parts
            weight = weights[target]
            down, up = lora.header[parts["down"]], lora.header[parts["up"]]
            rank = down.shape[0] if down.shape else 0
            fits = (down.shape, up.shape) == factor_shapes(weight.shape, rank)
            fits &= down.dtype.is_floating_point and up.dtype.is_floating_point
            # A larger rank changes no more, and all layers get the largest.
            if not fits or not 1 <= rank <= max(len(weight), weight[0].numel()):
                given = f"{down.shape} in {down.dtype} and {up.shape} in {up.dtype}"
                problems.append(f"{layer!r} has factors {given} for a weight {tuple(weight.shape)}")
    prefix = _prefix_before(known, lora.layers) if problems else None
    if prefix is not None:
        text = f"its names have {prefix!r} before those of the {type(network).__name__} of {base}"
        raise HddmError(f"{lora.path}: {text}, which hddm does not read yet; rename its tensors")
    if problems:
        raise HddmError(
            f"{lora.path}: does not fit the {type(network).__name__} of {base}, so it is a LoRA of another "
            f"base: {'; '.join(shown(problems, 5))}"
        )
    return found


def _prefix_before(known: Collection[str], layers: Collection[str]) -> str | None:
    """The prefix without which all ``layers`` are ``known``; None if there is none."""
    first = next(iter(layers), "")
    for match in re.finditer(r"[._]", first):
        prefix = first[: match.end()]
        rests = [name.removeprefix(prefix) for name in layers if name.startswith(prefix)]
        if len(rests) == len(layers) and all(rest in known for rest in rests):
            return prefix
    return None


def _layers_of(network: ModelMixin) -> dict[str, str]:
    """Layers of a network by every name that a file may have for them."""
    kinds = (nn.Linear, nn.Conv2d)
    layers = [name for name, module in network.named_modules() if isinstance(module, kinds)]
    names = {layer.replace(".", "_"): layer for layer in layers}
    for layer in layers:
        names[layer] = layer
    if family_of(network) is ldm.LDM.family:
        # Not every block of the class is one of latent diffusion.
        with contextlib.suppress(HddmError):
            weights = [f"{layer}.weight" for layer in layers]
            pairs = ldm.key_table(weights, network.config, "LoRA").pairs
            for pair, layer in zip(pairs, layers, strict=True):
                foreign = pair.foreign[0].removeprefix(ldm.UNET).removesuffix(".weight")
                names[foreign.replace(".", "_")] = layer
    return names


def _adapter(
    lora: LoraFile, targets: Mapping[str, Mapping[str, str]], base: Path, out: Path
) -> tuple[AdapterRecord, dict[str, Tensor]]:
    """The adapter of one rank and one alpha that does the same, and its tensors by peft's names."""
    stored, stated = read_safetensors(lora.path), _stated_alphas(lora, targets)
    refuse_non_finite(lora.path, stored)
    ranks = {target: len(stored[parts["down"]]) for target, parts in targets.items()}
    alphas = {}
    for target, parts in targets.items():
        alpha = stated.get(target, ranks[target])
        if "alpha" in parts:
            alpha = stored[parts["alpha"]].item() if stored[parts["alpha"]].numel() == 1 else None
        if not isinstance(alpha, int | float) or not 0 < alpha <= LARGEST:
            found = f"alpha of {target!r} is {one_line(alpha, 40)}"
            raise HddmError(f"{lora.path}: {found}, not a positive number up to {LARGEST:g}")
        alphas[target] = float(alpha)
    scales = {target: alphas[target] / ranks[target] for target in targets}
    widest, is_one = max(ranks, key=ranks.__getitem__), len(set(scales.values())) == 1
    alpha = alphas[widest] if is_one else float(ranks[widest])
    adapter = adapter_of(base, out, ranks[widest], alpha, tuple(targets))
    tensors: dict[str, Tensor] = {}
    for target, (down, up) in tensor_names(adapter.targets).items():
        a, b = stored[targets[target]["down"]], stored[targets[target]["up"]]
        a, b = a.to(promoted(a.dtype)), b.to(promoted(b.dtype))
        if not is_one:
            b = b.to(promoted(b.dtype, torch.float32)) * scales[target]
        more, window = adapter.rank - len(a), [0, 0] * (a.ndim - 2)
        tensors |= {down: pad(a, [*window, 0, 0, 0, more]), up: pad(b, [*window, 0, more])}
    return adapter, tensors


def _stated_alphas(lora: LoraFile, targets: Collection[str]) -> dict[str, Any]:
    """Alphas of ``targets`` that peft's config in the metadata states; empty if there is no such config.

    As in peft, a layer has the alpha of the first pattern that ends its name, or else the common one. Raises
    `HddmError` for a variant of LoRA, and for a pattern that ends no name, such as one with wildcards.
    """
    if _METADATA not in lora.metadata:
        return {}
    origin = f"{lora.path}: {_METADATA}"
    stated = parse_object(lora.metadata[_METADATA], origin)
    config = {}
    for key, value in stated.items():
        if _NETWORK.match(key):
            config[_NETWORK.sub("", key, 1)] = value
    refuse_variants(config, origin)
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise HddmError(f"{origin}: alpha_pattern is {one_line(patterns, 40)}, no alphas by layer")
    found = dict.fromkeys(targets, config.get("lora_alpha"))
    for pattern, alpha in reversed(patterns.items()):
        end = f"{pattern}.weight"
        fitting = []
        for target in targets:
            # A caret begins the whole name of a layer.
            if f"^{target}" == end or f".{target}".endswith(f".{end}"):
                fitting.append(target)
        if not fitting:
            raise HddmError(
                f"{origin}: alpha_pattern {one_line(pattern, 40)!r} ends the name of no layer"
            )
        found |= dict.fromkeys(fitting, alpha)
    return found
