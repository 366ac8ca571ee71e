"""What is written is on the disk before it counts: a few files one by one, many by one call."""

import os
import sys
from pathlib import Path

import pytest

from hddm.utils import syncing
from hddm.utils.syncing import _sync_file_system, sync_all

FSYNC = os.fsync


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the files that were waited for one by one, by the system's own calls."""
    found: list[int] = []
    monkeypatch.setattr(syncing, "_sync_file_system", _sync_file_system)

    def noted(descriptor: int) -> None:
        found.append(os.fstat(descriptor).st_ino)
        FSYNC(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    return found


def written(folder: Path, number: int) -> list[Path]:
    paths = [folder / str(k) for k in range(number)]
    for path in paths:
        path.write_bytes(b"content")
    return paths


def test_each_of_a_few_files_is_waited_for(tmp_path: Path, waited: list[int]) -> None:
    paths = written(tmp_path, 5)
    sync_all(paths, tmp_path)
    assert waited == [path.stat().st_ino for path in paths]


def test_many_files_are_waited_for_at_once_or_each_where_the_system_has_no_call(
    tmp_path: Path, waited: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = written(tmp_path, 200)
    if sys.platform == "linux":
        sync_all(paths, tmp_path)
        assert len(waited) == 64
        waited.clear()
    monkeypatch.setattr(syncing, "_sync_file_system", lambda folder: False)
    sync_all(paths, tmp_path)
    assert waited == [path.stat().st_ino for path in paths]
