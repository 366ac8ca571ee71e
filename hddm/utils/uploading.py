"""Results at addresses: made in a folder of this machine, and then uploaded as complete files.

The file that makes a result valid, its record, is uploaded last, after the manifests, which are after all
else. So an upload that is killed leaves a folder that nobody takes for a result. What is there is never
replaced: a second result goes to another address, and so does one beside whose files others lie.

What was uploaded, with its hash and the version that the file system gave it, is noted in
CACHE/uploads/KEY.jsonl until all is there; the same command skips it. Only files whose bytes are all there
get their name: object stores see to that, and other file systems get a draft that is renamed.
"""

import contextlib
import functools
import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from hddm.utils.addresses import (
    Address,
    Reached,
    cache_folder,
    is_file,
    names_below,
    note_copy,
    reached,
)
from hddm.utils.errors import HddmError, UsageError, shown
from hddm.utils.fetching import (
    UPLOADS,
    Entry,
    RemoteFile,
    batches,
    key_of,
    listed,
    version_of,
)
from hddm.utils.files import below, locked, read_json, sha256_of, write_json, write_whole
from hddm.utils.progress import Progress
from hddm.utils.records import ENSEMBLE_FILE, EXPERT_FILE, MANIFEST, ROUTER_FILE
from hddm.utils.work import differences

_RECORDS = (MANIFEST, EXPERT_FILE, ROUTER_FILE, ENSEMBLE_FILE)
_RENAMED = ("file", "local", "sftp", "ssh", "smb", "ftp")
"""Schemes of file systems where a file that is being written is seen under its name."""
_IDENTITY = "identity.json"
_PROBE, _PART = ".hddm-probe", ".part"
_THREADS = 16

Made = TypeVar("Made")


def work_folder(out: Address) -> Path:
    """Where this machine makes what is uploaded to ``out``: a folder of its name, in the cache."""
    return Entry.of_work(out).content


def begin(out: Address) -> Path:
    """`work_folder`, which stays from now on; raises `HddmError` if the cache cannot be written."""
    entry = Entry.of_work(out)
    note_copy(entry.content, out)
    if entry.is_complete:
        # A copy of what was at the address once, and is there no more.
        shutil.rmtree(entry.folder)
    entry.mark()
    return entry.content


def end(out: Address) -> None:
    """Allow the cache to remove `work_folder`, if there is one: all of it is uploaded."""
    entry = Entry.of_work(out)
    if not entry.content.is_dir():
        return
    entry.complete(out, sum(one.stat().st_size for one in below(entry.folder) if one.is_file()))


def refuse_target(out: Address, overwrite: bool = False) -> None:
    """Refuse an address that no result can go to, whatever is there; raises `HddmError` or `UsageError`."""
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


def refuse_existing(out: Address, record: str, overwrite: bool = False) -> None:
    """Refuse an address with a result, which the file ``record`` marks; raises as `refuse_target`."""
    refuse_target(out, overwrite)
    if is_file(out / record):
        # A process that was killed once all was uploaded may have left its folder.
        end(out)
        raise HddmError(f"{out} exists: choose another address")


def refuse_others(out: Address, own: Collection[str] = ()) -> None:
    """Refuse an address with files that neither this machine uploaded nor ``own`` names.

    They could become part of a result that is not theirs. Raises `HddmError`, and as `reached`.
    """
    known = {*own, *_Notes(out).names, _PROBE}
    others = [name for name in names_below(out) if name not in known and not _is_part(name)]
    if others:
        raise HddmError(
            f"{out}: holds files of something else, or of an upload that another machine did not finish; "
            "remove them, or choose another address",
            shown(others),
        )


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


def _is_part(name: str) -> bool:
    """True for what a killed upload leaves where files are renamed."""
    own = name.rpartition("/")[2]
    return own.startswith(".") and own.endswith(_PART)


def fingerprint(path: Path) -> str:
    """Hash that changes with what a path or address holds, by names, sizes and times of its files."""
    if isinstance(path, Address):
        return Entry.of(listed(path)).folder.name
    place = path.absolute()
    together = 0
    # In any order, since there may be millions.
    for one in below(place) if place.is_dir() else [place]:
        if one.is_file():
            status = one.stat()
            line = f"{one.relative_to(place)} {status.st_size} {status.st_mtime_ns}"
            together ^= int(key_of(line), 16)
    return key_of(str(place), str(together))


def produced(
    out: Address,
    record: str,
    asked: Mapping[str, Any],
    reads: Sequence[Path],
    overwrite: bool,
    make: Callable[[Path], object],
) -> Path:
    """Make a result in `work_folder`, upload it to ``out``, and return the folder.

    A call that was killed continues when it is repeated: ``make`` continues its own work, and where that is
    done already, of the same plain values that were ``asked`` for and of unchanged files in ``reads``, only
    the rest is uploaded.
    Raises `HddmError` as `refuse_existing`, `refuse_others` and ``make``, for a result of other values or
    files that was never uploaded, and where the upload fails, with what is kept.
    """
    refuse_existing(out, record, overwrite)
    refuse_others(out)
    entry = Entry.of_work(out)
    identity = {**asked, "reads": [fingerprint(path) for path in reads]}
    folder = begin(out)
    own = entry.folder / _IDENTITY
    with _alone(out):
        is_made = (folder / record).is_file()
        found = differences(read_json(own) if own.is_file() else {}, identity)
        if is_made and found:
            text = "holds a result of other options or files that was not uploaded; remove it"
            raise HddmError(f"{out}: {entry.folder} {text}", map(str, found))
        write_whole(own, lambda draft: write_json(draft, identity))
        if not is_made:
            refuse_unwritable(out)
            make(folder)
        upload(folder, out, record)
        end(out)
    return folder


@contextlib.contextmanager
def _alone(out: Address) -> Iterator[None]:
    """Keep other processes of this machine from making the same result in the block."""
    with locked(
        Entry.of_work(out).folder / "lock", f"{out}: another process of this machine makes it"
    ):
        yield


def made_and_uploaded(
    out: Address, record: str, overwrite: bool, make: Callable[[Path], Made]
) -> Made:
    """Make a result in `work_folder`, which takes seconds and is repeated after a kill, and upload it.

    Returns what ``make`` does, and raises as `refuse_existing`, ``make`` and `upload_files`.
    """
    refuse_existing(out, record, overwrite)
    refuse_others(out)
    folder = begin(out)
    with _alone(out):
        if folder.exists():
            shutil.rmtree(folder)
        made = make(folder)
        upload(folder, out, record)
        end(out)
    return made


def upload(folder: Path, out: Address, record: str) -> None:
    """Upload the files in a folder, but hidden ones, with ``record`` as the last.

    Raises `HddmError` as `refuse_others` and `upload_files`.
    """
    files: dict[str, Path] = {}
    for path in below(folder):
        name = path.relative_to(folder).as_posix()
        is_hidden = any(part.startswith(".") for part in name.split("/"))
        if path.is_file() and not is_hidden:
            files[name] = path
    refuse_others(out, files)
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
                # What a killed process leaves of these is its own.
                notes.begin([one.name for one in new])
                _put(there, new, contents, out)
                infos = pool.map(there.files.info, [one.path for one in new])
                for one, info in zip(new, infos, strict=True):
                    if info["size"] != one.size:
                        text = f"{one.name} has {info['size']} bytes there, and {one.size} here"
                        raise HddmError(f"{out}: {text}")
                    notes.add(one.name, hashes[one.name], version_of(info))
                    advance(one.size or 0)
    notes.remove()


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
        drafts = [f"{one.rpartition('/')[0]}/.{one.rpartition('/')[2]}{_PART}" for one in targets]
        for folder in {one.rpartition("/")[0] for one in targets}:
            there.files.makedirs(folder, exist_ok=True)
    there.files.put(places, drafts)
    for draft, target in zip(drafts, targets, strict=True):
        if draft != target:
            there.files.mv(draft, target)


class _Notes:
    """What this machine uploaded to an address: hash and version there, by name; a line for each file."""

    def __init__(self, out: Address) -> None:
        self._path = cache_folder() / UPLOADS / f"{key_of(str(out))}.jsonl"
        self._files: dict[str, tuple[str, str]] = {}
        if self._path.is_file():
            for line in self._path.read_text(encoding="utf-8").splitlines():
                # A process that was killed may have left a part of the last one.
                with contextlib.suppress(ValueError):
                    name, sha256, version = json.loads(line)
                    self._files[name] = (sha256, version)

    @property
    def names(self) -> Collection[str]:
        """Names of the files."""
        return self._files.keys()

    def holds(self, there: Reached, hashes: Mapping[str, str], one: RemoteFile) -> bool:
        """True if the file is there as this machine uploaded it, and has its hash of ``hashes``."""
        noted = self._files.get(one.name)
        if noted is None or noted[0] != hashes[one.name]:
            return False
        try:
            return version_of(there.files.info(one.path)) == noted[1]
        except FileNotFoundError:
            return False

    def begin(self, names: Sequence[str]) -> None:
        """Note files that will be there."""
        for name in names:
            self.add(name, "", "")

    def add(self, name: str, sha256: str, version: str) -> None:
        """Note a file that is there."""
        self._files[name] = (sha256, version)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([name, sha256, version]) + "\n")

    def remove(self) -> None:
        """Forget all, once the whole result is there."""
        self._path.unlink(missing_ok=True)
