"""Sources as they lie on hubs are read as they say; where they contradict themselves, nothing is guessed."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    ModelMixin,
    PNDMScheduler,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from hddm.networks.families.dit import IMAGENET_LICENCE
from tests.artefacts import Command, edit_json
from tests.checkpoint_files import (
    DDPM_BETAS,
    SD_BETAS,
    check_velocity,
    conditions_of,
    converted,
    dit,
    pipeline,
    pixart,
    plain_unet,
    record_of,
    refused,
    rounded,
    text_unet,
)
from tests.transformer_files import pixart_file

SD = DDPMScheduler(**SD_BETAS).betas


def test_stable_diffusion_with_absent_parts_and_a_silent_scheduler(
    hddm: Command, tmp_path: Path
) -> None:
    network = text_unet()
    source = pipeline(tmp_path / "sd", network, PNDMScheduler(**SD_BETAS, skip_prk_steps=True))
    scheduler = source / "scheduler" / "scheduler_config.json"
    stated = json.loads(scheduler.read_text())
    del stated["prediction_type"]
    scheduler.write_text(json.dumps(stated))
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
    (source / "vae" / "config.json").write_text(
        '{"_class_name": "AutoencoderKL", "latent_channels": 4}'
    )
    assert "no text_encoder/, tokenizer/ beside it (found scheduler, unet, vae)" in refused(
        hddm, source
    )
    text = converted(hddm, source / "unet", tmp_path / "expert")
    assert "no prediction_type, so PNDMScheduler's default epsilon" in text
    assert "AutoencoderKL's default 0.18215" in text
    assert record_of(tmp_path / "expert")["latent_scale"] == 0.18215
    check_velocity(tmp_path / "expert", network, SD)


SIZES = {"use_additional_conditions": True, "attention_head_dim": 12, "cross_attention_dim": 24}
POOLED = {
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "use_linear_projection": True,
}
POOLED |= {"projection_class_embeddings_input_dim": 48 + 10, "transformer_layers_per_block": [1, 2]}


@pytest.mark.integration
@pytest.mark.parametrize(
    ("make", "changes", "scheduler", "betas"),
    [
        (dit, {}, DDIMScheduler(prediction_type="sample"), DDPM_BETAS),
        (pixart, SIZES, DPMSolverMultistepScheduler(), DDPM_BETAS),
        (text_unet, POOLED, DDIMScheduler(**SD_BETAS, prediction_type="v_prediction"), SD),
    ],
    ids=["predicts the data", "takes sizes", "takes pooled text and sizes"],
)
def test_an_expert_means_what_its_pipeline_says(
    make: Any, changes: dict[str, Any], scheduler: Any, betas: Tensor, hddm: Command, tmp_path: Path
) -> None:
    network = make(**changes)
    converted(hddm, pipeline(tmp_path / "source", network, scheduler), tmp_path / "expert")
    assert set(conditions_of(network)) <= set(record_of(tmp_path / "expert")["conditions"])
    check_velocity(tmp_path / "expert", network, betas, scheduler.config.prediction_type)


OLD = {
    "_class_name": "Transformer2DModel",
    "_diffusers_version": "0.12.0.dev0",
    "attention_type": "default",
}
OLD |= dict.fromkeys(("cross_attention_dim", "num_vector_embeds"))
OLD |= dict.fromkeys(
    ("double_self_attention", "only_cross_attention", "use_linear_projection"), False
)


@pytest.mark.parametrize(
    ("make", "scheduler"), [(dit, DDIMScheduler), (pixart, DPMSolverMultistepScheduler)]
)
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


@pytest.mark.parametrize("sharded", [False, True])
def test_a_snapshot_of_the_hub_cache(hddm: Command, tmp_path: Path, sharded: bool) -> None:
    network = dit()
    plain = pipeline(tmp_path / "plain", network, max_shard_size="10KB" if sharded else "1GB")
    repository = tmp_path / "models--who--what"
    snapshot = repository / "snapshots" / "0123abc"
    (repository / "blobs").mkdir(parents=True)
    for number, path in enumerate(sorted(p for p in plain.rglob("*") if p.is_file())):
        blob, inner = repository / "blobs" / f"{number:040x}", path.relative_to(plain)
        shutil.move(path, blob)
        (snapshot / inner).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / inner).symlink_to("../" * (1 + len(inner.parts)) + f"blobs/{blob.name}")
    assert any("index" in path.name for path in snapshot.rglob("*")) or not sharded
    converted(hddm, snapshot, tmp_path / "expert")
    files = record_of(tmp_path / "expert")["source"]["files"]
    assert all(name.startswith("diffusion_pytorch_model") for name in files)
    check_velocity(tmp_path / "expert", network, DDPM_BETAS)


def test_the_denoiser_alone_beside_its_pipeline_and_without_one(
    hddm: Command, tmp_path: Path
) -> None:
    source = pipeline(tmp_path / "dit", dit(), DDIMScheduler(prediction_type="v_prediction"))
    alone, file = tmp_path / "alone", source / "scheduler" / "scheduler_config.json"
    shutil.copytree(source / "transformer", alone)
    assert "--schedule" in refused(hddm, alone)
    converted(hddm, source / "transformer", tmp_path / "beside")
    converted(hddm, alone, tmp_path / "expert", "--schedule", file)
    for expert in ("beside", "expert"):
        check_velocity(tmp_path / expert, dit(), DDPM_BETAS, "v_prediction")


@pytest.mark.integration
def test_the_licence_of_a_model_card_and_of_imagenet(hddm: Command, tmp_path: Path) -> None:
    source = pipeline(tmp_path / "dit", dit(num_embeds_ada_norm=1000))
    assert "licence: CC-BY-NC-4.0" in converted(hddm, source, tmp_path / "expert")
    assert "CC-BY-NC-4.0" in record_of(tmp_path / "expert")["licence"]
    card = "---\nlanguage: en\nlicense: 'openrail++'\ntags:\n- a\n---\n# A model\nlicense: mit\n"
    (source / "README.md").write_bytes(card.replace("\n", "\r\n").encode())
    assert "licence: openrail++" in converted(hddm, source, tmp_path / "other")
    assert record_of(tmp_path / "other")["licence"] == "openrail++"
    named = {
        "license: x\nlicense_name: own": "own",
        "license: mit # y": "mit",
        "license: [a, b]": "a AND b",
    }
    none = dict.fromkeys(
        ("license:\ntags:\n- a", "license: [mit, 3]", "license: a: b"), IMAGENET_LICENCE
    )
    for k, (front, licence) in enumerate((named | none).items()):
        (source / "README.md").write_text(f"---\n{front}\n---\n")
        converted(hddm, source, tmp_path / str(k))
        assert record_of(tmp_path / str(k))["licence"] == licence
    (source / "README.md").write_bytes(card.encode())
    assert "states 'openrail++'" in refused(hddm, source, "--licence", "mine")


WEIGHTS = "diffusion_pytorch_model"


@pytest.mark.integration
def test_latents_of_every_kind_of_vae(hddm: Command, tmp_path: Path) -> None:
    for name, config, scale, said in (
        ("vqvae", {"_class_name": "VQModel"}, 0.18215, "VQModel's default 0.18215"),
        ("vae", {"_class_name": "AutoencoderDC"}, None, "AutoencoderDC is not known"),
        ("vqvae", None, None, "latent scale not stated"),
    ):
        source = pipeline(tmp_path / "ldm", plain_unet(), DDIMScheduler())
        edit_json(source / "model_index.json", **{name: ["diffusers", "VQModel"]})
        if config is not None:
            (source / name).mkdir()
            (source / name / "config.json").write_text(json.dumps(config))
        assert said in converted(
            hddm, source / "unet", tmp_path / "expert", "--overwrite", "--no-verify"
        )
        facts = record_of(tmp_path / "expert")
        assert (facts["space"], facts["latent_scale"]) == ("latents", scale)
        shutil.rmtree(source)


@pytest.mark.integration
def test_a_side_that_is_stated_is_not_contradicted(hddm: Command, tmp_path: Path) -> None:
    source = pipeline(tmp_path / "dit", dit())
    assert "--sample-size 16" in refused(hddm, source, "--sample-size", 16)
    converted(hddm, source, tmp_path / "expert", "--sample-size", 8, "--dry-run")
    edit_json(source / "transformer" / "config.json", sample_size=None)
    converted(hddm, source, tmp_path / "expert", "--sample-size", 8)
    check_velocity(tmp_path / "expert", dit(), DDPM_BETAS)


def test_a_scheduler_of_another_family_than_its_pipeline_says(
    hddm: Command, tmp_path: Path
) -> None:
    source = pipeline(tmp_path / "dit", dit(), DDIMScheduler())
    edit_json(
        source / "model_index.json", scheduler=["diffusers", "FlowMatchEulerDiscreteScheduler"]
    )
    for path in (source, source / "transformer"):
        error = refused(hddm, path, out=tmp_path / "out")
        assert "is a DDIMScheduler" in error
        assert "says FlowMatchEulerDiscreteScheduler" in error
    edit_json(source / "model_index.json", scheduler=["diffusers", "PNDMScheduler"])
    converted(hddm, source, tmp_path / "expert")
    FlowMatchEulerDiscreteScheduler().save_pretrained(source / "scheduler")
    assert "means another schedule" in refused(hddm, source)


def test_what_a_file_does_not_tell_is_noted(hddm: Command, tmp_path: Path) -> None:
    content = pixart_file(pixart())
    for tokens, scale in ((300, None), (120, 0.18215)):
        content["y_embedder.y_embedding"] = torch.full((tokens, 12), 0.5)
        save_file(content, tmp_path / "pixart.safetensors")
        options = ("--num-heads", 2, "--overwrite")
        text = converted(hddm, tmp_path / "pixart.safetensors", tmp_path / "pixart", *options)
        assert ("PixArt-Σ" in text) == (scale is None)
        assert record_of(tmp_path / "pixart")["latent_scale"] == scale


@pytest.mark.parametrize(
    ("dtype", "index"),
    [
        (torch.float16, None),
        (torch.bfloat16, f"{WEIGHTS}.safetensors.index.fp16.json"),
        (torch.bfloat16, f"{WEIGHTS}.fp16.safetensors.index.json"),
    ],
)
def test_half_precision_alone_needs_its_variant_and_is_kept_whole_or_in_shards_of_either_index(
    hddm: Command, tmp_path: Path, dtype: torch.dtype, index: str | None
) -> None:
    network = rounded(dit(), dtype)
    size = "1GB" if index is None else "10KB"
    source = pipeline(
        tmp_path / "dit", copy.deepcopy(network).to(dtype), variant="fp16", max_shard_size=size
    )
    for found in (source / "transformer").glob("*.index*.json"):
        found.rename(found.with_name(str(index)))
    assert "--variant fp16" in refused(hddm, source)
    converted(hddm, source, tmp_path / "expert", "--variant", "fp16")
    written = load_file(tmp_path / "expert" / f"{WEIGHTS}.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {dtype}
    check_velocity(tmp_path / "expert", network, DDPM_BETAS)


def test_a_copy_without_averaging_beside_the_averaged_one(hddm: Command, tmp_path: Path) -> None:
    averaged, raw = dit(0), dit(1)
    source = pipeline(tmp_path / "dit", averaged)
    raw.save_pretrained(source / "transformer", variant="non_ema")
    text = converted(hddm, source, tmp_path / "ema")
    assert "weights: ema (present: ema, raw)" in text
    converted(hddm, source, tmp_path / "raw", "--weights", "raw")
    for name, network in (("ema", averaged), ("raw", raw)):
        assert record_of(tmp_path / name)["weights"] == name
        check_velocity(tmp_path / name, network, DDPM_BETAS)


def test_an_old_unconditional_model_with_former_names_at_the_root(
    hddm: Command, tmp_path: Path
) -> None:
    network = plain_unet()
    source = pipeline(tmp_path / "ddpm", network, DDPMScheduler())
    for path in [*(source / "unet").iterdir(), *(source / "scheduler").iterdir()]:
        path.rename(source / path.name)
    (source / "unet").rmdir()
    (source / "scheduler").rmdir()
    weights = load_file(source / f"{WEIGHTS}.safetensors")
    former = {
        ".to_q.": ".query.",
        ".to_k.": ".key.",
        ".to_v.": ".value.",
        ".to_out.0.": ".proj_attn.",
    }
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
    assert record_of(tmp_path / "expert")["space"] == "pixels"
    check_velocity(tmp_path / "expert", network, DDPM_BETAS)


def test_a_table_of_positions_that_an_old_file_holds_is_computed_anew(
    hddm: Command, tmp_path: Path
) -> None:
    network = dit()
    source = pipeline(tmp_path / "dit", network)
    path = source / "transformer" / f"{WEIGHTS}.safetensors"
    weights = load_file(path)
    path.unlink()
    save_file({**weights, "pos_embed.pos_embed": network.pos_embed.pos_embed.clone()}, path)
    assert "pos_embed.pos_embed" in converted(hddm, source, tmp_path / "expert")
    check_velocity(tmp_path / "expert", network, DDPM_BETAS)


def test_pixart_of_more_than_the_size_that_is_compared_converts(
    hddm: Command, tmp_path: Path
) -> None:
    """Its own network has the positions of its one size."""
    save_file(pixart_file(pixart(sample_size=32)), tmp_path / "large.safetensors")
    converted(hddm, tmp_path / "large.safetensors", tmp_path / "out", "--num-heads", 2)
