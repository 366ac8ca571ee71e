"""Files and folders at addresses, fetched to a cache on disk that is bounded.

CACHE/KEY/content/NAME   what was fetched: a file, or a folder whose files have appeared one by one, complete
CACHE/KEY/complete.json  the address, and its bytes; written last
CACHE/KEY/used-…         locked by a process that uses it, so that no other removes it

CACHE is the environment variable HDDM_CACHE, by default ``~/.cache/hddm``. KEY is the hash of the address and
of the versions of all its files, by what the file system tells: a hash, or a size and a time. So what changes
there is fetched again, and a fetch that was killed continues. A file of which neither hash nor time is known
is fetched anew by each process. Where the cache grows beyond HDDM_CACHE_SIZE, by default 50GB, what was not
used for longest goes first. What is in use stays, and so does a result that is not uploaded yet.
"""

import atexit
import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import threading
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from hddm.utils.addresses import Address, cache_folder, note_copy, reached
from hddm.utils.errors import HddmError, sizes_apart
from hddm.utils.files import (
    below,
    inside,
    locked,
    read_json,
    refuse_full_disk,
    write_json,
    write_whole,
)
from hddm.utils.progress import Progress
from hddm.utils.records import Memory
from hddm.utils.syncing import sync_all

log = logging.getLogger(__name__)
CACHE_SIZE = "HDDM_CACHE_SIZE"
_DEFAULT_SIZE = "50GB"
COMPLETE, UPLOADS = "complete.json", "uploads"
_LOCK, _DRAFTS, _USED, _WORK = "lock", "drafts", "used-", "work-"
_PATIENCE = 24 * 3600.0
"""Seconds to wait for another process that fetches the same."""
_BATCH, _BATCH_BYTES = 64, 2**28
"""Files that are sent or fetched at a time, and their bytes; a file may have more alone."""
_HASHES = (
    "ETag",
    "etag",
    "sha256",
    "sha",
    "md5Hash",
    "blob_id",
    "oid",
    "content_md5",
    "Content-MD5",
)
_TIMES = (
    "mtime",
    "LastModified",
    "Last-Modified",
    "last_modified",
    "modified",
    "modify",
    "updated",
    "created",
)
_UNKNOWN = uuid.uuid4().hex
"""Version of a file of which nothing is known: no other process takes it for the same."""


class RemoteFile(NamedTuple):
    """A file at an address: its name in the folder, its path for fsspec, its bytes, and its version."""

    name: str
    path: str
    size: int | None
    version: str


class Listing(NamedTuple):
    """What is at an address: a folder with ``files``, or one file."""

    address: Address
    files: Sequence[RemoteFile]
    is_folder: bool

    @property
    def size(self) -> int:
        """Bytes, as far as they are known."""
        return sum(one.size or 0 for one in self.files)


def version_of(info: Mapping[str, Any]) -> str:
    """What differs for another content of a file, by what its file system tells of it."""
    own = [str(info[name]) for name in _HASHES if info.get(name)]
    if not own:
        for name in _TIMES:
            time = info.get(name)
            # A listing may have as a number what the answer for one file has as a date.
            if time:
                own.append(str(time.timestamp() if hasattr(time, "timestamp") else time))
    if not own:
        own.append(_UNKNOWN)
    return " ".join([*own, str(info.get("size"))])


def listed(address: Address) -> Listing:
    """List the files at an address; raises `HddmError` as `reached`, and for a folder without files."""
    with reached(address) as (files, path):
        files.invalidate_cache()
        is_web = address.scheme in ("http", "https")
        # On the web every address is a file, and one without an ending may be a page that lists files.
        if is_web and (address.is_whole or not address.suffix):
            path = path.rstrip("/") + "/"
            found = {name: files.info(name) for name in files.find(path)}
        else:
            info = files.info(path)
            if info["type"] == "file":
                own = RemoteFile(address.name, path, info.get("size"), version_of(info))
                return Listing(address, [own], False)
            found = files.find(path, detail=True)
        # What an address looks like inside is the file system's own.
        root = files._strip_protocol(path).rstrip("/")
    remote: list[RemoteFile] = []
    for name, info in sorted(found.items()):
        own_name = name.removeprefix(root).strip("/")
        if own_name and info.get("type") != "directory":
            inside(Path(address.name), own_name)
            remote.append(RemoteFile(own_name, name, info.get("size"), version_of(info)))
    if not remote:
        raise HddmError(f"{address}: holds no files; check the address")
    return Listing(address, remote, True)


def key_of(*words: str) -> str:
    """Name of a folder in the cache for these words."""
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:20]


def _largest() -> int:
    """Bytes that the cache may have."""
    stated = os.environ.get(CACHE_SIZE) or _DEFAULT_SIZE
    try:
        return int(TypeAdapter(Memory).validate_python(stated))
    except ValidationError:
        raise HddmError(
            f"{CACHE_SIZE}={stated}: is no size; write a number with its unit, as 50GB"
        ) from None


_guard = threading.RLock()
_uses: Counter[Path] = Counter()
"""Folders of the cache that blocks of this process use at the moment."""
_kept: set[Path] = set()
"""Folders that this process uses until it ends."""
_pinned: dict[str, Listing] = {}
"""Files that are fetched one after the other, as they were when they were listed, by whole address."""


class Entry:
    """A folder of the cache."""

    def __init__(self, key: str, name: str) -> None:
        self.folder = cache_folder() / key
        self.content = self.folder / "content" / name

    @classmethod
    def of(cls, listing: Listing) -> "Entry":
        """The entry of what was listed."""
        lines = [f"{one.name} {one.version}" for one in listing.files]
        name = listing.address.name or listing.address.scheme
        # Two addresses may differ in their query alone.
        return cls(key_of(listing.address.opened_as, *lines), name)

    @classmethod
    def of_work(cls, out: Address) -> "Entry":
        """The entry of what this machine makes for an address."""
        return cls(f"{_WORK}{key_of(str(out))}", out.name)

    @property
    def is_complete(self) -> bool:
        return (self.folder / COMPLETE).is_file()

    def complete(self, address: Address, size: int) -> None:
        """Record that all of it is here, so that it may also be removed."""
        record = {"address": str(address), "bytes": size}
        write_whole(self.folder / COMPLETE, lambda draft: write_json(draft, record))

    def mark(self) -> None:
        """Let no other process remove it; raises `HddmError` for a bound of the cache that is no size."""
        _largest()
        mark = _marks.get(self.folder)
        if mark is None or not mark.path.exists():
            with _whole_cache():
                self.folder.mkdir(parents=True, exist_ok=True)
                _marks[self.folder] = _Mark(self.folder)
        os.utime(self.folder)

    def fill(self, listing: Listing) -> None:
        """Fetch the files that are missing; raises `HddmError` if they changed meanwhile."""
        self.mark()
        if self.is_complete:
            return
        busy = f"{listing.address}: another process fetches it"
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locked(self.folder / _LOCK, busy, patience=2.0))
            except HddmError:
                log.info("%s; waiting for it", busy)
                stack.enter_context(locked(self.folder / _LOCK, busy, patience=_PATIENCE))
            if not self.is_complete:
                self._fetch(listing)
                if Entry.of(listed(listing.address)).folder != self.folder:
                    text = (
                        "changed while it was fetched, or since it was opened; repeat the command"
                    )
                    raise HddmError(f"{listing.address}: {text}")
                sync_all(below(self.content) if listing.is_folder else [self.content], self.folder)
                self.complete(listing.address, listing.size)

    def _place(self, listing: Listing, one: RemoteFile) -> Path:
        return self.content / one.name if listing.is_folder else self.content

    def _fetch(self, listing: Listing) -> None:
        missing: list[RemoteFile] = []
        for one in listing.files:
            place = self._place(listing, one)
            if not place.is_file() or one.size not in (None, place.stat().st_size):
                missing.append(one)
        needed = sum(one.size or 0 for one in missing)
        make_room(needed)
        refuse_full_disk(self.folder, needed)
        drafts = self.folder / _DRAFTS
        shutil.rmtree(drafts, ignore_errors=True)
        address = listing.address
        with reached(address) as (files, _), Progress(needed, f"fetch {address}") as advance:
            for batch in batches(missing):
                drafts.mkdir(exist_ok=True)
                places = [drafts / str(number) for number in range(len(batch))]
                files.get([one.path for one in batch], [str(place) for place in places])
                for one, draft in zip(batch, places, strict=True):
                    size = draft.stat().st_size
                    if one.size not in (None, size):
                        wanted, got = sizes_apart(one.size or 0, size)
                        text = "it changed since it was opened, or on the way; repeat the command"
                        raise HddmError(
                            f"{address}: {one.name} has {got} and should have {wanted}: {text}"
                        )
                    place = self._place(listing, one)
                    place.parent.mkdir(parents=True, exist_ok=True)
                    draft.replace(place)
                    advance(one.size or 0)
        shutil.rmtree(drafts, ignore_errors=True)


def batches(files: Sequence[RemoteFile]) -> Iterator[list[RemoteFile]]:
    """Files in order, as many at a time as are sent or fetched together."""
    batch: list[RemoteFile] = []
    for one in files:
        full = sum(each.size or 0 for each in batch) + (one.size or 0) > _BATCH_BYTES
        if batch and (full or len(batch) == _BATCH):
            yield batch
            batch = []
        batch.append(one)
    if batch:
        yield batch


def fetched(address: Address) -> Path:
    """Where the file or folder at an address is on disk, fetched if its present version is not.

    It stays until this process ends. Raises `HddmError` as `reached`, for a folder without files, for what
    changes on the way, and for a disk without space.
    """
    listing = listed(address)
    entry = Entry.of(listing)
    with _guard:
        _kept.add(entry.folder)
    note_copy(entry.content, address)
    entry.fill(listing)
    return entry.content


def listed_for_streaming(address: Address) -> Listing:
    """List the files at an address, each of which `held` fetches by itself."""
    listing = listed(address)
    for one in listing.files:
        place = address / one.name if listing.is_folder else address
        _pinned[place.opened_as] = Listing(place, [one._replace(name=place.name)], False)
    return listing


@contextlib.contextmanager
def held(address: Address) -> Iterator[Path]:
    """Where the file at an address is on disk within the block; afterwards other files may take its place.

    Raises `HddmError` as `fetched`, and for a file that changed since it was listed.
    """
    listing = _pinned.get(address.opened_as) or listed(address)
    entry = Entry.of(listing)
    with _guard:
        _uses[entry.folder] += 1
    try:
        note_copy(entry.content, address)
        entry.fill(listing)
        yield entry.content
    finally:
        with _guard:
            _uses[entry.folder] -= 1
            if not _uses[entry.folder] and entry.folder not in _kept and entry.folder in _marks:
                _marks.pop(entry.folder).release()


@contextlib.contextmanager
def _whole_cache() -> Iterator[None]:
    """Keep other processes from adding to the cache and removing from it."""
    folder = cache_folder()
    with _guard, locked(folder / _LOCK, f"{folder}: another process tidies it", patience=600.0):
        yield


def make_room(size: int) -> None:
    """Remove what was not used for longest, until ``size`` more bytes keep the cache within its bound.

    What is in use stays, and so do results that are not uploaded, so the cache may have more.
    """
    largest = _largest()
    with _whole_cache():
        sizes: dict[Path, int] = {}
        for folder in cache_folder().iterdir():
            is_complete = (folder / COMPLETE).is_file()
            is_unsent = folder.name.startswith(_WORK) and not is_complete
            if folder.is_dir() and folder.name != UPLOADS and not is_unsent:
                sizes[folder] = _size_of(folder)
        total = sum(sizes.values())
        for folder in sorted(sizes, key=lambda folder: folder.stat().st_mtime_ns):
            if total + size <= largest:
                break
            if _is_used(folder):
                continue
            # Without it, what a killed process leaves of the rest is fetched again.
            (folder / COMPLETE).unlink(missing_ok=True)
            shutil.rmtree(folder)
            total -= sizes[folder]


def _size_of(folder: Path) -> int:
    """Bytes of a folder of the cache, from its record, or by its files if a fetch was cut off."""
    with contextlib.suppress(HddmError, KeyError):
        return int(read_json(folder / COMPLETE)["bytes"])
    # Not its own lock and marks.
    return sum(
        one.stat().st_size for one in below(folder) if one.parent != folder and one.is_file()
    )


class _Mark:
    """A file in a folder of the cache that this process holds a lock on until it ends.

    The system frees the lock of a process that is killed, also in a container or on another machine.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"{_USED}{uuid.uuid4().hex}"
        self.process = os.getpid()
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT)
        # A file system without locks leaves the mark, which then counts as one in use.
        with contextlib.suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def release(self) -> None:
        """Free the lock, and remove the mark; a fork leaves those of the process that it comes from."""
        if self.process == os.getpid():
            os.close(self._descriptor)
            self.path.unlink(missing_ok=True)


_marks: dict[Path, _Mark] = {}


def _is_used(folder: Path) -> bool:
    if _uses[folder] or folder in _kept:
        return True
    for path in folder.glob(f"{_USED}*"):
        if folder in _marks and path == _marks[folder].path:
            continue
        descriptor = os.open(path, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        path.unlink(missing_ok=True)
    return False


@atexit.register
def _unmark() -> None:
    for mark in _marks.values():
        with contextlib.suppress(OSError):
            mark.release()
