"""VAEs of every kind and age, against what diffusers itself makes of the same folders."""

import json
import os
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderTiny
from safetensors.torch import load_file, save_file

from hddm.experts.kept import put_component
from hddm.networks.identity import VaeRecord
from hddm.networks.vae import decode, encode, latents_of, read_vae, vae_record_of
from hddm.utils.errors import HddmError
from tests.artefacts import edit_json, refusal
from tests.checkpoint_files import rounded
from tests.component_files import write_vae

FILE = "diffusion_pytorch_model.safetensors"
HALF = "diffusion_pytorch_model.fp16.safetensors"
FORMER = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}


def _latents(num: int = 2, channels: int = 4) -> torch.Tensor:
    return torch.randn(num, channels, 4, 4, generator=torch.Generator().manual_seed(1))


def _renamed(folder: Path, names: dict[str, str]) -> None:
    """The folder's weights under the names of former versions."""
    weights = load_file(folder / FILE)
    for new, old in names.items():
        weights = {key.replace(f".{new}.", f".{old}."): value for key, value in weights.items()}
    save_file(weights, folder / FILE)


def _refused(folder: Path) -> str:
    refusal(vae_record_of, folder)
    return refusal(read_vae, folder)


@pytest.mark.parametrize("kind", ["kl", "tiny"])
@pytest.mark.parametrize("factor", [2, 8])
def test_images_are_what_diffusers_decodes_from_the_same_folder(
    kind: Literal["kl", "tiny"], factor: int, tmp_path: Path
) -> None:
    write_vae(tmp_path, kind, factor=factor)
    cls, scale = {"kl": (AutoencoderKL, 0.18215), "tiny": (AutoencoderTiny, 1.0)}[kind]
    # With gradients torch multiplies by another path, whose last bits differ on some processors.
    theirs = cls.from_pretrained(tmp_path).requires_grad_(False)
    images = decode(read_vae(tmp_path), _latents())
    with torch.no_grad():
        expected = theirs.decode(_latents() / scale).sample.clamp(-1, 1)
    assert images.shape == (2, 3, 4 * factor, 4 * factor)
    assert torch.equal(images, expected)


def test_scale_and_shift_are_undone_before_decoding(tmp_path: Path) -> None:
    vae = write_vae(tmp_path, latent_channels=16, scaling_factor=0.3611, shift_factor=0.1159)
    with torch.no_grad():
        expected = vae.decode(_latents(channels=16) / 0.3611 + 0.1159).sample.clamp(-1, 1)
    assert torch.allclose(decode(read_vae(tmp_path), _latents(channels=16)), expected, atol=1e-6)
    facts = vae_record_of(tmp_path)
    assert (facts.kind, facts.scale, facts.shift) == ("AutoencoderKL", 0.3611, 0.1159)


@pytest.mark.parametrize(
    "index", ["{0}.safetensors.index.fp16.json", "{0}.fp16.safetensors.index.json"]
)
def test_half_precision_in_several_files_is_found_where_it_is_the_only_copy(
    index: str, tmp_path: Path
) -> None:
    vae = write_vae(tmp_path / "whole", dtype=torch.float16)
    vae.save_pretrained(tmp_path / "parts", variant="fp16", max_shard_size="4KB")
    (written,) = (tmp_path / "parts").glob("*.index*.json")
    written.rename(written.with_name(index.format("diffusion_pytorch_model")))
    assert vae_record_of(tmp_path / "parts") == vae_record_of(tmp_path / "whole")
    with torch.no_grad():
        expected = vae.float().decode(_latents() / 0.18215).sample.clamp(-1, 1)
    assert torch.allclose(decode(read_vae(tmp_path / "parts"), _latents()), expected, atol=1e-6)
    put_component(tmp_path / "kept", "vae", tmp_path / "parts")
    assert vae_record_of(tmp_path / "kept" / "vae") == vae_record_of(tmp_path / "whole")


def test_names_of_former_versions_are_read_as_diffusers_reads_them(tmp_path: Path) -> None:
    write_vae(tmp_path)
    images, facts = decode(read_vae(tmp_path), _latents()), vae_record_of(tmp_path)
    _renamed(tmp_path, FORMER)
    assert any(".proj_attn." in key for key in load_file(tmp_path / FILE))
    theirs = AutoencoderKL.from_pretrained(tmp_path).requires_grad_(False)
    with torch.no_grad():
        assert torch.equal(images, theirs.decode(_latents() / 0.18215).sample.clamp(-1, 1))
    assert torch.equal(decode(read_vae(tmp_path), _latents()), images)
    assert vae_record_of(tmp_path) == facts


def test_a_config_of_early_versions_has_the_defaults_of_its_class(tmp_path: Path) -> None:
    write_vae(tmp_path)
    whole = vae_record_of(tmp_path)
    _drop(
        tmp_path, "scaling_factor", "shift_factor", "force_upcast", "use_quant_conv", "latents_mean"
    )
    assert (
        vae_record_of(tmp_path)
        == whole
        == VaeRecord(**whole.model_dump() | {"scale": 0.18215, "shift": 0.0})
    )


def _drop(folder: Path, *keys: str) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in config.items() if key not in keys}))


@pytest.mark.parametrize("kind", ["kl", "tiny"])
def test_a_float16_copy_is_the_same_vae(kind: Literal["kl", "tiny"], tmp_path: Path) -> None:
    vae = write_vae(tmp_path / "full", kind)
    write_vae(tmp_path / "half", kind, dtype=torch.float16)
    (tmp_path / "half" / FILE).rename(tmp_path / "half" / HALF)
    assert vae_record_of(tmp_path / "half") == vae_record_of(tmp_path / "full")
    read = read_vae(tmp_path / "half")
    assert {p.dtype for p in read.parameters()} == {torch.float32}
    scale = vae.config.scaling_factor
    with torch.no_grad():
        expected = rounded(vae, torch.float16).decode(_latents() / scale).sample.clamp(-1, 1)
    assert torch.allclose(decode(read, _latents()), expected, atol=1e-6)


@pytest.mark.parametrize("kind", ["kl", "tiny"])
def test_the_encoder_alone_tells_latent_spaces_apart(
    kind: Literal["kl", "tiny"], tmp_path: Path
) -> None:
    write_vae(tmp_path / "vae", kind)
    facts, weights = vae_record_of(tmp_path / "vae"), load_file(tmp_path / "vae" / FILE)
    parts = {"decoder.": True, "encoder.": False}
    parts |= {"post_quant_conv.": True, "quant_conv.": False} if kind == "kl" else {}
    for part, same in parts.items():
        changed = {
            key: value * 1.1 if key.startswith(part) else value for key, value in weights.items()
        }
        save_file(changed, tmp_path / "vae" / FILE)
        assert (vae_record_of(tmp_path / "vae") == facts) is same, part


def test_a_float16_vae_that_would_overflow_decodes_in_float32(tmp_path: Path) -> None:
    write_vae(tmp_path)
    # Activations in the middle beyond 65504 which the next norm brings back.
    weights = load_file(tmp_path / FILE)
    weights["decoder.conv_in.weight"] *= 1e5
    save_file(weights, tmp_path / FILE)
    read = read_vae(tmp_path, torch.float16)
    expected = decode(read_vae(tmp_path), _latents())
    assert (decode(read, _latents()) - expected).abs().max() < 0.05
    assert {p.dtype for p in read.parameters()} == {torch.float16}
    edit_json(tmp_path / "config.json", force_upcast=False)
    with pytest.raises(
        HddmError, match=r"images 0, 1 of 2 hold NaN or Inf; decode in float32 instead"
    ):
        decode(read_vae(tmp_path, torch.float16), _latents())


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("kl", {"auto_map": {"AutoModel": "x.Y"}}, "'auto_map', which names code of its own"),
        (
            "kl",
            {"_class_name": "VQModel"},
            "holds a VQModel, not an AutoencoderKL or an AutoencoderTiny",
        ),
        ("kl", {"scaling_facto": 1.0}, "did you mean 'scaling_factor'"),
        (
            "tiny",
            {"scaling_factor": 0},
            "scaling_factor 0 and shift_factor 0.0 must be numbers below 1e+06",
        ),
        ("tiny", {"shift_factor": "a"}, "shift_factor a must be numbers"),
        ("kl", {"latent_channels": 8}, "does not fit its config.json"),
        ("kl", {"latents_mean": [0.0] * 4}, "latents_mean of each channel, without latents_std"),
        ("kl", {"latents_mean": [0.0] * 3, "latents_std": [1.0] * 4}, "must be 4 numbers"),
        ("kl", {"latents_mean": [0.0] * 4, "latents_std": [1.0, 1, 1, 0]}, "from 1e-06 to 1e+06"),
        (
            "kl",
            {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4, "shift_factor": 0.1},
            "a shift_factor beside the latents_mean",
        ),
        ("kl", {"layers_per_block": 10**9}, "its depth is"),
        ("tiny", {"num_encoder_blocks": [1, 10**9]}, "its depth is 1000000000"),
    ],
    ids=str,
)
def test_a_config_that_cannot_be_trusted_is_refused(
    kind: Literal["kl", "tiny"], change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_vae(tmp_path, kind)
    edit_json(tmp_path / "config.json", **change)
    text = _refused(tmp_path)
    assert message in text
    assert "config.json" in text


def test_tensors_that_are_not_finite_or_do_not_fit_are_named(tmp_path: Path) -> None:
    write_vae(tmp_path)
    weights = load_file(tmp_path / FILE)
    weights["decoder.conv_in.bias"][0] = torch.inf
    save_file(weights, tmp_path / FILE)
    with pytest.raises(HddmError, match=r"'decoder\.conv_in\.bias' holds NaN or Inf"):
        read_vae(tmp_path)
    del weights["decoder.conv_in.bias"]
    save_file(weights | {"loss.weight": torch.zeros(1)}, tmp_path / FILE)
    text = _refused(tmp_path)
    assert "missing decoder.conv_in.bias (8,)" in text
    assert "left over loss.weight (1,)" in text


@pytest.mark.parametrize("name", ["config.json", FILE])
def test_a_missing_file_and_a_link_that_leaves_the_folder_are_refused(
    name: str, tmp_path: Path
) -> None:
    write_vae(tmp_path / "vae")
    (tmp_path / "vae" / name).rename(tmp_path / name)
    assert name in _refused(tmp_path / "vae")
    os.symlink(tmp_path / name, tmp_path / "vae" / name)
    assert "outside the folder" in _refused(tmp_path / "vae")
    if name == FILE:
        (tmp_path / "vae" / name).rename(tmp_path / "vae" / "diffusion_pytorch_model.bin")
        assert "only diffusion_pytorch_model.bin; save it as safetensors" in _refused(
            tmp_path / "vae"
        )


STATISTICS = {
    "latents_mean": [-1.6574, 1.886, -1.383, 2.5155],
    "latents_std": [8.4927, 5.9022, 6.5498, 5.2299],
    "scaling_factor": 0.5,
    "shift_factor": None,
}
"""Of Playground 2.5's VAE, by its config."""


def test_statistics_of_each_channel_are_undone_as_diffusers_pipelines_undo_them(
    tmp_path: Path,
) -> None:
    write_vae(tmp_path)
    plain = vae_record_of(tmp_path)
    edit_json(tmp_path / "config.json", **STATISTICS)
    record, vae = vae_record_of(tmp_path), read_vae(tmp_path)
    assert record.fingerprint == plain.fingerprint
    assert (record.scale, list(record.mean)) == (0.5, STATISTICS["latents_mean"])
    mean, std = (
        torch.tensor(STATISTICS[key]).view(1, 4, 1, 1) for key in ("latents_mean", "latents_std")
    )
    samples = _latents()
    with torch.no_grad():
        expected = vae.decode(samples * std / 0.5 + mean).sample.clamp(-1, 1)
    torch.testing.assert_close(decode(vae, samples), expected)
    pictures = torch.rand(2, 3, 8, 8) * 2 - 1
    z = encode(vae, pictures)[0]
    torch.testing.assert_close(latents_of(vae, pictures), (z - mean) * 0.5 / std)
    torch.testing.assert_close(record.scaling.z(record.scaling.samples(z)), z)
