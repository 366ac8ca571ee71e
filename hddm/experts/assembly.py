"""Assembly of experts, a router and components into one ensemble folder, and changes to such a folder.

`write_ensemble` makes a folder of a list of experts, each with what was decided on it (`Member`), after
checking that they fit: of new ones in `assemble`, of an ensemble's experts and others in `change`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hddm.calibration_records import FILE_NAME as CALIBRATION
from hddm.condition_names import TEXT
from hddm.experts.adapter_records import BASES, bases_in
from hddm.experts.compatibility import (
    candidates_of,
    common_shift,
    compare_experts,
    note_overlaps,
    router_condition,
    router_outputs,
)
from hddm.experts.components import arrange
from hddm.experts.decisions import kept_of, left_of, with_settings
from hddm.experts.ensemble_folders import (
    ENSEMBLE_FILE,
    bases_of,
    refuse_damaged_ensemble,
    write_ensemble_records,
)
from hddm.experts.ensemble_records import (
    COMPONENTS,
    KEPT,
    MOMENTS,
    MOMENTS_EVIDENCE,
    PIPELINE_CODE,
    PIPELINE_FILE,
    RELIABILITY,
    ROUTER,
    EnsembleRecord,
    Member,
    ReliabilityRecord,
    components_in,
    name_of,
    read_ensemble_record,
)
from hddm.experts.expert import Expert, experts_in, read_experts, with_decisions
from hddm.experts.expert_folders import open_expert
from hddm.experts.kept import put_component
from hddm.experts.parts import parts_of
from hddm.experts.record_folders import open_router, read_nulls, read_router
from hddm.experts.records import (
    FILES,
    FORMAT,
    ROUTER_FILE,
    RouterRecord,
    foreign_files,
    is_at_chance,
    weights_in,
)
from hddm.experts.routing import RecommendedStrategy, Routing, named_router
from hddm.experts.shares import domains_of
from hddm.fit import Findings, are_alike, compare_kinds
from hddm.networks.programs.permission import opens_programs
from hddm.settings import AssemblySettings, keywords
from hddm.strategies import Strategy, refuse_unrouted
from hddm.utils.addresses import Address, refuse_fetched
from hddm.utils.copies import link_or_copy
from hddm.utils.errors import HddmError
from hddm.utils.files import inside, is_draft, new_folder, restore, sha256_once
from hddm.utils.hub import local
from hddm.utils.records import MANIFEST, MODEL_INDEX, damage, read_record, refuse_damaged
from hddm.utils.tensors import read_safetensors, refuse_non_finite

_OWN = ("experts", BASES, ROUTER, "scheduler", *COMPONENTS, ENSEMBLE_FILE, MODEL_INDEX, MANIFEST)


@dataclass(frozen=True)
class Changed:
    """An ensemble that is changed: its folder, its record, its experts, and the indices of those kept."""

    folder: Path
    record: EnsembleRecord
    experts: Sequence[Expert]
    kept: Sequence[int]


@opens_programs
@keywords
def assemble(
    experts: Sequence[Path],
    out: Path,
    router: str | Path | None = None,
    *,
    settings: AssemblySettings,
    overwrite: bool = False,
) -> tuple[str, ...]:
    """Put experts, a router and components into one folder, after checking that they fit.

    Experts may be of one partition, of several or of none, in any order, and cover only some of the router's
    shards. p(k), p(k | class), domains and encoders follow from their records (`hddm.experts.parts`) and from
    ``settings``; the shift is the experts' common one. Files are hard-linked where possible, from the top
    level of expert and router folders only. Weights that adapters change are stored once.

    ``router`` is needed for all strategies but ``draw``: a folder, or ``moments`` for one of the experts'
    moments (`hddm.routers.MomentsRouter`). Experts, router and ``out`` may be addresses. ``vae``,
    ``text_encoder`` and ``tokenizer`` are by default those that experts keep, or several
    (`hddm.experts.components`). ``classes`` may be a dictionary in place of a file
    (`hddm.experts.decisions.read_classes`). With ``diffusers_pipeline``, stock diffusers opens the
    folder (`hddm.pipelines.parts`). Returns notes on what was taken on trust or could not be known.

    Raises `HddmError`, before writing, that lists all differences between the parts, and for weights and
    calibrations that are not those of their record.
    """
    if isinstance(out, Address):
        from hddm.utils.uploading import made_and_uploaded

        def make(folder: Path) -> tuple[str, ...]:
            return assemble(experts, folder, router, settings=settings)

        return made_and_uploaded(out, ENSEMBLE_FILE, overwrite, make)
    experts = [local(folder) for folder in experts]
    members = [Member(folder="", name=name_of(folder)) for folder in experts]
    opened = read_experts(experts, members)
    routing = named_router(router)
    chosen = routing.default_strategy
    if settings.strategy is not None:
        chosen = RecommendedStrategy(settings.strategy)
    return write_ensemble(opened, out, routing, chosen, overwrite, settings)


@keywords
def change(
    ensemble: Path,
    add: Sequence[Path] = (),
    remove: Sequence[str | int] = (),
    router: str | Path | None = None,
    out: Path | None = None,
    *,
    settings: AssemblySettings,
    overwrite: bool = False,
) -> tuple[str, ...]:
    """Add experts to an ensemble folder, or remove some, and replace other parts.

    Added experts come last. The router stays, with the outputs of the experts present: a posterior over more
    shards gives exactly the one over fewer. A router that does not know the shard of an added expert is left
    out for the moments of all experts, where all are calibrated. What was decided on an expert stays with it;
    where all experts that are left have shares, these keep their proportions. The strategy, a shift set by
    hand and the user's own files stay.

    ``remove`` names experts as `index_of` does; without ``add``, all of their domains go. ``out`` is the
    folder to write; by default ``ensemble`` is replaced, by two renames: a process killed between them leaves
    both complete, under other names beside it, and the next change restores the old one.
    Returns notes, as `assemble`.

    Raises `HddmError`, before writing, as `assemble`, and for a missing expert, and a link that leaves the
    folder (whose content would become part of it).
    """
    if isinstance(out, Address):
        from hddm.utils.uploading import made_and_uploaded

        def make(folder: Path) -> tuple[str, ...]:
            return change(ensemble, add, remove, router, folder, settings=settings)

        return made_and_uploaded(out, ENSEMBLE_FILE, overwrite, make)
    if out is None:
        refuse_fetched(ensemble)
    ensemble = local(ensemble)
    restore(ensemble)
    record = read_ensemble_record(ensemble)
    for path in ensemble.rglob("*"):
        if path.is_symlink():
            inside(ensemble, path.relative_to(ensemble).as_posix())
    experts = experts_in(ensemble, record)
    kept = kept_of(experts, remove, bool(add))
    gone = set(range(len(experts))).difference(kept)
    members = [Member(folder="", name=name_of(folder)) for folder in add]
    added = read_experts(add, members)
    everyone = [*left_of(experts, kept), *added]
    chosen = RecommendedStrategy(record.strategy, record.strategy_reason)
    if settings.strategy is not None:
        chosen = RecommendedStrategy(settings.strategy)
    if router is None:
        routing, notes = _kept_router(ensemble, record, everyone, chosen.name)
    else:
        routing, notes = named_router(router), []
        everyone = with_decisions(everyone, output=[None] * len(everyone))
    notes += [f"removed {record.experts[k].label}" for k in sorted(gone)]
    # In place, the folder itself and not a link to it is exchanged.
    target = ensemble.resolve() if out is None else out
    before = Changed(ensemble, record, experts, kept)
    overwrite = out is None or overwrite
    return (*write_ensemble(everyone, target, routing, chosen, overwrite, settings, before), *notes)


def _kept_router(
    ensemble: Path, record: EnsembleRecord, experts: Sequence[Expert], strategy: str
) -> tuple[Routing, list[str]]:
    """The router of a changed ensemble, and a note where it knows too few shards and is left out."""
    if record.router == RELIABILITY:
        return Routing(by_reliability=True), []
    if record.learned is None:
        return Routing(evidence=record.evidence if record.router == MOMENTS else None), []
    known = read_record(ensemble / record.learned / ROUTER_FILE, RouterRecord, FORMAT).shard_hashes
    unknown = []
    for one in experts:
        is_known = one.record.shard is not None and one.record.shard.hash in known
        if one.member.output is None and not is_known:
            unknown.append(one.name)
    # Experts of several kinds are drawn, and nothing routes.
    are_calibrated = all((one.place / CALIBRATION).is_file() for one in experts)
    can_route = are_calibrated and are_alike(candidates_of(experts))
    if unknown and (can_route or strategy == "draw"):
        instead = "the experts' moments route" if can_route else "draw needs none"
        note = (
            f"the router does not know the shard of {', '.join(unknown)} and is left out; {instead}"
        )
        return Routing(evidence=MOMENTS_EVIDENCE if can_route else None), [note]
    return Routing(ensemble / record.learned, is_new=False), []


def write_ensemble(
    experts: Sequence[Expert],
    out: Path,
    routing: Routing,
    strategy: RecommendedStrategy,
    overwrite: bool,
    settings: AssemblySettings,
    before: Changed | None = None,
) -> tuple[str, ...]:
    """Write an ensemble of these experts, and return notes.

    Where one is changed, its own experts come first; they were checked in full when they came.
    """
    if not experts:
        raise HddmError("no expert is left; an ensemble needs at least one")
    folders = [one.place for one in experts]
    bases = bases_of(folders, bases_in(settings.base))
    experts = with_settings(experts, settings.share, settings.classes, settings.domain)
    Strategy.parse(strategy.name).check(len(set(domains_of(experts))))
    if routing.is_absent:
        refuse_unrouted(strategy.name)
    found = Findings(trusts_components=settings.trust_components)
    components, experts = _fitting(experts, routing, settings, before, found)
    note_overlaps(experts, found)
    parts_of(experts, found=found)
    shift = common_shift(experts, found)
    if before is not None:
        if common_shift(before.experts, Findings()) != before.record.shift:
            shift = before.record.shift
        refuse_damaged_ensemble(before.folder, before.record, before.kept)
    experts = with_decisions(experts, folder=[f"experts/{k}" for k in range(len(experts))])
    record = EnsembleRecord(
        experts=tuple(one.member for one in experts),
        router=routing.name,
        evidence=routing.evidence or MOMENTS_EVIDENCE,
        reliability=_kept_weights(before, len(experts), routing, found),
        strategy=strategy.name,
        strategy_reason=strategy.reason,
        shift=shift,
    )
    _check_files(folders[_num_kept(before) :], routing.folder if routing.is_new else None, bases)
    rest = [] if before is None else _rest_of(before)
    with new_folder(out, ENSEMBLE_FILE, overwrite) as draft:
        for folder, member in zip(folders, record.experts, strict=True):
            _link(_files_of(folder), draft / member.folder)
        if routing.folder is not None:
            _link(_files_of(routing.folder), draft / ROUTER)
        kinds = {name: put_component(draft, name, folder) for name, folder in components.items()}
        write_ensemble_records(draft, record, kinds, bases)
        if settings.diffusers_pipeline:
            # No manifest lists it: hddm never reads it but to compare it.
            (draft / PIPELINE_FILE).write_bytes(PIPELINE_CODE)
        for path, name in rest:
            target = draft / name
            if path.is_dir():
                target.mkdir(parents=True, exist_ok=True)
            elif not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                link_or_copy(path, target)
    return tuple(found.notes)


def _kept_weights(
    before: Changed | None, number: int, routing: Routing, found: Findings
) -> ReliabilityRecord | None:
    """The weights by noise level of a changed ensemble, where experts and router stay; else a note."""
    known = None if before is None else before.record.reliability
    if before is None or known is None:
        return None
    if len(before.kept) == len(before.experts) == number and routing.name == before.record.router:
        return known
    found.note(
        "the weights by noise level were measured for other experts, or another router, and are left out; "
        "hddm calibrate ENSEMBLE --data IMAGES measures them again"
    )
    return None


def _num_kept(before: Changed | None) -> int:
    """Number of the experts that an ensemble has already."""
    return 0 if before is None else len(before.kept)


def _fitting(
    experts: Sequence[Expert],
    routing: Routing,
    settings: AssemblySettings,
    before: Changed | None,
    found: Findings,
) -> tuple[dict[str, Path], Sequence[Expert]]:
    """Components by name, and the experts with what was decided for them, if all of these fit together.

    Raises `HddmError` with all differences; notes go into ``found``.
    """
    folders, components = [one.place for one in experts], dict[str, Path]()
    for folder in folders:
        if folders.count(folder) > 1:
            found.differ(str(folder), "is named twice; name it once")
    if not found.differences:
        compare_experts(experts, not routing.is_absent, found, routing.by_reliability)
        given, own = dict[str, Path](), dict[str, Path]()
        for name in KEPT:
            chosen = getattr(settings, name)
            if chosen is not None:
                given[name] = chosen
        if before is not None:
            for name in components_in(before.folder):
                own[name] = before.folder / name
        components, experts = arrange(experts, given, own, _num_kept(before), found)
        if routing.folder is not None:
            experts = _with_outputs(experts, routing.folder, found)
        candidates = candidates_of(experts)
        if not are_alike(candidates):
            kinds = Findings()
            compare_kinds(candidates, kinds)
            found.note(
                "experts make samples of several kinds, so one is drawn per sample, and none are mixed "
                f"({', '.join(kinds.lines)})"
            )
    if routing.evidence is not None:
        for folder in folders:
            if not (folder / CALIBRATION).is_file():
                found.differ(
                    str(folder), "has no calibration, as `router` moments needs; run hddm calibrate"
                )
    found.refuse()
    return components, experts


def _with_outputs(experts: Sequence[Expert], folder: Path, found: Findings) -> list[Expert]:
    """The experts with their outputs of a learned router, where these do not follow from their shards."""
    router, known = open_router(folder)
    if is_at_chance(known.training.get("accuracy")):
        found.note(
            f"{folder} recognised shards no better than chance when it was trained, so strategies that ask "
            "it mix at random; train it for longer, or at another learning rate"
        )
    outputs = router_outputs(experts, known, router.network.config.num_experts, found, str(folder))
    null_text = read_nulls(folder).get(TEXT)
    router_condition(experts, known, null_text, found, str(folder))
    if len(outputs) < len(experts):
        return list(experts)
    stated: list[int | None] = list(outputs)
    for k, one in enumerate(experts):
        if one.record.shard is not None and known.shard_hashes:
            stated[k] = None
    return with_decisions(experts, output=stated)


def _check_files(experts: Sequence[Path], router: Path | None, bases: Mapping[str, Path]) -> None:
    """Check all files of experts and router against their manifests, and build their networks.

    Raises `HddmError` with a line for each folder whose files differ, whose network cannot be built, or whose
    weights hold NaN or Inf.
    """
    found = Findings()
    for folder in experts:
        name = str(folder)
        with found.errors_of(name):
            for line in foreign_files(folder, sha256_once):
                found.differ(name, line)
            if name not in found.differences:
                open_expert(folder, bases, unheld=FILES)
                weights = weights_in(folder)
                if weights is not None:
                    refuse_non_finite(weights, read_safetensors(weights))
    if router is not None:
        with found.errors_of(str(router)):
            refuse_damaged(router, damage(router, ROUTER_FILE, sha256=sha256_once))
            read_router(router)
    found.refuse("files are not those that were written with them, and nothing was written:")


def _link(files: Sequence[Path], target: Path) -> None:
    target.mkdir(parents=True)
    for path in files:
        link_or_copy(path, target / path.name)


def _files_of(folder: Path) -> list[Path]:
    """Regular, visible files at the top of a folder; a link must stay inside."""
    paths = sorted(folder.iterdir())
    seen = (path for path in paths if not path.is_dir() and not path.name.startswith("."))
    return [path for path in seen if inside(folder, path.name).is_file()]


def _rest_of(before: Changed) -> list[tuple[Path, Path]]:
    """The user's own files and empty folders in an ensemble, such as a licence or a card, with their names.

    A link to a folder is refused, since it may lead around in circles.
    """
    own = [*_OWN, before.record.learned or ROUTER]
    own += [member.folder for member in before.record.experts]
    found = []
    for path in before.folder.rglob("*"):
        name = path.relative_to(before.folder)
        if any(name.is_relative_to(one) for one in own) or any(map(is_draft, name.parts)):
            continue
        if path.is_symlink() and path.is_dir():
            raise HddmError(
                f"{path}: is a link to a folder; put the folder itself there, or take it out"
            )
        if path.is_file() or (path.is_dir() and not any(path.iterdir())):
            found.append((path, name))
    return found
