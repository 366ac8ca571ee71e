"""Files and folders appear whole or not at all, whoever else writes them; locks name their holder."""

import errno
import fcntl
import json
import multiprocessing
import os
import platform
import random
import subprocess
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from hddm.utils import copies
from hddm.utils.copies import copy_file, link_or_copy
from hddm.utils.errors import HddmError
from hddm.utils.files import (
    check_absent,
    locked,
    new_folder,
    read_json,
    read_yaml,
    restore,
    sha256_of,
    write_json,
    write_whole,
)
from hddm.utils.records import HashCache
from tests.artefacts import contents, killed_at_every_change, largest_file, refusal
from tests.hostile import grown_by

RECORD = "expert.json"


def test_a_folder_appears_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "target"
    with new_folder(target, RECORD) as draft:
        (draft / "sub").mkdir()
        (draft / "sub" / "file").write_bytes(b"content")
        assert not target.exists()
    assert contents(tmp_path / "deep") == {"target/sub/file": b"content"}


def test_a_failure_leaves_nothing_but_what_was_there(tmp_path: Path) -> None:
    def fail() -> None:
        with new_folder(tmp_path / "target", RECORD, overwrite=True) as draft:
            (draft / "file").write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert not list(tmp_path.iterdir())
    with new_folder(tmp_path / "target", RECORD) as draft:
        write_json(draft / RECORD, {"format": "1.0"})
    before = contents(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        fail()
    assert contents(tmp_path) == before


@pytest.mark.integration
def test_a_kill_at_any_change_leaves_the_old_folder_or_the_new(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "target"

    def write(content: str) -> None:
        with new_folder(target, RECORD, overwrite=True) as draft:
            write_whole(draft / RECORD, lambda path: write_json(path, {"format": content}))

    def check() -> None:
        assert "exists: choose another" in refusal(check_absent, target, RECORD)
        assert read_json(target / RECORD)["format"] in ("old", "new")
        write("old")
        assert [path.name for path in target.parent.iterdir()] == ["target"]

    write("old")
    assert killed_at_every_change(lambda: write("new"), check) > 8
    assert read_json(target / RECORD) == {"format": "new"}


def test_a_link_is_neither_written_through_nor_replaced(tmp_path: Path) -> None:
    with new_folder(tmp_path / "real", RECORD) as draft:
        write_json(draft / RECORD, {"format": "1.0"})
    for name, to in (("link", "real"), ("dangling", "nowhere")):
        link = tmp_path / name
        link.symlink_to(to)
        for overwrite in (False, True):
            told = refusal(check_absent, link, RECORD, overwrite)
            assert told.startswith(f"{link}: is a link to {to}, which is not followed")
        assert os.readlink(link) == to


def test_drafts_of_processes_that_are_gone_are_removed_and_those_of_others_are_not(
    tmp_path: Path,
) -> None:
    """Process numbers come round again: what has this one's is left by another."""
    aside = tmp_path / f".folder.old-{os.getppid()}"
    aside.mkdir()
    restore(tmp_path / "folder")
    assert list(tmp_path.iterdir()) == [aside]
    gone = subprocess.Popen(["true"])
    gone.wait()
    for number in (gone.pid, os.getpid(), os.getppid()):
        (tmp_path / f".target.part-{number}").mkdir()
        (tmp_path / f".target.part-{number}" / "old").write_bytes(b"half")
    with new_folder(tmp_path / "target", RECORD) as draft:
        (draft / "new").write_bytes(b"whole")
    assert contents(tmp_path) == {
        "target/new": b"whole",
        f".target.part-{os.getppid()}/old": b"half",
    }
    for left in (f".file.part-{os.getpid()}", f".file.part-{platform.node()}-{gone.pid}"):
        (tmp_path / left).write_text("half")
    elsewhere = tmp_path / f".file.part-elsewhere-{gone.pid}"
    elsewhere.write_text("half")
    write_whole(tmp_path / "file", lambda draft: draft.open("x").close())
    assert {path.name for path in tmp_path.glob(".file*")} == {
        f".file.part-{os.getpid()}",
        elsewhere.name,
    }


def test_overwriting_spares_what_hddm_did_not_write(tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    check_absent(images, RECORD, overwrite=True)  # nothing in it to lose
    (images / "cat.png").write_bytes(b"pixels")
    # A record's name alone is not enough, nor is another kind of folder.
    (images / RECORD).write_text("{}")
    write_json(images / "router.json", {"format": "1.0"})
    before = contents(tmp_path)
    for target in (images, images / "cat.png"):
        with (
            pytest.raises(HddmError, match="only a folder of the same kind"),
            new_folder(target, RECORD, overwrite=True),
        ):
            pytest.fail("the block must not run")
    assert contents(tmp_path) == before


def test_what_is_no_regular_file_is_named_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    for path in (tmp_path, tmp_path / "config.json", Path("/dev/zero")):
        cache = HashCache(tmp_path / "cache")
        for read in (
            read_json,
            sha256_of,
            read_yaml,
            lambda path, cache=cache: cache.matches(str(path), ""),
        ):
            with pytest.raises(HddmError, match=f"^{path}: is not a regular file"):
                read(path)


def test_a_file_larger_than_any_json_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(2**40)

    def read() -> None:
        assert "has more than 16777216 bytes" in refusal(read_json, tmp_path / "config.json")

    assert grown_by(read) < 64 * 2**20


def test_a_file_is_replaced_once_the_new_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, events, inodes = tmp_path / "record.json", [], []
    path.write_text("old")
    fsync = os.fsync

    def synced(descriptor: int) -> None:
        events.append((os.fstat(descriptor).st_ino, path.read_text()))
        fsync(descriptor)

    def write(draft: Path) -> None:
        draft.write_text("new")
        assert draft.parent == tmp_path
        inodes.append(draft.stat().st_ino)

    monkeypatch.setattr("os.fsync", synced)
    write_whole(path, write)
    # First the draft, while the old file has the name; then the folder, which lists the new one.
    assert events == [(inodes[0], "old"), (tmp_path.stat().st_ino, "new")]
    assert contents(tmp_path) == {"record.json": b"new"}


@pytest.mark.parametrize("way", ["by the system", "refused", "not at all"])
def test_a_copy_is_the_same_whoever_copies(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> int:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    if way != "by the system":
        # Some file systems say that they have copied all, and have copied nothing.
        instead = refuse if way == "refused" else lambda *_: 0
        monkeypatch.setattr(os, "copy_file_range", instead, raising=False)
    monkeypatch.setattr(copies, "_COPIED", 1000)
    (tmp_path / "a").write_bytes(random.Random(0).randbytes(2500))
    heard: list[int] = []
    copy_file(tmp_path / "a", tmp_path / "b", heard.append)
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()
    assert heard == [1000, 1000, 500]
    (tmp_path / "a").write_bytes(b"other")
    for function in (copy_file, link_or_copy):
        assert "File exists" in refusal(function, tmp_path / "a", tmp_path / "b")
    assert len((tmp_path / "b").read_bytes()) == 2500
    (tmp_path / "a").write_bytes(bytes(2500))
    with largest_file(1500):
        refused = refusal(copy_file, tmp_path / "a", tmp_path / "c")
    assert f"{tmp_path / 'c'}: cannot be written (File too large)" in refused
    assert not (tmp_path / "c").exists()


def test_what_cannot_be_linked_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "a").write_bytes(b"content")
    (tmp_path / "b").symlink_to("a")
    link_or_copy(tmp_path / "b", tmp_path / "c")
    assert not (tmp_path / "c").is_symlink()
    assert (tmp_path / "c").read_bytes() == b"content"
    assert (tmp_path / "c").stat().st_nlink == 1


def test_a_full_disk_is_one_line_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "out.safetensors"
    tensors = {"a": np.zeros(4096, dtype=np.uint8)}
    for write in (
        lambda draft: save_file(tensors, draft),
        lambda draft: draft.write_bytes(bytes(4096)),
    ):
        with largest_file(1000), pytest.raises(HddmError) as refused:
            write_whole(path, write)
        assert str(refused.value).startswith(f"{path}: cannot be written (")
        assert "File too large" in str(refused.value)
        assert "\n" not in str(refused.value)
        assert not list(tmp_path.iterdir())


def test_what_its_writer_made_for_the_owner_alone_is_for_whom_the_folder_is(tmp_path: Path) -> None:
    with new_folder(tmp_path / "out", RECORD) as out:
        (out / "weights").touch(0o600)
    assert (tmp_path / "out" / "weights").stat().st_mode & 0o777 == (
        tmp_path / "out"
    ).stat().st_mode & 0o666

    def write(draft: Path) -> None:
        draft.write_text("whole")
        draft.chmod(0o600)

    for mode in (0o700, 0o755):
        tmp_path.chmod(mode)
        write_whole(tmp_path / "file", write)
        assert (tmp_path / "file").stat().st_mode & 0o777 == mode & 0o666


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
                pytest.raises(
                    HddmError, match=f"^taken \\({holder}\\); wait for it, or choose another$"
                ),
                locked(path, "taken"),
            ):
                pytest.fail("the block must not run")
        assert not _is_held(path)


FORK = multiprocessing.get_context("fork")


def _folder(out: Path, number: int, overwrite: bool) -> None:
    with new_folder(out, RECORD, overwrite) as draft:
        write_json(draft / RECORD, {"format": "1.0", "by": number})
        (draft / f"of_{number}").write_text("")


def _file(out: Path, number: int, overwrite: bool) -> None:
    write_whole(out, lambda draft: write_json(draft, {"by": number}), overwrite)


def _run(
    write: Callable[..., None], out: Path, number: int, overwrite: bool, start: Barrier
) -> None:
    start.wait()
    try:
        write(out, number, overwrite)
    except HddmError as error:
        out.with_name(f"error_{number}").write_text(error.message)
        os._exit(1)
    os._exit(0)


def _codes(write: Callable[..., None], out: Path, overwrite: bool, num: int = 2) -> list[int]:
    start = FORK.Barrier(num)
    processes = [
        FORK.Process(target=_run, args=(write, out, k, overwrite, start)) for k in range(num)
    ]
    for one in processes:
        one.start()
    for one in processes:
        one.join()
    return [one.exitcode or 0 for one in processes]


@pytest.mark.integration
@pytest.mark.parametrize("write", [_folder, _file])
def test_of_two_that_start_together_one_refuses(write: Callable[..., None], tmp_path: Path) -> None:
    for attempt in range(5):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        out = folder / "out"
        codes = _codes(write, out, overwrite=False)
        assert sorted(codes) == [0, 1]
        record = out if out.is_file() else out / RECORD
        assert json.loads(record.read_text())["by"] == codes.index(0)
        message = (folder / f"error_{codes.index(1)}").read_text()
        assert message.startswith(f"{out}")
        assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_the_second_is_refused_while_the_first_is_at_work(tmp_path: Path) -> None:
    """Before it does work of hours, and with --overwrite too."""
    with new_folder(tmp_path / "out", RECORD):
        assert _codes(_folder, tmp_path / "out", True, 1) == [1]
        message = (tmp_path / "error_0").read_text()
        assert f"another process is writing it (process {os.getpid()} on " in message


def _folder_of_another(out: Path) -> None:
    out.mkdir()
    (out / "mine").write_text("mine")


@pytest.mark.parametrize(
    "slip_in",
    [_folder_of_another, lambda out: out.write_text("mine"), lambda out: out.symlink_to("nowhere")],
)
def test_what_came_into_being_meanwhile_stays(
    slip_in: Callable[[Path], None], tmp_path: Path
) -> None:
    for name in ("expected", "out"):
        (tmp_path / name).mkdir()
    slip_in(tmp_path / "expected" / "out")
    out = tmp_path / "out" / "out"
    with (
        pytest.raises(HddmError, match="made by another process in the meantime"),
        new_folder(out, RECORD),
    ):
        slip_in(out)
    assert out.is_symlink() == (tmp_path / "expected" / "out").is_symlink()
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["out"]
