"""By how much a LoRA file changes a layer: what peft itself does with the same folder, or a refusal."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from diffusers import DDIMScheduler
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import CLIPTextModel

from hddm.checkpoints.convert import write
from hddm.checkpoints.lora import convert_lora
from hddm.checkpoints.plan import plan_conversion
from hddm.experts.adapter_records import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from hddm.experts.expert_folders import open_expert
from hddm.settings import Conversion
from hddm.utils.files import write_json
from tests.artefacts import Command, edit_json, refusal
from tests.checkpoint_files import SD_BETAS, pipeline, refused, text_unet
from tests.component_files import write_clip, write_vae

QUERIES = "encoder.layers.0.self_attn.q_proj"
LAYER = "mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
WIDTH = 16


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An expert with a CLIP of two layers."""
    root = tmp_path_factory.mktemp("base")
    source = root / "source"
    pipeline(source, text_unet(), DDIMScheduler(**SD_BETAS, prediction_type="epsilon"))
    write_vae(source / "vae")
    write_clip(source, num_hidden_layers=2)
    write(plan_conversion(source, Conversion()), root / "base")
    return root / "base"


def _trained(network: nn.Module, config: peft.PeftConfig, folder: Path) -> dict[str, Tensor]:
    """Save an adapter of random factors with peft, and return the weights that peft merges it into."""
    model = peft.get_peft_model(network, config)
    noise = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("lora_", "hada_", "lokr_")):
            parameter.data.normal_(std=0.2, generator=noise)
    model.save_pretrained(folder)
    merged: dict[str, Tensor] = model.merge_and_unload().state_dict()
    return merged


def _compare(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, rtol=0, atol=2e-6)


PATTERNS: dict[str, Any] = {
    "alpha_pattern": {r"mid_block\..*to_[qk]": 5, "conv_in": 3},
    "rank_pattern": {r"mid_block\.attentions\.\d\.transformer_blocks\.\d.*to_q": 6},
}
LAYERS = ["to_q", "to_k", "conv_in"]


@pytest.mark.parametrize(
    "config",
    [
        peft.LoraConfig(r=4, lora_alpha=27, target_modules=LAYERS),
        peft.LoraConfig(r=4, lora_alpha=27, target_modules=LAYERS, use_rslora=True),
        peft.LoraConfig(r=4, lora_alpha=27, target_modules=LAYERS, **PATTERNS),
        peft.LoHaConfig(r=2, alpha=8, target_modules=LAYERS),
        peft.LoHaConfig(r=2, target_modules=LAYERS, use_effective_conv2d=True, **PATTERNS),
        peft.LoKrConfig(r=2, alpha=9, target_modules=LAYERS),
        peft.LoKrConfig(r=64, alpha=9, target_modules=LAYERS, **PATTERNS),
    ],
    ids=["LoRA", "rsLoRA", "patterns", "LoHa", "LoHa-patterns", "LoKr", "LoKr-whole"],
)
def test_a_folder_of_peft_is_scaled_as_peft_scales_it(
    config: peft.PeftConfig, base: Path, tmp_path: Path
) -> None:
    network = text_unet()
    expected = _trained(network, config, tmp_path / "lora")
    lines = convert_lora(tmp_path / "lora", base, tmp_path / "out")
    assert f"alpha: by {ADAPTER_CONFIG}" in lines
    found = open_expert(tmp_path / "out").read().network.state_dict()
    _compare(found, expected)
    assert any(
        (found[name] - one).abs().max() > 0.1 for name, one in text_unet().state_dict().items()
    )


def _merged_text(path: Path, base: Path, out: Path) -> dict[str, Tensor]:
    convert_lora(path, base, out, text_encoder_lora="apply")
    return load_file(out / "text_encoder" / "model.safetensors")


@pytest.mark.parametrize("use_rslora", [False, True])
def test_a_folder_of_peft_of_a_text_encoder_is_scaled_as_peft_scales_it(
    use_rslora: bool, base: Path, tmp_path: Path
) -> None:
    model = CLIPTextModel.from_pretrained(base / "text_encoder")
    config = peft.LoraConfig(
        r=3,
        lora_alpha=27,
        use_rslora=use_rslora,
        target_modules=["q_proj", "fc1"],
        alpha_pattern={r"encoder\.layers\.\d+\.mlp\.fc1": 6},
    )
    merged = _trained(model, config, tmp_path / "lora")
    # Of transformers 4, whose names are those that such files have.
    path = tmp_path / "lora" / ADAPTER_WEIGHTS
    content = {}
    for name, one in load_file(path).items():
        inner = name.removeprefix("base_model.model.").removeprefix("text_model.")
        content[f"base_model.model.text_model.{inner}"] = one
    save_file(content, path)
    found = _merged_text(tmp_path / "lora", base, tmp_path / "out")
    expected = {name.removeprefix("text_model."): one for name, one in merged.items()}
    _compare({name.removeprefix("text_model."): one for name, one in found.items()}, expected)


def _text(layer: str = QUERIES, stem: str = "text_encoder.text_model.") -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(1)
    return {
        f"{stem}{layer}.lora_A.weight": torch.randn(3, WIDTH, generator=noise),
        f"{stem}{layer}.lora_B.weight": torch.randn(WIDTH, 3, generator=noise),
    }


def _network() -> dict[str, Tensor]:
    width = text_unet().state_dict()[f"{LAYER}.weight"].shape[0]
    return {
        f"unet.{LAYER}.lora_A.weight": torch.ones(3, width),
        f"unet.{LAYER}.lora_B.weight": torch.ones(width, 3),
    }


def test_a_config_in_the_header_scales_the_text_encoder_that_it_names(
    base: Path, tmp_path: Path
) -> None:
    stated = {"text_encoder.r": 3, "text_encoder.lora_alpha": 3, "unet.r": 3, "unet.lora_alpha": 7}
    stated["text_encoder.alpha_pattern"] = {r"encoder\.layers\.\d+\.self_attn\.q_proj": 12}
    content, path = _text(), tmp_path / "lora.safetensors"
    save_file(content, path, {"lora_adapter_metadata": json.dumps(stated)})
    found = _merged_text(path, base, tmp_path / "out")
    before = load_file(base / "text_encoder" / "model.safetensors")
    (name,) = [name for name in before if name.endswith(f"{QUERIES}.weight")]
    a, b = content.values()
    torch.testing.assert_close(found[name] - before[name], 4 * b @ a, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({"text_encoder.lora_alpha": 3, "text_encoder.alpha_pattern": {"k_proj": 1}},
         "alpha_pattern 'k_proj' ends the name of no layer"),
        ({"text_encoder.lora_alpha": "two"}, "is two, not a positive number"),
        ({"text_encoder.lora_alpha": True}, "is True, not a positive number"),
        ({"text_encoder.r": 3}, "is missing, not a positive number"),
        ({"text_encoder_0.lora_alpha": 9}, "has keys of 'text_encoder_0', which is none of unet"),
        ({"lora_alpha": 9}, "does not say which of them it is of; put unet."),
        ({"text_encoder.lora_alpha": 3, "text_encoder.alpha_pattern": [1]}, "is [1], no object"),
        ({"text_encoder.lora_alpha": 3, "text_encoder.alpha_pattern": {"(a+)+": 1}}, "repeats a group"),
        ({"text_encoder.lora_alpha": 3, "text_encoder.alpha_pattern": {"(": 1}}, "no regular expression"),
        ({"text_encoder.lora_alpha": 1e9, "text_encoder.use_rslora": True}, "alpha of"),
        ({"unet.lora_alpha": 1e9, "unet.r": 3, "unet.use_rslora": True}, "alpha of"),
    ],
)  # fmt: skip
def test_a_config_that_is_none_of_the_files_is_refused_before_anything_is_written(
    stated: dict[str, object], said: str, base: Path, tmp_path: Path, hddm: Command
) -> None:
    path = tmp_path / "lora.safetensors"
    metadata = {"lora_adapter_metadata": json.dumps(stated)}
    save_file(_text() | _network(), path, metadata)
    options = ("--base", base, "--text-encoder-lora", "apply")
    assert said in refused(hddm, path, *options)
    assert said in refused(hddm, path, *options, "--dry-run")


_OTHER_STEMS = {
    "kohya": "lora_te_text_model_",
    "kohya, numbered": "lora_te1_text_model_",
    "diffusers": "text_encoder.",
    "short": "te.text_model.",
    "named": "clip_l.text_model.",
}


@pytest.mark.parametrize("case", [*_OTHER_STEMS, "attention processors"])
def test_two_names_of_one_layer_of_a_text_encoder_are_refused(
    case: str, base: Path, tmp_path: Path, hddm: Command
) -> None:
    if case == "attention processors":
        stem = f"text_encoder.text_model.{QUERIES.removesuffix('q_proj')}to_q_lora"
        twice = {f"{stem}.down.weight": torch.ones(3, WIDTH)}
        twice[f"{stem}.up.weight"] = torch.ones(WIDTH, 3)
    else:
        stem = _OTHER_STEMS[case]
        twice = _text(QUERIES.replace(".", "_") if stem.endswith("_") else QUERIES, stem)
    path = tmp_path / "lora.safetensors"
    save_file(_text() | twice, path)
    said = refused(hddm, path, "--base", base, "--text-encoder-lora", "apply")
    assert "once more; remove one" in said or "holds one factor twice" in said


@pytest.mark.parametrize("stem", ["lora_te0_text_model_", "text_encoder_0.text_model.", "te0."])
def test_text_encoders_are_counted_from_one(
    stem: str, base: Path, tmp_path: Path, hddm: Command
) -> None:
    layer = QUERIES.replace(".", "_") if stem.endswith("_") else QUERIES
    path = tmp_path / "lora.safetensors"
    save_file(_text(layer, stem), path)
    error = refused(hddm, path, "--base", base, "--text-encoder-lora", "apply")
    assert "is of text encoder 0, and they are counted from 1" in error


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"init_lora_weights": "pissa"}, "init_lora_weights is pissa"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is pissa_niter_4"),
        ({"init_lora_weights": "olora"}, "init_lora_weights is olora"),
        ({"init_lora_weights": "corda"}, "init_lora_weights is corda"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights is loftq"),
        ({"peft_type": "XLORA"}, "peft_type is XLORA"),
        ({"peft_type": "VERA"}, "peft_type is VERA"),
    ],
)
def test_a_config_of_another_formula_is_refused(
    change: dict[str, object], said: str, base: Path, tmp_path: Path
) -> None:
    _trained(text_unet(), peft.LoraConfig(r=2, target_modules=["to_q"]), tmp_path / "lora")
    edit_json(tmp_path / "lora" / ADAPTER_CONFIG, **change)
    told = refusal(convert_lora, tmp_path / "lora", base, tmp_path / "out")
    assert f"{said}, a variant of LoRA that is not read; merge it with peft first" in told


def test_a_config_beside_is_that_of_pefts_file_alone(base: Path, tmp_path: Path) -> None:
    content = {name.replace("lora_A", "lora.down"): one for name, one in _network().items()}
    content = {name.replace("lora_B", "lora.up"): one for name, one in content.items()}
    save_file(content, tmp_path / "lora.safetensors")
    write_json(tmp_path / ADAPTER_CONFIG, {"r": 3, "lora_alpha": 30})
    lines = convert_lora(tmp_path / "lora.safetensors", base, tmp_path / "out")
    assert "alpha: not stated, so it is the rank" in lines


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_largest_rank_that_outgrows_the_layers_is_merged(
    dtype: torch.dtype, base: Path, tmp_path: Path
) -> None:
    network, noise = text_unet(), torch.Generator().manual_seed(2)
    content, expected, is_first = {}, dict(network.state_dict()), True
    for name, module in network.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        out, width = module.weight.shape
        rank = max(out, width) if is_first and name.endswith("ff.net.0.proj") else 1
        is_first &= rank == 1
        a = torch.randn(rank, width, generator=noise).mul(0.1).to(dtype)
        b = torch.randn(out, rank, generator=noise).mul(0.1).to(dtype)
        content[f"unet.{name}.lora_A.weight"], content[f"unet.{name}.lora_B.weight"] = a, b
        expected[f"{name}.weight"] = module.weight + b.float() @ a.float()
    save_file(content, tmp_path / "lora.safetensors")
    lines = convert_lora(tmp_path / "lora.safetensors", base, tmp_path / "out")
    (said,) = [line for line in lines if line.startswith("base: ")]
    assert "merged into full weights, as with rank" in said
    assert "an adapter would be larger than these layers" in said
    assert not (tmp_path / "out" / ADAPTER_WEIGHTS).exists()
    _compare(open_expert(tmp_path / "out").read().network.state_dict(), expected)
    own = (base / "diffusion_pytorch_model.safetensors").stat().st_size
    assert (tmp_path / "out" / "diffusion_pytorch_model.safetensors").stat().st_size <= own + 2000


def test_an_adapter_needs_the_space_of_its_factors(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, path = _network(), tmp_path / "lora.safetensors"
    save_file(content, path)
    size = sum(one.numel() * one.itemsize for one in content.values())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=size - 1))
    words = refusal(convert_lora, path, base, tmp_path / "out")
    assert re.search(r"needs [0-9.]+ kB, and [0-9.]+ kB are free on its disk", words)
    monkeypatch.undo()
    convert_lora(path, base, tmp_path / "out")


def test_a_file_of_one_rank_stays_an_adapter_although_it_is_larger_than_its_layers(
    base: Path, tmp_path: Path
) -> None:
    width = text_unet().state_dict()[f"{LAYER}.weight"].shape[0]
    content = {
        f"unet.{LAYER}.lora_A.weight": torch.eye(width),
        f"unet.{LAYER}.lora_B.weight": torch.eye(width),
    }
    save_file(content, tmp_path / "lora.safetensors")
    convert_lora(tmp_path / "lora.safetensors", base, tmp_path / "out")
    assert (tmp_path / "out" / ADAPTER_WEIGHTS).is_file()
