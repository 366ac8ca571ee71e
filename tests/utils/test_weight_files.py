"""Files of weights: mapped as written, written as the library would, read in shards, broken ones refused."""

import json
import random
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hddm.networks.folders import read_index
from hddm.utils.errors import HddmError
from hddm.utils.files import inside, kind_of
from hddm.utils.pickles import read_pickle
from hddm.utils.tensors import Planned, TensorInfo, read_header, read_safetensors, write_safetensors
from tests.hostile import grown_by, save, zipped
from tests.mutations import spoil

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
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
    write_safetensors(path, _planned(_tensors()), {"format": "pt"}, check_finite=True)
    expected = {name: value.detach() for name, value in _tensors().items()}
    _assert_same(load_file(path), expected)
    _assert_same(read_safetensors(path), expected)
    infos, metadata = read_header(path)
    assert infos == {name: TensorInfo(tuple(value.shape), value.dtype) for name, value in expected.items()}
    assert metadata == {"format": "pt"}


def test_every_tensor_is_aligned_for_its_dtype(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_safetensors(path, _planned(_tensors()))
    length = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + length])
    assert length % 8 == 0
    assert all(header[n]["data_offsets"][0] % value.itemsize == 0 for n, value in _tensors().items())
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
        return Planned(f"t{index}", (8 * MIB,), torch.float32, lambda: torch.full((8 * MIB,), float(index)))

    path = tmp_path / "a.safetensors"
    grown = grown_by(lambda: write_safetensors(path, [plan(index) for index in range(6)], check_finite=True))
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
    assert kind_of(save({}, tmp_path, True).rename(tmp_path / "a.safetensors")) == "torch-zip"
    assert kind_of(save({}, tmp_path, False).rename(tmp_path / "b.safetensors")) == "pickle"
    # A header whose length looks like a pickle.
    write_safetensors(tmp_path / "c.pt", [], {"note": "x" * (0x280 - 29)})
    assert (tmp_path / "c.pt").read_bytes()[:2] == b"\x80\x02"
    (tmp_path / "link").symlink_to("c.pt")
    assert kind_of(tmp_path / "link") == "safetensors"


def _index(folder: Path, weight_map: dict[str, str]) -> Path:
    path = folder / "model.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return path


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_shards_are_read_as_one(ending: str, tmp_path: Path) -> None:
    names = [f"model-0000{index}-of-00002.{ending}" for index in (1, 2)]
    shards = [{"a": torch.ones(2), "b": torch.zeros(3).half()}, {"c": torch.arange(4)}]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, tmp_path / name) if ending == "safetensors" else torch.save(shard, tmp_path / name)
    path = _index(tmp_path, {"a": names[0], "b": names[0], "c": names[1]})
    _assert_same(read_index(path, allow_pickle=ending == "bin")[0], shards[0] | shards[1])
    if ending == "bin":
        with pytest.raises(HddmError, match="allow_pickle=True"):
            read_index(path)


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


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("valid")
    content = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3).half()}
    save_file(content, folder / "a.safetensors", {"format": "pt"})
    found = {"safetensors": (folder / "a.safetensors").read_bytes()}
    for in_zip in (True, False):
        found["zip" if in_zip else "legacy"] = save({"ema": content}, folder, in_zip).read_bytes()
    with zipfile.ZipFile(save({"ema": content}, folder, True)) as archive:
        found["code"] = archive.read("a/data.pkl")
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["safetensors", "zip", "legacy", "code"])
def test_a_damaged_file_is_read_or_refused(kind: str, valid: dict[str, bytes], tmp_path: Path) -> None:
    """Other values in headers; flips, insertions, deletions and cuts anywhere."""
    path = tmp_path / "a.pt"
    read, messages = 0, []

    def check() -> None:
        nonlocal read
        for seed in range(500):
            content = spoil(f"a.{kind}", valid[kind], random.Random(seed))
            if kind == "code":
                zipped(tmp_path, content, bytes(24), bytes(6))
            else:
                path.write_bytes(content)
            try:
                found = read_safetensors(path) if kind == "safetensors" else read_pickle(path, True)
                assert isinstance(found, dict)
                read += 1
            except HddmError as error:
                messages.append(str(error))

    assert grown_by(check) < 256 * MIB
    assert min(read, len(messages)) > 10
    assert all(str(path) in message and "\n" not in message for message in messages)
