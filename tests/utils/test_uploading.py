"""Uploads: what marks a result comes last, what is there is not sent again, and kills lose nothing."""

import hashlib
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hddm.utils import uploading
from hddm.utils.addresses import Address, address_of
from hddm.utils.errors import HddmError
from hddm.utils.fetching import fetched
from hddm.utils.files import write_json
from hddm.utils.uploading import produced, upload, work_folder
from tests.artefacts import Command, contents, refusal
from tests.s3 import S3, in_its_own

RECORD = "expert.json"


def at(text: str) -> Address:
    found = address_of(text)
    assert found is not None
    return found


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Address:
    """A folder by the address of a file system that renames drafts."""
    monkeypatch.setenv("HDDM_CACHE", str(tmp_path / "cache"))
    return at(f"file://{tmp_path}/remote")


def result(folder: Path) -> Path:
    """A folder as of an expert."""
    (folder / "deep").mkdir(parents=True)
    for number in range(4):
        (folder / "deep" / f"{number}.bin").write_bytes(bytes([number]) * 1000)
    (folder / "deep" / "manifest.json").write_text("{}")
    (folder / "manifest.json").write_text("{}")
    (folder / ".verified.json").write_text("{}")
    write_json(folder / RECORD, {"format": "1"})
    return folder


class Sent:
    """Names in the order in which they were sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.fails_at = -1
        put = uploading._put

        def noted(there: Any, files: Any, *more: Any) -> None:
            self.names += [one.name for one in files]
            if 0 <= self.fails_at < len(self.names):
                raise ConnectionResetError("the other side is gone")
            put(there, files, *more)

        monkeypatch.setattr(uploading, "_put", noted)


def test_contents_come_first_and_the_record_last(
    remote: Address, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, sent = result(tmp_path / "own"), Sent(monkeypatch)
    upload(folder, remote, RECORD)
    assert sent.names[:4] == [f"deep/{number}.bin" for number in range(4)]
    assert sent.names[4:] == ["deep/manifest.json", "manifest.json", RECORD]
    there = {name: one for name, one in contents(folder).items() if not name.startswith(".")}
    assert contents(tmp_path / "remote") == there
    assert contents(fetched(remote)) == there


def test_an_upload_goes_on_with_what_is_missing_or_was_changed_there(
    remote: Address, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, sent = result(tmp_path / "own"), Sent(monkeypatch)
    sent.fails_at = 5
    told = refusal(upload, folder, remote, RECORD)
    assert told.startswith(f"{remote}: cannot be reached (ConnectionResetError")
    assert told.endswith("what was uploaded stays, and the same command continues")
    assert not (tmp_path / "remote" / RECORD).exists()
    sent.names.clear()
    time.sleep(0.01)
    (tmp_path / "remote" / "deep" / "2.bin").write_bytes(b"\xff" * 1000)
    (folder / "deep" / "3.bin").write_bytes(b"\xfe" * 1000)
    sent.fails_at = -1
    upload(folder, remote, RECORD)
    assert sent.names == ["deep/2.bin", "deep/3.bin", "manifest.json", RECORD]
    assert (tmp_path / "remote" / "deep" / "2.bin").read_bytes() != b"\xff" * 1000
    assert not list((tmp_path / "cache" / "uploads").iterdir())


def test_files_of_something_else_are_in_the_way_and_stay(remote: Address, tmp_path: Path) -> None:
    """They could become a part of the result, such as held-out images of another partition."""
    other = tmp_path / "remote" / "held_out" / "shard_0" / "manifest.json"
    other.parent.mkdir(parents=True)
    other.write_text("{}")
    folder = result(tmp_path / "own")
    for call in (
        lambda: upload(folder, remote, RECORD),
        lambda: produced(remote, RECORD, {}, [], False, result),
    ):
        with pytest.raises(HddmError) as refused:
            call()
        assert f"{remote}: holds files of something else" in str(refused.value)
        assert "held_out/shard_0/manifest.json" in str(refused.value)
    assert contents(tmp_path / "remote") == {"held_out/shard_0/manifest.json": b"{}"}


def test_what_was_made_of_other_files_is_not_uploaded_for_these(
    remote: Address, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = Sent(monkeypatch)
    source = tmp_path / "source"
    source.mkdir()
    (source / "a").write_bytes(b"before")
    sent.fails_at = 0
    with pytest.raises(HddmError, match="cannot be reached"):
        produced(remote, RECORD, {}, [source], False, result)
    (source / "a").write_bytes(b"afters")
    sent.fails_at = -1
    told = refusal(produced, remote, RECORD, {}, [source], False, result)
    assert "holds a result of other options or files that was not uploaded; remove it" in told
    # The same name in another folder is another source.
    monkeypatch.chdir(tmp_path)
    first = uploading.fingerprint(Path("source"))
    (tmp_path / "b").mkdir()
    shutil.copytree(source, tmp_path / "b" / "source")
    monkeypatch.chdir(tmp_path / "b")
    assert uploading.fingerprint(Path("source")) != first


@pytest.mark.integration
def test_an_ensemble_is_pushed_to_an_address_and_private_is_no_option_of_it(
    ensemble: Path, remote: Address, tmp_path: Path, hddm: Command
) -> None:
    assert hddm("push", ensemble, str(remote))[0] == 0
    there = contents(tmp_path / "remote")
    for name, content in contents(ensemble).items():
        assert there[name] == content
    assert b"ensemble" in there["README.md"]
    code, _, error = hddm("push", ensemble, f"{remote}-other", "--private")
    assert (code, "--private: is for a hub" in error) == (2, True)
    code, _, error = hddm("push", ensemble, str(remote))
    assert (code, f"{remote} exists: choose another address" in error) == (1, True)


def test_a_result_is_made_once_however_often_its_upload_fails(
    remote: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, made = Sent(monkeypatch), []

    def make(folder: Path) -> None:
        made.append(folder)
        result(folder)

    sent.fails_at = 2
    for _ in range(2):
        with pytest.raises(HddmError, match="cannot be reached"):
            produced(remote, RECORD, {"seed": 1}, [], False, make)
    other = refusal(produced, remote, RECORD, {"seed": 2}, [], False, make)
    assert "holds a result of other options or files that was not uploaded" in other
    assert "seed: was 1, is 2" in other
    sent.fails_at = -1
    assert produced(remote, RECORD, {"seed": 1}, [], False, make) == work_folder(remote)
    assert len(made) == 1
    assert refusal(produced, remote, RECORD, {"seed": 1}, [], False, make) == (
        f"{remote} exists: choose another address"
    )
    assert "nothing is replaced at an address" in refusal(
        produced, remote, RECORD, {"seed": 1}, [], True, make
    )


def test_results_go_to_no_whole_bucket_and_no_address_with_a_password() -> None:
    for place, told in (
        ("s3://bucket", "is a whole bucket"),
        ("sftp://me:hunter2@host.example/x", "without a password or query"),
        ("s3://bucket/x?sig=deadbeef", "without a password or query"),
        ("https://host.example/x", "nothing can be written there"),
    ):
        refused = refusal(uploading.refuse_existing, at(place), RECORD)
        assert told in refused
        assert "hunter2" not in refused
        assert "deadbeef" not in refused


UPLOAD = """
from pathlib import Path
from hddm.utils.addresses import address_of
from hddm.utils.uploading import upload
print("go", flush=True)
upload(Path({folder!r}), address_of({address!r}), "expert.json")
"""


def killed_uploads(s3: S3, tmp_path: Path, kills: int) -> int:
    """Kill uploads at random moments, and repeat them; the number that were killed before their end."""
    draws = random.Random(0)
    interrupted = 0
    # Seconds of the shortest upload that came to its end, so that most kills come before it.
    longest = 2.0
    for number in range(kills):
        folder = tmp_path / f"result_{number}"
        (folder / "parts").mkdir(parents=True)
        for part in range(6):
            (folder / "parts" / f"{part}.bin").write_bytes(draws.randbytes(400_000))
        write_json(folder / "manifest.json", {"number": number})
        write_json(folder / RECORD, {"format": "1"})
        expected = contents(folder)
        place = f"s3://bucket/result_{number}"
        code = UPLOAD.format(folder=str(folder), address=place)
        own = in_its_own()
        own.pop("capture_output")
        for wait in (draws.uniform(0, longest), draws.uniform(0, longest), None):
            pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            with subprocess.Popen([sys.executable, "-c", code], **own, **pipes) as process:
                assert process.stdout is not None
                process.stdout.readline()
                began = time.perf_counter()
                try:
                    process.wait(timeout=wait)
                    longest = min(longest, time.perf_counter() - began)
                except subprocess.TimeoutExpired:
                    process.send_signal(signal.SIGKILL)
                    interrupted += 1
                if wait is None:
                    assert process.returncode == 0, process.stderr and process.stderr.read()
            there = s3.contents(f"result_{number}")
            for name, content in there.items():
                assert content == expected[name]
            if RECORD in there:
                assert there == expected
        # What was there before is as it was.
        for before in range(number + 1):
            digest = hashlib.sha256(s3.files.cat_file(f"bucket/result_{before}/manifest.json"))
            local = (tmp_path / f"result_{before}" / "manifest.json").read_bytes()
            assert digest.digest() == hashlib.sha256(local).digest()
    return interrupted


@pytest.mark.slow
def test_an_upload_that_is_killed_leaves_no_half_file_and_goes_on(s3: S3, tmp_path: Path) -> None:
    killed_uploads(s3, tmp_path, 1)


@pytest.mark.slow
def test_uploads_killed_at_many_moments_leave_whole_files_and_go_on(s3: S3, tmp_path: Path) -> None:
    assert killed_uploads(s3, tmp_path, 14) >= 10
