"""Results at addresses: made in a folder of this machine, and then uploaded as complete files.

The file that makes a result valid, its record, is uploaded last, after the manifests, which are after all
else. So an upload that is killed leaves a folder that nobody takes for a result. What is there is never
replaced: a second result goes to another address.

What was uploaded, with its hash and the version that the file system gave it, is noted in
CACHE/uploads/KEY.json; the same command skips it. Only files whose bytes are all there get their name: object
stores see to that, and other file systems get a draft that is renamed.
"""

import contextlib
import functools
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from hddm.utils.addresses import Address, Reached, cache_folder, is_file, note_copy, reached
from hddm.utils.errors import HddmError, UsageError
from hddm.utils.fetching import (
    Entry,
    RemoteFile,
    batches,
    key_of,
    version_of,
)
from hddm.utils.files import below, is_draft, locked, read_json, sha256_of, write_json, write_whole
from hddm.utils.progress import Progress
from hddm.utils.records import ENSEMBLE_FILE, EXPERT_FILE, MANIFEST, ROUTER_FILE
from hddm.utils.work import differences

_RECORDS = (MANIFEST, EXPERT_FILE, ROUTER_FILE, ENSEMBLE_FILE)
_RENAMED = ("file", "local", "sftp", "ssh", "smb", "ftp")
"""Schemes of file systems where a file that is being written is seen under its name."""
_IDENTITY = "identity.json"
_PROBE = ".hddm-probe"
_THREADS = 16
LARGEST_NOTES = 2**28

Made = TypeVar("Made")


def work_folder(out: Address) -> Path:
    """Where this machine makes what is uploaded to ``out``: a folder of its name, in the cache."""
    return _work_of(out).content


def _work_of(out: Address) -> Entry:
    return Entry(f"work-{key_of(str(out))}", out.name)


def begin(out: Address) -> Path:
    """`work_folder`, which stays from now on; raises `HddmError` if the cache cannot be written."""
    entry = _work_of(out)
    note_copy(entry.content, out)
    if entry.is_complete:
        # A copy of what was at the address once, and is there no more.
        shutil.rmtree(entry.folder)
    entry.mark()
    return entry.content


def end(out: Address) -> None:
    """Allow the cache to remove `work_folder`, of which all is uploaded."""
    entry = _work_of(out)
    entry.complete(out, sum(one.stat().st_size for one in below(entry.folder) if one.is_file()))


def refuse_existing(out: Address, record: str, overwrite: bool = False) -> None:
    """Refuse an address with a result, which the file ``record`` marks, and one where none can be written.

    Raises `HddmError`, also as `reached`, and `UsageError` for an address of the web.
    """
    if out.scheme in ("http", "https"):
        raise UsageError(
            f"{out}: nothing can be written there; name an address such as s3://bucket/name"
        )
    if out.is_whole:
        raise HddmError(f"{out}: is a whole bucket; name a folder in it")
    if out.secret:
        raise HddmError(
            f"{out}: results go to addresses without a password or query; set credentials as its file "
            "system reads them, in the environment or its configuration"
        )
    if overwrite:
        raise HddmError(
            f"{out}: nothing is replaced at an address, so `overwrite` does not hold there; choose another"
        )
    if is_file(out / record):
        raise HddmError(f"{out} exists: choose another address")


def refuse_unwritable(out: Address) -> None:
    """Refuse an address where no file can be written, before hours of work for it; raises as `reached`.

    A small file is written and removed, which needs no right to remove files: without it, the file stays.
    """
    with reached(out / _PROBE) as there:
        folder = there.path.rpartition("/")[0]
        if out.scheme in _RENAMED:
            there.files.makedirs(folder, exist_ok=True)
        there.files.pipe_file(there.path, b"")
        with contextlib.suppress(Exception):
            there.files.rm_file(there.path)


def produced(
    out: Address,
    record: str,
    identity: Mapping[str, Any],
    overwrite: bool,
    make: Callable[[Path], object],
) -> Path:
    """Make a result in `work_folder`, upload it to ``out``, and return the folder.

    A call that was killed continues when it is repeated: ``make`` continues its own work, and where that is
    done already for the same ``identity``, of plain values, only the rest is uploaded.
    Raises `HddmError` as `refuse_existing` and ``make``, for a result of another identity that was never
    uploaded, and where the upload fails, with what is kept.
    """
    refuse_existing(out, record, overwrite)
    folder = begin(out)
    own = folder.with_name(_IDENTITY)
    with locked(own.with_name("lock"), f"{out}: another process of this machine makes it"):
        is_made = (folder / record).is_file()
        found = differences(read_json(own) if own.is_file() else {}, identity)
        if is_made and found:
            text = (
                "holds a result of other options that was not uploaded; repeat those, or remove it"
            )
            raise HddmError(f"{out}: {folder.parent} {text}", map(str, found))
        write_whole(own, lambda draft: write_json(draft, identity))
        if not is_made:
            refuse_unwritable(out)
            make(folder)
        upload(folder, out, record)
        end(out)
    return folder


def made_and_uploaded(
    out: Address, record: str, overwrite: bool, make: Callable[[Path], Made]
) -> Made:
    """Make a result in `work_folder`, which takes seconds and is repeated after a kill, and upload it.

    Returns what ``make`` does, and raises as `refuse_existing`, ``make`` and `upload_files`.
    """
    refuse_existing(out, record, overwrite)
    folder = begin(out)
    with locked(folder.with_name("lock"), f"{out}: another process of this machine makes it"):
        if folder.exists():
            shutil.rmtree(folder)
        made = make(folder)
        upload(folder, out, record)
        end(out)
    return made


def upload(folder: Path, out: Address, record: str) -> None:
    """Upload the files in a folder, but hidden ones, with ``record`` as the last.

    Raises `HddmError` as `upload_files`.
    """
    files: dict[str, Path] = {}
    for path in below(folder):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not is_draft(path.name) and not path.name.startswith("."):
            files[name] = path
    upload_files(files, out, record)


def upload_files(contents: Mapping[str, Path], out: Address, record: str) -> None:
    """Upload files to their names below ``out``: first contents, then manifests, and ``record`` last.

    What an earlier call uploaded is skipped if it is still there and its hash is the same.
    Raises `HddmError` as `reached`, for whatever the file system refuses.
    """
    try:
        _send(contents, out, record)
    except HddmError as error:
        text = "what was uploaded stays, and the same command continues"
        raise type(error)(f"{error.message}; {text}", error.details) from error


def _send(contents: Mapping[str, Path], out: Address, record: str) -> None:
    sizes = {name: path.stat().st_size for name, path in contents.items()}
    notes = _Notes(out)
    with (
        reached(out) as there,
        ThreadPoolExecutor(_THREADS) as pool,
        Progress(sum(sizes.values()), f"upload {out}") as advance,
    ):
        there.files.invalidate_cache()
        for names in _in_order(contents, record):
            planned = [RemoteFile(one, f"{there.path}/{one}", sizes[one], "") for one in names]
            for batch in batches(planned):
                hashes = {one.name: sha256_of(contents[one.name]) for one in batch}
                holds = functools.partial(notes.holds, there, hashes)
                new: list[RemoteFile] = []
                for one, is_there in zip(batch, pool.map(holds, batch), strict=True):
                    if is_there:
                        advance.skip(one.size or 0)
                    else:
                        new.append(one)
                _put(there, new, contents, out)
                infos = pool.map(there.files.info, [one.path for one in new])
                for one, info in zip(new, infos, strict=True):
                    if info["size"] != one.size:
                        text = f"{one.name} has {info['size']} bytes there, and {one.size} here"
                        raise HddmError(f"{out}: {text}")
                    notes.add(one.name, hashes[one.name], version_of(info))
                    advance(one.size or 0)
                notes.keep()


def _in_order(contents: Mapping[str, Path], record: str) -> Iterator[list[str]]:
    """Names in groups, of which each is uploaded once all of those before are."""
    first: list[str] = []
    records: list[str] = []
    for name in sorted(contents):
        if name == record:
            continue
        is_record = name.rpartition("/")[2] in _RECORDS
        (records if is_record else first).append(name)
    # What marks a folder marks those in it as well.
    records.sort(key=lambda name: -name.count("/"))
    yield first
    for name in records:
        yield [name]
    if record in contents:
        yield [record]


def _put(
    there: Reached, files: Sequence[RemoteFile], contents: Mapping[str, Path], out: Address
) -> None:
    if not files:
        return
    places = [str(contents[one.name]) for one in files]
    targets = [one.path for one in files]
    drafts = targets
    if out.scheme in _RENAMED:
        drafts = [f"{one.rpartition('/')[0]}/.{one.rpartition('/')[2]}.part" for one in targets]
        for folder in {one.rpartition("/")[0] for one in targets}:
            there.files.makedirs(folder, exist_ok=True)
    there.files.put(places, drafts)
    for draft, target in zip(drafts, targets, strict=True):
        if draft != target:
            there.files.mv(draft, target)


class _Notes:
    """What this machine uploaded to an address: hash and version there, by name."""

    def __init__(self, out: Address) -> None:
        self._path = cache_folder() / "uploads" / f"{key_of(str(out))}.json"
        self._files: dict[str, list[str]] = {}
        if self._path.is_file():
            self._files = read_json(self._path, LARGEST_NOTES)

    def holds(self, there: Reached, hashes: Mapping[str, str], one: RemoteFile) -> bool:
        """True if the file is there as this machine uploaded it, and has its hash of ``hashes``."""
        noted = self._files.get(one.name)
        if noted is None or noted[0] != hashes[one.name]:
            return False
        try:
            return version_of(there.files.info(one.path)) == noted[1]
        except FileNotFoundError:
            return False

    def add(self, name: str, sha256: str, version: str) -> None:
        self._files[name] = [sha256, version]

    def keep(self) -> None:
        """Write them to the disk."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self._path, lambda draft: write_json(draft, self._files))
