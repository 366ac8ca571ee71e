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
from hddm.experts.compatibility import SHARE_TOLERANCE, Entry, decide, domains_of, read_entries
from hddm.experts.ensemble_folders import (
    ENSEMBLE_FILE,
    MOMENTS,
    MOMENTS_EVIDENCE,
    EnsembleRecord,
    Member,
    name_of,
    read_ensemble_facts,
)
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
    entries = read_entries([ensemble / member.folder for member in record.experts], record.experts)
    domains = domains_of(entries)
    gone = {index_of(str(name), entries, "--remove") for name in remove}
    if not add:
        # What is left of a domain cannot make a sample alone.
        gone = {k for k, domain in enumerate(domains) if domain in {domains[one] for one in gone}}
    kept = [k for k in range(len(entries)) if k not in gone]
    if not kept and not add:
        labels = ", ".join(member.label for member in record.experts)
        raise HddmError(f"{ensemble}: --remove takes {labels}, and there is no other expert")
    added = read_entries(add, [Member(folder="", name=name_of(folder)) for folder in add])
    staying = _left(entries, domains, kept)
    if staying and not allow_mixed_sizes:
        _refuse_other_kinds(ensemble, added, staying)
    everyone = [*staying, *added]
    if router is None:
        routing, chosen, notes = _kept_router(ensemble, record, everyone, strategy)
    else:
        routing, chosen, notes = named_router(router), strategy or record.strategy, []
        everyone = decide(everyone, output=[None] * len(everyone))
    # What was drawn for want of a router is mixed by it once there is one.
    if routing.folder is not None and record.learned is None and chosen == "draw" and strategy is None:
        chosen = default_strategy(has_learned_router=True)
    notes += [f"removed {record.experts[k].label}" for k in sorted(gone)]
    if out is not None and out.resolve() != ensemble.resolve():
        refuse_inside(out, [ensemble])
    # In place, the folder itself and not a link to it is exchanged.
    target, before = ensemble.resolve() if out is None else out, Changed(ensemble, record, entries, kept)
    overwrite = out is None or overwrite
    return (*write_ensemble(everyone, target, routing, chosen, overwrite, options, before), *notes)


def _left(entries: Sequence[Entry], domains: Sequence[int], kept: Sequence[int]) -> list[Entry]:
    """The experts that are left, with what was decided on them.

    Of a domain of which an expert goes, the others stand for all of it, so that another one may take its
    place; that they are one is no longer said.
    """
    shares = [one.member.share for one in entries]
    total = math.fsum(share or 0.0 for share in shares)
    are_parts = None in shares or abs(total - 1) < SHARE_TOLERANCE
    of, left = Counter(domains), Counter(domains[k] for k in kept)
    updated = []
    for k in kept:
        one, before, now = entries[k], of[domains[k]], left[domains[k]]
        share = one.member.share
        if share is not None:
            share = (share if are_parts else share / total) * before / now
        domain = one.member.domain if now == before else None
        updated += decide([one], class_shares=[{}], vae=[None], share=[share], domain=[domain])
    return updated


def _kept_router(
    ensemble: Path, record: EnsembleRecord, entries: Sequence[Entry], strategy: str | None
) -> tuple[Routing, str, list[str]]:
    """The router and the strategy of a changed ensemble, and notes on what becomes of the one it had."""
    chosen, learned = strategy or record.strategy, record.learned or record.aside(ensemble)
    if learned is None:
        return Routing(evidence=record.evidence if record.router == MOMENTS else None), chosen, []
    known = read_record(ensemble / learned / ROUTER_FILE, RouterRecord, FORMAT).shard_hashes
    unknown = [
        one.name
        for one in entries
        if one.member.output is None and (one.record.shard is None or one.record.shard.hash not in known)
    ]
    # Experts of several kinds are drawn, and nothing routes.
    can_route = len({one.kind for one in entries}) == 1
    can_route = can_route and all((one.folder / CALIBRATION).is_file() for one in entries)
    needs_none = chosen == "draw" or (chosen == ROUTED_STRATEGY and strategy is None)
    if unknown and (can_route or needs_none):
        instead = "the experts' moments route" if can_route else "draw needs none"
        note = f"the router does not know the shard of {', '.join(unknown)} and is set aside; {instead}"
        routing = Routing(None, MOMENTS_EVIDENCE if can_route else None, ensemble / learned)
        return routing, chosen if can_route else "draw", [note]
    again = "the router that was set aside knows all experts, and routes again"
    return Routing(ensemble / learned, is_new=False), chosen, [] if record.learned else [again]


def _refuse_other_kinds(ensemble: Path, added: Sequence[Entry], staying: Sequence[Entry]) -> None:
    """Refuse experts whose samples have the size and latent space of no expert that stays.

    A VAE that one of two does not record is taken on trust.
    """
    known = dict.fromkeys(one.kind for one in staying)
    for one in added:
        shape, space, vae = one.kind
        alike = [other for *kind, other in known if kind == [shape, space]]
        if not any(None in (vae, other) or vae == other for other in alike):
            theirs = " and ".join(f"{size} {kind}" for size, kind, _ in known)
            mine = f"{shape} {space}{' of another VAE' if alike else ''}"
            raise HddmError(
                f"{one.name}: makes {mine}, and the experts of {ensemble} {theirs}, so that "
                "images of several kinds would be in one folder; --allow-mixed-sizes adds it all the same"
            )
