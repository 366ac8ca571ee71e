"""Files and folders that are complete or absent, names that stay inside their folder, locks and hashes."""

import contextlib
import errno
import glob
import hashlib
import itertools
import json
import math
import os
import platform
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from hddm.utils.addresses import refuse_address
from hddm.utils.documents import parse_object, parse_yaml
from hddm.utils.errors import HddmError, one_line, sizes_apart
from hddm.utils.syncing import sync, sync_all

_LONGEST_NAME = 255
"""Bytes; longer names fail on the file systems in use."""


def inside(folder: Path, name: str) -> Path:
    """``folder/name`` with links followed, which must end in ``folder`` or in its hub-cache repository.

    A hub cache keeps ``models--org--name/snapshots/<revision>/file`` as a link to ``../../blobs/<hash>``; so
    links from below a revision may lead anywhere inside ``models--org--name``. Raises `HddmError` for an
    absolute name, ``..``, backslashes, NUL, and links that leave or loop.
    """
    path = PurePosixPath(name)
    odd = not path.parts or ".." in path.parts or any(letter in name for letter in "\\\0\n\r")
    odd |= any(len(part.encode("utf-8", "surrogatepass")) > _LONGEST_NAME for part in path.parts)
    # A colon after one letter is a drive on Windows.
    if odd or path.is_absolute() or name[1:2] == ":":
        shown = one_line(repr(name), 60)
        raise HddmError(f"{folder}: the name {shown} points outside the folder, or is too long")
    try:
        root = folder.resolve()
        target = (root / name).resolve()
    # Circles are RuntimeError before Python 3.13.
    except (OSError, RuntimeError) as error:
        raise HddmError(f"{folder / name}: cannot be followed ({one_line(error)})") from error
    if not target.is_relative_to(_repository_of(root)):
        raise HddmError(
            f"{folder / name}: is a link to {target}, outside the folder; copy it there"
        )
    return target


def _repository_of(root: Path) -> Path:
    """The repository in a hub cache that ``root`` lies in; ``root`` itself outside of hub caches."""
    for revision in (root, *root.parents):
        snapshots = revision.parent
        if snapshots.name == "snapshots" and snapshots.parent.name.startswith("models--"):
            return snapshots.parent
    return root


PATIENCE = 0.1
"""Seconds after which a lock is taken to belong to another process."""


@contextlib.contextmanager
def locked(
    path: Path, busy: str, other: str = "another", patience: float = PATIENCE
) -> Iterator[None]:
    """Hold the lock ``path`` within the block; the system frees it when the process ends or is killed.

    The file names the process that holds it, and is not removed; a missing folder is created. If another
    process holds the lock for ``patience`` seconds, raises `HddmError`: that it is ``busy``, with its name,
    and that one may choose an ``other``.
    """
    lock = FileLock(path, thread_local=False)
    with writing(path):
        while True:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                # More than one attempt, since the holder may just have removed the file that was opened.
                lock.acquire(timeout=patience)
                break
            except FileNotFoundError:
                # Another process just removed the folder with its lock.
                continue
            except Timeout:
                holder = "unknown"
                with contextlib.suppress(OSError):
                    holder = path.read_text().strip() or holder
                raise HddmError(f"{busy} ({holder}); wait for it, or choose {other}") from None
    try:
        with contextlib.suppress(OSError):
            path.write_text(f"process {os.getpid()} on {platform.node()}\n")
        yield
    finally:
        lock.release()


LARGEST_JSON = 16 * 2**20
"""Bytes of the largest JSON file read; an index of ten thousand tensors has one million."""
LARGEST_YAML = 2**18
"""Bytes of the largest YAML file read; PyYAML takes seconds for these."""


def nothing() -> str:
    """Say that a failure leaves nothing."""
    return "all is as it was before"


@contextlib.contextmanager
def new_folder(
    target: Path,
    record: str,
    overwrite: bool = False,
    is_locked: bool = False,
    kept: Callable[[], str] = nothing,
) -> Iterator[Path]:
    """Folder to fill, renamed to ``target`` when the block ends, and removed if it fails.

    It is beside ``target``, since a rename is atomic only within one file system. Files are synced to disk
    before the rename, and the rename after it. What killed processes left is removed. ``record`` is the JSON
    file that marks its kind; ``is_locked`` means that the caller holds the lock.

    A replaced folder is renamed away first, so for a moment ``target`` does not exist. A process killed at
    that moment leaves the old folder complete beside it; `restore` renames it back. Raises `HddmError` as
    `check_absent`, if another process writes ``target``, and as `writing` if the block cannot write.
    """
    check_absent(target, record, overwrite)
    with contextlib.nullcontext() if is_locked else alone(target):
        check_absent(target, record, overwrite)
        draft = target.parent / f".{target.name}.part-{os.getpid()}"
        try:
            with writing(target, kept):
                target.parent.mkdir(parents=True, exist_ok=True)
                _remove_left(target)
                draft.mkdir()
                yield draft
                put_in_place(draft, target, overwrite)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise


@contextlib.contextmanager
def alone(target: Path, patience: float = PATIENCE) -> Iterator[None]:
    """Keep other hddm processes from writing ``target`` within the block; creates its parent folder.

    Raises `HddmError` if another one is writing after ``patience`` seconds.
    """
    lock = _lock_of(target)
    with locked(lock, f"{target}: another process is writing it", patience=patience):
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def put_in_place(draft: Path, target: Path, overwrite: bool) -> None:
    """Rename a complete ``draft``, on the same file system, to ``target``.

    Files are synced to disk before, and the rename after. Call `check_absent` first. Raises `HddmError` if
    ``target`` has appeared since, unless ``overwrite``.
    """
    mode = draft.stat().st_mode & 0o666
    for path in below(draft):
        if path.is_symlink():
            continue
        if path.is_file() and path.stat().st_nlink == 1:
            # As `write_whole`; a file with other hard links keeps its mode, which they share.
            path.chmod(mode)
    own = (path for path in below(draft) if not path.is_symlink())
    sync_all(itertools.chain(own, [draft]), draft)
    old = target.parent / f".{target.name}.old-{os.getpid()}"
    gone = target.parent / f".{target.name}.part-{os.getpid()}"
    try:
        if overwrite and target.exists():
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
        # The system refuses if the name is taken.
        draft.rename(target)
    except BaseException as error:
        restore(target)
        if isinstance(error, OSError) and error.errno in (
            errno.EEXIST,
            errno.ENOTEMPTY,
            errno.ENOTDIR,
        ):
            raise _made_meanwhile(target) from error
        raise
    if old.exists():
        # Renamed before removal, so that no partial folder has the name that `restore` looks for, and to the
        # name of a draft, which the next process removes.
        old.rename(gone)
        shutil.rmtree(gone)
    sync(target.parent)


def below(folder: Path) -> Iterator[Path]:
    """Every file, link and folder below ``folder``, one after the other: there may be millions."""
    with os.scandir(folder) as found:
        for one in found:
            path = folder / one.name
            if one.is_dir(follow_symlinks=False):
                yield from below(path)
            yield path


def check_result_file(path: Path, overwrite: bool = False) -> None:
    """Refuse a ``path`` without a folder, and an existing file, unless a result to ``overwrite``."""
    refuse_address(path)
    if not path.parent.is_dir():
        raise HddmError(f"`out` {path}: {path.parent} is not a folder; create it first")
    if not path.exists():
        return
    if not overwrite:
        raise HddmError(
            f"{path} exists: choose another file, or pass `overwrite=True` to replace it"
        )
    if read_json(path).get("kind") != "evaluation":
        raise HddmError(f"{path}: is not a result of an evaluation; choose another file")


def check_absent(target: Path, record: str, overwrite: bool = False) -> None:
    """Refuse an existing ``target``; call it also before hours of work, to fail early.

    An empty folder may be filled, unless it cannot be renamed away: a mounted or the working folder.
    ``overwrite`` allows only an empty folder or one of the same kind, with a JSON file ``record`` that has a
    format version. A link is refused, since replacing it would not replace what it leads to, and an address.
    """
    refuse_address(target)
    recover(target)
    if target.is_symlink():
        text = "which is not followed; name the folder itself, or remove the link"
        raise HddmError(f"{target}: is a link to {os.readlink(target)}, {text}")
    if not target.exists():
        above = next(folder for folder in target.absolute().parents if folder.exists())
        if not above.is_dir() or not os.access(above, os.W_OK):
            raise HddmError(
                f"{target}: cannot be created: {above} is not a writable folder; choose another"
            )
        return
    is_empty = target.is_dir() and not any(target.iterdir())
    if is_empty and (overwrite or not (target.is_mount() or target.absolute() == Path.cwd())):
        return
    if not overwrite:
        raise HddmError(
            f"{target} exists: choose another folder, or pass `overwrite=True` to replace it"
        )
    if "format" not in (read_json(target / record) if (target / record).is_file() else {}):
        text = f"replaces only a folder of the same kind, and this one has no {record} of hddm's"
        raise HddmError(f"{target}: `overwrite=True` {text}")


def restore(target: Path) -> None:
    """Rename back a folder that a killed process had renamed away, or one around it.

    Whatever is in its place stays.
    """
    if target.exists() or target.is_symlink():
        return
    if target.parent != target:
        restore(target.parent)
    left = _left(target, "old")
    if left:
        # Where it may not be renamed it is not there, and another process may have done it just now.
        with contextlib.suppress(OSError):
            max(left, key=lambda path: path.stat().st_mtime_ns).rename(target)


def recover(target: Path) -> None:
    """`restore` a folder, or remove what processes left beside it that were killed once it was in place."""
    restore(target)
    # The lock is removed by `alone` unless its process was killed.
    has_left = _lock_of(target).exists() or _left(target, "part", "old")
    if target.exists() and not target.is_symlink() and has_left:
        with contextlib.suppress(HddmError, OSError), alone(target):
            _remove_left(target)


def _remove_left(target: Path) -> None:
    """Remove drafts of dead processes, and with ``target`` in place also what they had renamed away."""
    kinds = ("part", "old") if target.exists() else ("part",)
    for path in _left(target, *kinds):
        with contextlib.suppress(OSError):
            remove(path)


def _left(target: Path, *kinds: str) -> list[Path]:
    """Drafts of ``target``, or what was renamed away, by processes that have ended."""
    name = glob.escape(target.name)
    found: list[Path] = []
    for kind in kinds:
        paths = target.parent.glob(f".{name}.{kind}-*")
        found += [path for path in paths if _is_left(path)]
    return found


def _lock_of(target: Path) -> Path:
    return target.parent / f".{target.name}.lock"


def is_draft(name: str) -> bool:
    """True for the name of a hidden draft, of a file or folder, as processes leave it that are killed."""
    return re.fullmatch(r"\..+\.(part|old)-(.+-)?\d+", name) is not None


def is_empty(folder: Path) -> bool:
    """True for a folder that holds nothing but drafts of processes that were killed."""
    return folder.is_dir() and all(is_draft(path.name) for path in folder.iterdir())


def remove(path: Path) -> None:
    """Remove a file, a folder with its content, or a link alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_whole(path: Path, write: Callable[[Path], object], overwrite: bool = True) -> None:
    """Write a file that gets its name only once it is complete and on the disk.

    ``write`` writes a hidden file beside ``path``, which a failure removes. An existing
    ``path`` stays until then, and is replaced only with ``overwrite``. What killed processes of this machine
    left is removed. Raises `HddmError` if it cannot be written, or exists without ``overwrite``.
    """
    # Several machines may write one path, and know nothing of each other's processes.
    draft = path.with_name(f".{path.name}.part-{platform.node()}-{os.getpid()}")
    try:
        with writing(path):
            # Process numbers repeat, and some writers refuse an existing file.
            for left in _left(path, f"part-{glob.escape(platform.node())}"):
                remove(left)
            write(draft)
            # Some libraries write files for the owner only; the folder's mode is what the user wants.
            draft.chmod(path.parent.stat().st_mode & 0o666)
            sync(draft)
            if overwrite:
                draft.replace(path)
            else:
                with alone(path):
                    if path.exists() or path.is_symlink():
                        raise _made_meanwhile(path)
                    draft.replace(path)
            sync(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


class Unwritten(HddmError):
    """A file or folder cannot be written, because of its ``__cause__``."""


@contextlib.contextmanager
def writing(path: Path, kept: Callable[[], str] = nothing) -> Iterator[None]:
    """Block that writes ``path``; an OSError, SafetensorError or `Unwritten` in it becomes its `Unwritten`.

    On a full disk that says what is ``kept``.
    """
    try:
        yield
    except (OSError, SafetensorError, Unwritten) as error:
        why = error.__cause__ if isinstance(error, Unwritten) else error
        number, words = getattr(why, "errno", 0), str(why)
        # safetensors gives the number in words.
        full = next((one for one in FULL if number == one or f"(os error {one})" in words), None)
        text = f"{one_line(why)}); choose another place"
        if full is not None:
            text = f"{os.strerror(full)}); free some space; {kept()}"
        raise Unwritten(f"{path}: cannot be written ({text}") from why


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of the errors of a full disk."""


def refuse_full_disk(out: Path, size: float) -> None:
    """Raise `HddmError` where the disk that ``out`` lies on, or is to, has less than ``size`` bytes free."""
    path = out.absolute()
    there = next(one for one in (path, *path.parents) if one.exists())
    free = shutil.disk_usage(there).free
    needed = math.ceil(size * 1.02)
    if free < needed:
        wanted, left = sizes_apart(needed, free)
        raise HddmError(f"{out}: needs {wanted}, and {left} are free on its disk")


def write_json(path: Path, content: Any) -> None:
    """Write indented JSON with a final newline."""
    path.write_text(json.dumps(content, indent=2) + "\n")


def read_json(path: Path, largest: int = LARGEST_JSON) -> dict[str, Any]:
    """Read the JSON object in ``path``; raises `HddmError` as `read_whole` and `parse_object`."""
    return parse_object(read_whole(path, largest), str(path))


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the mapping in a YAML file; raises `HddmError` as `read_whole` and `parse_yaml`."""
    return parse_yaml(read_whole(path, LARGEST_YAML), str(path))


def read_whole(path: Path, largest: int) -> bytes:
    """All bytes of a file; raises `HddmError` for more than ``largest`` of them, and as `opened`."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = b"" if size > largest else file.read(largest + 1)
    if max(size, len(content)) > largest:
        raise HddmError(f"{path}: has more than {largest} bytes; fetch or write it again")
    return content


FileKind = Literal["safetensors", "gguf", "torch-zip", "pickle"]

_LARGEST_HEADER = 100_000_000
"""Bytes of the largest safetensors header that the library accepts."""


def identity_of(path: Path) -> tuple[int, ...]:
    """Numbers that differ for another file, and for the same one once it is written again."""
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def file_kind(path: Path) -> FileKind:
    """``"safetensors"``, ``"gguf"``, ``"torch-zip"`` (by `torch.save`) or ``"pickle"`` (before torch 1.6).

    Raises `HddmError` for a missing, empty or unknown file, and for anything but a regular one.
    """
    with opened(path) as file:
        head = file.read(16)
    if head.startswith(b"PK\x03\x04"):
        return "torch-zip"
    pickled = head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")
    # The length of a safetensors header may begin with the bytes of a pickle.
    if head[8:9] == b"{" and not (pickled and int.from_bytes(head[:8], "little") > _LARGEST_HEADER):
        return "safetensors"
    if pickled:
        return "pickle"
    if head.startswith(b"GGUF"):
        return "gguf"
    if head.startswith(b"version https"):
        why = "is a Git LFS pointer, not the weights; fetch them with git lfs pull"
    elif head.lstrip().startswith(b"{"):
        why = "is JSON, not weights; name the folder that it belongs to"
    else:
        why = f"is neither safetensors nor a PyTorch checkpoint (begins with {head[:8]!r}); fetch it again"
    raise HddmError(f"{path}: {why}")


def refuse_pickle(path: Path, allow_pickle: bool) -> None:
    """Refuse a weights file that is a pickle, unless it is allowed; raises as `file_kind`."""
    kind = file_kind(path)
    if kind not in ("safetensors", "gguf") and not allow_pickle:
        text = "use the safetensors version, or pass `allow_pickle=True` to read only its tensors"
        raise HddmError(f"{path}: is a pickle ({kind}), which can carry code; {text}")


def sha256_of(path: Path) -> str:
    """SHA-256 of a file in hexadecimal digits; raises as `opened`."""
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """Open a file for a block; raises `HddmError` for any but a readable regular one."""
    try:
        # Opening a pipe would block, and a device may have no end.
        if not stat.S_ISREG(path.stat().st_mode):
            raise HddmError(f"{path}: is not a regular file; name a regular file")
        with path.open("rb") as file:
            yield file
    except HddmError:
        raise
    except FileNotFoundError:
        raise HddmError(f"{path}: no such file") from None
    # ValueError is a name with NUL.
    except (OSError, ValueError) as error:
        raise HddmError(
            f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})"
        ) from error


def _made_meanwhile(path: Path) -> HddmError:
    text = "was made by another process in the meantime, and stays as it is; choose another"
    return HddmError(f"{path}: {text}")


def _is_left(path: Path) -> bool:
    """True if the process that drafted a file or folder, or renamed it away, has ended."""
    number = path.name.rpartition("-")[2]
    if not number.isdecimal():
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    # Process numbers repeat, and this process is not writing it.
    return int(number) == os.getpid()


def sha256_once(path: Path) -> str:
    """SHA-256 of a file, computed again only for a different file, under whatever name."""
    identity = identity_of(path)
    if identity not in _HASHES:
        _HASHES[identity] = sha256_of(path)
    return _HASHES[identity]


_HASHES: dict[tuple[int, ...], str] = {}
