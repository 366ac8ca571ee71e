"""Pipelines and model folders as they lie on hubs become experts whose velocity is the closed form's."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from diffusers import DDIMScheduler, DDPMScheduler, DPMSolverMultistepScheduler, ModelMixin, PNDMScheduler

from tests.artefacts import Command, edit_json
from tests.checkpoint_files import (
    DDPM_BETAS,
    SD_BETAS,
    check_velocity,
    converted,
    dit,
    facts_of,
    pipeline,
    pixart,
    refused,
    text_unet,
)

WEIGHTS = "diffusion_pytorch_model"

SD = DDPMScheduler(**SD_BETAS).betas


def test_stable_diffusion_with_absent_parts_and_a_silent_scheduler(hddm: Command, tmp_path: Path) -> None:
    network = text_unet()
    source = pipeline(tmp_path / "sd", network, PNDMScheduler(**SD_BETAS, skip_prk_steps=True))
    scheduler = source / "scheduler" / "scheduler_config.json"
    stated = json.loads(scheduler.read_text())
    scheduler.write_text(json.dumps({key: one for key, one in stated.items() if key != "prediction_type"}))
    edit_json(
        source / "model_index.json",
        safety_checker=["stable_diffusion", "StableDiffusionSafetyChecker"],
        feature_extractor=["transformers", "CLIPImageProcessor"],
        text_encoder=["transformers", "CLIPTextModel"],
        tokenizer=["transformers", "CLIPTokenizer"],
        vae=["diffusers", "AutoencoderKL"],
        requires_safety_checker=True,
    )
    (source / "vae").mkdir()
    (source / "vae" / "config.json").write_text('{"_class_name": "AutoencoderKL", "latent_channels": 4}')
    text = converted(hddm, source, tmp_path / "expert")
    assert "no prediction_type, so PNDMScheduler's default epsilon" in text
    assert "AutoencoderKL's default 0.18215" in text
    assert facts_of(tmp_path / "expert")["latent_scale"] == 0.18215
    check_velocity(tmp_path / "expert", network, SD)


@pytest.mark.parametrize("kind", ["v_prediction", "sample"])
def test_the_schedulers_prediction_type_is_followed(hddm: Command, tmp_path: Path, kind: str) -> None:
    network = dit()
    source = pipeline(tmp_path / "dit", network, DDIMScheduler(prediction_type=kind))
    converted(hddm, source, tmp_path / "expert")
    check_velocity(tmp_path / "expert", network, DDPM_BETAS, kind)


OLD = {
    "_class_name": "Transformer2DModel",
    "_diffusers_version": "0.12.0.dev0",
    "attention_type": "default",
    "cross_attention_dim": None,
    "double_self_attention": False,
    "num_vector_embeds": None,
    "only_cross_attention": False,
    "use_linear_projection": False,
}


@pytest.mark.parametrize(("make", "scheduler"), [(dit, DDIMScheduler), (pixart, DPMSolverMultistepScheduler)])
def test_transformers_under_their_former_class(
    hddm: Command, tmp_path: Path, make: Callable[[], ModelMixin], scheduler: Callable[[], Any]
) -> None:
    network = make()
    source = pipeline(tmp_path / "old", network, scheduler())
    old = OLD | ({"cross_attention_dim": 16} if make is pixart else {})
    edit_json(source / "transformer" / "config.json", **old)
    edit_json(source / "model_index.json", transformer=["diffusers", "Transformer2DModel"])
    converted(hddm, source, tmp_path / "expert")
    check_velocity(tmp_path / "expert", network, DDPM_BETAS)


def test_pixart_with_sizes_as_conditions(hddm: Command, tmp_path: Path) -> None:
    network = pixart(use_additional_conditions=True, attention_head_dim=12, cross_attention_dim=24)
    source = pipeline(tmp_path / "pixart", network, DPMSolverMultistepScheduler())
    converted(hddm, source, tmp_path / "expert")
    assert {"resolution", "aspect_ratio"} < set(facts_of(tmp_path / "expert")["conditions"])
    check_velocity(tmp_path / "expert", network, DDPM_BETAS)


def test_sdxl_with_pooled_text_and_sizes(hddm: Command, tmp_path: Path) -> None:
    network = text_unet(
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=48 + 10,
        transformer_layers_per_block=[1, 2],
        use_linear_projection=True,
    )
    source = pipeline(tmp_path / "sdxl", network, DDIMScheduler(**SD_BETAS, prediction_type="v_prediction"))
    converted(hddm, source, tmp_path / "expert")
    check_velocity(tmp_path / "expert", network, SD, "v_prediction")


@pytest.mark.parametrize("sharded", [False, True])
def test_a_snapshot_of_the_hub_cache(hddm: Command, tmp_path: Path, sharded: bool) -> None:
    network = dit()
    plain = pipeline(tmp_path / "plain", network, max_shard_size="10KB" if sharded else "1GB")
    repository = tmp_path / "models--who--what"
    snapshot = repository / "snapshots" / "0123abc"
    (repository / "blobs").mkdir(parents=True)
    for number, path in enumerate(sorted(p for p in plain.rglob("*") if p.is_file())):
        blob = repository / "blobs" / f"{number:040x}"
        shutil.move(path, blob)
        link = snapshot / path.relative_to(plain)
        link.parent.mkdir(parents=True, exist_ok=True)
        up = "../" * (2 + len(path.relative_to(plain).parts) - 1)
        link.symlink_to(f"{up}blobs/{blob.name}")
    assert any("index" in path.name for path in snapshot.rglob("*")) or not sharded
    converted(hddm, snapshot, tmp_path / "expert")
    files = facts_of(tmp_path / "expert")["source"]["files"]
    assert all(name.startswith(WEIGHTS) for name in files)
    check_velocity(tmp_path / "expert", network, DDPM_BETAS)


def test_the_denoiser_alone_beside_its_pipeline_and_without_one(hddm: Command, tmp_path: Path) -> None:
    network = dit()
    source = pipeline(tmp_path / "dit", network, DDIMScheduler(prediction_type="v_prediction"))
    converted(hddm, source / "transformer", tmp_path / "beside")
    check_velocity(tmp_path / "beside", network, DDPM_BETAS, "v_prediction")
    alone = Path(shutil.copytree(source / "transformer", tmp_path / "alone"))
    assert "--schedule" in refused(hddm, alone)
    file = source / "scheduler" / "scheduler_config.json"
    converted(hddm, alone, tmp_path / "expert", "--schedule", file)
    check_velocity(tmp_path / "expert", network, DDPM_BETAS, "v_prediction")


def test_the_licence_of_a_model_card_and_of_imagenet(hddm: Command, tmp_path: Path) -> None:
    source = pipeline(tmp_path / "dit", dit(num_embeds_ada_norm=1000))
    text = converted(hddm, source, tmp_path / "expert")
    assert "CC-BY-NC-4.0" in text
    assert "CC-BY-NC-4.0" in facts_of(tmp_path / "expert")["licence"]
    card = "---\nlanguage: en\nlicense: 'openrail++'\ntags:\n- a\n---\n# A model\nlicense: mit\n"
    (source / "README.md").write_bytes(card.replace("\n", "\r\n").encode())
    assert "licence: openrail++" in converted(hddm, source, tmp_path / "other")
    assert facts_of(tmp_path / "other")["licence"] == "openrail++"
    assert "states 'openrail++'" in refused(hddm, source, "--licence", "mine")
