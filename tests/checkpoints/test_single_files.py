"""Checkpoints of one file: whose wrappers, weight sets and other parts are told apart by their names."""

import argparse
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import EulerDiscreteScheduler
from safetensors.torch import load_file, save_file
from torch import Tensor

import hddm as library
from tests.artefacts import Command
from tests.checkpoint_files import (
    DDPM_BETAS,
    SD_BETAS,
    check_velocity,
    converted,
    facts_of,
    pixart,
    refused,
    rounded,
    text_unet,
    written_back,
)
from tests.ldm_files import ldm_file, ldm_unet
from tests.transformer_files import dit_file, dit_network, pixart_file

SD = torch.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
SIDE = ("--sample-size", 8)
HEADS = ("--num-heads", 8)
SD1: dict[str, Any] = {}
SD2 = {"use_linear_projection": True, "attention_head_dim": 4, "block_out_channels": (64, 128)}
SDXL = {
    "use_linear_projection": True,
    "attention_head_dim": 2,
    "block_out_channels": (64, 64, 64),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": [1, 1, 2],
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 6 * 256 + 10,
}


def _check_back(hddm: Command, expert: Path, layout: str, expected: dict[str, Tensor]) -> None:
    found = load_file(written_back(hddm, expert, expert.parent / "back", layout) / "checkpoint.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("changes", [SD1, SD2], ids=["1", "2"])
def test_stable_diffusion_in_one_file_and_back(
    hddm: Command, tmp_path: Path, changes: dict[str, Any]
) -> None:
    network = text_unet(**changes)
    source = tmp_path / "sd.safetensors"
    save_file(ldm_file(network), source)
    options = (*SIDE, "--num-heads", network.config["attention_head_dim"])
    assert "--prediction-type epsilon" in refused(hddm, source, *options)
    kind = "v_prediction" if changes else "epsilon"
    text = converted(hddm, source, tmp_path / "expert", "--prediction-type", kind, *options)
    assert "2 tensors of its VAE and text encoder are left alone" in text
    check_velocity(tmp_path / "expert", network, SD, kind)
    others = ("first_stage_model.", "cond_stage_model.")
    kept = {name: tensor for name, tensor in load_file(source).items() if not name.startswith(others)}
    assert "betas" in kept
    _check_back(hddm, tmp_path / "expert", "ldm", kept)


@pytest.mark.parametrize("pickled", [False, True])
def test_averaged_copies_in_a_stable_diffusion_file(hddm: Command, tmp_path: Path, pickled: bool) -> None:
    raw, averaged = text_unet(0), text_unet(1)
    source = tmp_path / ("sd.ckpt" if pickled else "sd.safetensors")
    options: list[object] = ["--prediction-type", "epsilon", *SIDE, *HEADS]
    if pickled:
        content = ldm_file(raw, averaged)
        torch.save({"state_dict": content, "global_step": 470000, "epoch": 3}, source)
        options.append("--allow-pickle")
    else:
        save_file(ldm_file(raw, averaged), source)
    chosen = "ema" if pickled else "raw"
    text = converted(hddm, source, tmp_path / "expert", *options, *([] if pickled else ["--weights", "raw"]))
    assert f"weights: {chosen} (present: raw, ema)" in text
    check_velocity(tmp_path / "expert", averaged if pickled else raw, SD)


def test_sdxl_in_one_file_says_neither_schedule_nor_prediction(hddm: Command, tmp_path: Path) -> None:
    network = rounded(text_unet(**SDXL), torch.float16)
    source, options = tmp_path / "xl.safetensors", (*SIDE, "--num-heads", 2)
    content = ldm_unet(copy.deepcopy(network).half())
    save_file(content | {"conditioner.embedders.0.x": torch.zeros(2)}, source)
    assert "--schedule" in refused(hddm, source, *options)
    scheduler = EulerDiscreteScheduler(**SD_BETAS, prediction_type="epsilon").save_pretrained
    scheduler(tmp_path / "scheduler")
    file = tmp_path / "scheduler" / "scheduler_config.json"
    converted(hddm, source, tmp_path / "expert", "--schedule", file, *options)
    check_velocity(tmp_path / "expert", network, SD)
    _check_back(hddm, tmp_path / "expert", "ldm", content)


Wrap = Callable[[dict[str, Tensor], dict[str, Tensor]], dict[str, Any]]
OPTIMISER = {
    "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2)}},
    "param_groups": [{"lr": 1e-4}],
}
ARGS = argparse.Namespace(model="DiT-XL/2", lr=None, image_size=256)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda raw, ema: {"model": raw, "ema": ema, "opt": OPTIMISER, "args": ARGS},
        lambda raw, ema: {"model": raw, "ema": {"decay": 0.999, "shadow": ema}},
        lambda raw, ema: {"model": {"module": raw}, "ema": {"module": ema}},
        lambda raw, ema: {"state_dict": raw, "ema": {"shadow_params": ema}},
        lambda raw, ema: {"model": raw, "model_ema": ema},
        lambda raw, ema: {"model": raw, "ema_model": ema},
        lambda raw, ema: {"model": raw, "ema_state_dict": ema},
        lambda raw, ema: {
            f"{head}.{k}": v for head, w in (("model", raw), ("model_ema", ema)) for k, v in w.items()
        },
    ],
)
def test_averaged_weights_are_found_under_all_their_names(hddm: Command, tmp_path: Path, wrap: Wrap) -> None:
    source, options = tmp_path / "dit.pt", ("--allow-pickle", "--num-heads", 4)
    torch.save(wrap(dit_file(dit_network(0)), dit_file(dit_network(1))), source)
    converted(hddm, source, tmp_path / "expert", *options)
    assert facts_of(tmp_path / "expert")["weights"] == "ema"
    check_velocity(tmp_path / "expert", dit_network(1), DDPM_BETAS)
    converted(hddm, source, tmp_path / "raw", *options, "--weights", "raw")
    check_velocity(tmp_path / "raw", dit_network(0), DDPM_BETAS)


@pytest.mark.parametrize("wrapping", ["bare", "prefixed", "published"])
def test_a_file_with_one_set_does_not_say_which_it_is(hddm: Command, tmp_path: Path, wrapping: str) -> None:
    network, options = dit_network(), ["--num-heads", 4]
    content, source = dit_file(network), tmp_path / "dit.safetensors"
    if wrapping == "prefixed":
        content = {f"model.module._orig_mod.{name}": tensor for name, tensor in content.items()}
    if wrapping == "published":
        source = tmp_path / "dit.pt"
        torch.save({"state_dict": content}, source)
        options.append("--allow-pickle")
    else:
        save_file(content, source)
    text = converted(hddm, source, tmp_path / "expert", *options)
    assert ("prefix: 'model.module._orig_mod.'" in text) == (wrapping == "prefixed")
    check_velocity(tmp_path / "expert", network, DDPM_BETAS)
    facts = facts_of(tmp_path / "expert")
    assert (facts["weights"], facts["schedule_source"]) == ("unstated", "the code of layout facebook-dit")
    _check_back(hddm, tmp_path / "expert", "facebook-dit", content)
    assert "--weights raw" in refused(hddm, source, "--weights", "raw", *options)


def test_pixarts_own_file_without_positions_and_back(hddm: Command, tmp_path: Path) -> None:
    network, raw = pixart(0), pixart(1)
    content = pixart_file(network, positions=False)
    source = tmp_path / "pixart.pth"
    torch.save({"state_dict": pixart_file(raw, False), "state_dict_ema": content, "epoch": 1}, source)
    options = ["--num-heads", 2, "--allow-pickle"]
    assert "--sample-size" in refused(hddm, source, *options)
    converted(hddm, source, tmp_path / "expert", *options, *SIDE)
    check_velocity(tmp_path / "expert", network, DDPM_BETAS)
    field = library.load(tmp_path / "expert")
    assert isinstance(field, library.VelocityField)
    assert torch.equal(field.null_conditions["encoder_hidden_states"], content["y_embedder.y_embedding"])
    _check_back(hddm, tmp_path / "expert", "pixart-original", content)


@pytest.mark.parametrize("half", [False, True])
def test_pixarts_own_file_with_sizes_as_conditions(hddm: Command, tmp_path: Path, half: bool) -> None:
    network = pixart(use_additional_conditions=True, attention_head_dim=12, cross_attention_dim=24)
    cast: Callable[[Tensor], Tensor] = torch.Tensor.half if half else torch.Tensor.clone
    if half:
        rounded(network, torch.float16)
    content = {f"module.{name}": cast(tensor) for name, tensor in pixart_file(network).items()}
    save_file(content, tmp_path / "pixart.safetensors")
    text = converted(hddm, tmp_path / "pixart.safetensors", tmp_path / "expert", "--num-heads", 2)
    assert "not needed: pos_embed, computed anew" in text
    check_velocity(tmp_path / "expert", network, DDPM_BETAS)
    _check_back(hddm, tmp_path / "expert", "pixart-original", content)


def test_imagenets_classes_bring_their_licence(hddm: Command, tmp_path: Path) -> None:
    save_file(dit_file(dit_network(num_classes=1000)), tmp_path / "dit.safetensors")
    text = converted(hddm, tmp_path / "dit.safetensors", tmp_path / "expert", "--num-heads", 4, "--no-verify")
    assert "CC-BY-NC-4.0" in text
    assert "CC-BY-NC-4.0" in json.dumps(facts_of(tmp_path / "expert")["licence"])
