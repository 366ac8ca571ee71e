"""Changes to an ensemble folder: experts are added or removed, the rest stays.

The new folder replaces the old one by two renames. A process killed between them leaves both complete, under
other names beside it; the next change then restores the old one.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from hddm.calibration import FILE_NAME as CALIBRATION
from hddm.experts.assembly import (
    DEFAULT_STRATEGY,
    MOMENTS,
    MOMENTS_EVIDENCE,
    ROUTED_STRATEGY,
    ClassNames,
    EnsembleFolders,
    check,
    check_files,
    choices,
    components_given,
    fill,
    index_of,
    read_records,
    refuse_inside,
)
from hddm.experts.compatibility import Findings, Shares, common_shift, sample_kind, spread
from hddm.experts.ensemble_folders import (
    BASES,
    COMPONENTS,
    ENSEMBLE_FILE,
    MODEL_INDEX,
    EnsembleRecord,
    bases_of,
    components_in,
    read_ensemble_facts,
    refuse_damaged_ensemble,
)
from hddm.experts.lora import bases_in
from hddm.experts.records import FORMAT, ROUTER_FILE, RouterRecord, open_expert
from hddm.utils.errors import HddmError
from hddm.utils.files import inside, is_draft, link_or_copy, new_folder, restore
from hddm.utils.records import MANIFEST, has_manifest, read_record

Value = TypeVar("Value")

_PARTS = ("experts", BASES, "router", "scheduler", *COMPONENTS, ENSEMBLE_FILE, MODEL_INDEX, MANIFEST)


def change(
    ensemble: Path,
    add: Sequence[Path] = (),
    remove: Sequence[str | int] = (),
    router: str | Path | None = None,
    out: Path | None = None,
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
    allow_mixed_sizes: bool = False,
) -> tuple[str, ...]:
    """Add experts to an ensemble folder, or remove some.

    Added experts come last. The router stays, with the outputs of the experts present: a posterior over more
    shards gives exactly the one over fewer. One that does not know the shard of an added expert is set aside
    for the moments of all experts, where all are calibrated, until that expert goes. Priors are counted anew,
    but for shares given now or before; if those of all experts left were given, they keep their proportions.
    The strategy (but for a ``draw`` that a first router replaces), a shift set by hand, domains of which no
    expert goes and all else in the folder stay.

    ``remove`` names experts as `hddm.experts.assembly.choices` does; without ``add``, all of their domains
    go. ``out`` is the folder to
    write; by default ``ensemble`` is replaced at the end. ``bases`` are as for
    `hddm.experts.assembly.assemble`, for the added experts; other arguments replace parts of the folder.
    ``allow_mixed_sizes`` lets added experts make samples of another size or latent space than those there.
    Returns notes, as `assemble`.

    Raises `HddmError`, before writing, as `assemble`, and for a missing expert, a link that leaves the folder
    (whose content would become part of it), and an ``out`` inside it.
    """
    parts = (add, remove, router, strategy, vae, text_encoder, tokenizer)
    if not any((*parts, share, classes, domain, diffusers_pipeline)):
        raise HddmError(f"{ensemble}: nothing to change; pass --add, --remove or another part")
    restore(ensemble)
    if not (ensemble / ENSEMBLE_FILE).is_file():
        raise HddmError(f"{ensemble}: no ensemble folder ({ENSEMBLE_FILE}); assemble one first")
    record = read_ensemble_facts(ensemble)
    for path in ensemble.rglob("*"):
        if path.is_symlink():
            inside(ensemble, path.relative_to(ensemble).as_posix())
    rest = _rest(ensemble, record)
    before = [ensemble / name for name in record.experts]
    gone = {index_of(str(name), before, "--remove") for name in remove}
    if not add:
        # What is left of a domain cannot make a sample alone.
        of = record.domain_of
        gone = {k for k, domain in enumerate(of) if domain in {of[one] for one in gone}}
    kept = [k for k in range(len(record.experts)) if k not in gone]
    if not kept and not add:
        raise HddmError(
            f"{ensemble}: --remove takes {', '.join(record.labels)}, and there is no other expert"
        )
    stay = [before[k] for k in kept]
    everyone = [*stay, *add]
    _refuse_other_kinds(ensemble, () if allow_mixed_sizes else add, stay)

    def kept_of(values: Sequence[Value], missing: Value) -> list[Value]:
        return [values[k] for k in kept] + [missing] * len(add)

    own_bases = {sha256: ensemble / name for sha256, name in record.bases.items()}
    groups = [[k for k, one in enumerate(record.domains) if one == first] for first in set(record.domains)]
    left = [[kept.index(k) for k in group] for group in groups if gone.isdisjoint(group) and len(group) > 1]
    old_lists = kept_of(record.class_lists, ()) if record.class_lists else []
    fixed, lists, domains = choices(everyone, share, classes, domain, left, old_lists)
    if record.class_lists:
        lists = [new or old for new, old in zip(lists, old_lists, strict=True)]
    if record.shares:
        # What is left of a domain stands for all of it, so that another expert may take the place of one.
        of, left_of = record.domain_of, Counter(record.domain_of[k] for k in kept)
        whole = [
            None if one is None else one * of.count(d) / max(1, left_of[d])
            for one, d in zip(record.shares, of, strict=True)
        ]
        fixed = spread(_shares(fixed, kept_of(whole, None)), domains)
    folders = EnsembleFolders(
        everyone,
        None if router in (None, MOMENTS) else Path(router),
        components_given(vae, text_encoder, tokenizer),
        {name: ensemble / name for name in components_in(ensemble)},
        kept_of(record.texts or [0] * len(record.experts), None),
        bases=bases_of(stay, own_bases, is_closed=True) | bases_of(add, bases_in(bases)),
        shares=fixed,
        class_lists=lists,
        moments_evidence=MOMENTS_EVIDENCE if router == MOMENTS else None,
        domains=domains,
    )
    is_asked, strategy = strategy is not None, strategy or record.strategy
    told: tuple[str, ...] = ()
    learned = record.router or record.router_aside
    if router is None and learned is not None:
        outputs: Sequence[int | None] = record.outputs
        if record.router is None:
            outputs = record.aside_outputs or [None] * len(record.experts)
        folders = replace(folders, outputs=kept_of(outputs, None))
        unknown = _unknown_to(ensemble / learned, everyone, folders.outputs)
        is_calibrated = all((folder / CALIBRATION).is_file() for folder in everyone)
        # Of several kinds experts are drawn, and nothing routes.
        is_calibrated &= len({sample_kind(one) for _, one in read_records(everyone)}) == 1
        needs_none = strategy == DEFAULT_STRATEGY or (strategy == ROUTED_STRATEGY and not is_asked)
        if unknown and (is_calibrated or needs_none):
            strategy = strategy if is_calibrated else DEFAULT_STRATEGY
            evidence = MOMENTS_EVIDENCE if is_calibrated else None
            folders = replace(folders, aside=ensemble / learned, moments_evidence=evidence)
            instead = "the experts' moments route" if is_calibrated else "draw needs none"
            told = (
                f"the router does not know the shard of {', '.join(unknown)} and is set aside; {instead}",
            )
        else:
            folders = replace(folders, router=ensemble / learned)
            if record.router is None:
                told = ("the router that was set aside knows all experts, and routes again",)
    elif router is None:
        folders = replace(folders, moments_evidence=record.moments_evidence)
    # What was drawn for want of a router is mixed by it once there is one.
    is_first = folders.router is not None and record.router is None and strategy == DEFAULT_STRATEGY
    strategy = ROUTED_STRATEGY if is_first and not is_asked else strategy
    prior = [record.prior[k] for k in kept]
    new_record, components, notes = check(
        folders,
        strategy,
        prior=None if add or not sum(prior) else prior,
        shift=_shift_by_hand(ensemble, record),
    )
    # Those that stay were checked in full when they came; their manifest says that they are as they were.
    refuse_damaged_ensemble(ensemble, record, kept)
    for folder in stay if not has_manifest(ensemble) else []:
        open_expert(folder, folders.bases)
    # The ensemble's own router was checked with it.
    new_router = None if router is None else folders.router
    told += tuple(f"removed {record.labels[k]}" for k in sorted(gone))
    notes += told + check_files(add, new_router, folders.bases)
    if out is not None and out.resolve() != ensemble.resolve():
        refuse_inside(out, [ensemble])
    # In place, the folder itself and not a link to it is exchanged.
    target = ensemble.resolve() if out is None else out
    refuse_inside(target, [*add, new_router, vae, text_encoder, tokenizer])
    with new_folder(target, ENSEMBLE_FILE, overwrite=out is None or overwrite) as draft:
        fill(draft, folders, new_record, components, diffusers_pipeline)
        _link_rest(ensemble, rest, draft)
    return notes


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


def _unknown_to(router: Path, experts: Sequence[Path], outputs: Sequence[int | None]) -> list[str]:
    """Names of the experts of no known output whose shard a router does not know."""
    known = read_record(router / ROUTER_FILE, RouterRecord, FORMAT).shard_hashes
    open_ones = [one for one, output in zip(read_records(experts), outputs, strict=True) if output is None]
    return [name for name, record in open_ones if record.shard is None or record.shard.hash not in known]


def _shares(given: Shares, before: Shares) -> Shares:
    """Shares given now, else before; where only what was given before is left, in the same proportions."""
    fixed = [share for share in before if share is not None]
    if set(given) == {None} and len(fixed) == len(before) and math.fsum(fixed) > 0:
        return [share / math.fsum(fixed) for share in fixed]
    return [old if new is None else new for new, old in zip(given, before, strict=True)]


def _shift_by_hand(ensemble: Path, record: EnsembleRecord) -> float | None:
    """The folder's shift, or None where it is the experts' common one."""
    experts = read_records([ensemble / name for name in record.experts])
    return None if common_shift(experts, Findings()) == record.shift else record.shift


def _rest(ensemble: Path, record: EnsembleRecord) -> list[Path]:
    """Names of the user's own files and empty folders in an ensemble, such as a licence or a card.

    A link to a folder is refused, since it may lead around in circles.
    """
    parts = [Path(name) for name in (*_PARTS, *record.experts, *([record.router] if record.router else []))]
    found = []
    for path in ensemble.rglob("*"):
        name = path.relative_to(ensemble)
        if any(name.is_relative_to(part) for part in parts) or any(map(is_draft, name.parts)):
            continue
        if path.is_symlink() and path.is_dir():
            raise HddmError(f"{path}: is a link to a folder; put the folder itself there, or take it out")
        if path.is_file() or (path.is_dir() and not any(path.iterdir())):
            found.append(name)
    return found


def _link_rest(ensemble: Path, names: Sequence[Path], draft: Path) -> None:
    for name in names:
        target = draft / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ensemble / name).is_dir():
            target.mkdir(exist_ok=True)
        elif not target.exists():
            link_or_copy(ensemble / name, target)
