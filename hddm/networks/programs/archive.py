"""The ``.pt2`` file of a program: a zip archive that is checked as a whole before one entry of it is read.

    NAME/models/model.json                       the graph, which is all that hddm reads
    NAME/data/weights/…, NAME/data/constants/…   for torch: zeros in place of weights, and constants
    NAME/data/sample_inputs/model.pt             empty
    NAME/archive_format, NAME/byteorder, …       marks of the format

An archive that torch writes holds no compressed entries and no pickles. Weights are in the expert's weights
file, and nowhere else.
"""

import io
import re
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path

from hddm.utils.errors import HddmError, one_line
from hddm.utils.files import opened

PROGRAM = "program.pt2"
"""Name of the file in an expert's folder."""
LARGEST = 2**28
"""Bytes of the file. The graph of a network of 10,000 operators takes 10 MB, its constants seldom more."""
LARGEST_GRAPH = 2**26
MOST_ENTRIES = 2**16
_MODEL = "models/model.json"
_EMPTY = "data/sample_inputs/model.pt"
_ENTRIES = re.compile(
    r"models/model\.json|data/sample_inputs/model\.pt|data/weights/(weight_\d{1,6}|model_weights_config\.json)"
    r"|data/constants/(tensor_\d{1,6}|model_constants_config\.json)|archive_format|archive_version|byteorder"
    r"|\.data/version|\.data/serialization_id"
)
_ROOT = re.compile(r"[A-Za-z0-9_]\w{0,99}")
_LOCAL_HEADER = 30


def read_archive(path: Path) -> bytes:
    """The bytes of a program's file; raises `HddmError` for a file of more than the bound."""
    with opened(path) as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise HddmError(f"{path}: has more than {LARGEST:,} bytes, and is no program")
    return content


def graph_text(content: bytes) -> bytes:
    """The JSON text of the graph in a program's file, of which these are the bytes.

    Raises `HddmError` for a file that is no such archive, for any entry beside those named above, twice, on
    top of another, compressed or encrypted, and for sizes beyond the bounds.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = _checked(archive.infolist(), len(content))
            return archive.read(entries[_MODEL])
    except HddmError:
        raise
    # zipfile raises these for damaged entries.
    except (
        zipfile.BadZipFile,
        struct.error,
        EOFError,
        NotImplementedError,
        ValueError,
        OverflowError,
        RuntimeError,
        OSError,
    ) as error:
        raise HddmError(f"cannot be read as a zip archive ({one_line(error)})") from error


def _checked(entries: Sequence[zipfile.ZipInfo], size: int) -> dict[str, zipfile.ZipInfo]:
    """The entries by their names within the archive's one folder."""
    if len(entries) > MOST_ENTRIES:
        raise HddmError(f"has {len(entries)} entries, of {MOST_ENTRIES} at most")
    found = dict[str, zipfile.ZipInfo]()
    roots = set[str]()
    for one in entries:
        # What zipfile cuts off, as after a zero byte, is a part of the name here.
        shown = repr(one_line(one.orig_filename, 60))
        root, _, name = one.orig_filename.partition("/")
        if _ROOT.fullmatch(root) is None or _ENTRIES.fullmatch(name) is None:
            raise HddmError(f"has an entry {shown}, which is no part of a program")
        if name in found:
            raise HddmError(f"has the entry {shown} twice")
        if one.compress_type != zipfile.ZIP_STORED or one.compress_size != one.file_size:
            raise HddmError(f"has a compressed entry {shown}, which a program has not")
        if one.flag_bits & 1:
            raise HddmError(f"has an encrypted entry {shown}")
        roots.add(root)
        found[name] = one
    if len(roots) > 1:
        raise HddmError(f"has entries in {len(roots)} folders, and a program has one")
    _check_places(entries, size)
    if _MODEL not in found:
        raise HddmError(f"has no {_MODEL}")
    if found[_MODEL].file_size > LARGEST_GRAPH:
        text = f"has a graph of {found[_MODEL].file_size:,} bytes, of {LARGEST_GRAPH:,} at most"
        raise HddmError(text)
    if _EMPTY in found and found[_EMPTY].file_size:
        raise HddmError(f"has something in {_EMPTY}, a pickle, which hddm.export leaves empty")
    return found


def _check_places(entries: Sequence[zipfile.ZipInfo], size: int) -> None:
    """Refuse entries that lie on top of each other, or beyond the end of the file."""
    ordered = sorted(entries, key=lambda one: one.header_offset)
    end = 0
    for one in ordered:
        if one.header_offset < end:
            shown = repr(one_line(one.orig_filename, 60))
            raise HddmError(f"has an entry {shown} that lies on top of another")
        end = one.header_offset + _LOCAL_HEADER + one.file_size
    if end > size:
        raise HddmError(f"has entries of more bytes than its own {size:,}")
