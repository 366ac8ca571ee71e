"""A folder of files that mean harm: each is refused in one line, before it costs anything."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hddm.networks.folders import read_index
from hddm.utils.files import inside, kind_of
from hddm.utils.tensors import Planned, read_header, read_safetensors, write_safetensors
from tests.artefacts import largest_file, refusal
from tests.hostile import ZIP_OR_LEGACY, Calls, address_space, grown_by, save

MIB = 2**20


def _entry(dtype: str, shape: list[Any], start: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def _file(folder: Path, header: object, data: int = 0, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "a.safetensors"
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data))
    return path


GOOD = {"a": _entry("F32", [1], 0, 4)}


@pytest.mark.parametrize(
    ("header", "data", "length"),
    [
        (b"{}", 0, 2**64 - 1),
        (b'{"a":' * 100_000, 0, None),
        (GOOD, 8, None),
        ({"a": _entry("F32", [2**28], 0, 2**30)}, 4, None),
        ({**GOOD, "b": _entry("F32", [1], 2, 6)}, 6, None),
        ({**GOOD, "b": _entry("F32", [1], 8, 12)}, 12, None),
        ({"a": _entry("F32", [2**62, 4], 0, 4)}, 4, None),
        ({"a": _entry("F32", [0, 2**63], 0, 0)}, 0, None),
        ({"a": _entry("F4", [2], 0, 1)}, 1, None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_header_is_refused(header: object, data: int, length: int | None, tmp_path: Path) -> None:
    path = _file(tmp_path, header, data, length)
    assert grown_by(lambda: refusal(read_safetensors, path)) < 16 * MIB
    assert str(path) in refusal(read_safetensors, path)


def test_a_header_of_a_gigabyte_is_refused_within_little_memory(tmp_path: Path) -> None:
    """The limit is that of the mapped file and a quarter of a gigabyte."""
    path = _file(tmp_path, b"{", 0, 2**30)
    os.truncate(path, 2**31)
    with address_space(2**31 + 256 * MIB):
        assert "header too large" in refusal(read_safetensors, path)


def test_a_safetensors_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(5), "b": torch.ones(3)}, path)
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        assert str(path) in refusal(read_safetensors, path)
        assert str(path) in refusal(read_header, path)


@ZIP_OR_LEGACY
def test_a_pickle_renamed_safetensors_is_refused_and_not_run(in_zip: bool, tmp_path: Path) -> None:
    content = {"a": Calls(os.system, (f"touch {tmp_path / 'ran'}",))}
    path = save(content, tmp_path, in_zip).rename(tmp_path / "model.safetensors")
    assert "cannot be read as safetensors (it is a pickle" in refusal(read_safetensors, path)
    (tmp_path / "x.index.json").write_text(json.dumps({"weight_map": {"a": path.name}}))
    assert "allow_pickle=True" in refusal(read_index, tmp_path / "x.index.json")
    assert "rename it" in refusal(read_index, tmp_path / "x.index.json", allow_pickle=True)
    assert not (tmp_path / "ran").exists()


def test_what_is_no_file_of_weights_is_named(tmp_path: Path) -> None:
    contents = {
        "empty": b"",
        "old": b"cposix\nsystem\n(S'true'\ntR.",
        "lfs": b"version https://git-lfs.github.com/spec/v1\n",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "circle").symlink_to("circle")
    for name, problem in (
        ("absent", "no such file"),
        ("circle", "cannot be read"),
        ("pipe", "is not a regular file"),
        ("/dev/zero", "is not a regular file"),
        ("empty", "is empty"),
        ("old", "is neither safetensors nor a PyTorch checkpoint"),
        ("lfs", "is a Git LFS pointer, not the weights; fetch them with git lfs pull"),
    ):
        assert f"{tmp_path / name}: {problem}" in refusal(kind_of, tmp_path / name)


@pytest.mark.parametrize(
    "name", ["../a", "/etc/passwd", "..", ".", "", "a\\b", "C:a", "a\0b", "a\nb", "//a", "x/.."]
)
def test_a_name_that_leaves_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    assert "points outside the folder" in refusal(inside, tmp_path, name)
    # Names are judged before files: the first shard is missing.
    weight_map = {"a": "absent.safetensors", "b": name}
    (tmp_path / "x.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert f"weight_map names {name!r}" in refusal(read_index, tmp_path / "x.index.json")


def test_links_out_of_the_folder_or_of_a_hub_cache_repository_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "models--org--name" / "snapshots" / "0123abc"
    folder.mkdir(parents=True)
    save_file({"a": torch.ones(1)}, tmp_path / "secret")
    (folder / "file").symlink_to("../../../secret")
    (folder / "above").symlink_to("../../..")
    (folder / "circle").symlink_to("circle")
    assert f"is a link to {tmp_path / 'secret'}, outside the folder" in refusal(inside, folder, "file")
    assert "outside the folder" in refusal(inside, folder, "above/secret")
    assert "outside the folder" in refusal(inside, tmp_path / "models--org--name", "snapshots/0123abc/file")
    assert "circle" in refusal(lambda: kind_of(inside(folder, "circle")))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "cannot be read as JSON"),
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": ["a"]}', "no weight_map"),
        ('{"weight_map": {"a": 1}}', "gives 'a' to 1"),
        ('{"weight_map": {"a": "absent"}}', "absent: no such file"),
        ('{"weight_map": {"a": "sub/a.safetensors"}}', "not a plain file name"),
    ],
)
def test_a_broken_index_is_refused(content: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "x.index.json").write_text(content)
    assert problem in refusal(read_index, tmp_path / "x.index.json")


def test_all_that_index_and_shards_disagree_about_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1), "stray": torch.ones(1)}, tmp_path / "1")
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "2")
    weight_map = {"a": "1", "b": "2", "gone": "2"}
    (tmp_path / "x.index.json").write_text(json.dumps({"weight_map": weight_map}))
    message = refusal(read_index, tmp_path / "x.index.json")
    assert "1 holds 'stray', which the index gives to no file" in message
    assert "2 holds 'a', which the index gives to 1; 2 lacks 'gone'" in message
    weight_map |= {f"more{index}": "1" for index in range(20)}
    (tmp_path / "x.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert refusal(read_index, tmp_path / "x.index.json").endswith("; … and 13 more")
    save({"a": torch.ones(1), "epoch": 3}, tmp_path, True)
    (tmp_path / "x.index.json").write_text(json.dumps({"weight_map": {"a": "a.pt"}}))
    assert "'epoch' is a int" in refusal(read_index, tmp_path / "x.index.json", allow_pickle=True)


def test_values_that_are_not_finite_are_refused_by_key_and_origin(tmp_path: Path) -> None:
    late = torch.zeros(3 * MIB, dtype=torch.float16)
    late[-1] = float("nan")
    for values in (
        late,
        torch.tensor([float("inf"), float("-inf")]),
        torch.tensor([float("nan")]).to(torch.float8_e4m3fn),
        torch.tensor([complex(0, float("inf"))]),
    ):
        plan = Planned("weight", tuple(values.shape), values.dtype, lambda values=values: values, "a.pt")
        message = refusal(write_safetensors, tmp_path / "a", [plan], check_finite=True)
        assert message == "a.pt: 'weight' holds NaN or Inf; get the weights again"
        assert not (tmp_path / "a").exists()


def test_plans_that_no_file_can_hold_are_refused_before_one_is_made(tmp_path: Path) -> None:
    def write(*plans: tuple[str, torch.dtype]) -> str:
        planned = [Planned(name, (1,), dtype, lambda: torch.ones(1)) for name, dtype in plans]
        return refusal(write_safetensors, tmp_path / "x", planned)

    assert "two tensors would be 'a'" in write(("a", torch.float32), ("a", torch.float32))
    assert "torch.complex128, which safetensors lacks" in write(("a", torch.complex128))
    assert "__metadata__" in write(("__metadata__", torch.float32))
    for value in (torch.ones(3), torch.ones(2).half()):
        plan = Planned("a", (2,), torch.float32, lambda value=value: value)
        assert "not (2,) in torch.float32 as planned" in refusal(write_safetensors, tmp_path / "x", [plan])
    assert not (tmp_path / "x").exists()
    (tmp_path / "x").write_text("mine")
    assert "exists" in write()
    assert (tmp_path / "x").read_text() == "mine"


def test_a_full_disk_leaves_no_file(tmp_path: Path) -> None:
    plan = Planned("a", (MIB,), torch.float32, lambda: torch.ones(MIB))
    with largest_file(MIB):
        assert f"{tmp_path / 'x'}: cannot be written" in refusal(write_safetensors, tmp_path / "x", [plan])
    assert not (tmp_path / "x").exists()


def test_the_limits_of_memory_notice_what_is_taken() -> None:
    with address_space(64 * MIB), pytest.raises(MemoryError):
        bytearray(1024 * MIB)
    assert grown_by(lambda: bytes(1) * (64 * MIB) + b"x") > 60 * MIB
