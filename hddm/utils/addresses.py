"""Addresses of files and folders elsewhere, such as ``s3://bucket/shards``, as fsspec opens them.

What begins as ``SCHEME://`` is an address, unless it is a path of this machine. It travels as a path, an
`Address`, which ``/`` continues and messages print as it was written, but without passwords: those of
``https://NAME:PASSWORD@HOST`` and the query of a signed URL stay in memory, in the one object that was
parsed, and are neither printed nor recorded.

`hddm.utils.fetching` reads addresses, and `hddm.utils.uploading` writes them. Neither is imported, and fsspec
by neither of them, before an address is used.
"""

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path, PosixPath
from typing import Any, NamedTuple

from hddm.utils.errors import HddmError, one_line

# A path has lost one of the slashes.
_FORM = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):/+(?P<rest>[^/].*)", re.DOTALL)
_LOCAL = ("file", "local")
_NAMES_A_CONTAINER = ("abfs", "abfss", "wasb", "wasbs", "adl")
"""Schemes with a container, and no user, before the @."""
_PASSWORD = re.compile(r"(?<=://)[^/\s]*:[^/\s]*@")
"""A user with a password, which may have an @ of its own. A user alone is no secret."""
_SPLIT_PASSWORD = re.compile(r"[^/:@]*:(?!\d+/)[^/@]*/.*@")
_QUERY = re.compile(r"\?[^\s'\"<>)]*")
EXTRA, IN_EXTRA = "remote", ("s3", "s3a", "gs", "gcs", "http", "https")
CACHE = "HDDM_CACHE"
_copies: dict[str, str] = {}
"""Addresses, by the path of their copy on this machine."""


class Address(PosixPath):
    """An address as a path. No file of this machine has this path."""

    secret: str = ""
    """The whole address with its password or query, if it has any."""

    def __str__(self) -> str:
        text = super().__str__()
        scheme = text.partition(":")[0]
        return text.replace(":/", ":///" if scheme in _LOCAL else "://", 1)

    @property
    def scheme(self) -> str:
        """What stands before ``://``."""
        return str(self).partition(":")[0]

    def __truediv__(self, name: str | os.PathLike[str]) -> "Address":
        below = super().__truediv__(name)
        # What a query signs is one file.
        if self.secret and "?" not in self.secret:
            below.secret = f"{self.secret.rstrip('/')}/{os.fspath(name)}"
        return below

    @property
    def is_whole(self) -> bool:
        """True for a whole bucket or host."""
        return not self.name or (self.parent.name.endswith(":") and self.scheme not in _LOCAL)

    @property
    def opened_as(self) -> str:
        """The address that fsspec is given, with its secrets."""
        return self.secret or str(self)

    def absolute(self) -> "Address":
        return self


def address_of(text: str | Path) -> Address | None:
    """The address that a text or path is; None for a path of this machine, which comes first.

    Raises `HddmError` for a password with a slash, which would end the name of the host.
    """
    if isinstance(text, Address):
        return text
    found = _FORM.fullmatch(str(text))
    if found is None or Path(text).exists():
        return None
    scheme = found["scheme"].lower()
    whole = f"{scheme}:{'///' if scheme in _LOCAL else '//'}{found['rest']}"
    plain = _QUERY.sub("", whole)
    if scheme not in _NAMES_A_CONTAINER:
        if _SPLIT_PASSWORD.match(plain.partition("://")[2]):
            raise HddmError(f"{scheme}://…: write / in a password as %2F, and @ as %40")
        plain = _PASSWORD.sub("", plain)
    address = Address(plain)
    if plain != whole:
        address.secret = whole
    return address


def as_path(text: str | Path) -> Path:
    """The path that a caller names: an `Address`, or a path of this machine."""
    return address_of(text) or Path(text)


def on_disk(path: Path) -> Path:
    """``path`` itself, or where the file or folder at an address was fetched to, whole.

    Raises `HddmError` as `hddm.utils.fetching.fetched`.
    """
    address = address_of(path)
    if address is None:
        return path
    from hddm.utils.fetching import fetched

    return fetched(address)


@contextlib.contextmanager
def at_hand(path: Path) -> Iterator[Path]:
    """``path`` itself, or for a block the copy on disk of the file at an address, which may go afterwards.

    Raises `HddmError` as `hddm.utils.fetching.held`.
    """
    if not isinstance(path, Address):
        yield path
        return
    from hddm.utils.fetching import held

    with held(path) as place:
        yield place


def made_at(out: Path) -> Path:
    """Where this machine makes the result ``out``: there, or in the cache if that is an address."""
    if not isinstance(out, Address):
        return out
    from hddm.utils.uploading import work_folder

    return work_folder(out)


def is_file(path: Path) -> bool:
    """True for a file on this machine or at an address; raises `HddmError` as `reached`."""
    if not isinstance(path, Address):
        return path.is_file()
    with reached(path) as (files, place):
        files.invalidate_cache()
        return bool(files.isfile(place))


def note_copy(path: Path, address: Address) -> None:
    """Let `in_addresses` name this copy by its address."""
    _copies[str(path)] = str(address)


def in_addresses(text: str) -> str:
    """A text for people, in which copies that this process made have their addresses in place of paths."""
    for path, address in _copies.items():
        text = text.replace(path, address)
    return text


def names_below(address: Address) -> list[str]:
    """Names of all files in a folder at an address; none where it is not there. Raises as `reached`."""
    with reached(address) as (files, place):
        files.invalidate_cache()
        found = files.find(place) if files.exists(place) else []
        # What an address looks like inside is the file system's own.
        root = files._strip_protocol(place).rstrip("/")
    return [path.removeprefix(root).strip("/") for path in found]


def cache_folder() -> Path:
    """Folder of what was fetched, and of what is made to be uploaded."""
    stated = os.environ.get(CACHE)
    if stated:
        return Path(stated).expanduser().absolute()
    above = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(above).expanduser().absolute() / "hddm"


def refuse_address(path: Path) -> None:
    """Refuse an address where only a path of this machine is of use; raises `HddmError`."""
    address = address_of(path)
    if address is not None:
        text = "is an address, and what this command writes stays on this machine; name a folder"
        raise HddmError(f"{address}: {text}")


def refuse_fetched(folder: Path) -> None:
    """Refuse to change a model in place that is at an address; raises `HddmError`."""
    address = address_of(folder)
    if address is not None:
        raise HddmError(
            f"{address}: is not changed where it is; name another folder or address with `out`"
        )
    if folder.absolute().is_relative_to(cache_folder()):
        raise HddmError(
            f"{folder}: is a copy of what is at an address; name a folder or address with `out`"
        )


class Reached(NamedTuple):
    """A file system of fsspec, and the path of an address in it."""

    files: Any
    path: str


@contextlib.contextmanager
def reached(address: Address) -> Iterator[Reached]:
    """Open the file system of an address for a block.

    Raises:
        HddmError: in one line that names the address, for whatever the file system raises in the block.
    """
    try:
        from fsspec.core import url_to_fs

        yield Reached(*url_to_fs(address.opened_as))
    except HddmError:
        raise
    # Each file system raises errors of its own libraries.
    except Exception as error:
        if _is_of_this_machine(error):
            raise
        why = HddmError(f"{address}: {_reason(error, address)}")
        # A traceback would show the original message.
        raise why from None if address.secret else error


def _is_of_this_machine(error: Exception) -> bool:
    """True if a file of the cache could not be read or written."""
    if not isinstance(error, OSError):
        return False
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return is_full or str(error.filename or "").startswith(str(cache_folder()))


def _reason(error: Exception, address: Address) -> str:
    """What went wrong, and what to do about it."""
    if isinstance(error, ImportError):
        remedy = f"hddm-diffusion[{EXTRA}]" if address.scheme in IN_EXTRA else "it"
        return f"needs a package that is not installed ({one_line(error, 80)}); install {remedy}"
    # A file system of the web raises this for every answer, and for none.
    if isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    name, status = type(error).__name__, getattr(error, "status", None)
    if status in (401, 403) or isinstance(error, PermissionError) or "Credentials" in name:
        return f"access is denied ({_shown(error, address)}); check the credentials of {address.scheme}"
    if "bucket does not exist" in str(error):
        return "its bucket does not exist; create it, or check the address"
    if status == 404 or isinstance(error, FileNotFoundError) or "does not exist" in str(error):
        return "no such file or folder there; check the address"
    if "rotocol not known" in str(error):
        text = "use s3, gs, hf, https or another of fsspec's"
        return f"no file system is known for {address.scheme}://; {text}"
    remedy = "check the address and the network"
    if address.scheme in ("s3", "s3a"):
        remedy += "; AWS_ENDPOINT_URL=http://HOST:PORT names a server of your own"
    return f"cannot be reached ({name}: {_shown(error, address)}); {remedy}"


def _shown(error: Exception, address: Address) -> str:
    """The message of an error on one line, without passwords."""
    text = str(error)
    if address.secret:
        text = text.replace(address.secret, str(address))
    return one_line(_PASSWORD.sub("", _QUERY.sub("", text)), 160)
