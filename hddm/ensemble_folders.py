"""Ensemble folders: what holds experts and a router together, and how it is read.

model_index.json         parts and their classes, for diffusers (`hddm.model_index`)
ensemble.json            format, experts in order, their outputs of the router, priors, strategy, shift
experts/<i>/             an expert folder each
bases/<hash>/            weights that adapters among them change, where no expert has them for its own
router/                  a router folder
scheduler/               the shift once more, for diffusers
vae/ text_encoder/ tokenizer/     for experts of latents
manifest.json            the hashes of all these (`hddm.manifest`)
"""

import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field

from hddm.errors import HddmError
from hddm.experts import FORMAT
from hddm.facts import Facts, read_facts
from hddm.files import write_json
from hddm.manifest import refuse_damaged, write_manifest
from hddm.model_folders import sha256_once
from hddm.model_index import (
    COMPONENTS,
    MODEL_INDEX,
    SCHEDULER_FILE,
    ClassName,
    read_shift,
    write_model_index,
    write_scheduler,
)
from hddm.model_index import read_model_index as read_model_index
from hddm.paths import inside
from hddm.record_names import ENSEMBLE_FILE as ENSEMBLE_FILE

ROUTER = "router"

Probabilities = tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...]


class EnsembleFacts(Facts):
    """``ensemble.json``."""

    format: str = FORMAT
    experts: Annotated[tuple[str, ...], Field(min_length=1)]
    """Their folders."""
    router: str | None = None
    router_outputs: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Output of the router for each expert; empty where it has as many, in order."""
    prior: Probabilities
    class_prior: tuple[Probabilities, ...] = ()
    """p(k | class), a row a class; for ``draw`` with class labels."""
    strategy: str
    shift: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Of the time grid (`hddm.sampling.time_grid`)."""
    bases: dict[str, str] = Field(default_factory=dict)
    """By SHA-256 the folders of the weights that adapters change: in ``bases/``, or an expert's."""


def read_ensemble_facts(folder: Path) -> EnsembleFacts:
    """``ensemble.json`` of ``folder``, held against ``model_index.json`` and ``scheduler/`` where they are.

    Raises:
        HddmError: for a path or a link that leads out of the folder, before anything there is opened; for
            numbers that do not fit the experts; and for records that contradict each other.
    """
    path = folder / ENSEMBLE_FILE
    facts = read_facts(path, EnsembleFacts, FORMAT)
    for name in (
        *facts.experts,
        *facts.bases.values(),
        *([facts.router] if facts.router is not None else []),
    ):
        _check_inside(folder, name, path)
    _check_numbers(facts, path)
    if (folder / MODEL_INDEX).exists():
        parts = read_model_index(folder)
        if (parts["router"] is None) != (facts.router is None):
            raise HddmError(
                f"{folder / MODEL_INDEX}: router is {parts['router']}, and {facts.router!r} in "
                f"{ENSEMBLE_FILE}; assemble it anew"
            )
        for part in ("scheduler", *COMPONENTS):
            if parts[part] is not None:
                _check_inside(folder, part, folder / MODEL_INDEX)
    if (folder / SCHEDULER_FILE).exists() or (folder / MODEL_INDEX).exists():
        shift = read_shift(folder)
        if shift != facts.shift:
            raise HddmError(
                f"{folder / SCHEDULER_FILE}: shift is {shift:g}, and {facts.shift:g} in {ENSEMBLE_FILE}; "
                "write the same in both"
            )
    return facts


def refuse_damaged_ensemble(
    folder: Path, facts: EnsembleFacts, experts: Collection[int], sha256: Callable[[Path], str] | None = None
) -> None:
    """Refuse an ensemble whose files are not those that were written; see `hddm.manifest.refuse_damaged`.

    Args:
        folder: the ensemble.
        facts: its record.
        experts: those that count; the others' folders are not looked into.
        sha256: of a file, to hash every one.
    """
    left_out = [f"{name}/" for k, name in enumerate(facts.experts) if k not in experts]
    refuse_damaged(
        folder, ENSEMBLE_FILE, sha256=sha256, chosen=lambda name: not name.startswith(tuple(left_out))
    )


def write_ensemble_records(draft: Path, facts: EnsembleFacts, components: Mapping[str, ClassName]) -> None:
    """Write ``ensemble.json``, ``model_index.json``, ``scheduler/`` and, last, the manifest into ``draft``.

    Args:
        draft: a folder that has no ``scheduler/`` yet, and all other parts.
        facts: what to write; in today's format, whatever was read.
        components: library and class by name, of vae, text_encoder and tokenizer; the others are known.

    Raises:
        HddmError: for numbers that do not fit the experts, which no one could open.
    """
    _check_numbers(facts, draft / ENSEMBLE_FILE)
    write_json(draft / ENSEMBLE_FILE, facts.model_dump(mode="json") | {"format": FORMAT})
    router = {} if facts.router is None else {"router": ("hddm", "RouterTransformer")}
    write_model_index(draft, {**components, **router})
    write_scheduler(draft, facts.shift)
    write_manifest(draft, sha256_once)


def _check_inside(folder: Path, name: str, origin: Path) -> None:
    """Refuse a part that is elsewhere, or has files that are."""
    try:
        inside(folder, name)
        for file in (folder / name).glob("*"):
            inside(folder, file.relative_to(folder).as_posix())
    except HddmError as error:
        raise HddmError(f"{origin}: names {name!r}, outside the folder; refused ({error})") from error


def _check_numbers(facts: EnsembleFacts, path: Path) -> None:
    experts = len(facts.experts)
    for key, row in (("prior", facts.prior), *(("class_prior", row) for row in facts.class_prior)):
        if len(row) != experts or not math.fsum(row) > 0:
            raise HddmError(
                f"{path}: {key} must be {experts} numbers with a positive sum, one an expert, not {list(row)}"
            )
    outputs = facts.router_outputs
    if outputs and (facts.router is None or len(outputs) != experts or len(set(outputs)) < experts):
        raise HddmError(
            f"{path}: router_outputs must be {experts} different outputs of a router, one an expert, not "
            f"{list(outputs)}"
        )
