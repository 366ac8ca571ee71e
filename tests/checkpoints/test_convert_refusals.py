"""Sources that lie, contradict themselves or mean harm are refused in one line, with nothing written."""

import builtins
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from safetensors.torch import load_file, save_file

from tests.artefacts import Command, copied, edit_json
from tests.checkpoint_files import dit, pipeline, refused
from tests.hostile import Calls
from tests.transformer_files import dit_file, dit_network

WEIGHTS = "diffusion_pytorch_model"
MODEL = f"transformer/{WEIGHTS}.safetensors"
INDEX = f"transformer/{WEIGHTS}.safetensors.index.json"
CONFIG, SCHEDULER, PIPELINE = "transformer/config.json", "scheduler/scheduler_config.json", "model_index.json"
BIAS = "proj_out_1.bias"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pipeline(tmp_path_factory.mktemp("dit") / "source", dit())


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pipeline(tmp_path_factory.mktemp("shards") / "source", dit(), max_shard_size="10KB")


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
@pytest.mark.parametrize("in_zip", [True, False])
def test_code_in_a_pickle_is_never_run(hddm: Command, tmp_path: Path, name: str, in_zip: bool) -> None:
    sentinel = tmp_path / "ran"
    content = {"ema": dit_file(dit_network()), "args": Calls(builtins.open, (str(sentinel), "w"))}
    torch.save(content, tmp_path / name, _use_new_zipfile_serialization=in_zip)
    assert "pickle" in refused(hddm, tmp_path / name)
    error = refused(hddm, tmp_path / name, "--allow-pickle", "--num-heads", 4)
    assert "open" in error or "rename it" in error
    assert not sentinel.exists()


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _oversized_header(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 2**40) + path.read_bytes()[8:])


def _overlap(path: Path) -> None:
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    first, second = [name for name in header if name != "__metadata__"][:2]
    header[second]["data_offsets"] = header[first]["data_offsets"]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def _rewritten(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def rewrite(path: Path) -> None:
        weights = {name: tensor.clone() for name, tensor in load_file(path).items()}
        change(weights)
        path.unlink()
        save_file(weights, path)

    return rewrite


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_cut, "cannot be read"),
        (_oversized_header, ""),
        (_overlap, "cannot be read"),
        (lambda path: path.write_bytes(b""), "empty"),
        (lambda path: path.write_bytes(b"version https://git-lfs"), "git lfs pull"),
        (lambda path: path.unlink(), "no diffusion_pytorch_model"),
        (_rewritten(lambda w: w[BIAS].fill_(float("nan"))), "holds NaN or Inf"),
        (_rewritten(lambda w: w[BIAS].fill_(float("inf"))), "holds NaN or Inf"),
        (_rewritten(lambda w: w.update({BIAS: torch.zeros(3)})), "bias is (3,), not (32,)"),
        (_rewritten(lambda w: w.update({BIAS: torch.tensor(3.0)})), "bias is (), not (32,)"),
        (_rewritten(lambda w: w.update({BIAS: torch.zeros(32).cfloat()})), "bias is of torch.complex64"),
        (_rewritten(lambda w: w.update({BIAS: torch.zeros(32).char()})), "bias is of torch.int8"),
        (_rewritten(lambda w: w.update({"a\nb\x1b": torch.zeros(1)})), "left over a\\nb\\x1b"),
    ],
)
def test_weights_that_are_damaged(
    hddm: Command, tmp_path: Path, whole: Path, spoil: Callable[[Path], object], said: str
) -> None:
    source = copied(whole, tmp_path)
    spoil(source / MODEL)
    assert said in refused(hddm, source)


def test_every_tensor_missing_and_left_over_is_named(hddm: Command, tmp_path: Path, whole: Path) -> None:
    source = copied(whole, tmp_path)
    gone = [f"transformer_blocks.{n}.attn1.to_{letter}.weight" for n in (0, 1) for letter in "qkv"]
    more = {f"extra.{n}": torch.zeros(n + 1, 2) for n in range(5)}
    _rewritten(lambda w: (w.update(more), [w.pop(name) for name in gone]))(source / MODEL)
    error = refused(hddm, source)
    assert all(f"missing {name}" in error for name in gone)
    assert all(f"left over {name} {tuple(tensor.shape)}" in error for name, tensor in more.items())


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/passwd", "..", "", "a/../../b", "a\\b", "c:x"]
)
def test_an_index_that_names_files_elsewhere(hddm: Command, tmp_path: Path, sharded: Path, name: str) -> None:
    source = copied(sharded, tmp_path)
    save_file({"a": torch.zeros(2)}, tmp_path / "outside.safetensors")
    content = json.loads((source / INDEX).read_text())
    first = next(iter(content["weight_map"]))
    edit_json(source / INDEX, weight_map=content["weight_map"] | {first: name})
    assert INDEX in refused(hddm, source)


@pytest.mark.parametrize("name", [MODEL, CONFIG, SCHEDULER, PIPELINE, "transformer", "scheduler", "vae"])
def test_links_that_lead_out_of_the_folder(hddm: Command, tmp_path: Path, whole: Path, name: str) -> None:
    source = copied(whole, tmp_path)
    (source / "vae").mkdir()
    (source / "vae" / "config.json").write_text("{}")
    (source / name).rename(tmp_path / "elsewhere")
    (source / name).symlink_to("../../elsewhere" if "/" in name else "../elsewhere")
    assert "outside the folder" in refused(hddm, source)


def test_two_words_on_what_is_predicted(hddm: Command, tmp_path: Path, whole: Path) -> None:
    source = copied(whole, tmp_path)
    error = refused(hddm, source, "--prediction-type", "v_prediction")
    assert "--prediction-type v_prediction contradicts" in error
    assert "choose one of" in refused(hddm, source, "--prediction-type", "noise")
    DDIMScheduler(prediction_type="sample").save_pretrained(tmp_path / "other")
    file = tmp_path / "other" / "scheduler_config.json"
    assert "contradicts" in refused(hddm, source, "--schedule", file, "--prediction-type", "epsilon")
    FlowMatchEulerDiscreteScheduler().save_pretrained(tmp_path / "flow")
    file = tmp_path / "flow" / "scheduler_config.json"
    assert "contradicts" in refused(hddm, source, "--schedule", file, "--prediction-type", "epsilon")
    edit_json(file, num_train_timesteps="many")
    assert "num_train_timesteps" in refused(hddm, source, "--schedule", file)
    assert "no such file" in refused(hddm, source, "--schedule", tmp_path / "none.json")


def test_no_word_on_the_schedule(hddm: Command, tmp_path: Path, whole: Path) -> None:
    source = copied(whole, tmp_path)
    (source / SCHEDULER).unlink()
    assert "--schedule" in refused(hddm, source)
    (source / SCHEDULER).write_text("[" * 100_000)
    assert "cannot be read as JSON" in refused(hddm, source)


def test_content_of_no_known_layout(hddm: Command, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2), "b.c": torch.zeros(2)}, tmp_path / "a.safetensors")
    assert "of no known layout (a, b.c" in refused(hddm, tmp_path / "a.safetensors")
    assert "did you mean 'facebook-dit'" in refused(
        hddm, tmp_path / "a.safetensors", "--layout", "facebok-dit"
    )
    for layout in ("facebook-dit", "pixart-original", "ldm"):
        assert "a.safetensors" in refused(hddm, tmp_path / "a.safetensors", "--layout", layout)
    assert "no such file" in refused(hddm, tmp_path / "none")
    (tmp_path / "folder").mkdir()
    assert "found: none" in refused(hddm, tmp_path / "folder")


def test_the_root_of_a_hub_cache_is_told_from_its_snapshots(hddm: Command, tmp_path: Path) -> None:
    (tmp_path / "models--x--y" / "snapshots" / "0").mkdir(parents=True)
    assert "one revision in its snapshots/" in refused(hddm, tmp_path / "models--x--y")
