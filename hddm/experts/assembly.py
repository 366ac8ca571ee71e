"""Assembly of experts, a router and components into one ensemble folder, after checking that they fit."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hddm.calibration import FILE_NAME as CALIBRATION
from hddm.classes import LABELS, join_classes
from hddm.ensemble import Strategy
from hddm.experts.compatibility import (
    ClassLists,
    Domains,
    Findings,
    Named,
    Shares,
    Value,
    by_domain,
    class_lists_of,
    class_prior_of,
    common_shift,
    compare_classes,
    compare_domains,
    compare_experts,
    domains_of,
    match_router,
    note_overlaps,
    prior_of,
    spread,
)
from hddm.experts.components import arrange
from hddm.experts.ensemble_folders import (
    ENSEMBLE_FILE,
    ROUTER,
    ClassName,
    EnsembleRecord,
    bases_of,
    label,
    name_of,
    put_component,
    write_ensemble_records,
)
from hddm.experts.lora import bases_in
from hddm.experts.records import (
    EXPERT_FILE,
    FILES,
    FORMAT,
    ROUTER_FILE,
    ExpertRecord,
    foreign_files,
    open_expert,
    open_router,
    read_router,
    weights_in,
)
from hddm.networks.folders import sha256_once
from hddm.utils.errors import HddmError, did_you_mean, one_line
from hddm.utils.files import inside, link_or_copy, new_folder, read_yaml
from hddm.utils.records import MANIFEST, composed, has_manifest, read_record, refuse_damaged
from hddm.utils.tensors import read_safetensors, refuse_non_finite

DEFAULT_STRATEGY = "draw"
ROUTED_STRATEGY = "commit-0.92"
"""Default with a learned router: at best level with drawing, on digits alone (docs/results.md)."""
MOMENTS = "moments"
"""In place of a router's folder."""
MOMENTS_EVIDENCE = 10.0
"""Directions of images that count in full, by measurements on digits and CIFAR-10 (docs/results.md)."""

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
"""Of an import statement diffusers would tell to install "hddm", a name that another project has."""


@dataclass(frozen=True)
class EnsembleFolders:
    """Folders that make up an ensemble.

    ``outputs`` has the router's output for each expert, or that of the one ``aside``, None where still open;
    empty where all are.
    ``given`` and ``own`` are components by name, and ``texts`` the numbers of text encoders that experts had
    (`hddm.experts.components.arrange`); ``bases``, the weights
    that adapters change, by SHA-256. ``aside`` is a learned router that waits for others to go; ``shares``,
    ``class_lists``, ``moments_evidence`` and ``domains`` are as in `EnsembleRecord`.
    """

    experts: Sequence[Path]
    router: Path | None = None
    given: Mapping[str, Path] = field(default_factory=dict)
    own: Mapping[str, Path] = field(default_factory=dict)
    texts: Sequence[int | None] = ()
    outputs: Sequence[int | None] = ()
    bases: Mapping[str, Path] = field(default_factory=dict)
    shares: Shares = ()
    class_lists: ClassLists = ()
    moments_evidence: float | None = None
    aside: Path | None = None
    domains: Domains = ()


ClassNames = Sequence[str] | Mapping[int | str, str]
"""Names of all of an expert's classes, or new ones of some, by number or by the name that they have."""


def assemble(
    experts: Sequence[Path],
    out: Path,
    router: str | Path | None = None,
    strategy: str | None = None,
    overwrite: bool = False,
    vae: Path | None = None,
    text_encoder: Path | None = None,
    tokenizer: Path | None = None,
    bases: Sequence[Path] = (),
    share: Mapping[str, float] | None = None,
    classes: Mapping[str, ClassNames] | None = None,
    domain: Sequence[Sequence[str]] = (),
    diffusers_pipeline: bool = False,
) -> tuple[str, ...]:
    """Put experts, a router and components into one folder, after checking that they fit.

    Experts may be of one partition, of several or of none. The prior is the shard sizes, or equal where one
    is unknown, but for ``share`` (by expert, 0 … 1). Classes are joined by name (`hddm.classes`), by
    ``classes`` where an expert has numbers alone, or makes one class without being asked; p(k | class) is
    counted where experts count images by class. The shift is the experts' common one. Each expert gets the
    router's output for its shard, so experts may come in any order and cover only some of the router's. Files
    are hard-linked where possible, from the top level of expert and router folders only, since nothing else
    is read. Weights that adapters change are hashed and stored once: in ``bases/``, or in the expert that
    owns them. Experts of one shard, each for a part of t, are one domain (`hddm.ensemble`); of others, as
    converted ones, ``domain`` says which are, a list for each.

    ``router`` is needed for all strategies but ``draw``: a folder, or ``moments`` for one of the experts'
    moments (`hddm.routers.MomentsRouter`). ``vae`` decodes latents, and ``text_encoder`` with
    ``tokenizer`` reads text; by default they are those that the experts keep, several where these differ
    (`hddm.experts.components`). Where experts have topics (`hddm.training.topics`), prompts are routed by
    them. Experts of unlike samples can be drawn, and not mixed. ``strategy`` is the one that
    the folder recommends, by default `ROUTED_STRATEGY` with a router's folder and ``draw`` without. ``bases``
    are folders of weights that adapters change, where they have moved since training. ``diffusers_pipeline``
    adds a ``pipeline.py``, by which stock diffusers opens the folder (`hddm.pipelines.stock`).
    Returns notes on what was taken on trust or could not be known.

    Raises `HddmError`, before writing, that lists all differences between the parts, and for weights and
    calibrations that are not those of their record.
    """
    for folder in experts:
        if (folder / ENSEMBLE_FILE).exists():
            raise HddmError(
                f"{folder}: is an ensemble; name its experts, {folder}/experts/*, or change it by --add and "
                "--remove"
            )
    fixed, lists, domains = choices(experts, share, classes, domain)
    folders = EnsembleFolders(
        experts,
        None if router in (None, MOMENTS) else Path(router),
        components_given(vae, text_encoder, tokenizer),
        bases=bases_of(experts, bases_in(bases)),
        shares=fixed,
        class_lists=lists,
        moments_evidence=MOMENTS_EVIDENCE if router == MOMENTS else None,
        domains=domains,
    )
    refuse_inside(out, (*experts, folders.router, *folders.given.values(), *folders.bases.values()))
    strategy = strategy or (DEFAULT_STRATEGY if folders.router is None else ROUTED_STRATEGY)
    record, components, notes = check(folders, strategy)
    notes += check_files(experts, folders.router, folders.bases)
    with new_folder(out, ENSEMBLE_FILE, overwrite) as draft:
        fill(draft, folders, record, components, diffusers_pipeline)
    return notes


def foreign_pipeline(folder: Path) -> str | None:
    """How `PIPELINE_FILE` in an ensemble differs from hddm's; None for that, and without one."""
    path = folder / PIPELINE_FILE
    if not (path.exists() or path.is_symlink()) or (path.is_file() and path.read_bytes() == PIPELINE_CODE):
        return None
    return (
        f"{PIPELINE_FILE}: is not hddm's, and diffusers would run it; remove it, or replace it by hddm "
        f"assemble {folder} --diffusers-pipeline"
    )


def components_given(vae: Path | None, text_encoder: Path | None, tokenizer: Path | None) -> dict[str, Path]:
    """Components that a caller names, by name."""
    named = {"vae": vae, "text_encoder": text_encoder, "tokenizer": tokenizer}
    return {name: folder for name, folder in named.items() if folder is not None}


def choices(
    experts: Sequence[Path],
    share: Mapping[str, float] | None,
    classes: Mapping[str, ClassNames] | None,
    domain: Sequence[Sequence[str]] = (),
    kept: Sequence[Sequence[int]] = (),
    known: ClassLists = (),
) -> tuple[Shares, ClassLists, Domains]:
    """Shares, class names and domains in the order of ``experts``; None and empty where nothing is given.

    Keys are an expert's folder, the end of its path, its name, or its index. A class of which nothing is said
    keeps its name, that of ``known`` (given before) or of its expert; a number without one is its own name.
    ``kept`` are domains of before, by index, where ``domain`` names none of their experts. Raises `HddmError`
    for a key of no expert, or of several, for two of one expert, and for names that do not fit the classes
    that an expert takes.
    """
    fixed: list[float | None] = [None] * len(experts)
    lists: list[tuple[str, ...]] = [()] * len(experts)
    for k, part in _by_index(share, experts, "--share").items():
        fixed[k] = part
    for k, names in _by_index(classes, experts, "--classes").items():
        ((name, record),) = read_records([experts[k]])
        lists[k] = _names_of(names, name, record, (known[k] if known else ()) or record.classes)
    groups = [[index_of(name, experts, "--domain") for name in names] for names in domain]
    named = set(itertools.chain.from_iterable(groups))
    domains = domains_of(read_records(experts), [*groups, *(one for one in kept if named.isdisjoint(one))])
    return spread(fixed, domains), lists, domains


def _by_index(given: Mapping[str, Value] | None, experts: Sequence[Path], option: str) -> dict[int, Value]:
    """What is given by names of experts (`index_of`), by their indices; `HddmError` for one named twice."""
    found: dict[int, Value] = {}
    for name, value in (given or {}).items():
        if (k := index_of(name, experts, option)) in found:
            raise HddmError(f"{option} {one_line(name, 60)}: {experts[k]} is named twice; name it once")
        found[k] = value
    return found


def index_of(name: str, experts: Sequence[Path], option: str) -> int:
    """Index of an expert by its folder, the end of its path, its name (`name_of`), or its number.

    Digits alone are no name. Raises `HddmError` for no expert, and for several.
    """
    full, parts = Path(name).resolve(), Path(name).parts
    found = [k for k, folder in enumerate(experts) if folder.resolve() == full]
    found = found or [
        k
        for k, folder in enumerate(experts)
        if folder.parts[-len(parts) :] == parts or (name == name_of(folder) and not name.isdecimal())
    ]
    found = found or [k for k in range(len(experts)) if str(k) == name]
    if len(found) != 1:
        which = "no expert" if not found else f"{len(found)} experts"
        known = ", ".join(label(str(folder), name_of(folder)) for folder in experts)
        raise HddmError(f"{option} {one_line(name, 60)}: names {which}; choose of {known}")
    return found[0]


def read_classes(path: Path) -> dict[str, ClassNames]:
    """Read names of classes by expert from a YAML or JSON file; `HddmError` for anything but names.

    experts/dit: {207: golden retriever, 281: tabby}
    experts/mine: [tabby, siamese]
    experts/theirs: {car: automobile}
    """
    classes: dict[str, ClassNames] = {}
    for expert, names in read_yaml(path, has_numbers=True).items():
        listed = dict(enumerate(names)) if isinstance(names, list) else names
        if not isinstance(listed, dict) or not listed:
            raise HddmError(
                f"{path}: {one_line(expert, 60)} must have a list of names, or classes with names"
            )
        for number, name in listed.items():
            if isinstance(name, bool | list | dict | None) or not str(name):
                wrong = f"{one_line(number, 40)}: {one_line(name, 40)}"
                raise HddmError(f"{path}: {one_line(expert, 60)}: {wrong}; write a class and its name")
        texts = [(composed(str(key)), composed(str(name))) for key, name in listed.items()]
        named = {int(key) if key.isdecimal() else key: name for key, name in texts}
        if len(named) < len(listed):
            raise HddmError(f"{path}: {one_line(expert, 60)}: has a number twice; name each class once")
        if str(expert) in classes:
            raise HddmError(f"{path}: {expert} is named twice; name it once")
        classes[str(expert)] = list(named.values()) if isinstance(names, list) else named
    return classes


def _names_of(given: ClassNames, name: str, record: ExpertRecord, known: Sequence[str]) -> tuple[str, ...]:
    size = len(known) or record.null_class
    if isinstance(given, Mapping):
        if size is None:
            raise HddmError(f"--classes {name}: does not record how many classes it takes; list all names")
        numbers = dict(enumerate(known)) or {number: str(number) for number in range(size)}
        of = {own: number for number, own in numbers.items()} | {number: number for number in numbers}
        if beyond := [one for one in given if one not in of]:
            what = f"--classes {name}: has classes 0 to {size - 1}, and no {one_line(beyond[0], 60)}"
            raise HddmError(what + did_you_mean(str(beyond[0]), known))
        if len({of[one] for one in given}) < len(given):
            raise HddmError(f"--classes {name}: a class is there by number and by name; name each once")
        given = [*(numbers | {of[one]: new for one, new in given.items()}).values()]
    if given and LABELS in record.conditions and size not in (None, len(given)):
        raise HddmError(f"--classes {name}: gives {len(given)} names, and it takes {size} classes")
    if len(set(given)) < len(given):
        twice = next(one for one in given if list(given).count(one) > 1)
        raise HddmError(f"--classes {name}: has {one_line(twice, 60)} twice")
    return tuple(given)


def check(
    folders: EnsembleFolders, strategy: str, prior: Sequence[float] | None = None, shift: float | None = None
) -> tuple[EnsembleRecord, Mapping[str, Path], tuple[str, ...]]:
    """Return the record of an ensemble of ``folders``, its components by name, and notes.

    Of weights, only those of components are read.

    ``prior`` is for experts of unknown shards (default: equal); ``shift`` defaults to the experts' own.
    Raises `HddmError` that lists all differences between parts, for a strategy that they cannot follow, and
    for unreadable records.
    """
    if not folders.experts:
        raise HddmError("an ensemble needs at least one expert")
    domains = tuple(folders.domains) or tuple(range(len(folders.experts)))
    Strategy.parse(strategy).check(len(set(domains)))
    is_routed = folders.router is not None or folders.moments_evidence is not None
    if not is_routed and strategy != DEFAULT_STRATEGY:
        raise HddmError(f"strategy {strategy!r} needs --router; only 'draw' does without")
    experts, found = read_records(folders.experts), Findings()
    for folder in folders.experts:
        _files_of(folder)
        if folders.moments_evidence is not None and not (folder / CALIBRATION).is_file():
            found.differ(str(folder), "has no calibration, as --router moments needs; run hddm calibrate")
    lists = class_lists_of(experts, folders.class_lists)
    others = compare_experts(experts, found, folders.shares, domains, is_drawn=not is_routed)
    for name in others:
        found.differ(name, "so it can be drawn, without a router, and not mixed")
    compare_domains(experts, domains, lists, found)
    compare_classes(experts, lists, found)
    arranged = arrange(folders.experts, experts, folders.given, folders.own, found, folders.texts)
    outputs: tuple[int, ...] = ()
    if folders.router is not None:
        _files_of(folders.router)
        router, router_record = open_router(folders.router)
        total = router.network.config.num_experts
        one_each, settled = by_domain(experts, domains), by_domain(folders.outputs, domains)
        outputs = match_router(one_each, router_record, total, found, str(folders.router), settled)
    found.refuse()
    if outputs:
        of = dict(zip(dict.fromkeys(domains), outputs, strict=True))
        outputs = tuple(of[one] for one in domains)
        outputs = () if outputs == tuple(range(total)) else outputs
    if arranged.vaes or len({one.sample_shape for _, one in experts}) > 1:
        found.note("experts make samples of several kinds, so they are drawn, one a sample, and never mixed")
    note_overlaps(experts, found)
    shares = prior_of(experts, found, folders.shares, prior, domains)
    record = EnsembleRecord(
        experts=tuple(f"experts/{k}" for k in range(len(experts))),
        names=tuple(map(name_of, folders.experts)),
        router=None if folders.router is None else ROUTER,
        router_outputs=outputs,
        prior=shares,
        shares=() if set(folders.shares) <= {None} else tuple(folders.shares),
        class_lists=tuple(map(tuple, folders.class_lists)) if any(folders.class_lists) else (),
        classes=join_classes(tuple(lists)).names,
        class_prior=class_prior_of(experts, lists, shares, found),
        router_aside=None if folders.aside is None else ROUTER,
        aside_outputs=() if folders.aside is None else tuple(folders.outputs),
        moments_evidence=folders.moments_evidence,
        strategy=strategy,
        shift=common_shift(experts, found) if shift is None else shift,
        texts=arranged.texts,
        vaes=arranged.vaes,
        topics=arranged.topics,
        domains=domains if len(set(domains)) < len(domains) else (),
    )
    return record, arranged.folders, tuple(found.notes)


def check_files(experts: Sequence[Path], router: Path | None, bases: Mapping[str, Path]) -> tuple[str, ...]:
    """Check all files of experts and router against the manifest or the record, and build their networks.

    Returns notes on folders of older versions, which cannot be checked in full. Raises `HddmError` with a
    line for each folder whose files differ, whose network cannot be built, or whose weights hold NaN or Inf.
    """
    found = Findings()
    for folder, (name, record) in zip(experts, read_records(experts), strict=True):
        with found.errors_of(name):
            for line in foreign_files(folder, record, sha256_once):
                found.differ(name, line)
            if name not in found.differences:
                open_expert(folder, bases, unheld=FILES)
                if (weights := weights_in(folder)) is not None:
                    refuse_non_finite(weights, read_safetensors(weights))
    if router is not None:
        with found.errors_of(str(router)):
            refuse_damaged(router, ROUTER_FILE, sha256=sha256_once)
            read_router(router)
    found.refuse("files are not those that were written with them, and nothing was written:")
    for older in (one for one in (*experts, router) if one is not None and not has_manifest(one)):
        found.note(f"{older} is of an older version, without a {MANIFEST}; not every change would be seen")
    return tuple(found.notes)


def read_records(folders: Sequence[Path]) -> list[Named]:
    """Records of expert folders, with the folders' names."""
    return [(str(folder), read_record(folder / EXPERT_FILE, ExpertRecord, FORMAT)) for folder in folders]


def fill(
    draft: Path,
    folders: EnsembleFolders,
    record: EnsembleRecord,
    components: Mapping[str, Path],
    diffusers_pipeline: bool,
) -> None:
    """Put ``folders``, their record and components into an empty folder, by hard links where possible.

    No manifest lists `PIPELINE_FILE`: hddm never reads it but to compare it.
    """
    for folder, name in zip(folders.experts, record.experts, strict=True):
        _link(_files_of(folder), draft / name)
    router = folders.router or folders.aside
    if router is not None:
        _link(_files_of(router), draft / ROUTER)
    kinds: dict[str, ClassName] = {}
    for name, folder in components.items():
        kinds[name] = put_component(draft, name, folder)
    write_ensemble_records(draft, record, kinds, folders.bases)
    if diffusers_pipeline:
        (draft / PIPELINE_FILE).write_bytes(PIPELINE_CODE)


def refuse_inside(out: Path, folders: Iterable[Path | None]) -> None:
    """Refuse to write into or below one of ``folders``, which are yet to be read."""
    for folder in folders:
        if folder is not None and out.resolve().is_relative_to(folder.resolve()):
            raise HddmError(f"{out}: lies in {folder}, which is to become part of it; write it elsewhere")


def _link(files: Sequence[Path], target: Path) -> None:
    target.mkdir(parents=True)
    for path in files:
        link_or_copy(path, target / path.name)


def _files_of(folder: Path) -> list[Path]:
    """Regular, visible files at the top of a folder; a link must stay inside."""
    paths = sorted(folder.iterdir())
    seen = (path for path in paths if not path.is_dir() and not path.name.startswith("."))
    return [path for path in seen if inside(folder, path.name).is_file()]
