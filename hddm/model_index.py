"""``model_index.json`` and ``scheduler/``: how an ensemble folder shows itself to diffusers.

The file names a library and a class for each part. It is foreign text: a part may be of the classes listed
here and of no other, so nothing that a folder says decides which code runs.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import diffusers

from hddm.errors import HddmError, did_you_mean
from hddm.files import read_json, write_json
from hddm.schedules import from_diffusers

MODEL_INDEX = "model_index.json"
PIPELINE = "HDDMPipeline"
SCHEDULER = "FlowMatchEulerDiscreteScheduler"
SCHEDULER_FILE = "scheduler/scheduler_config.json"

ClassName = tuple[str, str]
"""Library and class, as in ("diffusers", "AutoencoderKL")."""

CLASSES: Mapping[str, tuple[ClassName, ...]] = {
    "experts": (("hddm", "ExpertSet"),),
    "router": (("hddm", "RouterTransformer"),),
    "scheduler": (("diffusers", SCHEDULER),),
    "vae": (("diffusers", "AutoencoderKL"), ("diffusers", "AutoencoderTiny")),
    "text_encoder": (("transformers", "CLIPTextModel"),),
    "tokenizer": (("transformers", "CLIPTokenizer"),),
}
"""Every part that an ensemble may have, and what it may be."""

COMPONENTS = ("vae", "text_encoder", "tokenizer")
"""What an ensemble of latents may have besides experts and router, a folder each."""

_NEEDED = ("experts", "scheduler")
_RECORDS = ("_class_name", "_diffusers_version")
# What else a scheduler of this class can do to its grid; hddm's own grid has the shift alone.
OTHER_GRIDS = (
    "use_dynamic_shifting",
    "use_karras_sigmas",
    "use_exponential_sigmas",
    "use_beta_sigmas",
    "shift_terminal",
    "invert_sigmas",
    "stochastic_sampling",
)


def read_model_index(folder: Path) -> dict[str, ClassName | None]:
    """Library and class of every part in `CLASSES`; None for one that the folder does without.

    Raises:
        HddmError: in one line with file, key and value, for a key or a class that is not in the list
            (``auto_map``, ``custom_pipeline`` and module paths are such), or no experts or scheduler.
    """
    path = folder / MODEL_INDEX
    content = read_json(path)
    for key, value in content.items():
        if key not in CLASSES and key not in _RECORDS:
            raise HddmError(
                f"{path}: unknown key {key!r} (is {_short(value)}){did_you_mean(key, CLASSES)}; refused, "
                "since an ensemble folder brings no code and no parts of its own"
            )
    if content.get("_class_name") != PIPELINE:
        raise HddmError(f"{path}: _class_name is {_short(content.get('_class_name'))}, not {PIPELINE!r}")
    return {part: _class_of(path, part, content.get(part)) for part in CLASSES}


def write_model_index(folder: Path, parts: Mapping[str, ClassName]) -> None:
    """Write ``model_index.json`` into ``folder``; experts and scheduler are named anyway."""
    always = {part: CLASSES[part][0] for part in _NEEDED}
    named = {part: (always | dict(parts)).get(part) for part in CLASSES}
    content = {"_class_name": PIPELINE, "_diffusers_version": diffusers.__version__}
    write_json(folder / MODEL_INDEX, content | {part: one or (None, None) for part, one in named.items()})


def read_shift(folder: Path) -> float:
    """Shift of the time grid in ``scheduler/scheduler_config.json`` of ``folder``.

    Raises:
        HddmError: for another class, an unknown key, a shift that is no positive number, or a setting that
            would bend the grid otherwise.
    """
    path = folder / SCHEDULER_FILE
    config = read_json(path)
    if config.get("_class_name") != SCHEDULER:
        raise HddmError(f"{path}: _class_name is {_short(config.get('_class_name'))}, not {SCHEDULER!r}")
    from_diffusers(path)
    for key in OTHER_GRIDS:
        if config.get(key):
            raise HddmError(f"{path}: {key} is {_short(config[key])}, and hddm's grid has the shift alone")
    shift = config.get("shift", 1.0)
    if not isinstance(shift, int | float) or isinstance(shift, bool) or not 0 < shift < math.inf:
        raise HddmError(f"{path}: shift is {_short(shift)}, and must be a positive number")
    return float(shift)


def write_scheduler(folder: Path, shift: float) -> None:
    """Write ``scheduler/scheduler_config.json`` into ``folder``."""
    path = folder / SCHEDULER_FILE
    path.parent.mkdir()
    records = {"_class_name": SCHEDULER, "_diffusers_version": diffusers.__version__}
    write_json(path, {**records, "num_train_timesteps": 1000, "shift": shift})


def _class_of(path: Path, part: str, value: object) -> ClassName | None:
    known = CLASSES[part]
    if value is None or value == [None, None]:
        if part in _NEEDED:
            raise HddmError(f"{path}: {part} is {_short(value)}, and must be {list(known[0])}")
        return None
    if isinstance(value, list):
        for name in known:
            if value == list(name):
                return name
    options = " or ".join(str(list(name)) for name in known)
    raise HddmError(f"{path}: {part} is {_short(value)}, and may be {options}; refused")


def _short(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 200 else f"{text[:200]} …"
