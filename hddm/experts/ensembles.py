"""Ensemble folders: the files that hold experts and a router together, written and read.

    model_index.json         parts and their classes, for diffusers
    ensemble.json            format, experts in order, their outputs of the router, priors, strategy, shift
    experts/<i>/             an expert folder each
    bases/<hash>/            weights that adapters among them change, where no expert has them for its own
    router/                  a router folder
    scheduler/               the shift once more, for diffusers
    vae/ text_encoder/ tokenizer/     for experts of latents
    manifest.json            the hashes of all these (`hddm.utils.records`)

``model_index.json`` is foreign text: a part may be of the classes listed in `CLASSES` and of no other, so
nothing that a folder says decides which code runs.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import diffusers
from pydantic import Field

from hddm.experts.lora import base_beside, check_base
from hddm.experts.records import EXPERT_FILE, FORMAT, ExpertRecord
from hddm.networks.folders import WEIGHTS, sha256_once
from hddm.schedules import from_diffusers
from hddm.utils.errors import HddmError, did_you_mean
from hddm.utils.files import inside, link_or_copy, read_json, write_json
from hddm.utils.records import ENSEMBLE_FILE as ENSEMBLE_FILE
from hddm.utils.records import Record, read_record, refuse_damaged, write_manifest

MODEL_INDEX = "model_index.json"
ROUTER = "router"
BASES = "bases"
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
"""Parts that an ensemble of latents may have besides experts and router, a folder each."""

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


def bases_of(experts: Sequence[Path], given: Mapping[str, Path]) -> dict[str, Path]:
    """The folders of the weights that adapters among ``experts`` change, by SHA-256.

    Args:
        experts: expert folders.
        given: folders to take them from, by SHA-256; others are where they were at training.

    Raises:
        HddmError: for a base that is not there, or is another one than at training.
    """
    found = {}
    for folder in experts:
        adapter = read_record(folder / EXPERT_FILE, ExpertRecord, FORMAT).adapter
        if adapter is not None and adapter.base_sha256 not in found:
            base = given.get(adapter.base_sha256) or base_beside(folder, adapter)
            check_base(folder, adapter, base / WEIGHTS)
            found[adapter.base_sha256] = base
    return found


def places(bases: Mapping[str, Path], experts: Mapping[str, Path]) -> dict[str, str]:
    """The place in an ensemble of each of ``bases``, by SHA-256: an expert of the same weights, if any.

    Args:
        bases: folders by the SHA-256 of their weights.
        experts: folders by their names in the ensemble.
    """
    own = {name: folder / WEIGHTS for name, folder in experts.items() if (folder / WEIGHTS).is_file()}
    found = {}
    for sha256, base in bases.items():
        size = (base / WEIGHTS).stat().st_size
        # Only what is as long can be the same.
        same = (n for n, file in own.items() if file.stat().st_size == size and sha256_once(file) == sha256)
        found[sha256] = next(same, f"{BASES}/{sha256[:16]}")
    return found


def link_bases(draft: Path, names: Mapping[str, str], bases: Mapping[str, Path]) -> None:
    """Link the weights, config and licence of ``bases`` to their `places`, unless an expert holds them.

    Raises:
        HddmError: for a link that leads out of a base's folder.
    """
    for sha256, name in names.items():
        if (draft / name).exists():
            continue
        (draft / name).mkdir(parents=True)
        for path in bases[sha256].iterdir():
            if path.name in (WEIGHTS, "config.json") or path.name.startswith("LICENSE"):
                link_or_copy(inside(bases[sha256], path.name), draft / name / path.name)


Probabilities = tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...]


class EnsembleRecord(Record):
    """``ensemble.json``."""

    format: str = FORMAT
    experts: Annotated[tuple[str, ...], Field(min_length=1)]
    """Their folders."""
    router: str | None = None
    router_outputs: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Output of the router for each expert; empty where it has as many, in order."""
    prior: Probabilities
    class_prior: tuple[Probabilities, ...] = ()
    """p(k | class), a row a class; for ``draw`` with class labels."""
    strategy: str
    shift: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Of the time grid (`hddm.sampling.time_grid`)."""
    bases: dict[str, str] = Field(default_factory=dict)
    """By SHA-256 the folders of the weights that adapters change: in ``bases/``, or an expert's."""


def read_ensemble_facts(folder: Path) -> EnsembleRecord:
    """``ensemble.json`` of ``folder``, held against ``model_index.json`` and ``scheduler/`` where they are.

    Raises:
        HddmError: for a path or a link that leads out of the folder, before anything there is opened; for
            numbers that do not fit the experts; and for records that contradict each other.
    """
    path = folder / ENSEMBLE_FILE
    facts = read_record(path, EnsembleRecord, FORMAT)
    for name in (
        *facts.experts,
        *facts.bases.values(),
        *([facts.router] if facts.router is not None else []),
    ):
        _check_inside(folder, name, path)
    _check_numbers(facts, path)
    if (folder / MODEL_INDEX).exists():
        parts = read_model_index(folder)
        if (parts["router"] is None) != (facts.router is None):
            raise HddmError(
                f"{folder / MODEL_INDEX}: router is {parts['router']}, and {facts.router!r} in "
                f"{ENSEMBLE_FILE}; assemble it anew"
            )
        for part in ("scheduler", *COMPONENTS):
            if parts[part] is not None:
                _check_inside(folder, part, folder / MODEL_INDEX)
    if (folder / SCHEDULER_FILE).exists() or (folder / MODEL_INDEX).exists():
        shift = read_shift(folder)
        if shift != facts.shift:
            raise HddmError(
                f"{folder / SCHEDULER_FILE}: shift is {shift:g}, and {facts.shift:g} in {ENSEMBLE_FILE}; "
                "assemble it anew"
            )
    return facts


def refuse_damaged_ensemble(
    folder: Path, facts: EnsembleRecord, experts: Collection[int], sha256: Callable[[Path], str] | None = None
) -> None:
    """Refuse an ensemble whose files are not those that were written (`refuse_damaged`).

    Args:
        folder: the ensemble.
        facts: its record.
        experts: those that count; the others' folders are not looked into.
        sha256: of a file, to hash every one.
    """
    left_out = [f"{name}/" for k, name in enumerate(facts.experts) if k not in experts]
    refuse_damaged(
        folder, ENSEMBLE_FILE, sha256=sha256, chosen=lambda name: not name.startswith(tuple(left_out))
    )


def write_ensemble_records(draft: Path, facts: EnsembleRecord, components: Mapping[str, ClassName]) -> None:
    """Write ``ensemble.json``, ``model_index.json``, ``scheduler/`` and, last, the manifest into ``draft``.

    Args:
        draft: a folder that has no ``scheduler/`` yet, and all other parts.
        facts: what to write; in today's format, whatever was read.
        components: library and class by name, of vae, text_encoder and tokenizer; the others are known.

    Raises:
        HddmError: for numbers that do not fit the experts, which no one could open.
    """
    _check_numbers(facts, draft / ENSEMBLE_FILE)
    write_json(draft / ENSEMBLE_FILE, facts.model_dump(mode="json") | {"format": FORMAT})
    router = {} if facts.router is None else {"router": ("hddm", "RouterTransformer")}
    write_model_index(draft, {**components, **router})
    write_scheduler(draft, facts.shift)
    write_manifest(draft, sha256_once)


def _check_inside(folder: Path, name: str, origin: Path) -> None:
    """Refuse a part that is elsewhere, or has files that are."""
    try:
        inside(folder, name)
        for file in (folder / name).glob("*"):
            inside(folder, file.relative_to(folder).as_posix())
    except HddmError as error:
        raise HddmError(f"{origin}: names {name!r}, outside the folder; refused ({error})") from error


def _check_numbers(facts: EnsembleRecord, path: Path) -> None:
    experts = len(facts.experts)
    for key, row in (("prior", facts.prior), *(("class_prior", row) for row in facts.class_prior)):
        if len(row) != experts or not math.fsum(row) > 0:
            raise HddmError(
                f"{path}: {key} must be {experts} numbers with a positive sum, one an expert, not {list(row)}"
            )
    outputs = facts.router_outputs
    if outputs and (facts.router is None or len(outputs) != experts or len(set(outputs)) < experts):
        raise HddmError(
            f"{path}: router_outputs must be {experts} different outputs of a router, one an expert, not "
            f"{list(outputs)}"
        )
