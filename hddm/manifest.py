"""The manifest of a model's folder: the SHA-256 of every file that has a meaning, written last.

``manifest.json`` of an expert, a router or an ensemble lists its files by their place in the folder. A folder
below that has a manifest of its own is listed by that file alone. Pictures, papers (README, LICENSE, `*.md`)
and hidden files are not listed, and may come, change and go.

So damage and mistakes are found: a file that was cut off, exchanged, left out or edited. Forgery is not:
whoever can change a file can write its manifest anew.

Folders of formats before `SINCE` have no manifest. In one of a later format it must be there.
"""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated

from pydantic import Field

from hddm.errors import HddmError
from hddm.facts import Facts, read_facts
from hddm.files import read_json, sha256_of, write_json, write_whole
from hddm.paths import inside
from hddm.verified import Verified

MANIFEST = "manifest.json"
FORMAT = "1.0"
SINCE = (1, 4)
"""The first format of ``expert.json``, ``router.json`` and ``ensemble.json`` that goes with a manifest."""
SMALL = 2**24
"""Bytes below which a file is hashed whenever it is opened, in some milliseconds."""

_PAPERS = ("README", "LICENSE", "NOTICE", "COPYING")
_NO_MEANING = {".md", ".rst", ".png", ".jpg", ".jpeg", ".gif", ".webp", ".svg", ".html", ".pdf", ".log"}


class Manifest(Facts):
    """``manifest.json``: SHA-256 by the place of a file in the folder."""

    format: str = FORMAT
    files: dict[str, Annotated[str, Field(pattern="^[0-9a-f]{64}$")]]


def write_manifest(folder: Path, sha256: Callable[[Path], str] = sha256_of) -> None:
    """Write the manifest of what ``folder`` holds, over one that is there.

    Args:
        folder: of an expert, a router or an ensemble.
        sha256: of a file.

    Raises:
        HddmError: for a file that cannot be read.
    """
    names = sorted(_listed(folder, folder))
    files = {name: sha256(folder / name) for name in names if name != MANIFEST}
    content = Manifest(files=files).model_dump()
    # Not in place: the file may be a hard link to the manifest of the folder that this was assembled from.
    write_whole(folder / MANIFEST, lambda draft: write_json(draft, content))


def has_manifest(folder: Path) -> bool:
    """Whether there is one."""
    return (folder / MANIFEST).is_file()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder.

    Raises:
        HddmError: for one that is not there or cannot be read.
    """
    return read_facts(folder / MANIFEST, Manifest, FORMAT)


def damage(
    folder: Path,
    record: str,
    known: Collection[str] = (),
    sha256: Callable[[Path], str] | None = None,
    chosen: Callable[[str], bool] = lambda name: True,
) -> tuple[str, ...]:
    """What of a folder is not what was written, a line a file; nothing for a folder of an older format.

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
        numbers = tuple(int(one) for one in stated.split(".") if one.isdecimal())
        is_older = numbers < SINCE
        return () if is_older else (f"{MANIFEST}: is not there, and belongs to {record} of format {stated}",)
    files = read_manifest(folder).files
    remembered = Verified(folder, SMALL)
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
    """Refuse a folder that is not what was written; arguments as of `damage`.

    Raises:
        HddmError: with a line a file.
    """
    if found := damage(folder, record, known, sha256, chosen):
        raise HddmError(f"{folder}: is not what was written, by its {MANIFEST}; {remedy}", found)


def _listed(folder: Path, root: Path) -> list[str]:
    """The places in ``root`` of the files below ``folder`` that have a meaning."""
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
