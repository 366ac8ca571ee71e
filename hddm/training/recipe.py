"""Resolve what is requested of a training to its recipe: the one place where defaults are filled in."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from hddm.training.settings import Recipe, RouterRecipe, size_config
from hddm.utils.errors import UsageError
from hddm.utils.records import OPTIONS, WHOLE, NoiseRange, Record, parse_record

WEAK_AT = 0.25
MUON_RATE = 0.02
LONGEST_WARMUP = 100

Kind = TypeVar("Kind", bound=Recipe)


@dataclass(frozen=True)
class Start:
    """What a training begins with, as far as its defaults depend on that.

    A network with random weights (``is_new``) predicts ``prediction``, which its schedule may state, unless
    another one is requested. Of a network that goes on, ``prediction``, ``rotary`` and ``noise_range`` are
    its own, and the first two cannot be requested. ``strategy`` is a routed teacher's.
    """

    is_new: bool = True
    prediction: str | None = None
    rotary: bool = True
    noise_range: NoiseRange = WHOLE
    strategy: str | None = None

    @classmethod
    def of(cls, network: object, prediction: str, noise_range: NoiseRange = WHOLE) -> "Start":
        """Return the start of a training that continues ``network``."""
        return cls(False, prediction, bool(getattr(network, "config", {}).get("rotary", False)), noise_range)


NEW = Start()
# A value of the run that is resumed belongs to the request in the second place, and to no other.
_BELONGS_TO = {
    "muon_learning_rate": "optimizer",
    "prediction": "objective",
    "weighting": "prediction",
    "weak_at": "lora_rank",
    "lora_alpha": "lora_rank",
    "strategy": "teacher",
}


def kept(name: str, values: Mapping[str, Any], before: Mapping[str, Any]) -> Any:
    """Return the value ``name`` of the resumed recipe ``before``; None if it is of another request."""
    on = _BELONGS_TO.get(name)
    return before.get(name) if on is None or values.get(on) == before.get(on) else None


def resolve(
    kind: type[Kind],
    requested: Record,
    start: Start = NEW,
    before: Mapping[str, Any] | None = None,
) -> Kind:
    """Return the recipe of a training.

    Args:
        kind: of recipe, which goes with the kind of ``requested`` settings.
        requested: settings; what they leave open is filled in.
        start: what the training begins with.
        before: the recipe of the run that is resumed. It comes before defaults, which may have changed.

    Raises:
        UsageError: for a rate of Muon where AdamW trains everything.
    """
    values = requested.model_dump()
    if not start.is_new:
        decided = {"prediction": start.prediction, "weighting": None, "rotary": start.rotary}
        values |= {name: value for name, value in decided.items() if name in values}
    is_ddpm = values.get("objective") == "ddpm"
    recorded = before or {}
    optimizer = values["optimizer"] or recorded.get("optimizer") or ("muon" if start.is_new else "adamw")
    has_muon = optimizer == "muon"
    if values["muon_learning_rate"] is not None and not has_muon:
        text = "this training uses AdamW only; leave it out, or use --optimizer muon"
        raise UsageError(f"--muon-learning-rate {values['muon_learning_rate']:g}: {text}")
    by_width = 0.2 if has_muon else 0.125 if issubclass(kind, RouterRecipe) else 0.5
    prediction = values.get("prediction") or start.prediction or ("epsilon" if is_ddpm else "sample")
    is_new_sample = start.is_new and prediction == "sample"
    defaults = {
        "optimizer": optimizer,
        "learning_rate": by_width / size_config(values["size"])["hidden_size"] if start.is_new else 1e-4,
        "muon_learning_rate": MUON_RATE if has_muon else None,
        "warmup": min(LONGEST_WARMUP, values["steps"] // 10),
        "threads": torch.get_num_threads(),
        "prediction": prediction,
        "weighting": "velocity" if prediction == "sample" else "prediction",
        "rotary": start.rotary,
        "time_sampling": "uniform" if is_ddpm and not is_new_sample else "logit-normal",
        "noise_range": start.noise_range,
        "weak_at": WEAK_AT if start.is_new and values.get("lora_rank") is None else 0.0,
        "lora_alpha": values.get("lora_rank"),
        "strategy": start.strategy,
    }
    for name, default in defaults.items():
        if name in values and values[name] is None:
            known = kept(name, values, recorded)
            values[name] = default if known is None else known
    return parse_record(values, kind, OPTIONS)
