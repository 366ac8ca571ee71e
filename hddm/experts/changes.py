"""Changes to an ensemble folder: experts are added or removed, the rest stays."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from hddm.calibration import FILE_NAME as CALIBRATION
from hddm.experts.assembly import (
    ROUTED_STRATEGY,
    Changed,
    Options,
    Routing,
    default_strategy,
    named_router,
    refuse_inside,
    write_ensemble,
)
from hddm.experts.choices import index_of
from hddm.experts.compatibility import SHARE_TOLERANCE, sample_kind
from hddm.experts.ensemble_folders import (
    ENSEMBLE_FILE,
    MOMENTS,
    MOMENTS_EVIDENCE,
    EnsembleRecord,
    Member,
    name_of,
    read_ensemble_facts,
)
from hddm.experts.parts import domains_of, read_records
from hddm.experts.records import FORMAT, ROUTER_FILE, RouterRecord
from hddm.utils.errors import HddmError
from hddm.utils.files import inside, restore
from hddm.utils.records import read_record


def change(
    ensemble: Path,
    add: Sequence[Path] = (),
    remove: Sequence[str | int] = (),
    router: str | Path | None = None,
    out: Path | None = None,
    strategy: str | None = None,
    overwrite: bool = False,
    allow_mixed_sizes: bool = False,
    **options: Unpack[Options],
) -> tuple[str, ...]:
    """Add experts to an ensemble folder, or remove some, and replace other parts.

    Added experts come last. The router stays, with the outputs of the experts present: a posterior over more
    shards gives exactly the one over fewer. A router that does not know the shard of an added expert is set
    aside for the moments of all experts, where all are calibrated, until that expert goes. What was decided
    on an expert stays with it; where all experts that are left have shares, these keep their proportions. The
    strategy (but for a ``draw`` that a first router replaces), a shift set by hand and the user's own files
    stay.

    ``remove`` names experts as `index_of` does; without ``add``, all of their domains go. ``out`` is the
    folder to write; by default ``ensemble`` is replaced, by two renames: a process killed between them leaves
    both complete, under other names beside it, and the next change restores the old one.
    ``allow_mixed_sizes`` lets added experts make samples of another size or latent space than those there.
    Returns notes, as `assemble`.

    Raises `HddmError`, before writing, as `assemble`, and for a missing expert, a link that leaves the folder
    (whose content would become part of it), and an ``out`` inside it.
    """
    if not any((add, remove, router, strategy, *options.values())):
        raise HddmError(f"{ensemble}: nothing to change; pass --add, --remove or another part")
    restore(ensemble)
    if not (ensemble / ENSEMBLE_FILE).is_file():
        raise HddmError(f"{ensemble}: no ensemble folder ({ENSEMBLE_FILE}); assemble one first")
    record = read_ensemble_facts(ensemble)
    for path in ensemble.rglob("*"):
        if path.is_symlink():
            inside(ensemble, path.relative_to(ensemble).as_posix())
    folders = [ensemble / member.folder for member in record.experts]
    domains = domains_of(record.experts, read_records(folders))
    gone = {index_of(str(name), folders, "--remove") for name in remove}
    if not add:
        # What is left of a domain cannot make a sample alone.
        gone = {k for k, domain in enumerate(domains) if domain in {domains[one] for one in gone}}
    kept = [k for k in range(len(folders)) if k not in gone]
    if not kept and not add:
        labels = ", ".join(member.label for member in record.experts)
        raise HddmError(f"{ensemble}: --remove takes {labels}, and there is no other expert")
    stay = [folders[k] for k in kept]
    if not allow_mixed_sizes:
        _refuse_other_kinds(ensemble, add, stay)
    members = _left(record, domains, kept)
    members += [Member(folder="", name=name_of(folder)) for folder in add]
    everyone = [*stay, *add]
    routing, members, chosen, told = _kept_router(ensemble, record, everyone, members, router, strategy)
    told += [f"removed {record.experts[k].label}" for k in sorted(gone)]
    if out is not None and out.resolve() != ensemble.resolve():
        refuse_inside(out, [ensemble])
    # In place, the folder itself and not a link to it is exchanged.
    target, before = ensemble.resolve() if out is None else out, Changed(ensemble, record, kept)
    overwrite = out is None or overwrite
    notes = write_ensemble(everyone, members, target, routing, chosen, overwrite, options, before)
    return (*notes, *told)


def _left(record: EnsembleRecord, domains: Sequence[int], kept: Sequence[int]) -> list[Member]:
    """What was decided on the experts that are left.

    Of a domain of which an expert goes, the others stand for all of it, so that another one may take its
    place; that they are one is no longer said.
    """
    total = math.fsum(member.share or 0.0 for member in record.experts)
    are_parts = any(member.share is None for member in record.experts) or abs(total - 1) < SHARE_TOLERANCE
    of, left, members = Counter(domains), Counter(domains[k] for k in kept), []
    for k in kept:
        member, domain = record.experts[k], domains[k]
        changes: dict[str, object] = {"class_shares": {}, "vae": None}
        if member.share is not None:
            share = member.share if are_parts else member.share / total
            changes["share"] = share * of[domain] / left[domain]
        if left[domain] < of[domain]:
            changes["domain"] = None
        members.append(member.model_copy(update=changes))
    return members


def _kept_router(
    ensemble: Path,
    record: EnsembleRecord,
    folders: Sequence[Path],
    members: list[Member],
    router: str | Path | None,
    strategy: str | None,
) -> tuple[Routing, list[Member], str, list[str]]:
    """The router and the strategy of a changed ensemble, and notes on what becomes of the one it had."""
    told: list[str] = []
    chosen, learned = strategy or record.strategy, record.learned or record.aside(ensemble)
    if router is not None:
        routing = named_router(router)
        members = [member.model_copy(update={"output": None}) for member in members]
    elif learned is None:
        routing = Routing(evidence=record.evidence if record.router == MOMENTS else None)
    else:
        experts = read_records(folders)
        known = read_record(ensemble / learned / ROUTER_FILE, RouterRecord, FORMAT).shard_hashes
        unknown = [
            name
            for (name, one), member in zip(experts, members, strict=True)
            if member.output is None and (one.shard is None or one.shard.hash not in known)
        ]
        # Of several kinds experts are drawn, and nothing routes.
        is_one_kind = len({sample_kind(one) for _, one in experts}) == 1
        is_calibrated = is_one_kind and all((folder / CALIBRATION).is_file() for folder in folders)
        needs_none = chosen == "draw" or (chosen == ROUTED_STRATEGY and strategy is None)
        if unknown and (is_calibrated or needs_none):
            chosen = chosen if is_calibrated else "draw"
            routing = Routing(None, MOMENTS_EVIDENCE if is_calibrated else None, ensemble / learned)
            instead = "the experts' moments route" if is_calibrated else "draw needs none"
            told.append(
                f"the router does not know the shard of {', '.join(unknown)} and is set aside; {instead}"
            )
        else:
            routing = Routing(ensemble / learned, is_new=False)
            if record.learned is None:
                told.append("the router that was set aside knows all experts, and routes again")
    # What was drawn for want of a router is mixed by it once there is one.
    if routing.folder is not None and record.learned is None and chosen == "draw" and strategy is None:
        chosen = default_strategy(has_learned_router=True)
    return routing, members, chosen, told


def _refuse_other_kinds(ensemble: Path, add: Sequence[Path], stay: Sequence[Path]) -> None:
    """Refuse experts whose samples have the size and latent space of no expert that stays.

    A VAE that one of two does not record is taken on trust.
    """
    known = dict.fromkeys(sample_kind(one) for _, one in read_records(stay))
    for name, one in read_records(add) if known else ():
        shape, space, vae = sample_kind(one)
        alike = [other for *kind, other in known if kind == [shape, space]]
        if not any(None in (vae, other) or vae == other for other in alike):
            theirs = " and ".join(f"{size} {kind}" for size, kind, _ in known)
            mine = f"{shape} {space}{' of another VAE' if alike else ''}"
            raise HddmError(
                f"{name}: makes {mine}, and the experts of {ensemble} {theirs}, so that "
                "images of several kinds would be in one folder; --allow-mixed-sizes adds it all the same"
            )
