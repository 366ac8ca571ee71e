"""Sources whose parts contradict each other, or what the user says, are never read by guessing."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from safetensors.torch import save_file
from torch import Tensor

from hddm.checkpoints.plan import open_source
from hddm.checkpoints.sources import Reading
from tests.artefacts import Command, edit_json
from tests.checkpoint_files import (
    DDPM_BETAS,
    check_velocity,
    converted,
    dit,
    facts_of,
    pipeline,
    pixart,
    plain_unet,
    refused,
    text_unet,
)
from tests.ldm_files import ldm_file
from tests.transformer_files import dit_file, dit_network, pixart_file

WEIGHTS = "diffusion_pytorch_model"


@pytest.mark.parametrize(
    ("name", "seed", "chosen"),
    [
        (f"{WEIGHTS}.safetensors", 0, "ema"),
        (f"{WEIGHTS}.non_ema.safetensors", 1, "raw"),
        (f"{WEIGHTS}.fp16.safetensors", 2, "unstated"),
        (f"{WEIGHTS}.bin", 3, "ema"),
    ],
)
def test_exactly_the_file_that_is_named_is_read(
    hddm: Command, tmp_path: Path, name: str, seed: int, chosen: str
) -> None:
    folder = pipeline(tmp_path / "dit", dit(0)) / "transformer"
    dit(1).save_pretrained(folder, variant="non_ema")
    dit(2).save_pretrained(folder, variant="fp16")
    plain = (folder / f"{WEIGHTS}.safetensors").read_bytes()
    dit(3).save_pretrained(folder, safe_serialization=False)
    (folder / f"{WEIGHTS}.safetensors").write_bytes(plain)
    pickled = ("--allow-pickle",) if name.endswith("bin") else ()
    converted(hddm, folder / name, tmp_path / "expert", *pickled)
    facts = facts_of(tmp_path / "expert")
    assert (facts["weights"], list(facts["source"]["files"])) == (chosen, [name])
    check_velocity(tmp_path / "expert", dit(seed), DDPM_BETAS)
    error = refused(hddm, folder / name, "--variant", "other", *pickled, out=tmp_path / "no")
    assert "--variant other" in error
    other = "ema" if chosen == "raw" else "raw"
    assert f"--weights {other}" in refused(hddm, folder / name, "--weights", other, *pickled)


def test_a_shard_alone_is_no_model(hddm: Command, tmp_path: Path) -> None:
    folder = pipeline(tmp_path / "dit", dit(), max_shard_size="10KB") / "transformer"
    shard = next(folder.glob("*-00001-of-*"))
    assert "name its folder" in refused(hddm, shard)
    converted(hddm, folder / f"{WEIGHTS}.safetensors.index.json", tmp_path / "expert")
    check_velocity(tmp_path / "expert", dit(), DDPM_BETAS)


Wrap = Callable[[dict[str, Tensor], dict[str, Tensor]], dict[str, Any]]
HEADS = ("--allow-pickle", "--num-heads", 4)


def _flat(head: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{head}.{name}": tensor for name, tensor in weights.items()}


@pytest.mark.parametrize(
    ("wrap", "said"),
    [
        (lambda raw, ema: {"model": raw, "teacher": ema}, "under 'teacher'"),
        (lambda raw, ema: {**raw, "teacher": ema}, "under 'teacher'"),
        (lambda raw, ema: {"model": raw, "state_dict": ema}, "'model' and 'state_dict'"),
        (lambda raw, ema: {"ema": raw, "model_ema": ema}, "'ema' and 'model_ema'"),
        (lambda raw, ema: {**raw, "ema": ema}, "its top level and 'ema'"),
        (lambda raw, ema: {"model": {"model": raw, "module": ema}}, "under 'model'"),
        (lambda raw, ema: {"model": {**raw, "shadow": ema}}, "under 'model'"),
    ],
)
def test_weights_that_do_not_say_which_they_are(hddm: Command, tmp_path: Path, wrap: Wrap, said: str) -> None:
    torch.save(wrap(dit_file(dit_network(0)), dit_file(dit_network(1))), tmp_path / "dit.pt")
    error = refused(hddm, tmp_path / "dit.pt", *HEADS)
    assert said in error
    assert "save one set in a file of its own" in error


@pytest.mark.parametrize("named", [False, True])
def test_averages_without_names_are_never_passed_over(hddm: Command, tmp_path: Path, named: bool) -> None:
    raw = dit_file(dit_network(0))
    ema = list(dit_file(dit_network(1)).values())
    content: dict[str, Any] = {"model": raw, "ema": {"decay": 0.999, "shadow_params": ema}}
    if named:
        content = _flat("model", raw) | _flat("ema", dict(zip("abc", ema, strict=False)))
    torch.save(content, tmp_path / "dit.pt")
    assert "--weights raw" in refused(hddm, tmp_path / "dit.pt", *HEADS)
    converted(hddm, tmp_path / "dit.pt", tmp_path / "expert", *HEADS, "--weights", "raw")
    check_velocity(tmp_path / "expert", dit_network(0), DDPM_BETAS)


def test_two_latent_diffusion_networks_in_one_file(hddm: Command, tmp_path: Path) -> None:
    one, two = ldm_file(text_unet(0)), ldm_file(text_unet(1))
    for content, said in (
        ({"state_dict": one, "state_dict_ema": two}, "'state_dict' and 'state_dict_ema'"),
        ({"state_dict": one, "other": two}, "under 'other'"),
    ):
        torch.save(content, tmp_path / "sd.ckpt")
        assert said in refused(hddm, tmp_path / "sd.ckpt", "--prediction-type", "epsilon", *HEADS)


def test_latents_of_every_kind_of_vae(hddm: Command, tmp_path: Path) -> None:
    for name, config, scale, said in (
        ("vqvae", {"_class_name": "VQModel"}, 0.18215, "VQModel's default 0.18215"),
        ("vqvae", {"_class_name": "VQModel", "scaling_factor": 0.5}, 0.5, "latent scale 0.5"),
        ("movq", {"_class_name": "VQModel"}, None, "is not known"),
        ("vae", {"_class_name": "AutoencoderDC"}, None, "AutoencoderDC is not known"),
        ("vqvae", None, None, "latent scale not stated"),
    ):
        source = pipeline(tmp_path / "ldm", plain_unet(), DDIMScheduler())
        edit_json(source / "model_index.json", **{name: ["diffusers", "VQModel"]})
        if config is not None:
            (source / name).mkdir()
            (source / name / "config.json").write_text(json.dumps(config))
        text = converted(hddm, source, tmp_path / "expert", "--overwrite", "--no-verify")
        facts = facts_of(tmp_path / "expert")
        assert (facts["space"], facts["latent_scale"]) == ("latents", scale)
        assert said in text
        shutil.rmtree(source)


def test_a_side_that_is_stated_is_not_contradicted(hddm: Command, tmp_path: Path) -> None:
    source = pipeline(tmp_path / "dit", dit())
    save_file(dit_file(dit_network()), tmp_path / "dit.safetensors")
    save_file(pixart_file(pixart()), tmp_path / "pixart.safetensors")
    for path, options in (
        (source, ()),
        (tmp_path / "dit.safetensors", ("--num-heads", 4)),
        (tmp_path / "pixart.safetensors", ("--num-heads", 2)),
    ):
        assert "--sample-size 16" in refused(hddm, path, *options, "--sample-size", 16)
        converted(hddm, path, tmp_path / "expert", *options, "--sample-size", 8, "--dry-run")
    edit_json(source / "transformer" / "config.json", sample_size=None)
    converted(hddm, source, tmp_path / "expert", "--sample-size", 8)
    check_velocity(tmp_path / "expert", dit(), DDPM_BETAS)


def test_a_scheduler_of_another_family_than_its_pipeline_says(hddm: Command, tmp_path: Path) -> None:
    source = pipeline(tmp_path / "dit", dit(), DDIMScheduler())
    edit_json(source / "model_index.json", scheduler=["diffusers", "FlowMatchEulerDiscreteScheduler"])
    for path in (source, source / "transformer"):
        error = refused(hddm, path, out=tmp_path / "out")
        assert "DDIMScheduler" in error
        assert "FlowMatchEulerDiscreteScheduler" in error
    edit_json(source / "model_index.json", scheduler=["diffusers", "PNDMScheduler"])
    converted(hddm, source, tmp_path / "expert")
    FlowMatchEulerDiscreteScheduler().save_pretrained(source / "scheduler")
    assert "means another schedule" in refused(hddm, source)


def test_what_a_file_does_not_tell_is_noted(hddm: Command, tmp_path: Path) -> None:
    save_file(dit_file(dit_network()), tmp_path / "dit.safetensors")
    text = converted(hddm, tmp_path / "dit.safetensors", tmp_path / "dit", "--num-heads", 4)
    assert "SiT files look the same and mean a velocity" in text
    content = pixart_file(pixart())
    for tokens, scale in ((300, None), (120, 0.18215)):
        content["y_embedder.y_embedding"] = torch.full((tokens, 12), 0.5)
        save_file(content, tmp_path / "pixart.safetensors")
        options = ("--num-heads", 2, "--overwrite")
        text = converted(hddm, tmp_path / "pixart.safetensors", tmp_path / "pixart", *options)
        assert ("PixArt-Σ" in text) == (scale is None)
        assert facts_of(tmp_path / "pixart")["latent_scale"] == scale


def test_the_whole_config_of_a_scheduler_is_kept(tmp_path: Path) -> None:
    scheduler = DDIMScheduler(steps_offset=1, set_alpha_to_one=False, clip_sample=False)
    source = pipeline(tmp_path / "dit", dit(), scheduler)
    written = json.loads((source / "scheduler" / "scheduler_config.json").read_text())
    assert open_source(source, Reading()).declared.scheduler == written
