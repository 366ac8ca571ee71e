"""Ensemble folders: the files that hold experts and a router together, written and read.

    model_index.json         parts and their classes, for diffusers
    ensemble.json            format, experts in order, their outputs of the router, priors, strategy, shift
    experts/<i>/             an expert folder each
    bases/<hash>/            weights that adapters among them change, where no expert has them for its own
    router/                  a router folder
    scheduler/               the shift once more, for diffusers
    vae/ text_encoder/ tokenizer/     for experts of latents and text; second ones are vae_2/, …
    manifest.json            the hashes of all these (`hddm.utils.records`)

``model_index.json`` is foreign text: a part may be of the classes listed in `CLASSES` and of no other, so
nothing that a folder says decides which code runs.
"""

import math
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import diffusers
from pydantic import Field

from hddm.experts.lora import base_of, check_base
from hddm.experts.records import EXPERT_FILE, FORMAT, ExpertRecord, Temperature
from hddm.networks.folders import WEIGHTS, sha256_once
from hddm.networks.text_encoder import STEM as TEXT_STEM
from hddm.networks.text_encoder import TOKENIZERS, kind_of
from hddm.networks.vae import STEM as VAE_STEM
from hddm.networks.vae import read_config, read_weights
from hddm.schedules import from_diffusers
from hddm.utils.errors import HddmError, did_you_mean, one_line
from hddm.utils.files import inside, link_or_copy, read_json, write_json
from hddm.utils.records import ENSEMBLE_FILE as ENSEMBLE_FILE
from hddm.utils.records import (
    MANIFEST,
    ComposedName,
    Record,
    ensemble_around,
    has_manifest,
    read_record,
    refuse_damaged,
    write_manifest,
)

MODEL_INDEX = "model_index.json"
ROUTER = "router"
BASES = "bases"
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


COMPONENTS = tuple(numbered(name, number) for number in range(MOST_ENCODERS) for name in KEPT)
"""Parts that an ensemble may have besides networks and scheduler."""
_KINDS: Mapping[str, tuple[ClassName, ...]] = {
    "vae": (("diffusers", "AutoencoderKL"), ("diffusers", "AutoencoderTiny")),
    "text_encoder": (("transformers", "CLIPTextModel"), ("transformers", "T5EncoderModel")),
    "tokenizer": (("transformers", "CLIPTokenizer"), ("transformers", "T5Tokenizer")),
}
CLASSES: Mapping[str, tuple[ClassName, ...]] = {
    "experts": (("hddm", "ExpertSet"),),
    "router": (("hddm", "RouterTransformer"),),
    "scheduler": (("diffusers", SCHEDULER),),
    **{name: _KINDS[name.rstrip("_23")] for name in COMPONENTS},
}
"""Every part that an ensemble may have, and what it may be."""

_STEMS = {"vae": VAE_STEM, "text_encoder": TEXT_STEM}
_TEXT_FILES = (".json", ".txt", ".md")

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
            raise HddmError(
                f"{path}: unknown key {key!r} (is {_short(value)}){did_you_mean(key, CLASSES)}; refused, "
                "since an ensemble folder brings no code and no parts of its own"
            )
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
        raise HddmError(f"{path}: shift is {_short(shift)}, and must be a positive number")
    return float(shift)


def refuse_other_grids(config: Mapping[str, object], origin: str) -> None:
    """Raise an `HddmError` that names the first key by which a scheduler does more than shift its grid."""
    for key in _OTHER_GRIDS:
        if config.get(key):
            raise HddmError(f"{origin}: {key} is {_short(config[key])}, and hddm's grid has the shift alone")


def shift_of(scheduler: "diffusers.FlowMatchEulerDiscreteScheduler") -> float:
    """Shift of a scheduler's time grid; `HddmError` where it does more than shift."""
    if type(scheduler) is not diffusers.FlowMatchEulerDiscreteScheduler:
        raise HddmError(
            f"the scheduler is a {type(scheduler).__name__}, and hddm integrates by its own solvers: take a "
            "FlowMatchEulerDiscreteScheduler for the shift, and choose by solver="
        )
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
        raise HddmError(f"{path}: _class_name is {_short(content.get('_class_name'))}, not {name!r}")
    return content


def _class_of(path: Path, part: str, value: object) -> ClassName | None:
    if value in (None, [None, None]) and part not in _NEEDED:
        return None
    for name in CLASSES[part]:
        if value == list(name):
            return name
    options = " or ".join(str(list(name)) for name in CLASSES[part])
    raise HddmError(f"{path}: {part} is {_short(value)}, and may be {options}; refused")


def _short(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 200 else f"{text[:200]} …"


def bases_of(experts: Sequence[Path], given: Mapping[str, Path], is_closed: bool = False) -> dict[str, Path]:
    """Find the folders of the weights that adapters among ``experts`` change, by SHA-256.

    They come from ``given`` or, unless ``is_closed``, from their place at training. Raises `HddmError` for a
    base that is missing or differs from the one at training.
    """
    found = {}
    for folder in experts:
        adapter = read_record(folder / EXPERT_FILE, ExpertRecord, FORMAT).adapter
        if adapter is not None and adapter.base_sha256 not in found:
            is_given = is_closed or adapter.base_sha256 in given
            base = base_of(folder, adapter, given if is_given else None)
            check_base(folder, adapter, base / WEIGHTS)
            found[adapter.base_sha256] = base
    return found


def _put_in_bases(draft: Path, experts: Sequence[str], bases: Mapping[str, Path]) -> dict[str, str]:
    """Place of each base in ``draft``, by SHA-256: an expert of the same weights, else ``bases/``.

    ``bases/`` gets links to its weights, config and licence.
    """
    own = [draft / name / WEIGHTS for name in experts if (draft / name / WEIGHTS).is_file()]
    places = {}
    for sha256, base in bases.items():
        size = (base / WEIGHTS).stat().st_size
        # Only what is as long can be the same.
        same = (one for one in own if one.stat().st_size == size and sha256_once(one) == sha256)
        place = next(same, draft / BASES / sha256[:16] / WEIGHTS).parent
        places[sha256] = place.relative_to(draft).as_posix()
        if not place.exists():
            place.mkdir(parents=True)
            for path in base.iterdir():
                if path.name in (WEIGHTS, "config.json") or path.name.startswith("LICENSE"):
                    link_or_copy(inside(base, path.name), place / path.name)
    return places


Number = Annotated[int, Field(ge=0, lt=MOST_ENCODERS)]
Probabilities = tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...]


class EnsembleRecord(Record):
    """``ensemble.json``."""

    format: str = FORMAT
    experts: Annotated[tuple[str, ...], Field(min_length=1)]
    """Folders of the experts."""
    names: tuple[str, ...] = ()
    """Names of the folders that the experts came from; empty where they came from none."""
    router: str | None = None
    router_outputs: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Router output of each expert; empty where it has as many outputs, in order."""
    prior: Probabilities
    shares: tuple[Annotated[float, Field(ge=0, le=1)] | None, ...] = ()
    """Parts of the prior that were set by hand, None for those by shard size; empty where all are."""
    class_lists: tuple[tuple[ComposedName, ...], ...] = ()
    """Names of each expert's classes where they were given, empty for those of its record."""
    classes: tuple[ComposedName, ...] = ()
    """Names of all experts' classes; empty where none has names, and in folders of formats up to 1.4."""
    class_prior: tuple[Probabilities, ...] = ()
    """p(k | class), one row for each class."""
    router_aside: str | None = None
    """Folder of a learned router that does not know the shards of all experts; it comes back when they go."""
    aside_outputs: tuple[Annotated[int, Field(ge=0)] | None, ...] = ()
    """Its output for each expert, None for one that it does not know; empty where shards alone tell."""
    moments_evidence: Temperature | None = None
    """Of a router by the experts' moments (`hddm.routers.MomentsRouter`), in place of a learned one."""
    texts: tuple[Number, ...] = ()
    """Number of each expert's text encoder, from 0; empty where all have the first."""
    vaes: tuple[Annotated[int, Field(ge=-1, lt=MOST_ENCODERS)], ...] = ()
    """Number of each expert's VAE, -1 for experts of pixels; empty where all have the first or none."""
    topics: Number | None = None
    """Number of the text encoder that prompts are routed by (`hddm.routers.PromptRouter`); None for none."""
    strategy: str
    shift: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Of the time grid (`hddm.sampling.time_grid`)."""
    domains: tuple[int, ...] = ()
    """The same number for the experts of one domain (`hddm.ensemble`); empty where each is one of its own."""
    bases: dict[str, str] = Field(default_factory=dict)
    """By SHA-256 the folders of the weights that adapters change: in ``bases/``, or an expert's."""

    @classmethod
    def equal(
        cls, experts: Sequence[str], has_router: bool, strategy: str = "draw", shift: float = 1.0
    ) -> "EnsembleRecord":
        """Record of experts with equal shares."""
        return cls(
            experts=tuple(experts),
            router=ROUTER if has_router else None,
            prior=(1 / len(experts),) * len(experts),
            strategy=strategy,
            shift=shift,
        )

    @property
    def is_routed(self) -> bool:
        """True where a router looks at x_t, learned or by moments."""
        return self.router is not None or self.moments_evidence is not None

    @property
    def outputs(self) -> tuple[int, ...]:
        """Router output of each expert."""
        return self.router_outputs or tuple(range(len(self.experts)))

    @property
    def labels(self) -> tuple[str, ...]:
        """Folder of each expert and, where it had another one, that name: ``experts/0 (mine)``."""
        return tuple(map(label, self.experts, self.names or self.experts))

    @property
    def domain_of(self) -> tuple[int, ...]:
        """For each expert the index of the first one of its domain."""
        return tuple(map(self.domains.index, self.domains)) or tuple(range(len(self.experts)))


def read_ensemble_facts(folder: Path) -> EnsembleRecord:
    """Read ``ensemble.json`` and check it against ``model_index.json`` and ``scheduler/``, where present.

    Raises `HddmError` for a path or link that leaves the folder (before it is opened), for numbers that do
    not fit the experts, and for records that contradict each other.
    """
    path, index, scheduler = folder / ENSEMBLE_FILE, folder / MODEL_INDEX, folder / SCHEDULER_FILE
    facts = read_record(path, EnsembleRecord, FORMAT)
    routers = [name for name in (facts.router, facts.router_aside) if name is not None]
    for name in (*facts.experts, *facts.bases.values(), *routers):
        _check_inside(folder, name, path)
    _check_numbers(facts, path)
    if index.exists():
        kinds = read_model_index(folder)
        if (kinds["router"] is None) != (facts.router is None):
            stated = f"{facts.router!r} in {ENSEMBLE_FILE}"
            raise HddmError(f"{index}: router is {kinds['router']}, and {stated}; assemble it anew")
        for name in ("scheduler", *COMPONENTS):
            if kinds[name] is not None:
                _check_inside(folder, name, index)
    if scheduler.exists() or index.exists():
        shift = read_shift(folder)
        if shift != facts.shift:
            stated = f"{facts.shift:g} in {ENSEMBLE_FILE}"
            raise HddmError(f"{scheduler}: shift is {shift:g}, and {stated}; assemble it anew")
    return facts


def components_in(folder: Path) -> tuple[str, ...]:
    """`COMPONENTS` that an ensemble folder names; none in a folder older than ``model_index.json``."""
    if not (folder / MODEL_INDEX).exists():
        return ()
    kinds = read_model_index(folder)
    return tuple(name for name in COMPONENTS if kinds[name] is not None)


def put_component(draft: Path, name: str, folder: Path, variant: str | None = None) -> ClassName:
    """Put a component into ``draft / name``, by hard links where possible; its library and class.

    Its weights (`hddm.networks.vae.find_weights`), configs and licence: no pickle, no second copy of the
    weights. Raises `HddmError` for missing weights, a link that leaves ``folder``, and files that are not
    those of its manifest, where it has one.
    """
    if has_manifest(folder):
        _refuse_damaged_component(name, folder)
    target = draft / name
    target.mkdir(parents=True)
    kind = name.rstrip("_23")
    if kind in _STEMS:
        weights, _ = read_weights(folder, _STEMS[kind], variant)
        link_or_copy(weights, target / f"{_STEMS[kind]}{weights.suffix}")
    for path in sorted(folder.iterdir()):
        is_text = path.suffix in _TEXT_FILES or path.name.startswith("LICENSE")
        if is_text and path.name != MANIFEST and inside(folder, path.name).is_file():
            link_or_copy(path, target / path.name)
    if kind == "tokenizer":
        stated = read_config(folder, "tokenizer_config.json").get("tokenizer_class", "CLIPTokenizer")
        return "transformers", TOKENIZERS[stated]
    if kind == "text_encoder":
        return "transformers", str(kind_of(read_config(folder)))
    return "diffusers", str(read_config(folder)["_class_name"])


def keep_component(expert: Path, name: str, folder: Path, variant: str | None = None) -> None:
    """Put a component into a folder of an expert, with a manifest of its own.

    An ensemble takes the expert's files, which its manifest lists, and the component apart.
    """
    put_component(expert, name, folder, variant)
    write_manifest(expert / name)


def kept_components(expert: Path) -> dict[str, Path]:
    """Folders of the `COMPONENTS` that an expert's folder keeps, by name; `HddmError` for one outside."""
    return {name: expert / name for name in KEPT if inside(expert, name).is_dir()}


def _held(expert: Path) -> tuple[Path, EnsembleRecord, int] | None:
    """The ensemble that holds an expert's folder, its record, and the expert's index; None without one."""
    if (whole := ensemble_around(expert.resolve())) is None:
        return None
    facts = read_ensemble_facts(whole)
    places = [(whole / name).resolve() for name in facts.experts]
    return (whole, facts, places.index(expert.resolve())) if expert.resolve() in places else None


def name_of(expert: Path) -> str:
    """Name of an expert's folder; of one in an ensemble its name there, where it has one."""
    if (held := _held(expert)) is not None and held[1].names:
        return held[1].names[held[2]]
    # A name that is no Unicode could not be read again.
    return os.fsencode(Path(os.path.abspath(expert)).name).decode(errors="replace")


def label(folder: str, name: str) -> str:
    """An expert's folder, with its name behind it where that is another one."""
    shown = one_line(name if name.isprintable() else ascii(name), 60)
    return folder if Path(name).name == Path(folder).name else f"{folder} ({shown})"


def components_of(expert: Path) -> dict[str, Path]:
    """`kept_components`, and what the ensemble that holds the expert has for it."""
    found = kept_components(expert)
    if (held := _held(expert)) is None:
        return found
    whole, facts, k = held
    for name in KEPT:
        numbers = facts.vaes if name == "vae" else facts.texts
        place = inside(whole, numbered(name, numbers[k] if numbers else 0))
        if place.is_dir():
            found.setdefault(name, place)
    return found


def whole_components(expert: Path) -> dict[str, Path]:
    """`kept_components`, once their files are known to be those of their manifests; else an `HddmError`."""
    found = kept_components(expert)
    for name, folder in found.items():
        _refuse_damaged_component(name, folder)
    return found


def _refuse_damaged_component(name: str, folder: Path) -> None:
    """Refuse a component whose files are not those that were written with its manifest."""
    refuse_damaged(folder, "tokenizer_config.json" if name.startswith("tokenizer") else "config.json")


def refuse_damaged_ensemble(folder: Path, facts: EnsembleRecord, experts: Collection[int]) -> None:
    """Refuse an ensemble whose files have changed since they were written (`refuse_damaged`).

    Only ``experts``, by index, are checked; the folders of the others are not opened.
    """
    left_out = tuple(f"{name}/" for k, name in enumerate(facts.experts) if k not in experts)
    refuse_damaged(folder, ENSEMBLE_FILE, chosen=lambda name: not name.startswith(left_out))


def write_ensemble_records(
    draft: Path,
    facts: EnsembleRecord,
    components: Mapping[str, ClassName],
    bases: Mapping[str, Path] | None = None,
) -> None:
    """Write ``ensemble.json``, ``model_index.json``, ``scheduler/``, ``bases/`` and, last, the manifest.

    ``draft`` already has all other parts; ``components`` are vae, text_encoder and tokenizer; ``bases`` are
    the folders of weights that adapters change, by SHA-256. Raises `HddmError` for numbers that do not fit
    the experts, since no one could open the folder.
    """
    _check_numbers(facts, draft / ENSEMBLE_FILE)
    today = {"format": FORMAT, "bases": _put_in_bases(draft, facts.experts, bases or {})}
    write_json(draft / ENSEMBLE_FILE, facts.model_dump(mode="json") | today)
    router = {} if facts.router is None else {"router": CLASSES["router"][0]}
    write_model_index(draft, {**components, **router})
    write_scheduler(draft, facts.shift)
    write_manifest(draft, sha256_once)


def _check_inside(folder: Path, name: str, origin: Path) -> None:
    """Refuse a part that lies outside the folder, or whose files do."""
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
            raise HddmError(f"{path}: {key} must be {experts} numbers with a positive sum, not {list(row)}")
    for key in ("names", "shares", "class_lists", "domains", "texts", "vaes", "aside_outputs"):
        if len(getattr(facts, key)) not in (0, experts):
            raise HddmError(f"{path}: {key} must be of {experts} experts, not {len(getattr(facts, key))}")
    if facts.classes and len(facts.class_prior) not in (0, len(facts.classes)):
        raise HddmError(
            f"{path}: class_prior has {len(facts.class_prior)} rows of {len(facts.classes)} classes"
        )
    outputs = facts.router_outputs
    # Experts of one output divide it by shares that were set, or are of one domain.
    first = [(k, one) for k, one in enumerate(outputs) if k in facts.domain_of]
    own = [one for k, one in first if not facts.shares or facts.shares[k] is None]
    if outputs and (facts.router is None or len(outputs) != experts or len(set(own)) < len(own)):
        raise HddmError(
            f"{path}: router_outputs must be {experts} different outputs of a router, not {list(outputs)}"
        )
    if facts.router is not None and (facts.moments_evidence, facts.router_aside) != (None, None):
        raise HddmError(f"{path}: has a learned router and another; it routes by one of them")
