"""Records: validated JSON with a format version; and the manifest that seals a model's folder.

Each kind of folder is marked by one JSON file, named here, so that finding it needs no other import.

``manifest.json`` of an expert, a router or an ensemble is written last and holds the SHA-256 of every
relevant file. A subfolder with its own manifest is listed by that file alone. Pictures, documents (README,
LICENSE, `*.md`) and hidden files are not listed and may change. A manifest detects damage and mistakes, not
forgery: anyone who can change a file can rewrite its manifest.
"""

import contextlib
import hashlib
import math
import os
import re
import time
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from hddm.utils.documents import parse_object
from hddm.utils.errors import HddmError, did_you_mean, one_line, words
from hddm.utils.files import (
    LARGEST_JSON,
    inside,
    opened,
    read_json,
    read_whole,
    sha256_of,
    write_json,
    write_whole,
)

BENCHMARK_FILE = "benchmark.json"
ENSEMBLE_FILE = "ensemble.json"
EXPERT_FILE = "expert.json"
FEATURES_FILE = "features.json"
RESULTS_FILE = "results.json"
ROUTER_FILE = "router.json"
SAMPLING_FILE = "sampling.json"
MODEL_INDEX = "model_index.json"
"""Record of a pipeline of diffusers."""
WEIGHTS = "diffusion_pytorch_model.safetensors"
"""Weights of a network in diffusers' format."""


OPTIONS = "options"
"""Origin of command-line values, so that errors name them as options."""


class Record(BaseModel):
    """Base of all records: frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    oldest: ClassVar[str | None] = None
    """The oldest format that is read; None for every one of this major version and before."""
    remedy: ClassVar[str] = ""
    """What to do with an older one."""


class SparseRecord(Record):
    """Base of records with ``sparse`` fields, left out where they have their default.

    So a record that needs none of them is, to the byte, what earlier releases wrote and read.
    """

    sparse: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _without_defaults(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        content: dict[str, Any] = write(self)
        for name in self.sparse:
            if getattr(self, name) == type(self).model_fields[name].default:
                content.pop(name, None)
        return content


class OpenRecord(Record):
    """Base of records that may have further keys, of other versions; its numbers are finite."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)


def parse_noise_range(value: Any) -> tuple[float, float]:
    """Read ``0.5:1``, or a pair, as (low, high) in t; `HddmError` unless 0 <= low < high <= 1."""
    try:
        low, high = map(float, value.split(":") if isinstance(value, str) else value)
    except (TypeError, ValueError):
        low = high = math.nan
    if not 0 <= low < high <= 1:
        raise HddmError("must be LOW:HIGH, with 0 <= LOW < HIGH <= 1, as 0.5:1")
    return low, high


NoiseRange = Annotated[tuple[float, float], BeforeValidator(parse_noise_range)]
"""Part [low, high] of t that an expert covers, on the common path: 0 is data, 1 noise."""
WHOLE: NoiseRange = (0.0, 1.0)
LARGEST_UNIT = 1e6
"""Bound of the scale of an expert's own data, of its inverse, and of its shift (`hddm.units`)."""


def parse_data_range(value: Any) -> tuple[float, float]:
    """Read ``0,1``, or a pair, as (low, high) of pixels; `HddmError` unless low < high are finite."""
    try:
        low, high = map(float, value.split(",") if isinstance(value, str) else value)
    except (TypeError, ValueError):
        low = high = math.nan
    if not -LARGEST_UNIT <= low < high <= LARGEST_UNIT or high - low < 2 / LARGEST_UNIT:
        raise HddmError("must be LOW,HIGH, the pixels of black and white, as 0,1 or -0.5,0.5")
    return low, high


DataRange = Annotated[tuple[float, float], BeforeValidator(parse_data_range)]
"""The pixels of black and white in an expert's own data; (-1, 1) in those that all experts share."""
Count = Annotated[int, Field(ge=0, le=10**12)]
"""A count, at most 10^12."""
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
"""A seed of random numbers, or the number of a sample (`hddm.utils.streams`)."""
LEAST_BARE = 1_000_000
"""The least number of bytes without a unit: smaller ones are meant in gigabytes or megabytes."""


def _whole_amount(amount: Any) -> Any:
    """``amount``, where all of it is one: pydantic reads the beginning alone, and 1,5GB as a byte.

    Refuses a number below `LEAST_BARE` without a unit.
    """
    if isinstance(amount, ByteSize):
        return amount
    bare = amount
    if isinstance(amount, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*((?:[KMGT]i?)?B?)\s*", amount, re.IGNORECASE)
        if found is None:
            raise PydanticCustomError("byte_size", "not an amount of memory")
        bare = None if found[2] else found[1]
    if isinstance(bare, int | float | str) and 1 <= float(bare) < LEAST_BARE:
        raise PydanticCustomError("byte_size_bare", "an amount without a unit", {"number": bare})
    return amount


Memory = Annotated[ByteSize, Field(ge=1), BeforeValidator(_whole_amount)]
"""Bytes, as a number or such as 6GB."""
LARGEST = 1e9
Share = Annotated[float, Field(ge=0, le=1)]
"""A part of a whole, from 0 to 1."""
PositiveNumber = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""Any finite number above zero; `AboveZero` is for what networks multiply by."""
AboveZero = Annotated[float, Field(gt=0, le=LARGEST)]


def composed(name: str) -> str:
    """``name`` in Unicode's form NFC: macOS writes "é" as two characters, other systems as one."""
    return unicodedata.normalize("NFC", name)


def joint_names(lists: Iterable[Iterable[str]]) -> tuple[str, ...]:
    """All names of several lists, each once, in the order of their first appearance; see `composed`."""
    names: dict[str, None] = {}
    for one in lists:
        names.update(dict.fromkeys(map(composed, one)))
    return tuple(names)


ComposedName = Annotated[str, AfterValidator(composed)]
"""Name of a class, normalised."""


def _hash(text: str) -> str:
    if re.fullmatch("[0-9a-f]{64}", text) is None:
        raise HddmError("is no SHA-256, which has 64 digits 0-9 and a-f")
    return text


Sha256 = Annotated[str, AfterValidator(_hash)]
"""The hash of a file."""

AnyRecord = TypeVar("AnyRecord", bound=Record)


class OlderFormat(HddmError):
    """A record has a format that is no longer read."""


def read_record(
    path: Path, record: type[AnyRecord], format_version: str, largest: int = LARGEST_JSON
) -> AnyRecord:
    """Read the record in a JSON file.

    Raises `HddmError`, with file and key, for a missing file, a newer major format, one older than the
    record's ``oldest`` (`OlderFormat`), or an unknown, missing or ill-typed key.
    """
    text = read_whole(path, largest)
    content = parse_object(text, str(path))
    check_format(content, format_version, path)
    if record.oldest is not None and _numbers(content["format"]) < _numbers(record.oldest):
        raise OlderFormat(f"{path}: format {content['format']} is no longer read; {record.remedy}")
    return parse_record(text, record, str(path))


def parse_record(
    content: dict[str, Any] | bytes, record: type[AnyRecord], origin: str
) -> AnyRecord:
    """Parse ``content``; ``origin`` names its source in errors, or is `OPTIONS`.

    Bytes are JSON, of others: there a number is no text, no boolean, and where it is whole has no fraction.
    """
    try:
        if isinstance(content, bytes):
            return record.model_validate_json(content, strict=True)
        return record.model_validate(content)
    except ValidationError as error:
        first = first_problem(error)
        text = _of_arguments(first) if origin == OPTIONS else f"{origin}: {_of_keys(first, record)}"
        raise HddmError(text) from error


def first_problem(error: ValidationError) -> ErrorDetails:
    """The problem that `parse_record` tells."""
    problems = error.errors()
    # An unknown key before others, since a misspelt key is missing too.
    return next((one for one in problems if one["type"] == "extra_forbidden"), problems[0])


def _of_keys(problem: ErrorDetails, record: type[BaseModel]) -> str:
    """Problem of a record that was read from a file."""
    # pydantic lists our validators as steps on the way to the value.
    place = [step for step in problem["loc"] if step != "function-after"]
    key = place and one_line(".".join(map(str, place)), 100)
    if problem["type"] == "extra_forbidden":
        return f"unknown key {key!r}{did_you_mean(str(place[-1]), _fields_at(record, place[:-1]))}"
    is_shown = problem["type"] != "missing" and not isinstance(problem["input"], Mapping)
    value = f" (is {one_line(repr(problem['input']), 100)})" if is_shown else ""
    # A problem of several values together names no key.
    named = f"key {key!r}{value}: " if key else ""
    # Keys of a file are not arguments.
    return f"{named}{words(problem)}".replace("`", "")


def _fields_at(record: type[BaseModel], place: Sequence[int | str]) -> Collection[str]:
    """Fields of the record at ``place`` within another."""
    for step in place:
        if isinstance(step, str) and step in record.model_fields:
            record = next(_records_in(record.model_fields[step].annotation), record)
    return record.model_fields


def _records_in(kind: Any) -> Iterator[type[BaseModel]]:
    """Records within an annotation, such as a tuple of records, or a class that is a sequence of them."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for inner in (*get_args(kind), *getattr(kind, "__orig_bases__", ())):
        yield from _records_in(inner)


def _of_arguments(problem: ErrorDetails) -> str:
    """Problem of a record whose fields the caller passed, by keyword or as options."""
    text = words(problem)
    if not problem["loc"]:
        return text
    value = problem["input"]
    shown = " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
    return f"`{problem['loc'][0]}` " + (
        text if problem["type"] == "missing" else f"{shown}: {text}"
    )


def check_format(content: dict[str, Any], known: str, path: Path) -> None:
    """Refuse a missing format version or one of a newer major version."""
    version = content.get("format")
    if not isinstance(version, str) or not re.match(r"[0-9]{1,9}(\.|\Z)", version):
        raise HddmError(f"{path}: has no format version; was it written by hddm?")
    if int(version.split(".")[0]) > int(known.split(".")[0]):
        raise HddmError(f"{path}: format {version} is newer than {known}; upgrade hddm-diffusion")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())


MANIFEST = "manifest.json"
FORMAT = "1.0"
SMALL = 2**24
"""Bytes below which a file is hashed on every opening."""

PAPERS = ("README", "LICENSE", "NOTICE", "COPYING")
_NO_MEANING = {
    ".md",
    ".rst",
    ".png",
    ".jpg",
    ".jpeg",
    ".gif",
    ".webp",
    ".svg",
    ".html",
    ".pdf",
    ".log",
}


class FolderManifest(Record):
    """``manifest.json``: SHA-256 by a file's path in the folder."""

    format: str = FORMAT
    files: dict[str, Sha256]


def write_manifest(
    folder: Path, sha256: Callable[[Path], str] = sha256_of, read: Collection[str] | None = None
) -> None:
    """Write or replace the manifest of ``folder``.

    With ``read``, it lists these files only, since users may add others.
    """
    files = {}
    for name in sorted(_listed(folder, folder)):
        if name != MANIFEST and (read is None or name in read):
            files[name] = sha256(folder / name)
    _write_files(folder, files)


def ensemble_around(folder: Path) -> Path | None:
    """The ensemble that contains ``folder``, if any."""
    # A manifest.json above may belong to a shard, a web page or anything else.
    return next((above for above in folder.parents if (above / ENSEMBLE_FILE).is_file()), None)


def rewrite_entry(folder: Path) -> None:
    """Enter the new manifest of ``folder`` in the manifest of the ensemble that contains it, if any."""
    above = ensemble_around(folder)
    if above is None or not has_manifest(above):
        return
    files, part = read_folder_manifest(above).files, folder.relative_to(above).as_posix()
    rest = {name: sha256 for name, sha256 in files.items() if not name.startswith(f"{part}/")}
    if len(rest) < len(files):
        _write_files(above, rest | {f"{part}/{MANIFEST}": sha256_of(folder / MANIFEST)})


def _write_files(folder: Path, files: Mapping[str, str]) -> None:
    content = FolderManifest(files=dict(sorted(files.items()))).model_dump()
    # Not in place, since the file may be a hard link to the manifest of the source folder.
    write_whole(folder / MANIFEST, lambda draft: write_json(draft, content))


def has_manifest(folder: Path) -> bool:
    """True if ``folder`` has a manifest."""
    return (folder / MANIFEST).is_file()


def read_folder_manifest(folder: Path) -> FolderManifest:
    """Manifest of a folder; raises as `read_record`."""
    return read_record(folder / MANIFEST, FolderManifest, FORMAT)


def sealed_files(folder: Path, name: str = MANIFEST) -> set[str]:
    """Files that a manifest lists, itself, and the same of every manifest that it lists; paths in ``folder``.

    Raises `HddmError` as `read_folder_manifest`, and as `inside`.
    """
    part = PurePosixPath(name).parent
    found = {name}
    for one in read_folder_manifest(folder / part).files:
        path = part / one
        inside(folder, path.as_posix())
        is_other = path.name == MANIFEST and path.as_posix() != name
        if is_other:
            found |= sealed_files(folder, path.as_posix())
        else:
            found.add(path.as_posix())
    return found


def damage(
    folder: Path,
    record: str,
    known: Collection[str] = (),
    sha256: Callable[[Path], str] | None = None,
    chosen: Callable[[str], bool] = lambda name: True,
) -> tuple[str, ...]:
    """List the files that differ from the manifest, one line each.

    ``record`` is the JSON file that marks the folder's kind, ``known`` files are read
    even if the manifest does not list them, and ``chosen`` selects listed files. ``sha256`` hashes every
    file; by default one of `SMALL` bytes or more is not hashed again if size and time are unchanged. Raises
    `HddmError` for an unreadable record or manifest, and names that lead out of the folder.
    """
    if not has_manifest(folder):
        return (f"{MANIFEST}: is not there, and belongs to {record}",)
    files = read_folder_manifest(folder).files
    remembered = HashCache(folder, SMALL)
    added = [name for name in known if name not in files and (folder / name).exists()]
    found = [f"{name}: was added" for name in added]
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


COPY_AGAIN = "copy it again, whole, from where it was made"


def refuse_damaged(folder: Path, found: Sequence[str], remedy: str = COPY_AGAIN) -> None:
    """Raise `HddmError` with the lines ``found`` by `damage`, if any."""
    if found:
        raise HddmError(f"{folder}: differs from its {MANIFEST}; {remedy}", found)


def model_hash(folder: Path, sha256: Callable[[Path], str] = sha256_of) -> str:
    """SHA-256 of a model's folder: of its manifest, or of the relevant files of one that has none."""
    if has_manifest(folder):
        return sha256_of(folder / MANIFEST)
    lines = [f"{name} {sha256(folder / name)}" for name in sorted(_listed(folder, folder))]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _listed(folder: Path, root: Path) -> list[str]:
    """Relevant files below ``folder``, as paths in ``root``."""
    if folder != root and has_manifest(folder):
        return [(folder / MANIFEST).relative_to(root).as_posix()]
    names = []
    for path in folder.iterdir():
        if path.name.startswith("."):
            continue
        if path.is_dir():
            names += _listed(path, root)
        elif path.suffix.lower() not in _NO_MEANING and not path.name.upper().startswith(PAPERS):
            names.append(path.relative_to(root).as_posix())
    return names


HASHES = ".verified.json"
CLOCK_TICK = 2 * 10**9
"""Nanoseconds after a change until another change is sure to get another time."""


class HashCache:
    """Hashes of verified files in ``folder``, so that a restart does not hash 100 GB again.

    A hidden file, written by `keep`, has hash, size, inode and the times of the last change of content and of
    status: any write changes a time, any copy the inode, and the file is hashed again. A failing disk changes
    neither; remove the hidden file to detect it. Clocks of file systems may be as coarse as two seconds, so a
    file that was changed just before it was hashed is not remembered (as in git's index).

    Files of less than ``smallest`` bytes are hashed each time, and not remembered.
    """

    def __init__(self, folder: Path, smallest: int = 0) -> None:
        self._folder, self._smallest = folder, smallest
        self._known: dict[str, object] = {}
        with contextlib.suppress(HddmError):
            self._known = read_json(folder / HASHES)
        self._found: dict[str, object] = {}

    def matches(self, name: str, sha256: str) -> bool:
        """True if the file ``name`` has this hash; not read again if unchanged since it had.

        Raises as `opened`.
        """
        path, now = self._folder / name, time.time_ns()
        with opened(path) as file:
            # Status of the open file: opening queries a network file system anew; stat alone may use a cache.
            status = os.fstat(file.fileno())
        state = [sha256, status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]
        is_known = self._known.get(name) == state
        if not is_known and sha256_of(path) != sha256:
            return False
        if status.st_size < self._smallest:
            return True
        if is_known or now - status.st_ctime_ns > CLOCK_TICK:
            self._found[name] = state
        return True

    def keep(self) -> None:
        """Write the new verified hashes, if the folder is writable."""
        if self._found != self._known:
            with contextlib.suppress(HddmError):
                write_whole(self._folder / HASHES, lambda draft: write_json(draft, self._found))
