"""An encoding that was killed goes on, and gives the same bytes as one that was not."""

import contextlib
import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hddm.utils.errors import HddmError
from hddm.utils.work import Draft, open_draft
from tests.artefacts import contents, killed_at_every_change, largest_file, refusal
from tests.component_files import write_vae
from tests.shard_files import encode, write_partition

ROWS = 4
FILES = 12
"""Of data: two shards of 20 images and held-out ones of 4, 4 rows a file."""


def _encode(
    root: Path,
    out: Path,
    overwrite: bool = False,
    on_images: Callable[[int], None] = lambda number: None,
    **options: Any,
) -> list[int]:
    """Encode; the numbers of images that came at a time."""
    numbers: list[int] = []

    def note(number: int) -> None:
        numbers.append(number)
        on_images(number)

    options = {"vae": root / "vae", "random_flip": True, "batch_size": 3, **options}
    encode(root / "shards", out, ROWS, overwrite, note, **options)
    return numbers


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A partition, a VAE, and ``whole``: what an uninterrupted run makes of them."""
    root = tmp_path_factory.mktemp("resume")
    write_partition(root / "shards", held_out=4)
    write_vae(root / "vae")
    _encode(root, root / "whole")
    assert len(list((root / "whole").rglob("data-*"))) == FILES
    return root


def _open(
    target: Path, identity: dict[str, Any], overwrite: bool = False
) -> contextlib.AbstractContextManager[Draft]:
    return open_draft(target, "manifest.json", identity, "encoding", lambda: "it is kept", overwrite)


def _records(out: Path) -> list[Path]:
    return sorted((out.parent / f".{out.name}.encoding" / "parts").rglob("*.done.json"))


def test_a_killed_process_is_gone_on_with_to_the_same_bytes(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    # Forked, it has no libraries to import: that would take longer than all else.
    context = multiprocessing.get_context("fork")
    for wanted in (1, 4, 7):
        # With pauses, in which a kill hits.
        process = context.Process(target=_encode, args=(root, out, False, lambda _: time.sleep(0.01)))
        process.start()
        deadline = time.monotonic() + 60
        while len(_records(out)) < wanted and process.is_alive() and time.monotonic() < deadline:
            time.sleep(0.002)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert not out.exists()
        assert wanted <= len(_records(out)) < FILES
    kept = len(_records(out))
    # A file that is done counts at once, one that is encoded in batches of 3.
    assert _encode(root, out).count(ROWS) == kept
    assert contents(out) == contents(root / "whole")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def _interrupted(root: Path, out: Path, after: int) -> Path:
    """The draft that a run leaves that fails after ``after`` images."""
    seen: list[int] = []

    def fail(number: int) -> None:
        seen.append(number)
        if sum(seen) > after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _encode(root, out, on_images=fail)
    assert not out.exists()
    return out.parent / f".{out.name}.encoding"


def test_a_file_that_a_power_failure_spoilt_is_made_again(root: Path, tmp_path: Path) -> None:
    draft = _interrupted(root, tmp_path / "out", 13)
    files = sorted((draft / "whole").rglob("data-*"))
    assert len(files) == 3
    files[1].write_bytes(files[1].read_bytes()[:-9] + bytes(9))
    records = _records(tmp_path / "out")
    records[2].write_text("{")
    (draft / "whole" / "shard_0" / ".data-00003.safetensors.part-4711").write_bytes(b"half")
    assert _encode(root, tmp_path / "out")[:5] == [4, 3, 1, 3, 1]
    assert contents(tmp_path / "out") == contents(root / "whole")


def test_an_unfinished_encoding_of_other_options_is_named(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    draft = _interrupted(root, out, 9)
    told, *details = refusal(_encode, root, out, dtype="float32").splitlines()
    assert f"{draft} holds an unfinished encoding of other options" in told
    assert any(line.startswith("  encoding.dtype: ") and "float32" in line for line in details)
    assert len(_records(out)) == 2
    _encode(root, out, overwrite=True, dtype="float32")
    record = json.loads((out / "shard_0" / "manifest.json").read_text())
    assert record["encoding"]["dtype"] == "float32"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_encoding_goes_on_in_other_batches(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    _interrupted(root, out, 9)
    assert _encode(root, out, batch_size=2)[:4] == [4, 4, 2, 2]
    for path in sorted((root / "whole").rglob("data-*")):
        expected, found = load_file(path), load_file(out / path.relative_to(root / "whole"))
        # Stored in float16, of which a last digit is 2^-11.
        assert all(torch.allclose(found[n].float(), expected[n].float(), 2e-3, 1e-3) for n in expected)


def test_a_draft_goes_before_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next process begins in the moment in which the first one's lock is gone."""
    target, root = tmp_path / "out", tmp_path / ".out.encoding"
    unlink, left, second = os.unlink, [], contextlib.ExitStack()

    def watched(path: Any, **options: Any) -> None:
        unlink(path, **options)
        if Path(path).name == ".out.lock" and not left:
            left.append(root.exists())
            (tmp_path / "out").rename(tmp_path / "first")
            draft = second.enter_context(_open(target, {"a": 2}))
            (draft.whole / "manifest.json").write_text("second")

    with monkeypatch.context() as patched:
        patched.setattr("os.unlink", watched)
        with _open(target, {"a": 1}) as draft:
            (draft.whole / "manifest.json").write_text("first")
    assert left == [False]
    second.close()
    assert contents(tmp_path) == {"first/manifest.json": b"first", "out/manifest.json": b"second"}


@pytest.mark.parametrize("overwrite", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_kill_at_any_change_of_a_draft_leaves_nothing_for_long(overwrite: bool, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def write(content: str) -> None:
        with _open(out, {"a": content}, overwrite) as draft:
            (draft.whole / "manifest.json").write_text(json.dumps({"format": "1.0", "of": content}))
            (draft.whole / f"{content}.txt").write_text(content)

    def check() -> None:
        with contextlib.suppress(HddmError):
            write("new")
        # A run that is refused clears up, too.
        assert contents(tmp_path).keys() == {"out/manifest.json", "out/new.txt"}
        shutil.rmtree(out)
        if overwrite:
            write("old")

    if overwrite:
        write("old")
    assert killed_at_every_change(lambda: write("new"), check) > 8


def test_an_output_that_another_process_finished_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock

    def late(file: Any, how: int) -> None:
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "theirs").touch()
        flock(file, how)

    monkeypatch.setattr("fcntl.flock", late)
    with pytest.raises(HddmError, match="out exists"), _open(tmp_path / "out", {}):
        pytest.fail("the block must not run")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_in_the_middle_leaves_what_is_done(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    draft = _interrupted(root, out, 9)
    with largest_file(1000):
        told = refusal(_encode, root, out)
    remedy = "free some space; what is encoded is kept, and the same command continues"
    assert told == f"{out}: cannot be written (File too large); {remedy}"
    assert not out.exists()
    assert len(_records(out)) == 2
    assert not list(draft.rglob("*.part*"))
    _encode(root, out)
    assert contents(out) == contents(root / "whole")


def test_an_output_larger_than_the_disk_is_refused(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    told = "out: needs 0.00 GB, and 0.00 GB are free on its disk"
    assert told in refusal(_encode, root, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
