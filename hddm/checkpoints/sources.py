"""A pretrained checkpoint, read but not yet converted."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from diffusers import ModelMixin
from torch import Tensor

from hddm.checkpoints.keys import KeyTable
from hddm.checkpoints.layouts import Forward, Hints
from hddm.components.identity import TextEncoderFacts, VaeFacts
from hddm.errors import HddmError
from hddm.experts import ExpertFacts
from hddm.weight_files import kind_of, read_pickle, read_safetensors

WeightSet = Literal["ema", "raw", "unstated"]
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Reading:
    """How the user wants a source read.

    Args:
        layout: one of `hddm.checkpoints.recognise.LAYOUTS` instead of what its content says.
        allow_pickle: whether pickle files are read, without code all the same.
        weights: the set of weights; by default averaged ones where there are such.
        variant: of the file names in a diffusers folder, as ``fp16``.
        hints: sizes that no tensor tells.
    """

    layout: str | None = None
    allow_pickle: bool = False
    weights: WeightSet | None = None
    variant: str | None = None
    hints: Hints = field(default_factory=Hints)


@dataclass(frozen=True)
class Declared:
    """What a source says about its training, each with where it says so; None where it says nothing.

    ``scheduler`` is a diffusers scheduler config, or our own record of a schedule.
    """

    scheduler: Mapping[str, Any] | None = None
    scheduler_origin: str = ""
    is_layout_rule: bool = False
    prediction_type: str | None = None


@dataclass(frozen=True)
class Source:
    """Tensors under the layout's names, mapped from disk, and what they mean.

    ``network`` and ``arguments`` make the network of the same function, ``table`` leads there,
    ``forward`` builds the source's own network.
    """

    path: Path
    layout: str
    files: tuple[Path, ...]
    weights: Tensors
    network: type[ModelMixin]
    arguments: Mapping[str, Any]
    table: KeyTable
    forward: Callable[[], Forward]
    declared: Declared
    sets: tuple[str, ...] = ("unstated",)
    chosen: WeightSet = "unstated"
    prefix: str = ""
    nulls: Mapping[str, str] = field(default_factory=dict)
    is_latent: bool = True
    latent_scale: float | None = None
    licence: str | None = None
    notes: tuple[str, ...] = ()
    empty_prompt: Callable[[], Tensor] | None = None
    """Tokens (tokens, width) of no text, by the text encoder of a pipeline."""
    vae: VaeFacts | None = None
    text_encoder: Callable[[], TextEncoderFacts] | None = None
    """Of a pipeline with one CLIP text encoder."""
    no_text_encoder: str = "no pipeline with a CLIP encoder lies around it"
    """Why there is none, where there is none."""
    facts: ExpertFacts | None = None
    """Of an expert folder."""
    kept: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors that no network needs, for the way back."""
    null_tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """Of an expert folder."""


def read_file(path: Path, allow_pickle: bool) -> dict[str, Any]:
    """What a file of weights holds: tensors by name, or for a pickle nested dictionaries."""
    return dict(read_safetensors(path)) if kind_of(path) == "safetensors" else read_pickle(path, allow_pickle)


def choose_set(sets: Mapping[str, Tensors], asked: WeightSet | None, origin: str) -> WeightSet:
    """The set of weights to take: as asked, else the averaged one, else the only one.

    Raises:
        HddmError: for a set that is not there.
    """
    if asked is None:
        return next(name for name in ("ema", "unstated", "raw") if name in sets)
    if asked not in sets:
        what = ", ".join(sets)
        unsaid = " (it holds one set and does not say which)" if list(sets) == ["unstated"] else ""
        raise HddmError(
            f"--weights {asked}: {origin} holds {what}{unsaid}; drop the option or name one of these"
        )
    return asked
