"""Ensemble folders: the files that hold experts and a router together, written and read.

model_index.json         components and their classes, for diffusers
ensemble.json            format, what was decided on each expert (`Member`), router, strategy, shift
experts/<i>/             an expert folder each
bases/<hash>/            weights that adapters among them change, where no expert has them for its own
router/                  a router folder
scheduler/               the shift once more, for diffusers
vae/ text_encoder/ tokenizer/     for experts of latents and text; second ones are vae_2/, …; a
                         text_encoder/ may hold several with their tokenizers (`hddm.networks.prompts`)
manifest.json            the hashes of all these (`hddm.utils.records`)

``model_index.json`` is foreign text: a component may be of the classes listed in `CLASSES` and of no other,
so nothing that a folder says decides which code runs.
"""

import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import diffusers
from pydantic import Field

from hddm.experts.kept import KEPT, MOST_ENCODERS, ClassName, named, numbered, unnumbered
from hddm.experts.lora import BASES, base_of, check_base
from hddm.experts.records import EXPERT_FILE, ExpertRecord, read_expert_record, write_records
from hddm.networks.components import MODEL_INDEX
from hddm.networks.encoders import ALONE, READ_VAES
from hddm.networks.folders import WEIGHTS, sha256_once
from hddm.networks.identity import TextEncoderRecord, VaeRecord
from hddm.utils.addresses import refuse_fetched
from hddm.utils.errors import HddmError, an, did_you_mean, one_line
from hddm.utils.files import (
    alone,
    inside,
    is_draft,
    link_or_copy,
    new_folder,
    read_json,
    write_json,
)
from hddm.utils.records import ENSEMBLE_FILE as ENSEMBLE_FILE
from hddm.utils.records import (
    HASHES,
    MANIFEST,
    ComposedName,
    Count,
    OlderFormat,
    PositiveNumber,
    Record,
    Share,
    SparseRecord,
    damage,
    ensemble_around,
    read_record,
    refuse_damaged,
    rewrite_entry,
    write_manifest,
)

ROUTER = "router"
PIPELINE_CLASS = "HDDMPipeline"
SCHEDULER_CLASS = "FlowMatchEulerDiscreteScheduler"
SCHEDULER_FILE = "scheduler/scheduler_config.json"


def _all_components() -> tuple[str, ...]:
    names: list[str] = []
    for number in range(MOST_ENCODERS):
        names += [numbered(name, number) for name in KEPT]
    return tuple(names)


COMPONENTS = _all_components()
"""Components that an ensemble may have besides networks and scheduler."""
_KINDS: Mapping[str, tuple[ClassName, ...]] = {
    "vae": tuple(("diffusers", name) for name in READ_VAES),
    "text_encoder": (
        *map(named, ALONE),
        ("hddm", "PromptEncoders"),
    ),
    "tokenizer": tuple(named(kind.tokenizer) for kind in ALONE),
}
CLASSES: Mapping[str, tuple[ClassName, ...]] = {
    "experts": (("hddm", "ExpertSet"),),
    "router": (("hddm", "RouterTransformer"),),
    "scheduler": (("diffusers", SCHEDULER_CLASS),),
    **{name: _KINDS[unnumbered(name)] for name in COMPONENTS},
}
"""Every component that an ensemble may have, and what it may be."""
_NEEDED = ("experts", "scheduler")
_RECORDS = ("_class_name", "_diffusers_version")
# What else a scheduler of this class can do to its grid.
_OTHER_GRIDS = (
    "use_dynamic_shifting",
    "use_karras_sigmas",
    "use_exponential_sigmas",
    "use_beta_sigmas",
    "shift_terminal",
    "invert_sigmas",
    "stochastic_sampling",
)

ENSEMBLE_FORMAT = "2.0"
MOMENTS = "moments"
"""In place of a router's folder: a router by the experts' moments (`hddm.routers.MomentsRouter`)."""
RELIABILITY = "reliability"
"""In place of a router's folder: weights by noise level (`hddm.reliability.ReliabilityRouter`)."""
MOMENTS_EVIDENCE = 10.0
"""Directions of images that count in full, by measurements on digits and CIFAR-10 (docs/results.md)."""


def bases_of(experts: Sequence[Path], given: Mapping[str, Path]) -> dict[str, Path]:
    """Find the folders of the weights that adapters among ``experts`` change, by SHA-256.

    They are in ``given``, else where `hddm.experts.lora.base_of` finds them. Raises `HddmError` for a
    base that is missing or differs from the one at training.
    """
    found = {}
    for folder in experts:
        adapter = read_expert_record(folder).adapter
        if adapter is not None and adapter.base_sha256 not in found:
            base = given.get(adapter.base_sha256) or base_of(folder, adapter)
            check_base(folder, adapter, base / WEIGHTS)
            found[adapter.base_sha256] = base
    return found


ShareWeight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Member(SparseRecord):
    """An expert in ``ensemble.json``: what was decided on it; all else is in its own record."""

    sparse = ("trusted",)

    folder: str
    name: str | None = None
    """The name of the folder that it came from."""
    share: ShareWeight | None = None
    """Its share of all data, set by hand; None: by the size of its shard. If every expert has one, they are
    normalised; else each is a fraction of 1."""
    classes: tuple[ComposedName, ...] = ()
    """Names of its classes, set by hand; empty: those in its record."""
    domain: str | None = None
    """Name shared by the experts of one domain, set by hand; None: experts of one shard form a domain."""
    output: Count | None = None
    """Its output of the router, set by hand or by its place; None: found by the hash of its shard."""
    vae: VaeRecord | None = None
    """The VAE whose latents it is taken to make, where its record does not say."""
    text_encoder: TextEncoderRecord | None = None
    """The text encoder that it is taken to read, where its record does not say."""
    trusted: tuple[Literal["vae", "text_encoder"], ...] = ()
    """What the caller stated to be its own, and no record confirms (``trust_components``)."""
    class_shares: dict[ComposedName, ShareWeight] = Field(default_factory=dict)
    """p(k | class) by class name, set in Python; empty: counted from the experts' shards."""

    @property
    def label(self) -> str:
        """Its folder and, where it had another one, that name: ``experts/0 (mine)``."""
        return label(self.folder, self.name or self.folder)


class ReliabilityRecord(Record):
    """Weights of the experts by noise level, measured on held-out images."""

    times: Annotated[tuple[Share, ...], Field(min_length=1)]
    weights: tuple[tuple[ShareWeight, ...], ...]
    """A row for each time."""
    data: str
    """Hash of the images."""
    images: Annotated[int, Field(ge=1)]
    """Number of them that were looked at."""


class EnsembleRecord(SparseRecord):
    """``ensemble.json``."""

    sparse = ("reliability", "strategy_reason")
    oldest: ClassVar[str] = "2.0"
    remedy = (
        "assemble it anew from its parts: hddm assemble FOLDER/experts/* --router FOLDER/router "
        "--out NEW"
    )

    format: str = ENSEMBLE_FORMAT
    experts: Annotated[tuple[Member, ...], Field(min_length=1)]
    router: str | None = None
    """Folder of a learned router, `MOMENTS`, `RELIABILITY`, or None."""
    evidence: PositiveNumber = MOMENTS_EVIDENCE
    """Evidence of a router by moments (`hddm.routers.MomentsRouter`)."""
    reliability: ReliabilityRecord | None = None
    """Factors on the router's probabilities; without a router the weights themselves."""
    strategy: str = "draw"
    strategy_reason: str | None = None
    """Why it is recommended; None where someone chose it."""
    shift: PositiveNumber = 1.0
    """Shift of the time grid (`hddm.times.time_grid`)."""

    @property
    def learned(self) -> str | None:
        """Folder of the learned router that routes."""
        return None if self.router in (MOMENTS, RELIABILITY) else self.router

    @property
    def names(self) -> list[str]:
        """Names of the experts, or else their folders."""
        return [member.name or member.folder for member in self.experts]


def read_ensemble_record(folder: Path) -> EnsembleRecord:
    """Read ``ensemble.json``; `HddmError` for a path or link that leaves the folder, before it is opened."""
    path, index = folder / ENSEMBLE_FILE, folder / MODEL_INDEX
    record, kinds = read_record(path, EnsembleRecord, ENSEMBLE_FORMAT), read_model_index(folder)
    origins = {member.folder: path for member in record.experts}
    if record.learned is not None:
        origins[record.learned] = path
    for base in (folder / BASES).glob("*"):
        origins[f"{BASES}/{base.name}"] = path
    for name in ("scheduler", *COMPONENTS):
        if kinds[name] is not None:
            origins[name] = index
    for name, origin in origins.items():
        try:
            inside(folder, name)
            for file in (folder / name).glob("*"):
                inside(folder, file.relative_to(folder).as_posix())
        except HddmError as error:
            raise HddmError(
                f"{origin}: names {name!r}, outside the folder; refused ({error})"
            ) from error
    return record


def components_in(folder: Path) -> tuple[str, ...]:
    """`COMPONENTS` that an ensemble folder names."""
    kinds = read_model_index(folder)
    return tuple(name for name in COMPONENTS if kinds[name] is not None)


def read_model_index(folder: Path) -> dict[str, ClassName | None]:
    """Library and class of every component in `CLASSES`, None for absent ones.

    Raises a one-line `HddmError` with file, key and value for a key or a class that is not listed (such as
    ``auto_map``, ``custom_pipeline`` and module paths), and where experts or scheduler are missing.
    """
    path = folder / MODEL_INDEX
    content = read_json(path)
    if content.get("_class_name") != PIPELINE_CLASS:
        stated = one_line(repr(content.get("_class_name")))
        raise HddmError(f"{path}: _class_name is {stated}, not {PIPELINE_CLASS!r}")
    for key, value in content.items():
        if key not in CLASSES and key not in _RECORDS:
            near = did_you_mean(key, CLASSES)
            raise HddmError(
                f"{path}: unknown key {key!r} (is {one_line(repr(value))}){near}; refused"
            )
    return {name: _class_of(path, name, content.get(name)) for name in CLASSES}


def write_model_index(folder: Path, classes: Mapping[str, ClassName]) -> None:
    """Write ``model_index.json``; experts and scheduler are always named."""
    content: dict[str, object] = {
        "_class_name": PIPELINE_CLASS,
        "_diffusers_version": diffusers.__version__,
    }
    for name in CLASSES:
        if name in _NEEDED:
            content[name] = CLASSES[name][0]
        elif name in classes:
            content[name] = classes[name]
        elif name in (ROUTER, *KEPT):
            content[name] = (None, None)
    write_json(folder / MODEL_INDEX, content)


def _class_of(path: Path, component: str, value: object) -> ClassName | None:
    if value in (None, [None, None]) and component not in _NEEDED:
        return None
    for known in CLASSES[component]:
        if value == list(known):
            return known
    options = " or ".join(str(list(known)) for known in CLASSES[component])
    raise HddmError(
        f"{path}: {component} is {one_line(repr(value))}, and may be {options}; refused"
    )


def write_scheduler(folder: Path, shift: float) -> None:
    """Write ``scheduler/scheduler_config.json``."""
    path = folder / SCHEDULER_FILE
    path.parent.mkdir()
    records = {"_class_name": SCHEDULER_CLASS, "_diffusers_version": diffusers.__version__}
    write_json(path, {**records, "num_train_timesteps": 1000, "shift": shift})


def shift_of(scheduler: "diffusers.FlowMatchEulerDiscreteScheduler") -> float:
    """Shift of a scheduler's time grid; `HddmError` where it does more than shift."""
    kind = type(scheduler).__name__
    bent = [f"{key}={scheduler.config[key]}" for key in _OTHER_GRIDS if scheduler.config.get(key)]
    if bent:
        kind += f" with {', '.join(bent)}"
    if bent or kind != SCHEDULER_CLASS:
        problem = f"the scheduler is {an(kind)}, and hddm's time grid has the shift alone"
        raise HddmError(f"{problem}: take a {SCHEDULER_CLASS} for the shift, and choose by solver=")
    return float(scheduler.shift)


def held_by(expert: Path) -> tuple[Path, EnsembleRecord, int] | None:
    """The ensemble that holds an expert's folder, its record, and the expert's index; None without one."""
    whole = ensemble_around(expert.resolve())
    if whole is None:
        return None
    try:
        record = read_ensemble_record(whole)
    except OlderFormat:
        # Its experts can be assembled anew.
        return None
    for k, member in enumerate(record.experts):
        if (whole / member.folder).resolve() == expert.resolve():
            return whole, record, k
    return None


def name_of(expert: Path) -> str:
    """Name of an expert's folder; of one in an ensemble its name there, where it has one."""
    held = held_by(expert)
    if held is not None:
        _, record, k = held
        name = record.experts[k].name
        if name is not None:
            return name
    # A name that is no Unicode could not be read again.
    return os.fsencode(Path(os.path.abspath(expert)).name).decode(errors="replace")


def label(folder: str, name: str) -> str:
    """The expert's folder, followed by its name if the two differ."""
    shown = one_line(name if name.isprintable() else ascii(name), 60)
    return folder if Path(name).name == Path(folder).name else f"{folder} ({shown})"


def refuse_damaged_ensemble(folder: Path, record: EnsembleRecord, experts: Collection[int]) -> None:
    """Refuse an ensemble whose files have changed since they were written (`refuse_damaged`).

    Only ``experts``, by index, are checked; the folders of the others are not opened.
    """
    left_out = tuple(f"{one.folder}/" for k, one in enumerate(record.experts) if k not in experts)
    refuse_damaged(
        folder, damage(folder, ENSEMBLE_FILE, chosen=lambda name: not name.startswith(left_out))
    )


def write_ensemble_records(
    draft: Path,
    record: EnsembleRecord,
    components: Mapping[str, ClassName],
    bases: Mapping[str, Path],
) -> None:
    """Write ``ensemble.json``, ``model_index.json``, ``scheduler/``, ``bases/`` and, last, the manifest.

    ``draft`` already has all else; ``components`` are vae, text_encoder and tokenizer; ``bases`` are
    the folders of weights that adapters change, by SHA-256, of which weights, config and licence are linked.
    """
    own = []
    for one in record.experts:
        path = draft / one.folder / WEIGHTS
        if path.is_file():
            own.append(path)
    for sha256, base in bases.items():
        size = (base / WEIGHTS).stat().st_size
        # One with the weights of an expert is there already. Only what is as long can be the same.
        if any(one.stat().st_size == size and sha256_once(one) == sha256 for one in own):
            continue
        place = draft / BASES / sha256[:16]
        place.mkdir(parents=True)
        for path in base.iterdir():
            if path.name in (WEIGHTS, "config.json") or path.name.startswith("LICENSE"):
                link_or_copy(inside(base, path.name), place / path.name)
    _write_record(draft, record)
    router = {} if record.learned is None else {"router": CLASSES["router"][0]}
    write_model_index(draft, {**components, **router})
    write_scheduler(draft, record.shift)
    write_manifest(draft, sha256_once)


def _write_record(draft: Path, record: EnsembleRecord) -> None:
    experts = [member.model_dump(mode="json", exclude_defaults=True) for member in record.experts]
    today = {"format": ENSEMBLE_FORMAT, "experts": experts}
    write_json(draft / ENSEMBLE_FILE, record.model_dump(mode="json") | today)


REPLACE_SECONDS = 60.0
"""Seconds to wait for another process that replaces the same ensemble."""


def replace_file(
    folder: Path, record: ExpertRecord, name: str, save: Callable[[Path], None]
) -> None:
    """Replace the file ``name`` of an expert folder, with the folder or the ensemble around it as a whole.

    ``save`` writes it into a folder. Raises `HddmError` if another process writes there, and as
    `hddm.utils.files.new_folder`.
    """
    refuse_fetched(folder)
    # A link stays, and what it leads to is replaced.
    target = folder.resolve()
    whole = ensemble_around(target) or target
    kind = EXPERT_FILE if whole == target else ENSEMBLE_FILE
    # Another expert of the same ensemble may be calibrated at the same time.
    with (
        alone(whole, REPLACE_SECONDS),
        new_folder(whole, kind, overwrite=True, is_locked=True) as draft,
    ):
        _link_all(whole, draft)
        own = draft / target.relative_to(whole)
        for one in (name, EXPERT_FILE, MANIFEST):
            # Written anew, and not into a hard link.
            (own / one).unlink(missing_ok=True)
        save(own)
        write_records(own, record, {})
        rewrite_entry(own)


def replace_ensemble_record(folder: Path, record: EnsembleRecord) -> None:
    """Replace ``ensemble.json`` of a folder, with the folder as a whole; raises as `replace_file`."""
    refuse_fetched(folder)
    whole = folder.resolve()
    with (
        alone(whole, REPLACE_SECONDS),
        new_folder(whole, ENSEMBLE_FILE, overwrite=True, is_locked=True) as draft,
    ):
        _link_all(whole, draft)
        for one in (ENSEMBLE_FILE, MANIFEST):
            (draft / one).unlink(missing_ok=True)
        _write_record(draft, record)
        write_manifest(draft, sha256_once)


def _link_all(folder: Path, draft: Path) -> None:
    """Fill ``draft`` with all that is in ``folder``, but for what hddm keeps hidden there."""
    shutil.copymode(folder, draft)
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        if path.name == HASHES or any(map(is_draft, name.parts)):
            continue
        if path.is_symlink():
            (draft / name).symlink_to(os.readlink(path), target_is_directory=path.is_dir())
        elif path.is_dir():
            (draft / name).mkdir()
        else:
            link_or_copy(path, draft / name)
