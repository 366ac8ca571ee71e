"""What the header of safetensors files says of the network in them.

Public single files have the keys of Stability AI's ModelSpec (github.com/Stability-AI/ModelSpec), which
trainers and merging tools write; ComfyUI writes ``modelspec.predict_key`` for what the network predicts, and
kohya's trainers (github.com/kohya-ss/sd-scripts) what they were called with (``ss_*``):

    modelspec.prediction_type, modelspec.predict_key    epsilon, or v
    modelspec.architecture    stable-diffusion-v2-768-v predicts v; no other name says what is predicted
    modelspec.resolution      WIDTHxHEIGHT of pictures
    modelspec.timestep_range  MIN,MAX of a network for these timesteps alone
    modelspec.license         a name, a link, or the whole text
    modelspec.title           its name
    ss_base_model_version     sd_v1, sd_v2, sdxl_base_v1-0; with _v at the end it predicts v
    ss_v2, ss_v_parameterization, ss_zero_terminal_snr    True or False
    ss_resolution             (WIDTH, HEIGHT)
"""

import re
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
_VERSION, _IS_V2, _IS_V = "ss_base_model_version", "ss_v2", "ss_v_parameterization"
_HAS_NO_SIGNAL = "ss_zero_terminal_snr"
REFINER = "XL's refiner"
_KINDS = {
    "stable-diffusion-v1": "1",
    "stable-diffusion-v2-512": "2",
    "stable-diffusion-v2-768-v": "2",
    "stable-diffusion-xl-v1-base": "XL",
    "stable-diffusion-xl-v1-refiner": REFINER,
    "sd_v1": "1",
    "sd_v2": "2",
    "sdxl_base_v1-0": "XL",
    "sdxl_base_v0-9": "XL",
}
"""Kinds of Stable Diffusion by the names that headers have for them."""
_RESOLUTIONS = ("modelspec.resolution", "ss_resolution")
_TITLES = ("modelspec.title", "ss_output_name")
_HASHES = ("modelspec.hash_sha256", "sshs_model_hash", "sshs_legacy_hash")
"""Of the tensors of a file."""


@dataclass(frozen=True)
class Header:
    """What headers say.

    Args:
        predictions: what the network predicts, by the key and file that say so.
        kinds: the kind of Stable Diffusion (1, 2, XL or `REFINER`), likewise.
        zero_snr: the key and file that say that it was trained down to zero signal.
        side: of square pictures, in pixels, and the key that says so.
        licence: of the weights.
        metadata: all of the only file, as it is.
        notes: for the user.
    """

    predictions: Mapping[str, str] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)
    zero_snr: str | None = None
    side: tuple[int, str] | None = None
    licence: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read_headers(files: Sequence[Path]) -> Header:
    """Read the headers of weights files; a pickle has none."""
    predictions: dict[str, str] = {}
    kinds: dict[str, str] = {}
    metadata: Mapping[str, str] = {}
    licences: list[str] = []
    notes = []
    zero_snr = side = None
    for path in files:
        if file_kind(path) != "safetensors":
            continue
        metadata = read_header(path)[1]
        predictions |= predictions_in(metadata, path.name)
        kinds |= _kinds_in(metadata, path.name)
        side = side or _side_in(metadata, path.name)
        if metadata.get(_HAS_NO_SIGNAL) == "True":
            zero_snr = f"{_HAS_NO_SIGNAL} in the header of {path.name}"
        for key in _TITLES:
            if metadata.get(key, "").strip():
                notes.append(f"{path}: its {key} is {one_line(metadata[key], 80)}")
                break
        if (licence := licence_in(metadata)) is not None:
            licences.append(licence)
        if timesteps := metadata.get(_TIMESTEPS):
            text = f"its {_TIMESTEPS} is {one_line(timesteps, 40)}; `noise_range` keeps it to its part of t"
            notes.append(f"{path}: {text}")
    licence = " AND ".join(dict.fromkeys(licences)) or None
    whole = dict(metadata) if len(files) == 1 else {}
    return Header(predictions, kinds, zero_snr, side, licence, whole, tuple(notes))


def _kinds_in(metadata: Mapping[str, str], name: str) -> dict[str, str]:
    """The kind of Stable Diffusion that the header of the file ``name`` says, by its keys."""
    found = {}
    for key in (_ARCHITECTURE, _VERSION):
        stated = metadata.get(key, "").partition("/")[0]
        stated = stated.removesuffix("_v") if key == _VERSION else stated
        if stated in _KINDS:
            found[f"{key} in the header of {name}"] = _KINDS[stated]
    if metadata.get(_IS_V2) == "True":
        found[f"{_IS_V2} in the header of {name}"] = "2"
    return found


def _side_in(metadata: Mapping[str, str], name: str) -> tuple[int, str] | None:
    """Side of square pictures in pixels, and the key that says it; None for others."""
    for key in _RESOLUTIONS:
        sides = re.findall(r"\d{1,5}", metadata.get(key, ""))
        if 1 <= len(sides) <= 2 and len(set(sides)) == 1 and int(sides[0]) >= 1:
            return int(sides[0]), f"{key} in the header of {name}"
    return None


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
    if metadata.get(_VERSION, "").endswith("_v"):
        found[f"{_VERSION} in the header of {name}"] = PredictionType.V_PREDICTION.value
    if metadata.get(_IS_V) in ("True", "False"):
        is_v = metadata[_IS_V] == "True"
        kind = PredictionType.V_PREDICTION if is_v else PredictionType.EPSILON
        found[f"{_IS_V} in the header of {name}"] = kind.value
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


def without_hashes(metadata: Mapping[str, str]) -> dict[str, str]:
    """A header for other tensors of the same network."""
    return {key: value for key, value in metadata.items() if key not in _HASHES}


def without_names(metadata: Mapping[str, str]) -> dict[str, str]:
    """A header for changed weights, which have neither the title nor the hashes of those before."""
    found = without_hashes(metadata)
    return {key: value for key, value in found.items() if key not in _TITLES}


def with_licence(metadata: Mapping[str, str], licence: str | None) -> dict[str, str]:
    """A header that states ``licence``; as it is where it does."""
    found = dict(metadata)
    if licence != licence_in(metadata):
        found.pop(LICENCE, None)
        if licence is not None:
            found[LICENCE] = licence
    return found
