"""Two processes that write one place: one does, the other leaves it as it is and says so."""

import json
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from hddm.utils.errors import HddmError
from hddm.utils.files import new_folder, put_in_place, write_json, write_whole
from tests.artefacts import contents

FORK = multiprocessing.get_context("fork")
RECORD = "record.json"


def _folder(out: Path, number: int, overwrite: bool) -> None:
    with new_folder(out, RECORD, overwrite) as draft:
        write_json(draft / RECORD, {"format": "1.0", "by": number})
        (draft / f"of_{number}").write_text("")


def _rename(out: Path, number: int, overwrite: bool) -> None:
    """As a writer does that holds no lock of ``out`` itself."""
    draft = out.with_name(f"draft_{number}")
    draft.mkdir()
    write_json(draft / RECORD, {"format": "1.0", "by": number})
    put_in_place(draft, out, overwrite)


def _file(out: Path, number: int, overwrite: bool) -> None:
    write_whole(out, lambda draft: write_json(draft, {"by": number}), overwrite)


def _run(write: Callable[..., None], out: Path, number: int, overwrite: bool, start: Barrier) -> None:
    start.wait()
    try:
        write(out, number, overwrite)
    except HddmError as error:
        out.with_name(f"error_{number}").write_text(error.message)
        os._exit(1)
    os._exit(0)


def _codes(write: Callable[..., None], out: Path, overwrite: bool, num: int = 2) -> list[int]:
    start = FORK.Barrier(num)
    processes = [FORK.Process(target=_run, args=(write, out, k, overwrite, start)) for k in range(num)]
    for one in processes:
        one.start()
    for one in processes:
        one.join()
    return [one.exitcode or 0 for one in processes]


@pytest.mark.integration
@pytest.mark.parametrize("write", [_folder, _rename, _file])
def test_of_two_that_start_together_one_refuses(write: Callable[..., None], tmp_path: Path) -> None:
    for attempt in range(10):
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


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_second_is_refused_while_the_first_is_at_work(overwrite: bool, tmp_path: Path) -> None:
    """Before it does work of hours, and with --overwrite too."""
    with new_folder(tmp_path / "out", RECORD):
        assert _codes(_folder, tmp_path / "out", overwrite, 1) == [1]
        message = (tmp_path / "error_0").read_text()
        assert f"another process is writing it (process {os.getpid()} on " in message


def _folder_of_another(out: Path) -> None:
    out.mkdir()
    (out / "mine").write_text("mine")


@pytest.mark.parametrize(
    "slip_in", [_folder_of_another, lambda out: out.write_text("mine"), lambda out: out.symlink_to("nowhere")]
)
def test_what_came_into_being_meanwhile_stays(slip_in: Callable[[Path], None], tmp_path: Path) -> None:
    for name in ("expected", "out"):
        (tmp_path / name).mkdir()
    slip_in(tmp_path / "expected" / "out")
    out = tmp_path / "out" / "out"
    with pytest.raises(HddmError, match="made by another process in the meantime"), new_folder(out, RECORD):
        slip_in(out)
    assert out.is_symlink() == (tmp_path / "expected" / "out").is_symlink()
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["out"]
