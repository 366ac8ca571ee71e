"""Headers of files that are written back: they say what is true of the weights in them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hddm.checkpoints.lora import convert_lora
from hddm.checkpoints.plan import plan_conversion
from hddm.experts.expert_folders import open_expert
from hddm.settings import Conversion
from hddm.utils.tensors import read_header
from tests.artefacts import Command
from tests.checkpoint_files import converted, record_of, text_unet, written_back
from tests.ldm_files import ldm_file
from tests.transformer_files import dit_file, dit_network

HEADER = {
    "modelspec.title": "Base",
    "modelspec.license": "MIT",
    "modelspec.hash_sha256": "0xabc",
    "modelspec.architecture": "stable-diffusion-v1",
    "modelspec.prediction_type": "epsilon",
    "ss_output_name": "base",
    "sshs_model_hash": "abc",
    "sshs_legacy_hash": "def",
    "format": "pt",
}
OF_WEIGHTS = {
    *("modelspec.title", "modelspec.hash_sha256", "ss_output_name"),
    *("sshs_model_hash", "sshs_legacy_hash"),
}
OPTIONS = ("--preset", "sd1", "--sample-size", 8, "--no-verify")
LAYER = "mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
SIZES = {"attention_head_dim": 8, "block_out_channels": (32, 64)}


def _content() -> dict[str, Tensor]:
    return {name: one.contiguous() for name, one in ldm_file(text_unet(**SIZES)).items()}


@pytest.fixture
def expert(tmp_path: Path, hddm: Command) -> Path:
    """An expert of a file with `HEADER`."""
    save_file(_content(), tmp_path / "sd.safetensors", HEADER)
    converted(hddm, tmp_path / "sd.safetensors", tmp_path / "expert", *OPTIONS)
    return tmp_path / "expert"


def _header(hddm: Command, expert: Path, out: Path, layout: str = "ldm") -> dict[str, str]:
    return read_header(written_back(hddm, expert, out, layout) / "checkpoint.safetensors")[1]


def _lora(path: Path, kind: str, header: dict[str, str] | None) -> Path:
    weight = text_unet(**SIZES).state_dict()[f"{LAYER}.weight"]
    content = {f"unet.{LAYER}.diff": torch.ones(weight.shape)}
    if kind == "adapter":
        content = {
            f"unet.{LAYER}.lora_A.weight": torch.ones(2, weight.shape[1]),
            f"unet.{LAYER}.lora_B.weight": torch.ones(weight.shape[0], 2),
        }
    save_file(content, path, header)
    return path


@pytest.mark.parametrize("kind", ["adapter", "merged"])
def test_changed_weights_have_no_hash_or_title_of_the_old_ones_and_their_own_licence(
    kind: str, expert: Path, tmp_path: Path, hddm: Command
) -> None:
    theirs = {"modelspec.license": "CC-BY-NC-4.0"}
    convert_lora(_lora(tmp_path / "lora.safetensors", kind, theirs), expert, tmp_path / "changed")
    # Converting an expert again makes no other weights, and forgets nothing.
    converted(hddm, tmp_path / "changed", tmp_path / "again", "--no-verify")
    for name in ("changed", "again"):
        header = _header(hddm, tmp_path / name, tmp_path / f"{name} back")
        assert not OF_WEIGHTS & header.keys()
        licence = record_of(tmp_path / name)["licence"]
        assert header["modelspec.license"] == licence == "CC-BY-NC-4.0 AND MIT"
        kept = HEADER.keys() - OF_WEIGHTS - {"modelspec.license"}
        assert {key: header.get(key) for key in kept} == {key: HEADER[key] for key in kept}
        read = plan_conversion(
            tmp_path / f"{name} back" / "checkpoint.safetensors", Conversion(num_heads=8)
        )
        assert read.record.licence == licence


def test_an_unchanged_expert_comes_back_with_its_own_header(
    expert: Path, tmp_path: Path, hddm: Command
) -> None:
    assert _header(hddm, expert, tmp_path / "back") == HEADER
    converted(hddm, expert, tmp_path / "again", "--no-verify")
    assert _header(hddm, tmp_path / "again", tmp_path / "back again") == HEADER
    found = load_file(tmp_path / "back again" / "checkpoint.safetensors")
    for name, one in _content().items():
        assert torch.equal(found[name], one)


def test_a_licence_that_only_the_user_stated_is_in_the_header(
    tmp_path: Path, hddm: Command
) -> None:
    save_file(_content(), tmp_path / "sd.safetensors")
    licence = ("--licence", "openrail")
    converted(hddm, tmp_path / "sd.safetensors", tmp_path / "expert", *OPTIONS, *licence)
    header = _header(hddm, tmp_path / "expert", tmp_path / "back")
    assert header == {"modelspec.license": "openrail"}
    torch.save(dit_file(dit_network()), tmp_path / "dit.pt")
    more = ("--num-heads", 4, "--no-verify", "--allow-pickle", "--licence", "mit")
    converted(hddm, tmp_path / "dit.pt", tmp_path / "dit", *more)
    header = _header(hddm, tmp_path / "dit", tmp_path / "dit back", "facebook-dit")
    assert header["modelspec.license"] == "mit"


@pytest.mark.parametrize("case", ["two sets", "float8"])
def test_other_tensors_of_the_same_network_have_no_hash_of_the_old_ones(
    case: str, tmp_path: Path, hddm: Command
) -> None:
    content = _content()
    if case == "two sets":
        other = text_unet(seed=1, **SIZES)
        content = {
            name: one.contiguous() for name, one in ldm_file(text_unet(**SIZES), other).items()
        }
    else:
        name = next(name for name in content if name.endswith("attn1.to_q.weight"))
        content[name] = content[name].to(torch.float8_e4m3fn)
        content[name.replace("weight", "scale_weight")] = torch.tensor(0.5)
    save_file(content, tmp_path / "sd.safetensors", HEADER)
    converted(hddm, tmp_path / "sd.safetensors", tmp_path / "expert", *OPTIONS)
    header = _header(hddm, tmp_path / "expert", tmp_path / "back")
    hashes = {"modelspec.hash_sha256", "sshs_model_hash", "sshs_legacy_hash"}
    assert header == {key: one for key, one in HEADER.items() if key not in hashes}


def test_a_header_that_is_too_large_to_be_kept_is_named(tmp_path: Path, hddm: Command) -> None:
    tags = {"ss_tag_frequency": "é" * 2**20, "workflow": "x" * 2**20, "prompt": "y" * 2**19}
    save_file(_content(), tmp_path / "sd.safetensors", HEADER | tags)
    text = converted(hddm, tmp_path / "sd.safetensors", tmp_path / "expert", *OPTIONS)
    assert "note: " in text
    assert f"{tmp_path / 'sd.safetensors'}: ss_tag_frequency of 6.0 MB in its header" in text
    assert "workflow of" not in text
    open_expert(tmp_path / "expert")
    header = _header(hddm, tmp_path / "expert", tmp_path / "back")
    assert header == HEADER | {key: tags[key] for key in ("workflow", "prompt")}
