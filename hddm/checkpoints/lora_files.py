"""LoRA files, read but not yet laid on a base: which tensor is which part of a change to which layer.

Layers keep the names that the file has for them, without the prefixes of tools; `hddm.checkpoints.lora_names`
finds them in a network. Files of cloneofsimo's tool count layers: ``unet:0:up``, or, in a pickle, a list of
``up`` and ``down`` in turn.

The alpha of a layer is in a tensor of the file; else in the config of peft that is in its header
(``lora_adapter_metadata``) or beside it (``adapter_config.json``); else it is the layer's rank.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from hddm.checkpoints.headers import licence_in
from hddm.checkpoints.lora_changes import (
    ALPHA,
    DOWN,
    FACTOR,
    UP,
    Change,
    is_change,
    kind_of,
    part_of,
    unread_kind,
)
from hddm.checkpoints.lora_names import COUNTED_MODULES, plain_name
from hddm.experts.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS, refuse_variants
from hddm.utils.documents import parse_object
from hddm.utils.errors import HddmError, counted, one_line
from hddm.utils.files import file_kind, read_json, refuse_pickle
from hddm.utils.pickles import read_any
from hddm.utils.records import LARGEST
from hddm.utils.tensors import read_header, read_safetensors

IN_FOLDERS = (ADAPTER_WEIGHTS, "pytorch_lora_weights.safetensors")
"""Files of a LoRA in a folder of peft, and of diffusers."""
_COUNTED = re.compile(r"(unet|text_encoder):(0|[1-9][0-9]{0,5}):(up|down)")
_NUMBER = re.compile("0|[1-9][0-9]{0,5}")
_TEXT = re.compile(
    r"(lora_te(?P<kohya>\d?)_|text_encoder(_(?P<diffusers>\d))?\.|te(?P<short>\d?)\.|"
    r"(?P<named>clip_l|clip_g|t5xxl)\.|(base_model\.model\.)?(?=text_model\.))(?P<layer>.+)"
)
_NAMED = {"clip_l": 0, "clip_g": 1, "t5xxl": 2}
_BUNDLED = re.compile(r"bundle_emb\.([^.]+)\..+")
_TOKEN = "<embed>"
_METADATA = "lora_adapter_metadata"
_CONFIG_PART = re.compile(r"(unet|transformer|text_encoder(?:_\d)?)\.(.+)")
_NETWORK_PARTS = ("unet", "transformer", "")
NETWORK = -1
"""In place of the number of a text encoder: the network itself."""

Layers = dict[str, dict[str, str]]
"""Names of tensors by layer and part."""


@dataclass(frozen=True)
class LoraFile:
    """What a file changes: layers of the network, and of text encoders by their number from 0."""

    path: Path
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]
    layers: Layers = field(default_factory=dict)
    texts: dict[int, Layers] = field(default_factory=dict)
    tokens: dict[str, list[str]] = field(default_factory=dict)
    """Tensors of learned tokens, by token."""

    @property
    def is_counted(self) -> bool:
        """True if layers of the network have numbers in place of names."""
        return _has_numbers(self.path, self.layers)

    def counts_text(self, encoder: int) -> bool:
        """True if layers of a text encoder have numbers in place of names."""
        return _has_numbers(self.path, self.texts[encoder])

    @property
    def licence(self) -> str | None:
        """The licence that the header states."""
        return licence_in(self.metadata)

    @property
    def naming(self) -> str:
        """The tool whose names these are."""
        names = self.tensors.keys()
        if any(map(_COUNTED.fullmatch, names)):
            return "cloneofsimo's lora"
        if any(name.startswith("lora_") for name in names):
            return "kohya"
        if any(".processor." in name for name in names):
            return "diffusers' attention processors"
        if any(name.startswith("base_model.") for name in names):
            return "peft"
        if any(name.startswith(("diffusion_model.", "model.diffusion_model.")) for name in names):
            return "the network's authors or diffusers (diffusion_model.)"
        return "diffusers"

    @property
    def kinds(self) -> dict[str, int]:
        """Number of layers of the network by kind of change."""
        return dict(Counter(kind_of(parts) for parts in self.layers.values()))

    @property
    def ranks(self) -> dict[str, int]:
        """Number of layers of the network by rank."""
        found = Counter[int]()
        for parts in self.layers.values():
            rank = self.change(parts).rank
            if rank:
                found[rank] += 1
        return {str(rank): found[rank] for rank in sorted(found)}

    @property
    def text_tensors(self) -> list[str]:
        """Names of the tensors of text encoders."""
        found: list[str] = []
        for layers in self.texts.values():
            for parts in layers.values():
                found += parts.values()
        return found

    def change(self, parts: Mapping[str, str], alpha: float | None = None) -> Change:
        """The change that tensors by ``parts`` make."""
        tensors = {part: self.tensors[name] for part, name in parts.items() if part != ALPHA}
        return Change(tensors, alpha)

    def modules(self, part: str) -> frozenset[str] | None:
        """Classes of modules whose layers a file of cloneofsimo's tool counts; None if it does not say.

        ``part`` is ``unet`` or ``text_encoder``.
        """
        if part not in self.metadata:
            return None
        origin = f"{self.path}: {part} in its header"
        stated = parse_object(f'{{"modules": {self.metadata[part]}}}', origin)["modules"]
        known = COUNTED_MODULES if part == "unet" else {"CLIPAttention"}
        if not isinstance(stated, list) or not set(map(str, stated)) <= known:
            text = f"is {one_line(stated, 80)}; hddm knows the order of {', '.join(sorted(known))}"
            raise HddmError(f"{origin} {text}; merge it with the tool that made it")
        return frozenset(map(str, stated))


def _has_numbers(path: Path, layers: Layers) -> bool:
    """True if all layers are numbers; `HddmError` if only some are."""
    numbers = [name for name in layers if _NUMBER.fullmatch(name)]
    if numbers and len(numbers) < len(layers):
        raise HddmError(f"{path}: calls some layers by names and some by numbers; fetch it again")
    return bool(numbers)


def is_lora(names: Collection[str]) -> bool:
    """True for tensor names of a LoRA file, or of a similar small change to a network."""
    return any(is_change(name) or _COUNTED.fullmatch(name) for name in names)


def lora_file(path: Path) -> Path:
    """The file in a folder of peft or diffusers; any other path as it is."""
    for name in IN_FOLDERS:
        if (path / name).is_file():
            return path / name
    return path


def read_lora(path: Path, allow_pickle: bool = False) -> LoraFile:
    """Read a LoRA file; `HddmError` for a pickle that is not allowed, and tensors of no known change."""
    refuse_pickle(path, allow_pickle)
    if file_kind(path) == "safetensors":
        tensors: Mapping[str, Any] = read_safetensors(path)
        metadata = read_header(path)[1]
    else:
        tensors, metadata = _from_pickle(path), {}
    found = LoraFile(path, tensors, metadata)
    strangers = []
    for name in tensors:
        if metadata.get(name) == _TOKEN:
            found.tokens.setdefault(name, []).append(name)
        elif match := _BUNDLED.fullmatch(name):
            found.tokens.setdefault(match[1], []).append(name)
        elif match := _COUNTED.fullmatch(name):
            layers = found.layers if match[1] == "unet" else found.texts.setdefault(0, {})
            layers.setdefault(match[2], {})[match[3]] = name
        elif not _add(found, name):
            strangers.append(name)
    if strangers:
        _refuse(found, strangers)
    return found


def _from_pickle(path: Path) -> dict[str, Tensor]:
    content = read_any(path, allow_pickle=True)
    if isinstance(content, list):
        return _from_list(path, content)
    for name, value in content.items():
        if not isinstance(value, Tensor):
            text = f"holds {type(value).__name__} under {name!r}, no tensor"
            raise HddmError(f"{path}: {text}; save the tensors of the LoRA alone, by name")
    return {name: tensor.detach() for name, tensor in content.items()}


def _from_list(path: Path, content: list[Any]) -> dict[str, Tensor]:
    """Name the tensors of a list of cloneofsimo's tool as its safetensors do."""
    if len(content) % 2 or not content or not all(isinstance(one, Tensor) for one in content):
        raise HddmError(
            f"{path}: is a list of {len(content)}, and no list of up and down tensors in turn, as "
            "cloneofsimo's tool writes; name another file"
        )
    tensors = {}
    for index, tensor in enumerate(content):
        tensors[f"unet:{index // 2}:{DOWN if index % 2 else UP}"] = tensor.detach()
    return tensors


def _add(found: LoraFile, name: str) -> bool:
    """Add the tensor ``name`` to its layer; false where that is of no known kind."""
    split = part_of(name)
    if split is None or unread_kind(name) is not None:
        return False
    layer, part = split
    text = _TEXT.fullmatch(layer)
    if text is not None:
        number = text["kohya"] or text["diffusers"] or text["short"]
        index = _NAMED[text["named"]] if text["named"] else int(number or 1) - 1
        layers, layer = found.texts.setdefault(index, {}), text["layer"]
    else:
        layers, layer = found.layers, plain_name(layer)
    other = layers.setdefault(layer, {}).setdefault(part, name)
    if other != name:
        raise HddmError(
            f"{found.path}: holds one factor twice, as {other!r} and {name!r}; remove one"
        )
    return True


def _refuse(found: LoraFile, strangers: list[str]) -> None:
    """Raise an `HddmError` for tensors of kinds that are not read."""
    kinds: dict[str, list[str]] = {}
    for name in strangers:
        kinds.setdefault(unread_kind(name) or "", []).append(name)
    said = []
    for kind, names in kinds.items():
        what = f" of {kind}" if kind else " of no change that hddm knows"
        more = ", …" if len(names) > 1 else ""
        said.append(f"{counted(len(names), 'tensor')}{what} ({one_line(names[0], 80)!r}{more})")
    beside = ", ".join(f"{number} of {kind}" for kind, number in found.kinds.items())
    rest = f", beside layers that it reads ({beside})" if beside else ""
    raise HddmError(
        f"{found.path}: holds {', '.join(said)}{rest}, which hddm does not read; merge it into its base "
        "with the tool that made it, and convert the result"
    )


class Alphas:
    """Alphas of the layers of a file, and where they are stated."""

    def __init__(self, lora: LoraFile) -> None:
        self._lora = lora
        self._configs, self._origin = _configs(lora)
        self._sources = Counter[str]()

    def of(
        self, parts: Mapping[str, str], names: Collection[str], encoder: int = NETWORK
    ) -> float | None:
        """The alpha of a layer, which files and configs may call by any of ``names``; None if unstated.

        Raises `HddmError` where it is no positive number.
        """
        rank = self._lora.change(parts).rank
        source, alpha = "not stated, so it is the rank", None
        if ALPHA in parts:
            tensor = self._lora.tensors[parts[ALPHA]]
            source, alpha = "in the file", tensor.item() if tensor.numel() == 1 else "no number"
        elif rank and encoder in self._configs:
            config = self._configs[encoder]
            alpha = config.get("lora_alpha", "missing")
            for pattern, value in (config.get("alpha_pattern") or {}).items():
                if _ends(pattern, names):
                    alpha = value
                    break
            source = f"by {self._origin}"
        if alpha is None:
            self._sources[source] += bool(rank)
            return None
        if not isinstance(alpha, int | float) or not (0 < alpha <= LARGEST):
            name = next(iter(names))
            raise HddmError(
                f"{self._lora.path}: alpha of {name!r} is {one_line(alpha, 40)}, not a positive number up to "
                f"{LARGEST:g}"
            )
        self._sources[source] += bool(rank)
        if rank and source != "in the file" and self._configs[encoder].get("use_rslora"):
            # rsLoRA scales by alpha/sqrt(rank), arXiv:2312.03732.
            return float(alpha) * math.sqrt(rank)
        return float(alpha)

    def refuse_unused(self, names: Collection[str]) -> None:
        """Raise an `HddmError` for a pattern of the network's config that ends the name of no layer."""
        config = self._configs.get(NETWORK, {})
        for pattern in config.get("alpha_pattern") or {}:
            if not _ends(pattern, names):
                raise HddmError(
                    f"{self._lora.path}: {self._origin}: alpha_pattern {one_line(pattern, 40)!r} ends the "
                    "name of no layer"
                )

    @property
    def line(self) -> str:
        """Where the alphas are stated, in words."""
        found = [source for source, number in self._sources.items() if number]
        if len(found) < 2:
            return f"alpha: {found[0] if found else 'none is needed'}"
        each = [f"{counted(self._sources[source], 'layer')} {source}" for source in found]
        return f"alpha: {', '.join(each)}"


def _ends(pattern: str, names: Collection[str]) -> bool:
    """True if ``pattern`` ends one of ``names`` as in peft, where a caret begins the whole name."""
    return any(f"^{name}" == pattern or f".{name}".endswith(f".{pattern}") for name in names)


def _configs(lora: LoraFile) -> tuple[dict[int, dict[str, Any]], str]:
    """Configs of peft for the network and text encoders that the file or its folder states, and their origin.

    Raises `HddmError` for a variant of LoRA that is not read.
    """
    beside = lora.path.with_name(ADAPTER_CONFIG)
    is_others = lora.path.with_name(ADAPTER_WEIGHTS).is_file() and lora.path.name != ADAPTER_WEIGHTS
    has_names = any(match and match[2] in "AB" for match in map(FACTOR.fullmatch, lora.tensors))
    if _METADATA in lora.metadata:
        origin = _METADATA
        stated = parse_object(lora.metadata[_METADATA], f"{lora.path}: {origin}")
    elif beside.is_file() and has_names and not is_others:
        origin, stated = ADAPTER_CONFIG, read_json(beside)
    else:
        return {}, ""
    found: dict[int, dict[str, Any]] = {}
    for key, value in stated.items():
        match = _CONFIG_PART.fullmatch(key)
        part, key = (match[1], match[2]) if match else ("", key)
        index = NETWORK
        if part not in _NETWORK_PARTS:
            index = int(part.partition("text_encoder_")[2] or 1) - 1
        found.setdefault(index, {})[key] = value
    for config in found.values():
        # Both are read: the one by its formula, the other by its tensors.
        read = {"use_rslora": None, "use_dora": None}
        refuse_variants(config | read, f"{lora.path}: {origin}")
        patterns = config.get("alpha_pattern") or {}
        if not isinstance(patterns, dict):
            raise HddmError(
                f"{lora.path}: {origin}: alpha_pattern is {one_line(patterns, 40)}, no alphas by layer"
            )
    return found, origin
