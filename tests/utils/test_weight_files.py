"""Files of weights: mapped, streamed and read in shards; what means harm is refused before it costs."""

import json
import math
import os
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hddm.networks.components import read_index
from hddm.utils.files import file_kind, inside, sha256_of
from hddm.utils.tensors import (
    Planned,
    TensorInfo,
    has_header_of,
    holds_exactly,
    read_header,
    read_safetensors,
    refuse_non_finite,
    write_safetensors,
)
from tests.artefacts import largest_file, refusal
from tests.hostile import Calls, address_space, attempts, grown_by, save, zipped
from tests.mutations import spoil

DTYPES = [
    *(
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]
MIB = 2**20


def _planned(tensors: dict[str, Tensor]) -> list[Planned]:
    return [
        Planned(name, tuple(value.shape), value.dtype, lambda value=value: value)
        for name, value in tensors.items()
    ]


def _assert_same(read: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(read, expected, rtol=0, atol=0)


def _tensors() -> dict[str, Tensor]:
    odd = {f"t{index}": torch.arange(3).to(dtype) for index, dtype in enumerate(DTYPES)}
    return odd | {
        "scalar": torch.tensor(2.5),
        "empty": torch.ones(0, 3),
        "turned": torch.arange(6.0).reshape(2, 3).T,
        'é"\n': torch.ones(1, 1, 1),
        "leaf": torch.nn.Parameter(torch.ones(2)),
    }


def test_what_is_written_is_read_in_every_dtype(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    sha256 = write_safetensors(path, _planned(_tensors()), {"format": "pt"}, check_finite=True)
    assert sha256 == sha256_of(path)
    expected = {name: value.detach() for name, value in _tensors().items()}
    _assert_same(load_file(path), expected)
    _assert_same(read_safetensors(path), expected)
    infos, metadata = read_header(path)
    assert infos == {
        name: TensorInfo(tuple(value.shape), value.dtype) for name, value in expected.items()
    }
    assert metadata == {"format": "pt"}


def test_every_tensor_is_aligned_for_its_dtype(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_safetensors(path, _planned(_tensors()))
    length = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + length])
    assert length % 8 == 0
    assert all(
        header[n]["data_offsets"][0] % value.itemsize == 0 for n, value in _tensors().items()
    )
    write_safetensors(tmp_path / "empty", [])
    assert read_safetensors(tmp_path / "empty") == {}


def test_a_read_file_is_mapped_and_changes_to_its_tensors_stay_out_of_it(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.zeros(64 * MIB, dtype=torch.uint8)}, path)
    assert grown_by(lambda: read_safetensors(path)) < 8 * MIB
    read_safetensors(path)["a"].fill_(1)
    assert not read_safetensors(path)["a"].any()


def test_writing_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    def plan(index: int) -> Planned:
        return Planned(
            f"t{index}", (8 * MIB,), torch.float32, lambda: torch.full((8 * MIB,), float(index))
        )

    path = tmp_path / "a.safetensors"
    grown = grown_by(
        lambda: write_safetensors(path, [plan(index) for index in range(6)], check_finite=True)
    )
    assert grown < 72 * MIB
    assert path.stat().st_size > 192 * MIB
    read = read_safetensors(path)
    assert all((read[f"t{index}"] == index).all() for index in range(6))


def test_large_finite_values_pass_the_check_for_finite_ones(tmp_path: Path) -> None:
    """Their sum overflows."""
    values = {
        "a": torch.full((5,), 60000.0).half(),
        "b": torch.full((5,), 3e38),
        "c": torch.full((5,), 448.0).to(torch.float8_e4m3fn),
    }
    write_safetensors(tmp_path / "a", _planned(values), check_finite=True)
    _assert_same(read_safetensors(tmp_path / "a"), values)


def test_a_file_is_known_by_its_content(tmp_path: Path) -> None:
    assert file_kind(save({}, tmp_path / "a.safetensors")) == "torch-zip"
    torch.save({}, tmp_path / "b.safetensors", _use_new_zipfile_serialization=False)
    assert file_kind(tmp_path / "b.safetensors") == "pickle"
    # A header whose length looks like a pickle.
    write_safetensors(tmp_path / "c.pt", [], {"note": "x" * (0x280 - 29)})
    assert (tmp_path / "c.pt").read_bytes()[:2] == b"\x80\x02"
    (tmp_path / "link").symlink_to("c.pt")
    assert file_kind(tmp_path / "link") == "safetensors"


def _index(folder: Path, weight_map: dict[str, str]) -> Path:
    path = folder / "model.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return path


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_shards_are_read_as_one(ending: str, tmp_path: Path) -> None:
    names = [f"model-0000{index}-of-00002.{ending}" for index in (1, 2)]
    shards = [{"a": torch.ones(2), "b": torch.zeros(3).half()}, {"c": torch.arange(4)}]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, tmp_path / name) if ending == "safetensors" else torch.save(
            shard, tmp_path / name
        )
    path = _index(tmp_path, {"a": names[0], "b": names[0], "c": names[1]})
    _assert_same(read_index(path, allow_pickle=ending == "bin")[0], shards[0] | shards[1])
    if ending == "bin":
        assert "allow_pickle=True" in refusal(read_index, path)


def test_names_and_links_that_stay_inside_are_resolved(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    folder = repository / "snapshots" / "0123abc" / "transformer"
    folder.mkdir(parents=True)
    blob = repository / "blobs" / "f00d"
    blob.parent.mkdir()
    save_file({"a": torch.ones(2)}, blob)
    (folder / "model.safetensors").symlink_to("../../../blobs/f00d")
    (folder / "link").symlink_to("model.safetensors")
    assert inside(folder, "model.safetensors") == inside(folder, "link") == blob
    assert inside(folder.parent, "transformer/model.safetensors") == blob
    assert inside(folder, "absent") == folder / "absent"
    read, _ = read_index(_index(folder, {"a": "model.safetensors"}))
    assert torch.equal(read["a"], torch.ones(2))


@pytest.mark.integration
def test_a_damaged_pickle_is_read_or_refused(tmp_path: Path) -> None:
    content = {"ema": {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3).half()}}
    whole = save(content, tmp_path / "a.pt")
    with zipfile.ZipFile(whole) as archive:
        code = archive.read("a/data.pkl")
    paths = [tmp_path / f"{seed}.pt" for seed in range(400)]
    for seed, path in enumerate(paths):
        rng = random.Random(seed)
        if seed % 2:
            path.write_bytes(spoil("a.pt", whole.read_bytes(), rng))
        else:
            zipped(path, spoil("a.code", code, rng), bytes(24), bytes(6))
    messages = attempts(paths)
    for path, message in zip(paths, messages, strict=True):
        if not message:
            torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    assert 20 < sum(map(bool, messages)) < 380


def _entry(dtype: str, shape: list[Any], start: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def _file(folder: Path, header: object, data: int = 0, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "a.safetensors"
    path.write_bytes(
        (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data)
    )
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
def test_a_wrong_header_is_refused(
    header: object, data: int, length: int | None, tmp_path: Path
) -> None:
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


def test_a_pickle_renamed_safetensors_is_refused_and_not_run(tmp_path: Path) -> None:
    path = save(
        {"a": Calls(os.system, (f"touch {tmp_path / 'ran'}",))}, tmp_path / "model.safetensors"
    )
    assert "cannot be read as safetensors (it is a pickle" in refusal(read_safetensors, path)
    (tmp_path / "x.index.json").write_text(json.dumps({"weight_map": {"a": path.name}}))
    assert "allow_pickle=True" in refusal(read_index, tmp_path / "x.index.json")
    assert "rename it" in refusal(read_index, tmp_path / "x.index.json", allow_pickle=True)
    assert not (tmp_path / "ran").exists()


def test_what_is_no_file_of_weights_is_named(tmp_path: Path) -> None:
    contents = {
        "old": b"cposix\nsystem\n(S'true'\ntR.",
        "lfs": b"version https://git-lfs.github.com/spec/v1\n",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    os.mkfifo(tmp_path / "pipe")
    for name, problem in (
        ("pipe", "is not a regular file"),
        ("/dev/zero", "is not a regular file"),
        ("old", "is neither safetensors nor a PyTorch checkpoint"),
        ("lfs", "is a Git LFS pointer, not the weights; fetch them with git lfs pull"),
    ):
        assert f"{tmp_path / name}: {problem}" in refusal(file_kind, tmp_path / name)


@pytest.mark.parametrize(
    "name", ["../a", "/etc/passwd", "..", ".", "", "a\\b", "C:a", "a\0b", "a\nb", "//a", "x/.."]
)
def test_a_name_that_leaves_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    assert "points outside the folder" in refusal(inside, tmp_path, name)
    # Names are judged before files: the first shard is missing.
    weight_map = {"a": "absent.safetensors", "b": name}
    (tmp_path / "x.index.json").write_text(json.dumps({"weight_map": weight_map}))
    said = refusal(read_index, tmp_path / "x.index.json")
    assert (
        "points outside the folder" in said
        or f"'b' to {name!r}, which is not a plain file name" in said
    )


def test_links_out_of_the_folder_or_of_a_hub_cache_repository_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "models--org--name" / "snapshots" / "0123abc"
    folder.mkdir(parents=True)
    save_file({"a": torch.ones(1)}, tmp_path / "secret")
    (folder / "file").symlink_to("../../../secret")
    (folder / "above").symlink_to("../../..")
    (folder / "circle").symlink_to("circle")
    assert f"is a link to {tmp_path / 'secret'}, outside the folder" in refusal(
        inside, folder, "file"
    )
    assert "outside the folder" in refusal(inside, folder, "above/secret")
    assert "outside the folder" in refusal(
        inside, tmp_path / "models--org--name", "snapshots/0123abc/file"
    )
    assert "circle" in refusal(lambda: file_kind(inside(folder, "circle")))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"weight_map": ["a"]}', "no weight_map"),
        ('{"weight_map": {"a": 1}}', "gives 'a' to 1"),
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
    save({"a": torch.ones(1), "epoch": 3}, tmp_path / "a.pt")
    (tmp_path / "x.index.json").write_text(json.dumps({"weight_map": {"a": "a.pt"}}))
    assert "'epoch' is an int" in refusal(read_index, tmp_path / "x.index.json", allow_pickle=True)


def test_values_that_are_not_finite_are_refused_by_key_and_origin(tmp_path: Path) -> None:
    late = torch.zeros(3 * MIB, dtype=torch.float16)
    late[-1] = float("nan")
    for values in (
        late,
        torch.tensor([float("inf"), float("-inf")]),
        torch.tensor([float("nan")]).to(torch.float8_e4m3fn),
        torch.tensor([complex(0, float("inf"))]),
    ):
        plan = Planned(
            "weight", tuple(values.shape), values.dtype, lambda values=values: values, "a.pt"
        )
        message = refusal(write_safetensors, tmp_path / "a", [plan], check_finite=True)
        assert message == "a.pt: 'weight' holds NaN or Inf; get the weights again"
        assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("dtype", [one for one in DTYPES if one.is_floating_point], ids=str)
def test_the_largest_and_the_smallest_numbers_are_finite(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    kind = torch.finfo(dtype)
    values = torch.tensor([kind.max, kind.min, kind.tiny, -kind.tiny, 0.0, -0.0]).to(dtype)
    if dtype == torch.float64:
        values = torch.tensor([kind.max, kind.min, 5e-324, -5e-324], dtype=dtype)
    path = tmp_path / "a.safetensors"
    # Their sum overflows.
    values = values.repeat(3)
    write_safetensors(path, _planned({"a": values}), check_finite=True)
    _assert_same(load_file(path), {"a": values})
    refuse_non_finite(path, {"a": values})
    for wrong in (math.inf, -math.inf, math.nan, -math.nan):
        spoilt = values.clone()
        spoilt[4] = torch.tensor(wrong).to(dtype)
        # The format of four bits for the exponent alone has no Inf.
        if not spoilt[4].float().isfinite():
            assert "'a' holds NaN or Inf" in refusal(refuse_non_finite, path, {"a": spoilt})


def test_a_file_is_known_by_its_names_and_by_its_bits(tmp_path: Path) -> None:
    tensors = {name: value.detach() for name, value in _tensors().items()}
    path = tmp_path / "a.safetensors"
    write_safetensors(path, _planned(tensors), {"format": "pt"})
    assert has_header_of(path, _planned(tensors), {"format": "pt"})
    assert holds_exactly(path, _planned(tensors), {"format": "pt"}, check_finite=True)
    assert not holds_exactly(path, _planned(tensors))
    assert not has_header_of(path, _planned(tensors))
    assert not has_header_of(path, _planned({**tensors, "scalar": torch.ones(1)}), {"format": "pt"})
    for name in ("scalar", "turned", "t0", "t3", "t10"):
        spoilt = tensors[name].clone().contiguous()
        # Of the lowest bit, which -0.0 instead of 0.0 shows too.
        spoilt.view(-1)[-1:].view(torch.uint8)[0] ^= 1
        changed = _planned({**tensors, name: spoilt})
        assert has_header_of(path, changed, {"format": "pt"})
        assert not holds_exactly(path, changed, {"format": "pt"})


def test_what_other_tools_write_of_the_same_tensors_has_our_header(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {
        "b.weight": torch.ones(3, 2),
        "a.weight": torch.ones(2).to(torch.bfloat16),
        "b.bias": torch.ones(3),
    }
    save_file(tensors, path, {"format": "pt"})
    assert has_header_of(path, _planned(tensors), {"format": "pt"})


def test_a_tensor_unlike_its_plan_leaves_no_file(tmp_path: Path) -> None:
    for value in (torch.ones(3), torch.ones(2).half()):
        plan = Planned("a", (2,), torch.float32, lambda value=value: value)
        assert "not (2,) in torch.float32 as planned" in refusal(
            write_safetensors, tmp_path / "x", [plan]
        )
    assert not (tmp_path / "x").exists()


def test_a_full_disk_leaves_no_file(tmp_path: Path) -> None:
    plan = Planned("a", (MIB,), torch.float32, lambda: torch.ones(MIB))
    with largest_file(MIB):
        assert f"{tmp_path / 'x'}: cannot be written" in refusal(
            write_safetensors, tmp_path / "x", [plan]
        )
    assert not (tmp_path / "x").exists()
