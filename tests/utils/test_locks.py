"""Locks: one holder, named to the next, also where the file is removed in between."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hddm.utils.errors import HddmError
from hddm.utils.files import locked


def _is_held(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_a_lock_is_held_in_its_block_alone_and_names_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "new" / "lock"
    for _ in range(2):
        with locked(path, "taken"):
            assert _is_held(path)
            holder = path.read_text().strip()
            assert holder.startswith("process ")
            with (
                pytest.raises(HddmError, match=f"^taken \\({holder}\\); wait for it, or choose another$"),
                locked(path, "taken"),
            ):
                pytest.fail("the block must not run")
        assert not _is_held(path)


@pytest.mark.parametrize("remove", [lambda path: path.unlink(), lambda path: shutil.rmtree(path.parent)])
def test_a_removed_lock_is_taken_anew(
    remove: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, flock, calls = tmp_path / "draft" / "lock", fcntl.flock, []

    def late(file: Any, how: int) -> None:
        """As after another process ended between the opening and this."""
        # Not of files with which filelock finds out whether the folder has locks at all.
        if path.exists() and os.path.samestat(os.fstat(file), path.stat()):
            if not calls:
                remove(path)
            calls.append(how)
        flock(file, how)

    with monkeypatch.context() as patched:
        patched.setattr("fcntl.flock", late)
        holding = locked(path, "taken")
        holding.__enter__()
    assert len(calls) == 2
    assert _is_held(path)
    holding.__exit__(None, None, None)
    assert not _is_held(path)
