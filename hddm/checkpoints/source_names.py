"""The names that an expert's tensors had in a whole single file, so that it can be written again.

Tables are made by diffusers' functions, which lead in one direction; an expert keeps what they led to.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field

from hddm.experts.records import SOURCE_NAMES
from hddm.utils.errors import one_line
from hddm.utils.records import Record, read_record

_FORMAT = "1.0"
_LARGEST_METADATA = 4 * 2**20
"""Bytes of metadata that are kept; the file that has them must stay readable."""


class NamePair(Record):
    """One tensor of a file, and what it is in a component (`hddm.checkpoints.sources.Pair`)."""

    foreign: str
    ours: tuple[str, ...]
    is_transposed: bool = False
    ones: int = Field(default=0, ge=0, le=2)


class SourceNames(Record):
    """``source_names.json``: a file's names by component, its network's root and its header."""

    format: str = _FORMAT
    root: str = ""
    """What the names of the network's tensors begin with."""
    parts: dict[str, tuple[NamePair, ...]] = Field(default_factory=dict)
    """Of each component, by its name in a pipeline."""
    metadata: dict[str, str] = Field(default_factory=dict)
    """The metadata in the file's header."""


def read_source_names(folder: Path) -> SourceNames | None:
    """The names that an expert in ``folder`` keeps; None for one that is of no single file."""
    path = folder / SOURCE_NAMES
    return read_record(path, SourceNames, _FORMAT) if path.exists() else None


def kept_metadata(metadata: Mapping[str, str], origin: str) -> tuple[dict[str, str], list[str]]:
    """The metadata that an expert keeps, and notes on what is too large for that.

    Trainers put lists of all their tags there, and tools their whole workflow; the largest are left out.
    """
    sizes = {key: len(json.dumps(key)) + len(json.dumps(one)) for key, one in metadata.items()}
    notes = []
    for key in sorted(sizes, key=sizes.__getitem__, reverse=True):
        if sum(sizes.values()) <= _LARGEST_METADATA:
            break
        size = sizes.pop(key) / 2**20
        text = f"of {size:.1f} MB in its header is too large to be kept, and is not written back"
        notes.append(f"{origin}: {one_line(key, 60)} {text}")
    return {key: one for key, one in metadata.items() if key in sizes}, notes
