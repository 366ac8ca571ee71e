"""LoRA files, read but not yet laid on a base: which tensor is which part of a change to which layer.

Layers keep the names that the file has for them, without the prefixes of tools; `hddm.checkpoints.lora_names`
finds them in a network. Files of cloneofsimo's tool count layers: ``unet:0:up``, or, in a pickle, a list of
``up`` and ``down`` in turn.

How much each change is scaled by is in `hddm.checkpoints.lora_scales`.
"""

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
    UP,
    Change,
    is_change,
    kind_of,
    part_of,
    unread_kind,
)
from hddm.checkpoints.lora_names import COUNTED_MODULES, plain_name
from hddm.experts.adapter_records import ADAPTER_WEIGHTS
from hddm.utils.documents import parse_object
from hddm.utils.errors import HddmError, counted, one_line
from hddm.utils.files import file_kind, refuse_pickle
from hddm.utils.pickles import read_any
from hddm.utils.tensors import read_header, read_safetensors

IN_FOLDERS = (ADAPTER_WEIGHTS, "pytorch_lora_weights.safetensors")
"""Files of a LoRA in a folder of peft, and of diffusers."""
_COUNTED = re.compile(r"(unet|text_encoder):(0|[1-9][0-9]{0,5}):(up|down)")
_NUMBER = re.compile("0|[1-9][0-9]{0,5}")
_TEXT = re.compile(
    r"(lora_te(?P<kohya>[1-9]?)_|text_encoder(_(?P<diffusers>[1-9]))?\.|te(?P<short>[1-9]?)\.|"
    r"(?P<named>clip_l|clip_g|t5xxl)\.|(base_model\.model\.)?(?=text_model\.))(?P<layer>.+)"
)
_NO_ENCODER = re.compile(r"(lora_te0_|text_encoder_0\.|te0\.).+")
"""Tools count text encoders from 1, and give none to the only one."""
_NAMED = {"clip_l": 0, "clip_g": 1, "t5xxl": 2}
_BUNDLED = re.compile(r"bundle_emb\.([^.]+)\..+")
_TOKEN = "<embed>"
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

    def change(self, parts: Mapping[str, str], scale: float = 1.0) -> Change:
        """The change that tensors by ``parts`` make."""
        tensors = {part: self.tensors[name] for part, name in parts.items() if part != ALPHA}
        return Change(tensors, scale)

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
    if _NO_ENCODER.fullmatch(layer):
        raise HddmError(
            f"{found.path}: {one_line(name, 80)!r} is of text encoder 0, and they are counted from 1; rename "
            "the tensor"
        )
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
