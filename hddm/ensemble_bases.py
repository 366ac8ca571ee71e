"""Weights that adapters of an ensemble change: where they come from, and where they lie, once."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from hddm.adapters import base_beside, check_base
from hddm.experts import EXPERT_FILE, FORMAT, ExpertFacts
from hddm.facts import read_facts
from hddm.files import link_or_copy
from hddm.model_folders import WEIGHTS, sha256_once
from hddm.paths import inside

FOLDER = "bases"


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
        adapter = read_facts(folder / EXPERT_FILE, ExpertFacts, FORMAT).adapter
        if adapter is not None and adapter.base_sha256 not in found:
            base = given.get(adapter.base_sha256) or base_beside(folder, adapter)
            check_base(folder, adapter, base / WEIGHTS)
            found[adapter.base_sha256] = base
    return found


def places(bases: Mapping[str, Path], experts: Mapping[str, Path]) -> dict[str, str]:
    """By SHA-256 where in an ensemble each of ``bases`` is to lie: in an expert of the same weights, if any.

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
        found[sha256] = next(same, f"{FOLDER}/{sha256[:16]}")
    return found


def link_bases(draft: Path, names: Mapping[str, str], bases: Mapping[str, Path]) -> None:
    """Put ``bases`` where `places` says, but for those that experts hold: weights, config and licence.

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
