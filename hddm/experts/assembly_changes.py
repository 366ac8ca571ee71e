"""Changing an ensemble folder: experts come and go, the rest stays.

The old folder makes room for the new one by two renames, between which nothing has its name. A process that
is killed just there leaves both beside it, whole; the next change puts the old one back.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hddm.experts.assembly import PartFolders, check, check_files, fill, read_records, refuse_inside
from hddm.experts.compatibility import Findings, common_shift
from hddm.experts.ensembles import (
    COMPONENTS,
    ENSEMBLE_FILE,
    MODEL_INDEX,
    EnsembleRecord,
    bases_of,
    read_ensemble_facts,
    read_model_index,
    refuse_damaged_ensemble,
)
from hddm.experts.ensembles import FOLDER as BASES
from hddm.experts.lora import bases_in, check_base
from hddm.experts.records import EXPERT_FILE, FORMAT, ExpertRecord, base_of, open_expert
from hddm.networks.folders import WEIGHTS
from hddm.utils.errors import HddmError
from hddm.utils.files import inside, link_or_copy, new_folder, restore
from hddm.utils.records import read_record

_PARTS = ("experts", BASES, "router", "scheduler", *COMPONENTS, ENSEMBLE_FILE, MODEL_INDEX)
# What a killed process leaves of a folder that it was writing here.
_LEFTOVER = re.compile(r"\..+\.(part|old)-\d+$")


def change(
    ensemble: Path,
    add: Sequence[Path] = (),
    remove: Sequence[str | int] = (),
    router: Path | None = None,
    out: Path | None = None,
    strategy: str | None = None,
    overwrite: bool = False,
    vae: Path | None = None,
    text_encoder: Path | None = None,
    tokenizer: Path | None = None,
    bases: Sequence[Path] = (),
) -> tuple[str, ...]:
    """Add experts to an ensemble folder, or take some out.

    Experts that are added come last. The router stays, with the outputs of those that are there: of a
    posterior over more shards that makes exactly the one over fewer. An expert of a shard that it does not
    know needs another router. Priors are counted anew; strategy, a shift that was set by hand, and all else
    in the folder stay.

    Args:
        ensemble: an ensemble folder.
        add: expert folders.
        remove: index or folder name, as in ``ensemble.json``, of each expert that goes.
        router: another router.
        out: the folder to write; by default ``ensemble`` itself is replaced, at the end.
        strategy: another strategy.
        overwrite: whether an existing ``out`` is replaced.
        vae: another VAE.
        text_encoder: another text encoder.
        tokenizer: another tokenizer.
        bases: folders of weights that adapters to be added change, as for `hddm.experts.assembly.assemble`.

    Returns:
        Notes, as `hddm.experts.assembly.assemble`.

    Raises:
        HddmError: before anything is written, for an expert that is not there, for a link out of the folder,
            whose content would become part of it, for an ``out`` inside it, with every difference
            between the parts, and for weights and calibrations to be added that their records do not state.
    """
    given = {"vae": vae, "text_encoder": text_encoder, "tokenizer": tokenizer}
    if not (add or remove or router or strategy or any(given.values())):
        raise HddmError(f"{ensemble}: nothing to change; pass --add, --remove or another part")
    restore(ensemble)
    if not (ensemble / ENSEMBLE_FILE).is_file():
        raise HddmError(
            f"{ensemble}: no ensemble folder ({ENSEMBLE_FILE}), and only such a one can be changed"
        )
    facts = read_ensemble_facts(ensemble)
    for path in ensemble.rglob("*"):
        if path.is_symlink():
            inside(ensemble, path.relative_to(ensemble).as_posix())
    rest = _rest(ensemble, facts)
    gone = {_index_of(ensemble, facts, name) for name in remove}
    kept = [k for k in range(len(facts.experts)) if k not in gone]
    parts = _parts(ensemble, facts, kept, add, router)
    parts = replace(
        parts,
        components={**parts.components, **{name: folder for name, folder in given.items() if folder}},
        bases=_bases(ensemble, facts, kept) | bases_of(add, bases_in(bases)),
    )
    prior = [facts.prior[k] for k in kept]
    new_facts, notes = check(
        parts,
        strategy or facts.strategy,
        prior=None if add or not sum(prior) else prior,
        shift=_shift_by_hand(ensemble, facts),
    )
    # Those that stay were checked in full when they came, and are now as they are when they are loaded.
    refuse_damaged_ensemble(ensemble, facts, kept)
    for k in kept:
        open_expert(ensemble / facts.experts[k], parts.bases)
    notes += check_files(add, router, parts.bases)
    if out is not None and out.resolve() != ensemble.resolve():
        refuse_inside(out, [ensemble])
    # In place, the folder itself and not a link to it is exchanged.
    target = ensemble.resolve() if out is None else out
    refuse_inside(target, [*add, *([router] if router else []), *(one for one in given.values() if one)])
    with new_folder(target, ENSEMBLE_FILE, overwrite=out is None or overwrite) as draft:
        fill(draft, parts, new_facts)
        _link_rest(ensemble, rest, draft)
    return notes


def _parts(
    ensemble: Path, facts: EnsembleRecord, kept: Sequence[int], add: Sequence[Path], router: Path | None
) -> PartFolders:
    """The folders of what stays and what comes; the ensemble's own router has its outputs settled."""
    experts = [*(ensemble / facts.experts[k] for k in kept), *add]
    index = read_model_index(ensemble) if (ensemble / MODEL_INDEX).exists() else {}
    components = {name: ensemble / name for name in COMPONENTS if index.get(name)}
    if router is not None or facts.router is None:
        return PartFolders(experts, router, components)
    outputs = facts.router_outputs or tuple(range(len(facts.experts)))
    settled = [*(outputs[k] for k in kept), *(None for _ in add)]
    return PartFolders(experts, ensemble / facts.router, components, settled)


def _bases(ensemble: Path, facts: EnsembleRecord, kept: Sequence[int]) -> dict[str, Path]:
    """Those of the adapters that stay, as the ensemble has them."""
    held = {sha256: ensemble / name for sha256, name in facts.bases.items()}
    found = {}
    for k in kept:
        folder = ensemble / facts.experts[k]
        adapter = read_record(folder / EXPERT_FILE, ExpertRecord, FORMAT).adapter
        if adapter is not None:
            found[adapter.base_sha256] = base_of(folder, adapter, held)
            check_base(folder, adapter, found[adapter.base_sha256] / WEIGHTS)
    return found


def _index_of(ensemble: Path, facts: EnsembleRecord, name: str | int) -> int:
    if name in facts.experts:
        return facts.experts.index(str(name))
    if str(name).isdecimal() and int(name) < len(facts.experts):
        return int(name)
    raise HddmError(
        f"--remove {name}: {ensemble} has no such expert; choose one of 0 … {len(facts.experts) - 1}, or of "
        f"{', '.join(facts.experts)}"
    )


def _shift_by_hand(ensemble: Path, facts: EnsembleRecord) -> float | None:
    """The shift in the folder, unless it is just what its experts want."""
    experts = read_records([ensemble / name for name in facts.experts])
    return None if common_shift(experts, Findings()) == facts.shift else facts.shift


def _rest(ensemble: Path, facts: EnsembleRecord) -> list[Path]:
    """What a user put into the folder, a licence or a card: files and empty folders, by their names in it.

    Raises:
        HddmError: for a link to a folder, which may lead around in circles.
    """
    parts = [Path(name) for name in (*_PARTS, *facts.experts, *([facts.router] if facts.router else []))]
    found = []
    for path in ensemble.rglob("*"):
        name = path.relative_to(ensemble)
        if any(name.is_relative_to(part) for part in parts) or _LEFTOVER.match(name.parts[0]):
            continue
        if path.is_symlink() and path.is_dir():
            raise HddmError(f"{path}: is a link to a folder; put the folder itself there, or take it out")
        if path.is_file() or (path.is_dir() and not any(path.iterdir())):
            found.append(name)
    return found


def _link_rest(ensemble: Path, names: Sequence[Path], draft: Path) -> None:
    for name in names:
        target = draft / name
        if target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ensemble / name).is_dir():
            target.mkdir()
        else:
            link_or_copy(ensemble / name, target)
