"""Records of ensemble folders: ``ensemble.json`` and ``model_index.json``, and what they name.

``model_index.json`` is foreign text: a component may be of the classes listed in `CLASSES` and of no other,
so nothing that a folder says decides which code runs.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from hddm.experts.adapter_records import BASES
from hddm.networks.encoders import ALONE, READ_VAES, TextEncoderClass, TokenizerClass
from hddm.networks.identity import TextEncoderRecord, VaeRecord
from hddm.utils.errors import HddmError, did_you_mean, one_line
from hddm.utils.files import inside, read_json
from hddm.utils.records import ENSEMBLE_FILE as ENSEMBLE_FILE
from hddm.utils.records import (
    MODEL_INDEX,
    ComposedName,
    Count,
    OlderFormat,
    PositiveNumber,
    Record,
    Share,
    SparseRecord,
    ensemble_around,
    read_record,
)

ClassName = tuple[str, str]
"""Library and class of a component, as a pipeline's index names them."""


KEPT = ("vae", "text_encoder", "tokenizer")
"""Components that a converted expert may have besides its network, one folder each."""
MOST_ENCODERS = 3
"""VAEs, and text encoders, of an ensemble at most."""


def numbered(name: str, number: int) -> str:
    """Name of a component by its number, from 0: ``vae``, ``vae_2``, ``vae_3``, as in diffusers."""
    return name if number == 0 else f"{name}_{number + 1}"


def unnumbered(name: str) -> str:
    """The kind of a component, by its name: ``vae`` of ``vae_2``."""
    return re.sub(r"_\d$", "", name)


def named(kind: TextEncoderClass | TokenizerClass) -> ClassName:
    """Library and class of a text encoder or tokenizer."""
    return kind.library, kind.name


def kept_components(expert: Path) -> dict[str, Path]:
    """Folders of the `COMPONENTS` that an expert's folder keeps, by name; `HddmError` for one outside."""
    return {name: expert / name for name in KEPT if inside(expert, name).is_dir()}


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


NEEDED = ("experts", "scheduler")
"""Components that every ensemble has."""
_RECORDS = ("_class_name", "_diffusers_version")
ENSEMBLE_FORMAT = "2.0"
MOMENTS = "moments"
"""In place of a router's folder: a router by the experts' moments (`hddm.routers.MomentsRouter`)."""
RELIABILITY = "reliability"
"""In place of a router's folder: weights by noise level (`hddm.reliability.ReliabilityRouter`)."""
MOMENTS_EVIDENCE = 10.0
"""Directions of images that count in full, by measurements on digits and CIFAR-10 (docs/results.md)."""
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


def _class_of(path: Path, component: str, value: object) -> ClassName | None:
    if value in (None, [None, None]) and component not in NEEDED:
        return None
    for known in CLASSES[component]:
        if value == list(known):
            return known
    options = " or ".join(str(list(known)) for known in CLASSES[component])
    raise HddmError(
        f"{path}: {component} is {one_line(repr(value))}, and may be {options}; refused"
    )


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


PIPELINE_FILE = "pipeline.py"
PIPELINE_CODE = b'''"""Opens this folder in diffusers by the installed hddm; it has no other code.

    DiffusionPipeline.from_pretrained(folder, custom_pipeline=folder, trust_remote_code=True)
"""

from importlib import import_module

try:
    HDDMPipeline = import_module("hddm").HDDMPipeline
except (ImportError, AttributeError) as error:
    raise ImportError("this folder is an ensemble of hddm; pip install . in a checkout of hddm") from error
'''
"""After a plain import statement diffusers would advise to install "hddm", the name of another project."""


def foreign_pipeline(folder: Path) -> str | None:
    """How `PIPELINE_FILE` in an ensemble differs from hddm's; None for that, and without one."""
    path = folder / PIPELINE_FILE
    if not (path.exists() or path.is_symlink()) or (
        path.is_file() and path.read_bytes() == PIPELINE_CODE
    ):
        return None
    return (
        f"{PIPELINE_FILE}: is not hddm's, and diffusers would run it; remove it, or replace it by hddm "
        f"assemble {folder} --diffusers-pipeline"
    )
