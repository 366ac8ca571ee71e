"""The scale of each change in a LoRA file, and the place that states it.

    scale = alpha/r;   alpha/sqrt(r) for rsLoRA (arXiv:2312.03732)

alpha is in a tensor of the file; else in the config of peft that is in its header (``lora_adapter_metadata``)
or beside it (``adapter_config.json``); else it is r, so that the scale is 1. r is the width of the factors. A
LoKr of two whole sides has none: LyCORIS does not scale it, and peft does by the r of its config.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from hddm.checkpoints.lora_changes import ALPHA, FACTOR
from hddm.checkpoints.lora_files import NETWORK, LoraFile
from hddm.experts.adapter_records import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from hddm.experts.lora import refuse_variants
from hddm.utils.documents import parse_object
from hddm.utils.errors import HddmError, counted, one_line
from hddm.utils.files import read_json
from hddm.utils.records import LARGEST

_METADATA = "lora_adapter_metadata"
_PARTS = {
    "unet": NETWORK,
    "transformer": NETWORK,
    "text_encoder": 0,
    "text_encoder_2": 1,
    "text_encoder_3": 2,
}
"""What diffusers puts before the keys of a config, and the part that it is of."""
_OF_LYCORIS = ("LOHA", "LOKR")
"""Types of peft whose config calls alpha so, and not ``lora_alpha``."""
_LONGEST_PATTERN, _MOST_REPEATS = 200, 3
"""Larger regular expressions may take for ever to match."""


class Scales:
    """Scales of the layers of a file, and where they are stated."""

    def __init__(self, lora: LoraFile) -> None:
        self._lora = lora
        self._configs = _configs(lora)
        self._places: dict[tuple[str, ...], str] = {}

    def of(self, parts: Mapping[str, str], names: Collection[str], encoder: int = NETWORK) -> float:
        """The scale of a layer, which files and configs may call by any of ``names``.

        Raises `HddmError` where its alpha is no positive number.
        """
        change, config = self._lora.change(parts), self._configs.get(encoder)
        rank: int | float | None = change.rank
        alpha: object = None
        divisor, place = rank, "not stated, so it is the rank"
        if ALPHA in parts:
            tensor = self._lora.tensors[parts[ALPHA]]
            alpha, place = tensor.item() if tensor.numel() == 1 else "no number", "in the file"
        elif config is not None and (rank or change.is_kronecker):
            rank = rank or self._positive(config.rank(names), "r", names)
            divisor = math.sqrt(rank) if config.values.get("use_rslora") else rank
            alpha, place = config.alpha(names), f"by {config.origin}"
        scale = 1.0
        if alpha is not None:
            found = self._positive(alpha, "alpha", names)
            scale = found / divisor if divisor else 1.0
            self._positive(scale * (rank or 1), "alpha", names)
        if rank:
            self._places[tuple(parts.values())] = place
        return scale

    def _positive(self, value: object, what: str, names: Collection[str]) -> int | float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and isinstance(value, int | float) and 0 < value <= LARGEST):
            name = next(iter(names))
            raise HddmError(
                f"{self._lora.path}: {what} of {name!r} is {one_line(value, 40)}, not a positive number up "
                f"to {LARGEST:g}; correct it where it is stated"
            )
        return value

    def refuse_unused(self, names: Collection[str], encoder: int = NETWORK) -> None:
        """Raise an `HddmError` for a pattern of a config that ends the name of no layer of its part."""
        config = self._configs.get(encoder)
        if config is None:
            return
        for pattern in config.alphas:
            if not pattern.ends(names):
                raise HddmError(
                    f"{self._lora.path}: {config.origin}: alpha_pattern {one_line(pattern.text, 40)!r} ends "
                    "the name of no layer; correct it"
                )

    @property
    def line(self) -> str:
        """Where the alphas are stated, in words."""
        found = Counter(self._places.values())
        if len(found) < 2:
            return f"alpha: {next(iter(found), 'none is needed')}"
        each = [f"{counted(number, 'layer')} {place}" for place, number in found.items()]
        return f"alpha: {', '.join(each)}"


@dataclass(frozen=True)
class _Pattern:
    """The end of names of layers, as a regular expression."""

    text: str
    compiled: re.Pattern[str]
    value: object

    def ends(self, names: Collection[str]) -> bool:
        """True if it ends one of ``names`` as in peft, where a caret begins the whole name."""
        return any(map(self.compiled.match, names))


@dataclass(frozen=True)
class _Config:
    """The config of peft of one part, and the place where it is."""

    values: Mapping[str, Any]
    origin: str
    alphas: tuple[_Pattern, ...]
    ranks: tuple[_Pattern, ...]

    def alpha(self, names: Collection[str]) -> object:
        """The alpha of a layer that has one of ``names``."""
        key = "alpha" if self.values.get("peft_type") in _OF_LYCORIS else "lora_alpha"
        return _first(self.alphas, names, self.values.get(key, "missing"))

    def rank(self, names: Collection[str]) -> object:
        """The r of a layer that has one of ``names``."""
        return _first(self.ranks, names, self.values.get("r", "missing"))


def _first(patterns: Collection[_Pattern], names: Collection[str], default: object) -> object:
    for pattern in patterns:
        if pattern.ends(names):
            return pattern.value
    return default


def _configs(lora: LoraFile) -> dict[int, _Config]:
    """Configs of peft for the network and text encoders that the file or its folder states.

    Raises `HddmError` for a variant of LoRA that is not read, and for one that does not say what it is of.
    """
    beside = lora.path.with_name(ADAPTER_CONFIG)
    is_pefts = lora.path.name == ADAPTER_WEIGHTS
    if not is_pefts and not lora.path.with_name(ADAPTER_WEIGHTS).is_file():
        is_pefts = any(match and match[2] in "AB" for match in map(FACTOR.fullmatch, lora.tensors))
    if _METADATA in lora.metadata:
        origin = _METADATA
        stated = parse_object(lora.metadata[_METADATA], f"{lora.path}: {origin}")
    elif beside.is_file() and is_pefts:
        origin, stated = ADAPTER_CONFIG, read_json(beside)
    else:
        return {}
    values: dict[int, dict[str, Any]] = {}
    for key, value in stated.items():
        part, _, own = key.rpartition(".")
        values.setdefault(_part(lora, part, origin), {})[own] = value
    found = {}
    for index, config in values.items():
        # Both are read: the one by its formula, the other by its tensors.
        read = {"use_rslora": None, "use_dora": None}
        place = f"{lora.path}: {origin}"
        refuse_variants(config | read, place)
        alphas, ranks = (_patterns(config, key, place) for key in ("alpha_pattern", "rank_pattern"))
        found[index] = _Config(config, origin, alphas, ranks)
    return found


def _part(lora: LoraFile, part: str, origin: str) -> int:
    """The number of the text encoder that a config's ``part`` is, or `NETWORK`."""
    if part in _PARTS:
        return _PARTS[part]
    if part:
        known = ", ".join(_PARTS)
        raise HddmError(
            f"{lora.path}: {origin} has keys of {one_line(part, 40)!r}, which is none of {known}; correct it"
        )
    changed = [NETWORK] if lora.layers else []
    changed += lora.texts
    if len(changed) > 1:
        raise HddmError(
            f"{lora.path}: changes a network and text encoders, or several, and {origin} does not say which "
            "of them it is of; put unet., transformer. or text_encoder. before its keys"
        )
    return changed[0] if changed else NETWORK


def _patterns(config: Mapping[str, Any], key: str, place: str) -> tuple[_Pattern, ...]:
    """The patterns of a config under ``key``; `HddmError` for what is none, or may take for ever."""
    stated = config.get(key) or {}
    if not isinstance(stated, dict):
        raise HddmError(f"{place}: {key} is {one_line(stated, 40)}, no object; correct it")
    found = []
    for text, value in stated.items():
        repeats = len(re.findall(r"[*+{]", text))
        is_slow = len(text) > _LONGEST_PATTERN or repeats > _MOST_REPEATS
        is_slow |= re.search(r"\)[*+{]", text) is not None
        if is_slow:
            raise HddmError(
                f"{place}: {key} {one_line(text, 40)!r} repeats a group, repeats more than {_MOST_REPEATS} "
                f"times, or is longer than {_LONGEST_PATTERN}; state the layers in another way"
            )
        try:
            # As peft matches it (get_pattern_key).
            compiled = re.compile(rf"(.*\.)?({text})$")
        except re.error as error:
            raise HddmError(
                f"{place}: {key} {one_line(text, 40)!r} is no regular expression ({error}); correct it"
            ) from error
        found.append(_Pattern(text, compiled, value))
    return tuple(found)
