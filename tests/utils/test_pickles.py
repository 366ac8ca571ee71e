"""PyTorch checkpoints: read without running them, refused by name where they want more than tensors."""

import argparse
import collections
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hddm.utils.pickles import read_pickle
from tests.artefacts import refusal
from tests.hostile import ZIP_OR_LEGACY, Calls, address_space, grown_by, save, zipped


def _refusal(path: Path, allow_pickle: bool = True) -> str:
    message = refusal(read_pickle, path, allow_pickle)
    assert str(path) in message
    return message


@ZIP_OR_LEGACY
def test_a_training_checkpoint_is_read_as_it_was_saved(tmp_path: Path, in_zip: bool) -> None:
    network = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(network.parameters())
    network(torch.ones(3)).sum().backward()
    optimizer.step()
    saved = {
        "ema": network.state_dict(),
        "model": {name: torch.arange(2).to(getattr(torch, name)) for name in ("float16", "bfloat16", "bool")},
        "opt": optimizer.state_dict(),
        "args": argparse.Namespace(lr=1e-4, data="x", sizes=(1, 2), seed=None, big=2**40),
        "dtype": torch.float16,
        "size": torch.Size([1, 2]),
    }
    read = read_pickle(save(saved, tmp_path, in_zip), allow_pickle=True)
    assert read.keys() == saved.keys()
    assert read["args"] == saved["args"]
    assert (read["dtype"], read["size"]) == (torch.float16, (1, 2))
    assert isinstance(read["ema"], collections.OrderedDict)
    assert torch.equal(read["ema"]["weight"], network.weight)
    assert {name: str(values.dtype) for name, values in read["model"].items()} == {
        name: f"torch.{name}" for name in saved["model"]
    }
    assert torch.equal(read["opt"]["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


@ZIP_OR_LEGACY
def test_a_bare_state_dict_is_read_and_tied_tensors_stay_tied(tmp_path: Path, in_zip: bool) -> None:
    values = torch.randn(4, 3)
    path = save({"a": values, "b": values, "part": values[1:3], "empty": torch.ones(0, 3)}, tmp_path, in_zip)
    read = read_pickle(path, allow_pickle=True)
    assert torch.equal(read["a"], values)
    assert read["a"].data_ptr() == read["b"].data_ptr()
    assert torch.equal(read["part"], values[1:3])
    assert read["empty"].shape == (0, 3)


def test_eight_bit_and_unsigned_tensors_are_read(tmp_path: Path) -> None:
    saved = {"f8": torch.arange(3).to(torch.float8_e4m3fn), "u16": torch.arange(3).to(torch.uint16)}
    read = read_pickle(save(saved, tmp_path, True), allow_pickle=True)
    assert read["f8"].dtype == torch.float8_e4m3fn
    assert read["f8"].float().tolist() == [0, 1, 2]
    assert read["u16"].tolist() == [0, 1, 2]


def test_tensors_of_an_archive_are_mapped(tmp_path: Path) -> None:
    path = save({"a": torch.zeros(64 * 2**20, dtype=torch.uint8)}, tmp_path, True)
    assert grown_by(lambda: read_pickle(path, allow_pickle=True)) < 8 * 2**20


@ZIP_OR_LEGACY
def test_a_pickle_is_refused_unless_asked_for(tmp_path: Path, in_zip: bool) -> None:
    message = _refusal(save({"a": torch.ones(2)}, tmp_path, in_zip), allow_pickle=False)
    assert "is a pickle" in message
    assert "use the safetensors version, or pass `allow_pickle=True`" in message


@pytest.mark.parametrize("version", ["2.6.0", "2.9.1+cu128", "2.10.0a0"])
def test_a_torch_with_known_holes_is_refused(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save({"a": torch.ones(2)}, tmp_path, True)
    monkeypatch.setattr(torch, "__version__", version)
    assert f"needs torch>=2.10, whose unpickler has no known holes, and this is {version}" in _refusal(path)


def test_a_pickle_named_safetensors_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = save({"a": torch.ones(2)}, tmp_path, True).rename(tmp_path / "a.safetensors")
    assert "rename it to .pt" in _refusal(path)


@ZIP_OR_LEGACY
@pytest.mark.parametrize(
    ("call", "arguments", "name"),
    [
        (os.system, ("touch {sentinel}",), "posix.system"),
        (eval, ("open('{sentinel}', 'w')",), "__builtin__.eval"),
        (getattr, (os, "system"), "__builtin__.getattr"),
        (bytearray, (10**10,), "__builtin__.bytearray"),
        (torch.Tensor, (10**10,), "torch._tensor.Tensor"),
        (torch.load, ("{sentinel}",), "torch.serialization.load"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_code_is_refused_by_name_and_not_run(
    call: Callable[..., Any], arguments: tuple[Any, ...], name: str, in_zip: bool, tmp_path: Path
) -> None:
    sentinel = tmp_path / "ran"
    filled = tuple(a.format(sentinel=sentinel) if isinstance(a, str) else a for a in arguments if a is not os)
    path = save({"a": torch.ones(2), "b": Calls(call, filled)}, tmp_path, in_zip)
    with address_space(256 * 2**20):
        message = _refusal(path)
    assert name.removeprefix("torch._tensor.") in message
    assert not sentinel.exists()


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.", "has protocol 4"),
        (b"(S'true'\niposix\nsystem\n.", "opcode STRING"),
        (b"(iposix\nsystem\n.", "opcode INST"),
        (b"\x8c\x05posix\x8c\x06system\x93)R.", "opcode SHORT_BINUNICODE"),
        (b"\x80\x02cposix\nsystem\nX\x04\x00\x00\x00true\x85R.", "would import 'posix.system'"),
        (b"\x80\x02(cargparse\nNamespace\no.", "opcode OBJ"),
        (b"\x80\x02\x82\x01.", "opcode EXT1"),
        (b"\x80\x02Pabc\n.", "opcode PERSID"),
        (b"\x80\x04}.", "has protocol 4"),
        (b"\x80\x02C\x03a\nb.", "opcode SHORT_BINBYTES"),
        (b"\x80\x02c" + b"a" * 9999 + b"\nb\n.", "would import 'aaaa"),
        (b"\x80\x02X\x03\x00\x00\x00abcQ.", "loads something that is not a storage"),
        (b"\x80\x02ctorch\nFloatStorage\nJ\xff\xff\xff\x7f\x85R.", "calls an unknown function"),
        (b"\x80\x02ccollections\nOrderedDict\n]\x85R.", "odd arguments"),
        (b"\x80\x02cargparse\nNamespace\n)\x81}\x86b.", "broken pickle"),
        (b"\x80\x02cargparse\nNamespace\n)\x81)b.", "a state that is not a dictionary"),
        (b"\x80\x02})K\x01s.", "has odd keys"),
        (b"\x80\x02})" + b"\x85" * 100_000 + b"Ns.", "has odd keys"),
        (b"\x80\x02}", "broken pickle"),
        (b"\x80\x02h\x05.", "broken pickle"),
        (b"\x80\x02X\xff\xff\xff\xffabc.", "broken pickle"),
        (b"", "broken pickle"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)
def test_a_pickle_that_does_what_weights_never_need_is_refused(
    code: bytes, problem: str, tmp_path: Path
) -> None:
    assert problem in _refusal(zipped(tmp_path, code))


@ZIP_OR_LEGACY
@pytest.mark.parametrize("content", [[torch.ones(2)], torch.ones(2), {1: torch.ones(2)}, 5], ids=str)
def test_what_is_no_dictionary_of_names_is_refused(content: object, in_zip: bool, tmp_path: Path) -> None:
    assert "not a dictionary of names" in _refusal(save(content, tmp_path, in_zip))


@ZIP_OR_LEGACY
def test_a_view_that_repeats_its_storage_is_refused_by_its_key(in_zip: bool, tmp_path: Path) -> None:
    """A kilobyte that would become a gigabyte as soon as it is cast."""
    path = save({"ema": {"bomb": torch.ones(1).expand(2**28)}}, tmp_path, in_zip)
    message = _refusal(path)
    assert "'ema.bomb' of shape (268435456,) is 1073741824 bytes made of 4" in message


def test_a_refused_pickle_does_not_change_what_is_known_of_the_next(tmp_path: Path) -> None:
    """Its BUILD would make a storage of eight bytes a number one of a byte."""
    state = b"(X\x11\x00\x00\x00torch ByteStorageNNt"
    _refusal(zipped(tmp_path, b"\x80\x02ctorch\nDoubleStorage\n" + state + b"b."))
    read = read_pickle(save({"a": torch.ones(2).double()}, tmp_path, True), allow_pickle=True)
    assert read["a"].tolist() == [1, 1]


def test_sparse_tensors_and_devices_are_refused(tmp_path: Path) -> None:
    assert "_rebuild_sparse_tensor" in _refusal(save({"a": torch.eye(3).to_sparse()}, tmp_path, True))
    assert "torch.device" in _refusal(save({"a": torch.device("cpu")}, tmp_path, True))


def test_nesting_beyond_reason_is_refused_and_a_circle_read_in_finite_time(tmp_path: Path) -> None:
    code = b"\x80\x02}X\x01\x00\x00\x00a" + b"]" * 10_000 + b"a" * 9_999 + b"s."
    assert "is nested too deep" in _refusal(zipped(tmp_path, code))
    read = read_pickle(zipped(tmp_path, b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s."), allow_pickle=True)
    assert read["a"] is read


def test_storages_that_the_old_format_does_not_hold_are_refused(tmp_path: Path) -> None:
    path = save({"a": torch.ones(2)}, tmp_path, in_zip=False)
    content = path.read_bytes()
    # Before memory is taken for them.
    path.write_bytes(content.replace(b"K\x02Nt", b"J\xff\xff\xff\x7fNt"))
    with address_space(256 * 2**20):
        assert "wants 8589934" in _refusal(path)
    start = content.rindex(b"\x80\x02]")
    for keys in (b"]", b"}", b"](" + b"]" * 50_000 + b"a" * 49_999 + b"e"):
        path.write_bytes(content[:start] + b"\x80\x02" + keys + b"." + content[-16:])
        assert "lists other storages than it uses" in _refusal(path)


def test_storages_that_an_archive_lacks_are_refused(tmp_path: Path) -> None:
    path = save({"a": torch.ones(2)}, tmp_path, True)
    with zipfile.ZipFile(path) as archive:
        code = archive.read("a/data.pkl")
    path = zipped(tmp_path, code.replace(b"K\x02tq", b"K\x09tq", 1), b"12345678")
    assert "wants 36 bytes of storage '0', which are not there" in _refusal(path)


GOOD = ("a/data.pkl", b"\x80\x02}.")


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("records", "problem"),
    [
        ([GOOD, ("a/../../x", b"")], "points outside the archive"),
        ([GOOD, ("/etc/x", b"")], "points outside the archive"),
        ([GOOD, ("a\\x/b", b"")], "points outside the archive"),
        ([("data.pkl", b"\x80\x02}.")], "points outside the archive"),
        ([GOOD, GOOD], "is there twice"),
        ([GOOD, ("b/data.pkl", b"\x80\x02}.")], "in a second folder"),
        ([GOOD, ("a/b/data.pkl", b"\x80\x02}.")], "2 records data.pkl"),
        ([("a/version", b"3")], "0 records data.pkl"),
        ([GOOD, ("a/constants.pkl", b"")], "TorchScript program"),
        ([("a/data.pkl", bytes(8 * 2**20 + 1))], "its data.pkl has 8388609 bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_archive_that_torch_never_writes_is_refused(
    records: list[tuple[str, bytes]], problem: str, tmp_path: Path
) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        for name, content in records:
            archive.writestr(name, content)
    assert problem in _refusal(tmp_path / "a.pt")


def test_a_compressed_archive_is_refused_without_inflating_it(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", bytes(60 * 2**20))
    assert path.stat().st_size < 2**20
    assert grown_by(lambda: _refusal(path)) < 16 * 2**20
    assert "is compressed" in _refusal(path)


def test_an_archive_behind_another_one_is_refused(tmp_path: Path) -> None:
    """Two zip readers take different directories for the file's; only agreement will do."""
    first = zipped(tmp_path, pickle.dumps({"a": 1}, 2)).read_bytes()
    second = zipped(tmp_path, pickle.dumps({"a": 2}, 2)).read_bytes()
    (tmp_path / "a.pt").write_bytes(first + second)
    assert "two directories that differ" in _refusal(tmp_path / "a.pt")


def test_a_flipped_bit_of_a_tensor_in_an_archive_is_refused(tmp_path: Path) -> None:
    path = save({"a": torch.ones(1000)}, tmp_path, True)
    values = torch.ones(1000).numpy().tobytes()
    assert path.read_bytes().count(values) == 1
    path.write_bytes(path.read_bytes().replace(values, values[:-1] + b"\x3e"))
    assert "record 'a/data/0' is damaged" in _refusal(path)


@ZIP_OR_LEGACY
def test_a_file_cut_anywhere_is_refused(in_zip: bool, tmp_path: Path) -> None:
    path = save({"a": torch.ones(5), "b": {"c": torch.zeros(3)}}, tmp_path, in_zip)
    content = path.read_bytes()
    for length in range(0, len(content), 13):
        path.write_bytes(content[:length])
        _refusal(path)


def test_a_plain_pickle_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pkl"
    sentinel = tmp_path / "ran"
    for protocol in range(2, 6):
        for content in ({"a": 1}, Calls(os.system, (f"touch {sentinel}",))):
            path.write_bytes(pickle.dumps(content, protocol))
            _refusal(path)
    assert not sentinel.exists()
