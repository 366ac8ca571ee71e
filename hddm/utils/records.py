"""Records: validated JSON with a format version; and the manifest that seals a model's folder.

Each kind of folder is marked by one JSON file, named here, so that nothing else must be imported to find it.

``manifest.json`` of an expert, a router or an ensemble is written last and holds the SHA-256 of every file
that has a meaning. A folder below it with a manifest of its own is listed by that file alone. Pictures,
papers (README, LICENSE, `*.md`) and hidden files are not listed and may change. A manifest finds damage and
mistakes, not forgery: whoever can change a file can write its manifest anew. Folders of formats before
`SINCE` have none; in later ones it is required.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from hddm.utils.errors import HddmError, did_you_mean, words
from hddm.utils.files import LARGEST_JSON, HashCache, inside, read_json, sha256_of, write_json, write_whole

BENCHMARK_FILE = "benchmark.json"
ENSEMBLE_FILE = "ensemble.json"
EXPERT_FILE = "expert.json"
FEATURES_FILE = "features.json"
RESULTS_FILE = "results.json"
ROUTER_FILE = "router.json"
SAMPLING_FILE = "sampling.json"


OPTIONS = "options"
"""Origin of values from the command line: errors name them as they are spelt there."""


class Record(BaseModel):
    """Base of every record: frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


AnyRecord = TypeVar("AnyRecord", bound=Record)


def read_record(
    path: Path, record: type[AnyRecord], format_version: str, largest: int = LARGEST_JSON
) -> AnyRecord:
    """The record in a JSON file.

    Raises:
        HddmError: with file and key, for a missing file, a newer major format, or an unknown, missing or
            ill-typed key.
    """
    content = read_json(path, largest)
    check_format(content, format_version, path)
    return parse_record(content, record, str(path))


def parse_record(content: dict[str, Any], record: type[AnyRecord], origin: str) -> AnyRecord:
    """``content`` as a record; ``origin`` names its source in the error, or is `OPTIONS`."""
    try:
        return record.model_validate(content)
    except ValidationError as error:
        first = first_problem(error)
        if origin == OPTIONS:
            raise HddmError(_of_options(first, record.model_fields)) from error
        # pydantic names a validator of ours too, as a step on the way to the value.
        place = [step for step in first["loc"] if step != "function-after"]
        key = ".".join(map(str, place))
        if first["type"] == "extra_forbidden":
            nearest = did_you_mean(str(place[-1]), _fields_at(record, place[:-1]))
            raise HddmError(f"{origin}: unknown key {key!r}{nearest}") from error
        is_shown = first["type"] != "missing" and not isinstance(first["input"], Mapping)
        value = f" (is {first['input']!r})" if is_shown else ""
        # What is wrong with several values together is said of none.
        named = f"key {key!r}{value}: " if key else ""
        raise HddmError(f"{origin}: {named}{words(first)}") from error


def first_problem(error: ValidationError) -> ErrorDetails:
    """The problem to tell of: an unknown key before others, since a misspelt one is missing too."""
    problems = error.errors()
    return next((one for one in problems if one["type"] == "extra_forbidden"), problems[0])


def _fields_at(record: type[BaseModel], place: Sequence[int | str]) -> Collection[str]:
    """Fields of the record that lies at ``place`` within another."""
    for step in place:
        if isinstance(step, str) and step in record.model_fields:
            record = next(_records_in(record.model_fields[step].annotation), record)
    return record.model_fields


def _records_in(kind: Any) -> Iterator[type[BaseModel]]:
    """The records that an annotation is made of, as that of a tuple of them."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for inner in get_args(kind):
        yield from _records_in(inner)


def _of_options(problem: ErrorDetails, names: Iterable[str]) -> str:
    """A problem of a record whose keys are options, the options spelt as they are given."""
    text = words(problem)
    if not problem["loc"]:
        for name in names:
            # Without an underscore it may be a word like any other.
            if "_" in name or text.startswith(f"{name} "):
                text = re.sub(rf"\b{name}\b", _option(name), text)
        return text
    value = problem["input"]
    given = " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
    return f"{_option(str(problem['loc'][0]))} " + (
        text if problem["type"] == "missing" else f"{given}: {text}"
    )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def check_format(content: dict[str, Any], known: str, path: Path) -> None:
    """Refuse a missing format version or one of a newer major."""
    version = content.get("format")
    if not isinstance(version, str) or not version.split(".")[0].isdecimal():
        raise HddmError(f"{path}: has no format version; was it written by hddm?")
    if int(version.split(".")[0]) > int(known.split(".")[0]):
        raise HddmError(f"{path}: format {version} is newer than {known}; upgrade hddm-diffusion")


MANIFEST = "manifest.json"
FORMAT = "1.0"
SINCE = (1, 4)
"""The first format of ``expert.json``, ``router.json`` and ``ensemble.json`` that goes with a manifest."""
SMALL = 2**24
"""Bytes below which a file is hashed whenever it is opened."""

_PAPERS = ("README", "LICENSE", "NOTICE", "COPYING")
_NO_MEANING = {".md", ".rst", ".png", ".jpg", ".jpeg", ".gif", ".webp", ".svg", ".html", ".pdf", ".log"}


class FolderManifest(Record):
    """``manifest.json``: SHA-256 by a file's path in the folder."""

    format: str = FORMAT
    files: dict[str, Annotated[str, Field(pattern="^[0-9a-f]{64}$")]]


def write_manifest(
    folder: Path, sha256: Callable[[Path], str] = sha256_of, read: Collection[str] | None = None
) -> None:
    """Write the manifest of what ``folder`` holds, over one that is there.

    It lists the files in ``read`` alone, where that is given: a user may add others.
    """
    names = [name for name in _listed(folder, folder) if name != MANIFEST and (read is None or name in read)]
    _write_files(folder, {name: sha256(folder / name) for name in sorted(names)})


def rewrite_entry(folder: Path) -> None:
    """Write the new manifest of ``folder`` into that of the ensemble that it is a part of, if it is."""
    for above in folder.parents:
        # A manifest.json may be of anything else up there, as of a shard or a web page.
        if (above / ENSEMBLE_FILE).is_file() and has_manifest(above):
            files, part = read_folder_manifest(above).files, folder.relative_to(above).as_posix()
            own = {name: sha256 for name, sha256 in files.items() if name.startswith(f"{part}/")}
            if own:
                rest = {name: sha256 for name, sha256 in files.items() if name not in own}
                _write_files(above, rest | {f"{part}/{MANIFEST}": sha256_of(folder / MANIFEST)})
            return


def _write_files(folder: Path, files: Mapping[str, str]) -> None:
    content = FolderManifest(files=dict(files)).model_dump()
    # Not in place: the file may be a hard link to the manifest of the folder that this was assembled from.
    write_whole(folder / MANIFEST, lambda draft: write_json(draft, content))


def has_manifest(folder: Path) -> bool:
    """True if ``folder`` has a manifest."""
    return (folder / MANIFEST).is_file()


def read_folder_manifest(folder: Path) -> FolderManifest:
    """The manifest of a folder; raises as `read_record`."""
    return read_record(folder / MANIFEST, FolderManifest, FORMAT)


def damage(
    folder: Path,
    record: str,
    known: Collection[str] = (),
    sha256: Callable[[Path], str] | None = None,
    chosen: Callable[[str], bool] = lambda name: True,
) -> tuple[str, ...]:
    """List the files that differ from the manifest, a line each; none for a folder of an older format.

    Args:
        folder: of an expert, a router or an ensemble.
        record: the JSON file that marks its kind and tells its format.
        known: files that would be read although the manifest does not list them.
        sha256: of a file, to hash every one. By default one of `SMALL` bytes or more is not hashed again
            where size and time are those that it had when it was.
        chosen: which of the listed files count.

    Raises:
        HddmError: for a record or a manifest that cannot be read, and names that lead out of the folder.
    """
    if not has_manifest(folder):
        stated = str(read_json(folder / record).get("format"))
        numbers = [int(one) if one.isdecimal() else SINCE[0] for one in stated.split(".")]
        is_older = len(numbers) == len(SINCE) and tuple(numbers) < SINCE
        return () if is_older else (f"{MANIFEST}: is not there, and belongs to {record} of format {stated}",)
    files = read_folder_manifest(folder).files
    remembered = HashCache(folder, SMALL)
    found = [f"{name}: was added" for name in known if name not in files and (folder / name).exists()]
    for name, expected in files.items():
        if not chosen(name):
            continue
        path = inside(folder, name)
        if not path.is_file():
            found.append(f"{name}: is not there")
        elif not (sha256(path) == expected if sha256 else remembered.matches(name, expected)):
            found.append(f"{name}: has changed")
    if sha256 is None and not found:
        remembered.keep()
    return tuple(found)


def refuse_damaged(
    folder: Path,
    record: str,
    known: Collection[str] = (),
    sha256: Callable[[Path], str] | None = None,
    chosen: Callable[[str], bool] = lambda name: True,
    remedy: str = "copy it again, whole, from where it was made",
) -> None:
    """Raise `HddmError` with what `damage` finds, a line a file."""
    if found := damage(folder, record, known, sha256, chosen):
        raise HddmError(f"{folder}: is not what was written, by its {MANIFEST}; {remedy}", found)


def _listed(folder: Path, root: Path) -> list[str]:
    """Paths in ``root`` of the files below ``folder`` that have a meaning."""
    if folder != root and has_manifest(folder):
        return [(folder / MANIFEST).relative_to(root).as_posix()]
    names = []
    for path in folder.iterdir():
        if path.name.startswith("."):
            continue
        if path.is_dir():
            names += _listed(path, root)
        elif path.suffix.lower() not in _NO_MEANING and not path.name.upper().startswith(_PAPERS):
            names.append(path.relative_to(root).as_posix())
    return names
