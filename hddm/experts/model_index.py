"""The files of an ensemble folder that are diffusers': ``model_index.json`` and the scheduler's config.

``model_index.json`` is foreign text: a part may be of the classes listed in `CLASSES` and of no other, so
nothing that a folder says decides which code runs.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers

from hddm.schedules import from_diffusers
from hddm.utils.errors import HddmError, did_you_mean, one_line
from hddm.utils.files import read_json, write_json

MODEL_INDEX = "model_index.json"
ROUTER = "router"
PIPELINE = "HDDMPipeline"
SCHEDULER = "FlowMatchEulerDiscreteScheduler"
SCHEDULER_FILE = "scheduler/scheduler_config.json"

ClassName = tuple[str, str]
"""Library and class, as in ("diffusers", "AutoencoderKL")."""

KEPT = ("vae", "text_encoder", "tokenizer")
"""Parts that a converted expert may have besides networks, one folder each."""
MOST_ENCODERS = 3
"""VAEs, and text encoders, of an ensemble at most."""


def numbered(name: str, number: int) -> str:
    """Name of a component by its number, from 0: ``vae``, ``vae_2``, ``vae_3``, as in diffusers."""
    return name if number == 0 else f"{name}_{number + 1}"


def unnumbered(name: str) -> str:
    """The kind of a component, by its name: ``vae`` of ``vae_2``."""
    return re.sub(r"_\d$", "", name)


COMPONENTS = tuple(numbered(name, number) for number in range(MOST_ENCODERS) for name in KEPT)
"""Parts that an ensemble may have besides networks and scheduler."""
_KINDS: Mapping[str, tuple[ClassName, ...]] = {
    "vae": (("diffusers", "AutoencoderKL"), ("diffusers", "AutoencoderTiny")),
    "text_encoder": (
        *(("transformers", "CLIPTextModel"), ("transformers", "T5EncoderModel")),
        ("hddm", "PromptEncoders"),
    ),
    "tokenizer": (("transformers", "CLIPTokenizer"), ("transformers", "T5Tokenizer")),
}
CLASSES: Mapping[str, tuple[ClassName, ...]] = {
    "experts": (("hddm", "ExpertSet"),),
    "router": (("hddm", "RouterTransformer"),),
    "scheduler": (("diffusers", SCHEDULER),),
    **{name: _KINDS[unnumbered(name)] for name in COMPONENTS},
}
"""Every part that an ensemble may have, and what it may be."""


_NEEDED = ("experts", "scheduler")
_RECORDS = ("_class_name", "_diffusers_version")
# What else a scheduler of this class can do to its grid; hddm's own grid has the shift alone.
_OTHER_GRIDS = (
    *("use_dynamic_shifting", "use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas"),
    *("shift_terminal", "invert_sigmas", "stochastic_sampling"),
)


def read_model_index(folder: Path) -> dict[str, ClassName | None]:
    """Library and class of every part in `CLASSES`, None for absent parts.

    Raises a one-line `HddmError` with file, key and value for a key or a class that is not listed (such as
    ``auto_map``, ``custom_pipeline`` and module paths), and where experts or scheduler are missing.
    """
    path = folder / MODEL_INDEX
    content = _read_class(path, PIPELINE)
    for key, value in content.items():
        if key not in CLASSES and key not in _RECORDS:
            near = did_you_mean(key, CLASSES)
            raise HddmError(f"{path}: unknown key {key!r} (is {one_line(repr(value))}){near}; refused")
    return {part: _class_of(path, part, content.get(part)) for part in CLASSES}


def write_model_index(folder: Path, classes: Mapping[str, ClassName]) -> None:
    """Write ``model_index.json``; experts and scheduler are always named."""
    always = {part: CLASSES[part][0] for part in _NEEDED}
    parts = ("experts", "router", "scheduler", *KEPT, *classes)
    named = {part: (always | dict(classes)).get(part) for part in CLASSES if part in parts}
    content = {"_class_name": PIPELINE, "_diffusers_version": diffusers.__version__}
    write_json(folder / MODEL_INDEX, content | {part: one or (None, None) for part, one in named.items()})


def read_shift(folder: Path) -> float:
    """Read the time grid's shift from ``scheduler/scheduler_config.json``.

    Raises `HddmError` for another class, an unknown key, a shift that is not positive, or a setting that
    changes the grid in another way.
    """
    path = folder / SCHEDULER_FILE
    config = _read_class(path, SCHEDULER)
    from_diffusers(path)
    refuse_other_grids(config, str(path))
    shift = config.get("shift", 1.0)
    if not isinstance(shift, int | float) or isinstance(shift, bool) or not 0 < shift < math.inf:
        raise HddmError(f"{path}: shift is {one_line(repr(shift))}, and must be a positive number")
    return float(shift)


def refuse_other_grids(config: Mapping[str, object], origin: str) -> None:
    """Raise an `HddmError` that names the first key by which a scheduler does more than shift its grid."""
    for key in _OTHER_GRIDS:
        if config.get(key):
            raise HddmError(
                f"{origin}: {key} is {one_line(repr(config[key]))}, and hddm's grid has the shift alone"
            )


def shift_of(scheduler: "diffusers.FlowMatchEulerDiscreteScheduler") -> float:
    """Shift of a scheduler's time grid; `HddmError` where it does more than shift."""
    if type(scheduler) is not diffusers.FlowMatchEulerDiscreteScheduler:
        problem = f"the scheduler is a {type(scheduler).__name__}, and hddm integrates by its own solvers"
        raise HddmError(f"{problem}: take a {SCHEDULER} for the shift, and choose by solver=")
    refuse_other_grids(scheduler.config, "the scheduler")
    return float(scheduler.shift)


def write_scheduler(folder: Path, shift: float) -> None:
    """Write ``scheduler/scheduler_config.json``."""
    path = folder / SCHEDULER_FILE
    path.parent.mkdir()
    records = {"_class_name": SCHEDULER, "_diffusers_version": diffusers.__version__}
    write_json(path, {**records, "num_train_timesteps": 1000, "shift": shift})


def _read_class(path: Path, name: str) -> dict[str, Any]:
    """The JSON file of a diffusers class, which must be ``name``."""
    content = read_json(path)
    if content.get("_class_name") != name:
        raise HddmError(f"{path}: _class_name is {one_line(repr(content.get('_class_name')))}, not {name!r}")
    return content


def _class_of(path: Path, part: str, value: object) -> ClassName | None:
    if value in (None, [None, None]) and part not in _NEEDED:
        return None
    for name in CLASSES[part]:
        if value == list(name):
            return name
    options = " or ".join(str(list(name)) for name in CLASSES[part])
    raise HddmError(f"{path}: {part} is {one_line(repr(value))}, and may be {options}; refused")
