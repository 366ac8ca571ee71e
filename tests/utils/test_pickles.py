"""PyTorch checkpoints: read without running them, refused by name where they want more than tensors."""

import argparse
import collections
import os
import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from hddm.utils.errors import HddmError
from hddm.utils.pickles import read_any, read_pickle
from tests.artefacts import refusal
from tests.hostile import Calls, attempts, grown_by, save, zipped


def _refusal(path: Path, allow_pickle: bool = True) -> str:
    message = refusal(read_pickle, path, allow_pickle)
    assert str(path) in message
    return message


@pytest.mark.slow
def test_a_training_checkpoint_is_read_as_it_was_saved(tmp_path: Path) -> None:
    network = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(network.parameters())
    network(torch.ones(3)).sum().backward()
    optimizer.step()
    dtypes, values = ("float16", "bfloat16", "bool", "float8_e4m3fn", "uint16"), torch.randn(4, 3)
    saved = {
        "ema": network.state_dict(),
        "raw": {f"module.blocks.{n}.weight": torch.full((4,), float(n)) for n in range(1200)},
        "model": {name: torch.arange(2).to(getattr(torch, name)) for name in dtypes},
        "opt": optimizer.state_dict(),
        "args": argparse.Namespace(lr=1e-4, data="x", sizes=(1, 2), seed=None, big=2**40),
        "dtype": torch.float16,
        "size": torch.Size([1, 2]),
        "tied": [values, values, values[1:3], torch.ones(0, 3)],
    }
    read = read_pickle(save(saved, tmp_path / "a.pt"), allow_pickle=True)
    assert read.keys() == saved.keys()
    assert read["args"] == saved["args"]
    assert (read["dtype"], read["size"]) == (torch.float16, (1, 2))
    assert isinstance(read["ema"], collections.OrderedDict)
    assert torch.equal(read["ema"]["weight"], network.weight)
    assert [one.tolist() for one in read["raw"].values()] == [[float(n)] * 4 for n in range(1200)]
    assert {name: str(one.dtype) for name, one in read["model"].items()} == {
        name: f"torch.{name}" for name in dtypes
    }
    assert all(one.float().tolist() == [0, 1] for one in read["model"].values())
    assert torch.equal(
        read["opt"]["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"]
    )
    whole, again, part, empty = read["tied"]
    assert torch.equal(whole, values)
    assert whole.data_ptr() == again.data_ptr()
    assert torch.equal(part, values[1:3])
    assert empty.shape == (0, 3)


@pytest.mark.integration
def test_tensors_are_mapped(tmp_path: Path) -> None:
    path = save({"a": torch.zeros(64 * 2**20, dtype=torch.uint8)}, tmp_path / "a.pt")
    assert grown_by(lambda: read_pickle(path, allow_pickle=True)) < 8 * 2**20


def test_a_pickle_is_refused_unless_asked_for(tmp_path: Path) -> None:
    message = _refusal(save({"a": torch.ones(2)}, tmp_path / "a.pt"), allow_pickle=False)
    assert "is a pickle" in message
    assert "use the safetensors version, or pass `allow_pickle=True`" in message


@pytest.mark.parametrize("version", ["2.6.0", "2.9.1+cu128", "2.10.0a0"])
def test_a_torch_with_known_holes_is_refused(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save({"a": torch.ones(2)}, tmp_path / "a.pt")
    monkeypatch.setattr(torch, "__version__", version)
    assert (
        f"needs torch>=2.10, whose unpickler has no known holes, and this is {version}"
        in _refusal(path)
    )


def test_what_is_no_archive_or_has_a_wrong_name_is_refused_without_loading_it(
    tmp_path: Path,
) -> None:
    assert "rename it to .pt" in _refusal(save({"a": torch.ones(2)}, tmp_path / "a.safetensors"))
    sentinel, path = tmp_path / "ran", tmp_path / "a.pkl"
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    assert "write it again by torch.save" in _refusal(path)
    for protocol in range(2, 6):
        path.write_bytes(pickle.dumps(Calls(os.system, (f"touch {sentinel}",)), protocol))
        assert "write it again by torch.save" in _refusal(path)
    assert not sentinel.exists()


def _pickled(content: object) -> Callable[[Path], Path]:
    return lambda path: save(content, path)


def _coded(code: bytes) -> Callable[[Path], Path]:
    return lambda path: zipped(path, code)


def _compressed(path: Path) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", bytes(60 * 2**20))
    assert path.stat().st_size < 2**20
    return path


def _program(path: Path) -> Path:
    with zipfile.ZipFile(zipped(path, b"\x80\x02}."), "a") as archive:
        archive.writestr("a/constants.pkl", b"")
    return path


def _flipped(path: Path) -> Path:
    """One bit of a tensor is another."""
    content, values = (
        save({"a": torch.ones(1000)}, path).read_bytes(),
        torch.ones(1000).numpy().tobytes(),
    )
    assert content.count(values) == 1
    path.write_bytes(content.replace(values, values[:-1] + b"\x3e"))
    return path


def _of_larger_storage(path: Path) -> Path:
    """Its storage and tensor are to have 8 GB."""
    with zipfile.ZipFile(save({"a": torch.ones(2)}, path)) as archive:
        code = archive.read("a/data.pkl")
    code = code.replace(b"K\x02tq", b"J\xff\xff\xff\x7ftq").replace(
        b"K\x02\x85", b"J\xff\xff\xff\x7f\x85"
    )
    return zipped(path, code, b"12345678")


# Code that would write the file "ran".
HOSTILE: Mapping[str, tuple[Callable[[Path], Path], str]] = {
    "system": (_pickled({"b": Calls(os.system, ("touch ran",))}), "posix.system"),
    "eval": (_pickled({"b": Calls(eval, ("open('ran', 'w')",))}), "GLOBAL eval"),
    "getattr": (_pickled({"b": Calls(getattr, ("a", "upper"))}), "GLOBAL getattr"),
    "torch.load": (_pickled({"b": Calls(torch.load, ("ran",))}), "torch.serialization.load"),
    "bytearray": (_pickled({"b": Calls(bytearray, (10**10,))}), "MemoryError"),
    "a tensor of sizes": (_pickled({"b": Calls(torch.Tensor, (10**10,))}), "can't allocate memory"),
    "protocol 4": (
        _coded(b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x09touch ran\x85R."),
        "operand 140",
    ),
    "protocol 0": (_coded(b"(S'touch ran'\niposix\nsystem\n."), "Unsupported operand 83"),
    "no storage": (_coded(b"\x80\x02X\x03\x00\x00\x00abcQ."), "persistent_load id"),
    "a call of a class": (
        _coded(b"\x80\x02ctorch\nFloatStorage\nJ\xff\xff\xff\x7f\x85R."),
        "is not callable",
    ),
    "an end too soon": (_coded(b"\x80\x02}"), "EOFError"),
    "an empty pickle": (_coded(b""), "EOFError"),
    "a sparse tensor in a list": (_pickled([torch.ones(2).to_sparse()]), "'0' is sparse"),
    "a tensor": (_pickled(torch.ones(2)), "holds a Tensor, not a dictionary of names"),
    "numbers as names": (_pickled({1: torch.ones(2)}), "not a dictionary of names"),
    "a kilobyte that becomes a gigabyte when cast": (
        _pickled({"ema": {"bomb": torch.ones(1).expand(2**28)}}),
        "'ema.bomb' of shape (268435456,) is 1073741824 bytes made of 4",
    ),
    "a sparse tensor": (_pickled({"a": torch.eye(3).to_sparse()}), "'a' is sparse"),
    "deep lists": (
        _coded(b"\x80\x02}X\x01\x00\x00\x00a" + b"]" * 10_000 + b"a" * 9_999 + b"s."),
        "too deep",
    ),
    "a circle": (_coded(b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s."), "too deep"),
    "compressed": (_compressed, "record 'a/data.pkl' is compressed"),
    "a program": (_program, "TorchScript"),
    "a flipped bit": (_flipped, "record 'a/data/0' is damaged"),
    "a storage that is not there": (_of_larger_storage, "torch cannot load it"),
}


@pytest.mark.integration
def test_what_weights_never_need_is_refused_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = []
    for name, (make, _) in HOSTILE.items():
        (tmp_path / name).mkdir()
        paths.append(make(tmp_path / name / "a.pt"))
    for name, said in zip(HOSTILE, attempts(paths), strict=True):
        assert HOSTILE[name][1] in said, name
        assert len(said) < 500
    assert not Path("ran").exists()


@pytest.mark.slow
def test_a_list_is_read_where_one_is_expected_and_refused_elsewhere(tmp_path: Path) -> None:
    path = save([torch.arange(3.0), torch.ones(2)], tmp_path / "a.pt")
    content = read_any(path, allow_pickle=True)
    assert isinstance(content, list)
    assert [one.tolist() for one in content] == [[0, 1, 2], [1, 1]]
    with pytest.raises(HddmError, match="holds a list, not a dictionary of names; if it is a LoRA"):
        read_pickle(path, allow_pickle=True)


@pytest.mark.integration
def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    content = save({"a": torch.ones(5), "b": {"c": torch.zeros(3)}}, tmp_path / "a.pt").read_bytes()
    paths = []
    for length in range(4, len(content), 13):
        paths.append(tmp_path / f"{length}.pt")
        paths[-1].write_bytes(content[:length])
    assert all("torch cannot load it" in said for said in attempts(paths))


@pytest.mark.slow
def test_what_crashes_the_process_is_refused_in_one_line(tmp_path: Path) -> None:
    """Hashing a tuple in a tuple in a tuple takes a part of the stack for each."""
    tuples = zipped(tmp_path / "a.pt", b"\x80\x02})" + b"\x85" * 2_000_000 + b"Ns.")
    assert "ends a process that loads it (code -" in _refusal(tuples)


@pytest.mark.slow
def test_a_pickle_that_takes_forever_is_refused(tmp_path: Path) -> None:
    """Each of 60 lists holds the one before twice."""
    lists = b"]q\x00" + b"".join(b"](h%ch%ceq%c" % (at - 1, at - 1, at) for at in range(1, 60))
    path = zipped(tmp_path / "a.pt", b"\x80\x02}X\x01\x00\x00\x00a](" + lists + b"es.")
    assert "ends a process that loads it (code -24)" in _refusal(path)
