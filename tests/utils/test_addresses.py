"""Addresses: what is one, what of it is shown, and what is fetched from it."""

import errno
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest

from hddm.utils import fetching
from hddm.utils.addresses import Address, address_of, as_path, at_hand, on_disk
from hddm.utils.errors import HddmError
from hddm.utils.fetching import (
    Entry,
    Listing,
    RemoteFile,
    fetched,
    held,
    listed,
    listed_for_streaming,
    version_of,
)
from hddm.utils.hub import HubName
from tests.artefacts import Command, contents, refusal
from tests.s3 import KEY, S3, SECRET, free_port, in_its_own

SIGNED = "https://me:hunter2@host.example/folder/one.tar?X-Signature=deadbeef&X-Key=abc"


def at(text: str) -> Address:
    found = address_of(text)
    assert found is not None
    return found


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty folder of fsspec's file system in memory, and an empty cache."""
    monkeypatch.setenv("HDDM_CACHE", str(tmp_path / "cache"))
    fsspec.filesystem("memory").store.clear()
    return f"memory://{tmp_path.name}"


def write(address: str, content: bytes) -> None:
    with fsspec.open(address, "wb") as file:
        file.write(content)


@pytest.mark.parametrize(
    "text", ["s3://bucket/a b/c", "gs://b", "hf://datasets/o/n@v1/x", "https://h.example/x.tar"]
)
def test_an_address_stays_what_it_was_as_text_as_a_path_and_by_a_slash(text: str) -> None:
    for one in (text, Path(text), at(text)):
        assert str(address_of(one)) == text
    assert str(at(text) / "d" / "e.png") == f"{text}/d/e.png"
    assert isinstance((at(text) / "d").parent, Address)
    assert not at(text).exists()


def test_a_path_of_this_machine_is_no_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in ("a/b", "/a/b", "OWNER/NAME@main", "C:/images", "a:b", "s3:", str(tmp_path)):
        assert address_of(text) is None
        assert type(as_path(text)) is type(Path())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s3:" / "bucket").mkdir(parents=True)
    assert address_of("s3://bucket") is None
    assert on_disk(Path("s3://bucket")) == Path("s3:/bucket")


def test_passwords_and_signatures_are_in_no_text_of_an_address() -> None:
    address = at(SIGNED)
    assert str(address) == "https://host.example/folder/one.tar"
    assert address.opened_as == SIGNED
    for one in (address, address.parent, address / "x", address.with_name("y"), Path(address)):
        for shown in (str(one), repr(one), os.fspath(one)):
            assert not any(word in shown for word in ("hunter2", "me@", "deadbeef", "X-"))
    # A container, and no user.
    assert str(at("abfs://box@account.example/x")) == "abfs://box@account.example/x"


def test_no_message_cache_or_record_holds_a_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HDDM_CACHE", str(tmp_path))
    port = free_port()
    place = f"http://me:hunter2@127.0.0.1:{port}/one.tar?X-Signature=deadbeef"
    with pytest.raises(HddmError) as caught:
        on_disk(Path(place))
    told = f"{caught.value!r} {caught.value.__cause__} {caught.value.__suppress_context__}"
    assert f"http://127.0.0.1:{port}/one.tar: cannot be reached" in told
    assert not any(word in told for word in ("hunter2", "deadbeef"))
    assert caught.value.__suppress_context__
    folder = tmp_path / "web"
    folder.mkdir()
    (folder / "one.tar").write_bytes(b"whole")
    command = [sys.executable, "-m", "http.server", str(port), "-d", str(folder), "-b", "127.0.0.1"]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=quiet, stderr=quiet) as server:
        try:
            for _ in range(100):
                try:
                    found = on_disk(Path(place))
                    break
                except HddmError:
                    time.sleep(0.1)
            assert found.read_bytes() == b"whole"
            assert refusal(on_disk, Path(f"http://127.0.0.1:{port}/two.tar")).endswith(
                "no such file or folder there; check the address"
            )
            # A page that lists files is a folder.
            assert {one.name for one in on_disk(Path(f"http://127.0.0.1:{port}")).iterdir()} == {
                "one.tar"
            }
        finally:
            server.kill()
    for path in tmp_path.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        assert b"hunter2" not in content
        assert b"deadbeef" not in content
        assert "hunter2" not in str(path)
        assert "deadbeef" not in str(path)


def test_a_folder_is_fetched_once_and_again_when_a_file_of_it_changes(memory: str) -> None:
    write(f"{memory}/set/a.txt", b"a")
    write(f"{memory}/set/deep/b.txt", b"b")
    first = on_disk(Path(f"{memory}/set"))
    assert first.name == "set"
    assert (first / "deep" / "b.txt").read_bytes() == b"b"
    assert fetched(at(f"{memory}/set")) == first
    write(f"{memory}/set/a.txt", b"c")
    second = fetched(at(f"{memory}/set"))
    assert second != first
    assert (second / "a.txt").read_bytes() == b"c"
    assert (first / "a.txt").read_bytes() == b"a"


def test_a_fetch_that_failed_goes_on_with_the_files_that_are_missing(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    monkeypatch.setattr(fetching, "_BATCH", 1)
    for name in "abc":
        write(f"{memory}/set/{name}", name.encode())
    whole, asked = MemoryFileSystem.get_file, []

    def get_file(self: MemoryFileSystem, rpath: str, lpath: str, **more: object) -> None:
        asked.append(rpath[-1])
        if len(asked) == 2:
            raise ConnectionResetError("the other side is gone")
        whole(self, rpath, lpath, **more)

    monkeypatch.setattr(MemoryFileSystem, "get_file", get_file)
    text = "cannot be reached (ConnectionResetError: the other side is gone)"
    assert refusal(fetched, at(f"{memory}/set")).startswith(f"{memory}/set: {text}")
    found = fetched(at(f"{memory}/set"))
    assert asked == ["a", "b", "b", "c"]
    assert {path.name: path.read_text() for path in found.iterdir()} == {
        "a": "a",
        "b": "b",
        "c": "c",
    }


def test_names_that_lead_out_of_the_folder_are_refused(memory: str) -> None:
    fsspec.filesystem("memory").store[f"/{memory.partition('://')[2]}/set/../x"] = (
        fsspec.filesystem("memory").open("/y", "wb")
    )
    assert "points outside the folder" in refusal(fetched, at(f"{memory}/set"))


def test_the_cache_keeps_to_its_bound_and_what_is_in_use(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that are streamed go once they are read; a folder that was opened stays."""
    size = 2_000_000
    monkeypatch.setenv("HDDM_CACHE_SIZE", "5MB")
    for number in range(6):
        write(f"{memory}/tars/{number}.tar", bytes([number]) * size)
    write(f"{memory}/kept", b"k" * 1_000_000)
    kept = fetched(at(f"{memory}/kept"))
    listing = listed_for_streaming(at(f"{memory}/tars"))
    most = 0
    for _ in range(2):
        for number, one in enumerate(listing.files):
            with at_hand(at(f"{memory}/tars") / one.name) as place:
                assert place.read_bytes() == bytes([number]) * size
                on_disk_now = sum(p.stat().st_size for p in (tmp_path / "cache").rglob("*.tar"))
                most = max(most, on_disk_now)
    assert most == 2 * size
    assert kept.is_file()
    # Two at once are in use, and neither goes.
    zero, one, two = (at(f"{memory}/tars/{number}.tar") for number in range(3))
    with held(zero) as first, held(one) as second, held(two):
        assert first.is_file()
        assert second.is_file()
    monkeypatch.setenv("HDDM_CACHE_SIZE", "5")
    assert "HDDM_CACHE_SIZE=5: is no size" in refusal(held(at(f"{memory}/tars/3.tar")).__enter__)


def test_a_file_that_changed_since_it_was_listed_is_refused(memory: str) -> None:
    write(f"{memory}/tars/0.tar", b"before")
    listed_for_streaming(at(f"{memory}/tars"))
    write(f"{memory}/tars/0.tar", b"after it")
    told = refusal(held(at(f"{memory}/tars/0.tar")).__enter__)
    assert told.endswith("it changed since it was opened, or on the way; repeat the command")
    write(f"{memory}/tars/1.tar", b"before")
    listed_for_streaming(at(f"{memory}/tars"))
    write(f"{memory}/tars/1.tar", b"afters")
    told = refusal(held(at(f"{memory}/tars/1.tar")).__enter__)
    changed = "changed while it was fetched, or since it was opened; repeat the command"
    assert told == f"{memory}/tars/1.tar: {changed}"


def test_a_folder_that_changes_while_it_is_fetched_is_no_mixture(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both files change to others of the same size, between the first and the second."""
    for name in "az":
        write(f"{memory}/set/{name}", b"old")
    whole = fetching.batches
    monkeypatch.setattr(
        fetching, "batches", lambda files: itertools.chain(*(whole([one]) for one in files))
    )
    advance = fetching.Progress.__call__

    def changed(self: fetching.Progress, number: int = 1) -> None:
        advance(self, number)
        for name in "az":
            write(f"{memory}/set/{name}", b"new")

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(fetching.Progress, "__call__", changed)
        assert "changed while it was fetched" in refusal(fetched, at(f"{memory}/set"))
    assert contents(fetched(at(f"{memory}/set"))) == {"a": b"new", "z": b"new"}


def test_addresses_that_differ_in_their_query_are_two_files() -> None:
    one, other = (address_of(f"https://host/get.tar?id={k}") for k in (1, 2))
    assert one is not None
    assert other is not None
    assert str(one) == str(other) == "https://host/get.tar"
    entries = []
    for address in (one, other):
        file = RemoteFile("get.tar", "get.tar", 5, "5")
        entries.append(Entry.of(Listing(address, [file], False)).folder)
    assert entries[0] != entries[1]


def test_a_file_without_a_hash_or_a_time_is_known_to_no_other_process() -> None:
    info = {"name": "a", "size": 3}
    code = f"from hddm.utils.fetching import version_of; print(version_of({info}))"
    other = subprocess.run([sys.executable, "-c", code], **in_its_own()).stdout.strip()
    assert version_of(info) == version_of(info) != other
    for known in ({"ETag": "x"}, {"modify": "20260101"}, {"sha": "abc"}):
        assert version_of(info | known) == f"{next(iter(known.values()))} 3"


def test_what_no_process_uses_goes_also_if_it_is_incomplete_or_was_marked_by_one_that_is_gone(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was killed leaves a mark that nobody locks, and a fetch that was cut off."""
    monkeypatch.setenv("HDDM_CACHE_SIZE", "3MB")
    cache = tmp_path / "cache"
    for number in range(3):
        left = cache / f"left-{number}" / "content" / "set"
        left.mkdir(parents=True)
        (left / "part").write_bytes(bytes(1_000_000))
        (cache / f"left-{number}" / "used-of-another-host").touch()
    unsent = cache / "work-of-a-result" / "content" / "a"
    unsent.mkdir(parents=True)
    write(f"{memory}/new", b"n" * 2_500_000)
    code = f"""
import fcntl, sys
mark = open({str(cache / "left-2" / "used-now")!r}, "w")
fcntl.flock(mark, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as user:
        assert user.stdout.readline() == "locked\n"
        fetched(at(f"{memory}/new"))
        user.stdin.close()
    left_over = sorted(path.name for path in cache.glob("left-*"))
    assert left_over == ["left-2"]
    assert unsent.is_dir()


@pytest.mark.parametrize("name", ["drafts", "lock", "complete.json"])
def test_names_of_the_cache_itself_are_names_like_any_other(memory: str, name: str) -> None:
    write(f"{memory}/{name}/a", b"a")
    for _ in range(2):
        assert contents(fetched(at(f"{memory}/{name}"))) == {"a": b"a"}


def test_a_password_may_have_an_at_sign_and_a_user_alone_is_none() -> None:
    address = at("https://me:p@ssword@host/x.tar")
    assert str(address) == "https://host/x.tar"
    assert address.opened_as == "https://me:p@ssword@host/x.tar"
    assert (address / "one").opened_as == "https://me:p@ssword@host/x.tar/one"
    user = at("sftp://me@host/x")
    assert (str(user), user.secret) == ("sftp://me@host/x", "")
    told = refusal(address_of, "https://me:pa/ss@host/x.tar")
    assert told == "https://…: write / in a password as %2F, and @ as %40"
    for plain in ("https://host:8080/a@b", "hf://owner/name@v1/a", "s3://bucket/a:b/c@d"):
        assert str(at(plain)) == plain


def test_a_fault_of_this_machines_disk_is_not_blamed_on_the_address(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(f"{memory}/a", b"a")

    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "somewhere")

    monkeypatch.setattr(fsspec.AbstractFileSystem, "get", full)
    with pytest.raises(OSError, match="No space left on device"):
        fetched(at(f"{memory}/a"))


def test_schemes_without_a_package_or_a_file_system_say_what_to_do() -> None:
    assert refusal(listed, at("nothing://a/b")) == (
        "nothing://a/b: no file system is known for nothing://; use s3, gs, hf, https or another of fsspec's"
    )
    told = refusal(listed, at("smb://host/share/x"))
    assert told.startswith("smb://host/share/x: needs a package that is not installed")
    assert told.endswith("install it")


def test_a_model_repository_at_an_hf_address_is_a_name_on_the_hub() -> None:
    assert HubName.at(at("hf://owner/name")) == HubName("owner/name", "", None)
    assert HubName.at(at("hf://owner/name@v1/a/b")) == HubName("owner/name", "a/b", "v1")
    assert HubName.at(at("hf://datasets/owner/name/x")) is None
    assert HubName.at(at("s3://owner/name")) is None


def test_faults_of_a_bucket_are_one_line_that_names_the_address(
    s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refusal(fetched, at("s3://bucket/none")) == (
        "s3://bucket/none: no such file or folder there; check the address"
    )
    s3.files.pipe("bucket/set/a", b"a")
    assert (fetched(at("s3://bucket/set")) / "a").read_bytes() == b"a"
    code = "from hddm.utils.addresses import *; on_disk(Path('s3://bucket/set'))"
    denied = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_PROFILE": ""}
    refused = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_port()}"}
    for changes, told in ((denied, "access is denied"), (refused, "cannot be reached")):
        own = in_its_own(**changes, HOME="/nonexistent", AWS_EC2_METADATA_DISABLED="true")
        ended = subprocess.run([sys.executable, "-c", code], **own)
        last = ended.stderr.strip().splitlines()[-1]
        assert f"HddmError: s3://bucket/set: {told}" in last
        assert SECRET not in ended.stderr
        assert KEY not in ended.stderr


@pytest.mark.integration
@pytest.mark.parametrize(
    "words",
    [
        "train all --shards {shards} --objective flow --out",
        "train router {shards} --out",
        "convert {ddpm} --out",
        "sample {ddpm} --out",
        "merge {ddpm} {ddpm} --out",
        "calibrate {ddpm} --out",
        "distill {ddpm} --out",
        "data digits --out",
        "quickstart --out",
        "benchmark digits --out",
        "evaluate {images} --reference {images} --out",
    ],
)
def test_a_verb_that_writes_on_this_machine_alone_refuses_an_address_and_makes_no_folder(
    words: str,
    shards: Path,
    images: Path,
    ddpm_expert: Path,
    tmp_path: Path,
    hddm: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    named = words.format(shards=shards, images=images, ddpm=ddpm_expert)
    code, out, error = hddm(*named.split(), "s3://bucket/some/where")
    assert (code, out) in ((1, ""), (2, ""))
    assert error.startswith("hddm: s3://bucket/some/where: is an address"), error
    assert contents(tmp_path) == {}


@pytest.mark.integration
def test_messages_name_the_address_and_not_its_copy(
    images: Path, tmp_path: Path, hddm: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HDDM_CACHE", str(tmp_path / "cache"))
    code, out, error = hddm("data", "check", f"file://{images}")
    assert (code, error) == (0, "")
    assert out.startswith(f"file://{images}: 48 images")
    assert str(tmp_path) not in out


def test_a_size_of_the_cache_that_is_none_is_refused_also_when_nothing_is_fetched(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(f"{memory}/a", b"a")
    fetched(at(memory))
    monkeypatch.setenv("HDDM_CACHE_SIZE", "abc")
    assert refusal(fetched, at(memory)) == (
        "HDDM_CACHE_SIZE=abc: is no size; write a number with its unit, as 50GB"
    )


def test_a_scheme_may_be_written_in_capitals() -> None:
    assert str(at("S3://bucket/Name")) == "s3://bucket/Name"
