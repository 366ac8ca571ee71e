"""The zip archives of `torch.save`, checked before torch opens them."""

import zipfile
from pathlib import Path

import torch

from hddm.errors import HddmError
from hddm.weight_files.kinds import one_line

LARGEST_PICKLE = 8 * 2**20
"""Bytes of the largest pickle that is scanned; the tensors lie outside, thousands in one MB or two."""

_PIECE = 2**20


def read_archive(path: Path) -> tuple[bytes, dict[str, int]]:
    """The pickle of an archive, and the bytes of each record by its name below the archive's folder.

    Raises:
        HddmError: for a damaged archive (sums are checked), compressed or encrypted records, records that
            overlap, names that leave the archive, and any number of pickles but one.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            records = _checked(path, archive.infolist())
            data = archive.read(records["data.pkl"])
            for record in records.values():
                _check_sum(archive, record)
        sizes = {name: record.file_size for name, record in records.items()}
        _compare(path, sizes, data)
    except HddmError:
        raise
    # zipfile also raises struct.error, NotImplementedError, RuntimeError and others on damaged archives.
    except Exception as error:
        raise HddmError(
            f"{path}: cannot be read as a PyTorch archive ({one_line(error)}); fetch it again"
        ) from error
    return data, sizes


def _checked(path: Path, entries: list[zipfile.ZipInfo]) -> dict[str, zipfile.ZipInfo]:
    records: dict[str, zipfile.ZipInfo] = {}
    total = 0
    for entry in entries:
        name = entry.orig_filename
        folder, _, below = name.partition("/")
        parts = name.split("/")
        if not folder or not below or ".." in parts or "\\" in name or "\0" in name:
            raise HddmError(f"{path}: record {name!r} leaves the archive; refused")
        if below in records or folder != entries[0].orig_filename.partition("/")[0]:
            raise HddmError(f"{path}: record {name!r} is there twice or in a second folder; refused")
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise HddmError(f"{path}: record {name!r} is compressed, as torch.save never writes; refused")
        total += entry.file_size
        records[below] = entry
    if total > path.stat().st_size:
        raise HddmError(f"{path}: its records make {total} bytes, more than the file has; refused")
    if "constants.pkl" in records:
        raise HddmError(f"{path}: is a TorchScript program, not weights; save the model's state_dict instead")
    pickles = [name for name in records if name.split("/")[-1] == "data.pkl"]
    if pickles != ["data.pkl"]:
        raise HddmError(f"{path}: holds {len(pickles)} records data.pkl, not one at its top; refused")
    if records["data.pkl"].file_size > LARGEST_PICKLE:
        size = records["data.pkl"].file_size
        raise HddmError(f"{path}: its data.pkl has {size} bytes, more than {LARGEST_PICKLE}; refused")
    return records


def _check_sum(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> None:
    # torch checks no sums of what it maps; zipfile raises at the end of a record.
    with archive.open(record) as file:
        while file.read(_PIECE):
            pass


def _compare(path: Path, sizes: dict[str, int], data: bytes) -> None:
    # Two readers may find two directories in one crafted file; torch must see what was checked here.
    reader = torch._C.PyTorchFileReader(str(path))
    if sorted(reader.get_all_records()) != sorted(sizes) or reader.get_record("data.pkl") != data:
        raise HddmError(f"{path}: has two directories that differ; refused")
