"""Single files in fp8 with scales, and in GGUF, become the numbers that they stand for."""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hddm.checkpoints.quantised import dequantised, read_gguf
from hddm.utils.errors import HddmError
from tests.artefacts import Command, refusal
from tests.checkpoint_files import refused, text_unet
from tests.ldm_files import ldm_file

ROOT = "model.diffusion_model."
LAYER = f"{ROOT}input_blocks.1.1.transformer_blocks.0.attn1.to_q"
SIDE = ("--sample-size", 8)
OPTIONS = ("--prediction-type", "epsilon", "--num-heads", 8, *SIDE)


def _in_fp8(content: dict[str, Tensor], scale: str, by_row: bool = False) -> dict[str, Tensor]:
    """Layers of attention in float8 with a scale, as ComfyUI's files have them."""
    stored = dict(content)
    for name, weight in content.items():
        if ".to_" not in name or not name.endswith(".weight"):
            continue
        largest = weight.abs().amax(1, keepdim=True) if by_row else weight.abs().max()
        factor = (largest / 448).float()
        layer = name.removesuffix("weight")
        stored[name] = (weight / factor).to(torch.float8_e4m3fn)
        stored[f"{layer}{scale}"] = factor
        stored[f"{layer}{'scale_input' if scale == 'scale_weight' else 'input_scale'}"] = (
            torch.ones(())
        )
    return stored


def _bytes(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


@pytest.mark.integration
@pytest.mark.parametrize(("scale", "by_row"), [("scale_weight", False), ("weight_scale", True)])
def test_a_file_in_fp8_is_the_file_of_its_numbers(
    scale: str, by_row: bool, hddm: Command, tmp_path: Path
) -> None:
    stored = _in_fp8(ldm_file(text_unet()), scale, by_row)
    stored |= (
        {f"{ROOT}scaled_fp8": torch.empty(0, dtype=torch.float8_e4m3fn)}
        if scale == "scale_weight"
        else {f"{LAYER}.comfy_quant": _bytes(json.dumps({"format": "float8_e4m3fn"}))}
    )
    plain = {}
    for name, tensor in stored.items():
        factor = stored.get(f"{name.removesuffix('weight')}{scale}")
        if tensor.is_floating_point() and tensor.itemsize == 1 and tensor.numel():
            assert factor is not None
            plain[name] = tensor.float() * factor
        elif not name.endswith(
            ("scale", "scale_weight", "scale_input", "comfy_quant", "scaled_fp8")
        ):
            plain[name] = tensor
    save_file(stored, tmp_path / "fp8.safetensors")
    save_file(plain, tmp_path / "plain.safetensors")
    options = (*OPTIONS, "--out", tmp_path / "fp8")
    shown = hddm("convert", tmp_path / "fp8.safetensors", *options)[1]
    assert "tensors in float8 with a scale each are read in float32" in shown
    hddm("convert", tmp_path / "plain.safetensors", *OPTIONS, "--out", tmp_path / "plain")
    weights = "diffusion_pytorch_model.safetensors"
    found, expected = load_file(tmp_path / "fp8" / weights), load_file(tmp_path / "plain" / weights)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.integration
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {f"{LAYER}.comfy_quant": _bytes('{"format": "int8_blockwise"}')},
            "comfy_quant' says int8_blockwise), and hddm reads float8",
        ),
        (
            {f"{LAYER}.comfy_quant": torch.zeros(10**6, dtype=torch.uint8)},
            "says None), and hddm reads",
        ),
        ({f"{LAYER}.weight_scale": torch.ones(3)}, "the scale of"),
        ({"lost.scale_weight": torch.ones(())}, "holds a scale for 'lost.weight', which it lacks"),
        ({f"{LAYER}.scale_weight": torch.ones(())}, "has two scales"),
        ({f"{LAYER}.weight": torch.zeros(32, 32, dtype=torch.int8)}, "in int8 with a scale"),
        (
            {f"{ROOT}out.2.weight": torch.zeros(4, 32, 3, 3, dtype=torch.int8)},
            "holds quantised weights",
        ),
        ({f"{LAYER}.absmax": torch.zeros(3)}, "holds quantised weights"),
    ],
)
def test_other_quantisations_are_named(
    changes: dict[str, Tensor], said: str, hddm: Command, tmp_path: Path
) -> None:
    stored = _in_fp8(ldm_file(text_unet()), "weight_scale")
    save_file(stored | changes, tmp_path / "a.safetensors")
    error = refused(hddm, tmp_path / "a.safetensors", *OPTIONS)
    assert said in error
    assert len(error) < 400


def test_a_scale_of_zero_is_a_number_like_others() -> None:
    stored = {"a.weight": torch.ones(2, 2).to(torch.float8_e5m2), "a.scale_weight": torch.zeros(1)}
    found = dequantised(stored, Path("a")).content
    assert torch.equal(found["a.weight"], torch.zeros(2, 2))


def _write_gguf(path: Path, content: dict[str, Tensor]) -> dict[str, Tensor]:
    """Write the network alone as city96's converter does; returns what its tensors stand for."""
    writer, kept = gguf.GGUFWriter(path, "sd1"), {}
    for full, tensor in content.items():
        name, values = full.removeprefix(ROOT), tensor.float().numpy()
        kind = gguf.GGMLQuantizationType.F32
        shape = values.shape
        if values.ndim > 1 and values.size % 256 == 0:
            kind = (
                gguf.GGMLQuantizationType.Q4_0
                if values.ndim == 2
                else gguf.GGMLQuantizationType.Q8_0
            )
            if values.shape[-1] % 32:
                writer.add_array(f"comfy.gguf.orig_shape.{name}", [int(size) for size in shape])
                values = values.reshape(-1, 256)
        data = gguf.quants.quantize(values, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
        kept[full] = torch.from_numpy(np.array(gguf.quants.dequantize(data, kind))).reshape(shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


@pytest.mark.integration
def test_a_gguf_file_is_the_file_of_its_numbers(hddm: Command, tmp_path: Path) -> None:
    content = ldm_file(text_unet())
    plain = _write_gguf(tmp_path / "a.gguf", content)
    differing = [name for name in content if not torch.equal(plain[name], content[name].float())]
    assert len(differing) > 10
    save_file(plain, tmp_path / "plain.safetensors")
    shown = hddm("convert", tmp_path / "a.gguf", *OPTIONS, "--out", tmp_path / "a")[1]
    assert "F32, Q4_0, Q8_0 of GGUF, read in float32" in shown
    hddm("convert", tmp_path / "plain.safetensors", *OPTIONS, "--out", tmp_path / "plain")
    weights = "diffusion_pytorch_model.safetensors"
    found, expected = load_file(tmp_path / "a" / weights), load_file(tmp_path / "plain" / weights)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    # Inspecting tells the layout without options.
    assert "layout: ldm" in hddm("inspect", tmp_path / "a.gguf")[1]


def test_a_broken_gguf_file_is_refused_and_the_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.gguf"
    _write_gguf(path, ldm_file(text_unet()))
    whole = path.read_bytes()
    for length in (20, 200, len(whole) // 2):
        path.write_bytes(whole[:length])
        with pytest.raises(HddmError, match="is no sound GGUF file"):
            read_gguf(path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install 'hddm-diffusion[gguf]'" in refusal(read_gguf, path)
