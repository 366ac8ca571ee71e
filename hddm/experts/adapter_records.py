"""Records of adapters (`hddm.experts.lora`), and where the weights that they change lie."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from hddm.utils.errors import HddmError
from hddm.utils.files import inside, sha256_of, sha256_once
from hddm.utils.records import (
    MANIFEST,
    WEIGHTS,
    AboveZero,
    Record,
    Sha256,
    ensemble_around,
    read_folder_manifest,
)

BASES = "bases"
"""Folder of an ensemble for weights that adapters change."""
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_FILES = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)


class AdapterRecord(Record):
    """The weights changed by the adapter beside an ``expert.json``, and their base."""

    rank: Annotated[int, Field(ge=1, le=2**16)]
    alpha: AboveZero
    targets: Annotated[tuple[str, ...], Field(min_length=1)]
    """Names of the changed weights."""
    base: str
    """The base's folder at training, relative to this one; an ensemble keeps bases of its own."""
    base_sha256: Sha256
    """SHA-256 of the base's weights file."""

    @property
    def base_name(self) -> str:
        """The base's name in messages."""
        return f"{Path(self.base).name} (SHA-256 {self.base_sha256[:16]}…)"


def adapter_of(
    base: Path, out: Path, rank: int, alpha: float, targets: Sequence[str]
) -> AdapterRecord:
    """Make the record of an adapter in ``out`` for the expert in ``base``, which must not be an adapter."""
    if not (base / WEIGHTS).is_file():
        remedy = "name its base, or merge them by hddm convert"
        raise HddmError(f"{base}: holds no {WEIGHTS} that could be adapted; {remedy}")
    return AdapterRecord(
        rank=rank,
        alpha=alpha,
        targets=tuple(targets),
        base=Path(os.path.relpath(base.resolve(), out.resolve())).as_posix(),
        base_sha256=sha256_of(base / WEIGHTS),
    )


def base_of(folder: Path, adapter: AdapterRecord, bases: Mapping[str, Path] | None = None) -> Path:
    """Find the folder of the weights that the adapter in ``folder`` changes.

    It is looked up in ``bases`` by SHA-256; else it is where the ensemble around the folder keeps it, or the
    place at training. Raises `HddmError` where it is missing or the place is no relative path.
    """
    if bases is not None and adapter.base_sha256 in bases:
        return bases[adapter.base_sha256]
    if Path(adapter.base).is_absolute() or any(letter in adapter.base for letter in "\\\0\n\r"):
        raise HddmError(
            f"{folder}: its base is at {adapter.base!r}, which is no relative path; refused"
        )
    base, place = (folder.resolve() / adapter.base).resolve(), folder / adapter.base
    whole = ensemble_around(folder.resolve())
    if whole is not None:
        base = place = _base_within(whole, adapter.base_sha256)
    if not (base / WEIGHTS).is_file():
        problem = f"is an adapter of {adapter.base_name}, and {place} holds no {WEIGHTS}"
        raise HddmError(
            f"{folder}: {problem}; name its base: hddm.load(…, base=…), hddm assemble --base"
        )
    return base


def _base_within(ensemble: Path, sha256: str) -> Path:
    """Folder of the weights with this hash in an ensemble: in ``bases/``, or an expert with its own."""
    for manifest in ensemble.glob(f"*/*/{MANIFEST}"):
        if read_folder_manifest(manifest.parent).files.get(WEIGHTS) == sha256:
            return manifest.parent
    return inside(ensemble, f"{BASES}/{sha256[:16]}")


def bases_in(folders: Sequence[Path]) -> dict[str, Path]:
    """``folders`` by the SHA-256 of their weights; `HddmError` for one without."""
    for folder in folders:
        if not (folder / WEIGHTS).is_file():
            raise HddmError(f"{folder}: holds no {WEIGHTS}; a base is an expert that has its own")
    return {sha256_once(folder / WEIGHTS): folder for folder in folders}


def check_base(folder: Path, adapter: AdapterRecord, weights: Path) -> None:
    """Check the file ``weights`` against the base's hash in the adapter's record."""
    found = sha256_once(weights)
    if found != adapter.base_sha256:
        theirs = f"{folder} is an adapter of {adapter.base_name}"
        raise HddmError(f"{weights}: has SHA-256 {found[:16]}…, and {theirs}; use its own base")
