"""What a student learns from: an ensemble, asked for one expert a sample or for its mixture."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from hddm.data.shards import Shard
from hddm.ensemble import Ensemble
from hddm.errors import HddmError
from hddm.experts import UnreadExpert
from hddm.loading import ensemble_of, expert_set
from hddm.manifest import MANIFEST
from hddm.model_folders import sha256_once
from hddm.parts import Parts, open_parts
from hddm.routing import Strategy
from hddm.training.shard_fit import check_fit

LABELS = "class_labels"


@dataclass(frozen=True)
class Teacher:
    """An ensemble, opened and held against the data; its experts are read when they are first asked.

    ``experts`` (shards,) is the index of the expert of each shard, None for the mixture. ``record`` holds
    plain values that say what it is; two teachers with the same record have the same velocity.
    """

    parts: Parts
    experts: Tensor | None
    record: dict[str, Any]

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes that its experts take labels of; empty where none does."""
        return next((one.facts.classes for one in self.parts.experts if one.facts.classes), ())

    @property
    def licence(self) -> str | None:
        """All licences that its experts state, of which a student is under every one; None for none."""
        stated = {one.facts.licence for one in self.parts.experts if one.facts.licence}
        return " AND ".join(sorted(stated)) or None

    def on(self, device: torch.device) -> Ensemble:
        """The ensemble in float32 on a device."""
        router = self.parts.router
        if router is not None:
            router.to(device)
        held = expert_set(self.parts, torch.float32, device)
        return ensemble_of(held, router, self.parts.router_facts, self.parts.facts)


def open_teacher(
    folder: Path,
    whole: Shard,
    shards: Sequence[Shard],
    kind: Literal["shard", "routed"],
    condition_dropout: float,
) -> Teacher:
    """The teacher in ``folder`` for a student of ``shards``.

    Args:
        folder: of an ensemble, or of one expert.
        whole: the data.
        shards: the same by shards.
        kind: ``shard``: each sample's own expert, known by the hash of its shard. ``routed``: the mixture,
            by the strategy in the folder.
        condition_dropout: share of samples that are to be learned without their conditions.

    Raises:
        HddmError: for a folder that cannot be read, a shard without its expert, a strategy that is no
            mixture, conditions other than classes, classes that the data has not, or samples of another
            shape or space.
    """
    parts = open_parts(folder, torch.float32)
    names = [f"{folder / name}" for name in parts.facts.experts]
    _check_conditions(names, parts.experts, whole, condition_dropout)
    check_fit(whole, parts.experts[0].facts, parts.experts[0].unread.network)
    experts = None
    if kind == "shard":
        experts = _by_shard(folder, parts.experts, names, shards)
    else:
        _check_strategy(folder, parts)
    record: dict[str, Any] = {
        "ensemble": folder.resolve().name,
        "kind": kind,
        "experts": {
            name: {"files": _hashes(one), "shard": one.facts.shard and one.facts.shard.hash}
            for name, one in zip(parts.facts.experts, parts.experts, strict=True)
        },
    }
    if experts is None:
        record["strategy"] = parts.facts.strategy
        if parts.facts.router is not None:
            record["router"] = _files(folder / parts.facts.router)
    return Teacher(parts, experts, record)


def _by_shard(
    folder: Path, experts: Sequence[UnreadExpert], names: Sequence[str], shards: Sequence[Shard]
) -> Tensor:
    places = {one.facts.shard.hash: k for k, one in enumerate(experts) if one.facts.shard is not None}
    missing = [one for one in shards if one.hash not in places]
    if missing:
        lines = [f"{one.folder} ({one.hash[:12]}): no expert was trained on it" for one in missing]
        lines += [
            f"{name}: records no shard"
            for name, one in zip(names, experts, strict=True)
            if one.facts.shard is None
        ]
        raise HddmError(
            f"{folder}: --teacher shard needs the expert of every shard; take the partition that they were "
            "trained on, or --teacher routed",
            lines,
        )
    return torch.tensor([places[one.hash] for one in shards])


def _check_strategy(folder: Path, parts: Parts) -> None:
    strategy = parts.facts.strategy
    if Strategy.parse(strategy).kind == "draw":
        raise HddmError(
            f"{folder}: its strategy is draw, one expert a sample and no mixture; assemble it with another "
            "--strategy, or take --teacher shard"
        )
    if parts.router is None and len(parts.experts) > 1:
        raise HddmError(f"{folder}: --teacher routed needs its router, and it has none; take --teacher shard")


def _check_conditions(
    names: Sequence[str], experts: Sequence[UnreadExpert], shard: Shard, dropout: float
) -> None:
    for name, one in zip(names, experts, strict=True):
        facts = one.facts
        others = [condition for condition in facts.conditions if condition != LABELS]
        if others:
            raise HddmError(f"{name}: takes {', '.join(others)}; a student learns classes, and no texts yet")
        if LABELS not in facts.conditions:
            continue
        if shard.labels is None or shard.classes != facts.classes:
            raise HddmError(
                f"{shard.folder}: its classes are {list(shard.classes)}, and those of {name} are "
                f"{list(facts.classes)}"
            )
        if dropout and facts.null_class != len(facts.classes):
            raise HddmError(
                f"{name}: has no label {len(facts.classes)} for no class (its null class is "
                f"{facts.null_class}); pass --condition-dropout 0"
            )


def _hashes(expert: UnreadExpert) -> dict[str, str]:
    return {} if expert.folder is None else _files(expert.folder)


def _files(folder: Path) -> dict[str, str]:
    """SHA-256 by name of what gives a model its velocity: weights, calibration and records."""
    kept = (path for path in folder.iterdir() if path.suffix in (".safetensors", ".json"))
    paths = sorted(path for path in kept if path.name != MANIFEST and not path.name.startswith("."))
    return {path.name: sha256_once(path) for path in paths}
