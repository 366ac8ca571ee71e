"""What the header of safetensors files says of the network in them.

Public single files have the keys of Stability AI's ModelSpec (github.com/Stability-AI/ModelSpec), which
trainers and merging tools write; ComfyUI writes ``modelspec.predict_key`` for what the network predicts:

    modelspec.prediction_type, modelspec.predict_key    epsilon, or v
    modelspec.architecture    stable-diffusion-v2-768-v predicts v; no other name says what is predicted
    modelspec.timestep_range  MIN,MAX of a network for these timesteps alone
    modelspec.license         a name, a link, or the whole text
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hddm.predictions import PredictionType
from hddm.utils.errors import one_line
from hddm.utils.files import file_kind
from hddm.utils.tensors import read_header

LICENCE = "modelspec.license"
_PREDICTION_KEYS = ("modelspec.prediction_type", "modelspec.predict_key")
_ARCHITECTURE = "modelspec.architecture"
_V_ARCHITECTURE = "stable-diffusion-v2-768-v"
_TIMESTEPS = "modelspec.timestep_range"
LONGEST_LICENCE = 200


@dataclass(frozen=True)
class Header:
    """What headers say; ``predictions`` are what the network predicts, by the key and file that say so."""

    predictions: Mapping[str, str] = field(default_factory=dict)
    licence: str | None = None
    notes: tuple[str, ...] = ()


def read_headers(files: Sequence[Path]) -> Header:
    """Read the headers of weights files; a pickle has none."""
    predictions: dict[str, str] = {}
    licences: list[str] = []
    notes = []
    for path in files:
        if file_kind(path) != "safetensors":
            continue
        metadata = read_header(path)[1]
        predictions |= predictions_in(metadata, path.name)
        if (licence := licence_in(metadata)) is not None:
            licences.append(licence)
        if timesteps := metadata.get(_TIMESTEPS):
            text = f"its {_TIMESTEPS} is {one_line(timesteps, 40)}; `noise_range` keeps it to its part of t"
            notes.append(f"{path}: {text}")
    return Header(predictions, " AND ".join(dict.fromkeys(licences)) or None, tuple(notes))


def predictions_in(metadata: Mapping[str, str], name: str) -> dict[str, str]:
    """What the header of the file ``name`` says that the network predicts, by its keys.

    Values are those of `PredictionType`, or, where hddm does not know them, as they are.
    """
    found = {}
    for key in _PREDICTION_KEYS:
        if stated := metadata.get(key, "").strip():
            found[f"{key} in the header of {name}"] = one_line(_kind(stated.lower()), 40)
    if metadata.get(_ARCHITECTURE, "").partition("/")[0] == _V_ARCHITECTURE:
        found[f"{_ARCHITECTURE} in the header of {name}"] = PredictionType.V_PREDICTION.value
    return found


def _kind(stated: str) -> str:
    """The name of a `PredictionType` for one of its aliases; other names as they are."""
    for kind in PredictionType:
        if stated in kind.prediction.aliases:
            return kind.value
    return stated


def licence_in(metadata: Mapping[str, str]) -> str | None:
    """The licence that a header states, in one line."""
    stated = metadata.get(LICENCE, "").strip()
    return one_line(stated, LONGEST_LICENCE) if stated else None
