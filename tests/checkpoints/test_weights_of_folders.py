"""The weights in a diffusers folder, under all the names that they have had."""

import copy
import json
from pathlib import Path

import pytest
import torch
from diffusers import DDPMScheduler
from safetensors.torch import load_file, save_file

from tests.artefacts import Command
from tests.checkpoint_files import (
    DDPM_BETAS,
    check_velocity,
    converted,
    dit,
    facts_of,
    pipeline,
    plain_unet,
    refused,
    rounded,
)

WEIGHTS = "diffusion_pytorch_model"


def test_half_precision_alone_needs_its_variant_and_is_kept(hddm: Command, tmp_path: Path) -> None:
    network = rounded(dit(), torch.float16)
    source = pipeline(tmp_path / "dit", copy.deepcopy(network).half(), variant="fp16")
    assert "--variant fp16" in refused(hddm, source)
    converted(hddm, source, tmp_path / "expert", "--variant", "fp16")
    written = load_file(tmp_path / "expert" / f"{WEIGHTS}.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {torch.float16}
    check_velocity(tmp_path / "expert", network, DDPM_BETAS)


@pytest.mark.parametrize(
    "style", [f"{WEIGHTS}.safetensors.index.fp16.json", f"{WEIGHTS}.fp16.safetensors.index.json"]
)
def test_a_sharded_variant_under_both_names_of_its_index(hddm: Command, tmp_path: Path, style: str) -> None:
    network = rounded(dit(), torch.bfloat16)
    halved = copy.deepcopy(network).bfloat16()
    source = pipeline(tmp_path / "dit", halved, variant="fp16", max_shard_size="10KB")
    (index,) = (source / "transformer").glob("*.index*.json")
    index.rename(index.with_name(style))
    assert "--variant fp16" in refused(hddm, source)
    converted(hddm, source, tmp_path / "expert", "--variant", "fp16")
    check_velocity(tmp_path / "expert", network, DDPM_BETAS)


def test_a_copy_without_averaging_beside_the_averaged_one(hddm: Command, tmp_path: Path) -> None:
    averaged, raw = dit(0), dit(1)
    source = pipeline(tmp_path / "dit", averaged)
    raw.save_pretrained(source / "transformer", variant="non_ema")
    text = converted(hddm, source, tmp_path / "ema")
    assert "weights: ema (present: ema, raw)" in text
    converted(hddm, source, tmp_path / "raw", "--weights", "raw")
    for name, network in (("ema", averaged), ("raw", raw)):
        assert facts_of(tmp_path / name)["weights"] == name
        check_velocity(tmp_path / name, network, DDPM_BETAS)


def test_a_folder_that_holds_one_set_does_not_have_another(hddm: Command, tmp_path: Path) -> None:
    source = pipeline(tmp_path / "dit", dit())
    for name in ("ema", "raw"):
        assert f"--weights {name}" in refused(hddm, source, "--weights", name)


def test_an_old_unconditional_model_with_former_names_at_the_root(hddm: Command, tmp_path: Path) -> None:
    network = plain_unet()
    source = pipeline(tmp_path / "ddpm", network, DDPMScheduler())
    for path in [*(source / "unet").iterdir(), *(source / "scheduler").iterdir()]:
        path.rename(source / path.name)
    (source / "unet").rmdir()
    (source / "scheduler").rmdir()
    weights = load_file(source / f"{WEIGHTS}.safetensors")
    former = {".to_q.": ".query.", ".to_k.": ".key.", ".to_v.": ".value.", ".to_out.0.": ".proj_attn."}
    for new, old in former.items():
        weights = {name.replace(new, old): tensor for name, tensor in weights.items()}
    assert any("proj_attn" in name for name in weights)
    (source / f"{WEIGHTS}.safetensors").unlink()
    torch.save(weights, source / f"{WEIGHTS}.bin")
    config = json.loads((source / "scheduler_config.json").read_text())
    keys = ("_class_name", "beta_start", "beta_end", "beta_schedule", "num_train_timesteps")
    old = {key: config[key] for key in keys} | {"tensor_format": "pt", "predict_epsilon": True}
    (source / "scheduler_config.json").write_text(json.dumps(old))
    assert "--allow-pickle" in refused(hddm, source)
    converted(hddm, source, tmp_path / "expert", "--allow-pickle")
    assert facts_of(tmp_path / "expert")["space"] == "pixels"
    check_velocity(tmp_path / "expert", network, DDPM_BETAS)


def test_a_table_of_positions_that_an_old_file_holds_is_computed_anew(hddm: Command, tmp_path: Path) -> None:
    network = dit()
    source = pipeline(tmp_path / "dit", network)
    path = source / "transformer" / f"{WEIGHTS}.safetensors"
    weights = load_file(path)
    path.unlink()
    save_file({**weights, "pos_embed.pos_embed": network.pos_embed.pos_embed.clone()}, path)
    assert "pos_embed.pos_embed" in converted(hddm, source, tmp_path / "expert")
    check_velocity(tmp_path / "expert", network, DDPM_BETAS)
