"""Whole single files of Stable Diffusion, with VAE and text encoders, compared with the model's folder."""

import gzip
import importlib.util
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CLIPTokenizer

import hddm as library
from hddm.networks import file_text
from tests.artefacts import Command
from tests.checkpoint_files import (
    check_velocity,
    converted,
    record_of,
    refused,
    text_unet,
    written_back,
)
from tests.component_files import write_t5, write_tokenizer
from tests.ldm_files import SIZES, XL, ldm_unet, tiny_pipeline, whole_file
from tests.transformer_files import dit_file, dit_network

SD = torch.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2

ALONE = SIZES | {"XL": XL | {"attention_head_dim": 1}}
"""Networks without the text encoders that show the width of a size."""
PRESETS = {"1": "sd1", "2": "sd2", "XL": "sdxl"}
SIDE = ("--sample-size", 8)
PROMPT = ("--prompt", "a cat!", "--negative-prompt", "dog", "--guidance-scale", 3, "--steps", 3)


def _pictures(hddm: Command, expert: Path, out: Path) -> np.ndarray[Any, Any]:
    code, _, error = hddm("sample", expert, "--out", out, "--num-images", 2, *PROMPT)
    assert code == 0, error
    found = [np.asarray(Image.open(path)) for path in sorted(out.glob("*.png"))]
    assert len(found) == 2
    return np.stack(found)


@pytest.mark.integration
# Of version 1, test_single_files.py has the file, and the command of a pipeline its pictures.
@pytest.mark.parametrize("kind", [pytest.param("1", marks=pytest.mark.slow), "2", "XL"])
def test_a_whole_file_makes_the_pictures_of_its_folder_and_comes_back_bit_for_bit(
    hddm: Command, tmp_path: Path, kind: str
) -> None:
    pipe = tiny_pipeline(tmp_path / "made", kind)
    content = {name: one.contiguous() for name, one in whole_file(pipe, kind).items()}
    source, header = tmp_path / "whole.safetensors", {"modelspec.title": "tiny"}
    save_file(content, source, header)
    words = tmp_path / "made/parts/tokenizer"
    options = ("--preset", PRESETS[kind], "--tokenizer", words, *SIDE)
    text = converted(hddm, source, tmp_path / "file", *options)
    assert "so hddm sample makes pictures of it" in text
    converted(hddm, tmp_path / "made/pipeline", tmp_path / "folder")
    one, other = record_of(tmp_path / "file"), record_of(tmp_path / "folder")
    for key in ("vae", "text_encoder", "latent_scale", "prediction_type", "sample_shape"):
        assert one[key] == other[key], key
    pictures = _pictures(hddm, tmp_path / "file", tmp_path / "a")
    assert np.array_equal(pictures, _pictures(hddm, tmp_path / "folder", tmp_path / "b"))
    assert pictures.std() > 1

    back = (
        written_back(hddm, tmp_path / "file", tmp_path / "back", "ldm") / "checkpoint.safetensors"
    )
    found = load_file(back)
    assert found.keys() == content.keys()
    for name, tensor in content.items():
        assert found[name].shape == tensor.shape
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    with safe_open(back, "pt") as opened:
        assert opened.metadata() == header


def _file(folder: Path, kind: str, header: dict[str, str] | None = None, **changes: Any) -> Path:
    """A file of a tiny network alone, with further tensors ``changes``."""
    content = ldm_unet(text_unet(**ALONE[kind])) | changes
    folder.mkdir(parents=True, exist_ok=True)
    save_file(content, folder / "sd.safetensors", header)
    return folder / "sd.safetensors"


def _zero(name: str) -> dict[str, Tensor]:
    return {name: torch.zeros(0)}


@pytest.mark.integration
@pytest.mark.parametrize("root", ["diffusion_model.", "model.", ""])
def test_a_file_of_the_network_alone_comes_back_under_its_own_names(
    hddm: Command, tmp_path: Path, root: str
) -> None:
    network, source = text_unet(**ALONE["1"]), tmp_path / "unet.safetensors"
    content = {
        name.replace("model.diffusion_model.", root): one for name, one in ldm_unet(network).items()
    }
    save_file(content, source)
    converted(hddm, source, tmp_path / "expert", "--preset", "sd1", *SIDE)
    check_velocity(tmp_path / "expert", network, SD)
    back = written_back(hddm, tmp_path / "expert", tmp_path / "back", "ldm")
    found = load_file(back / "checkpoint.safetensors")
    assert found.keys() == content.keys()
    assert all(torch.equal(found[name], one) for name, one in content.items())


@pytest.mark.parametrize(
    ("preset", "kind", "predicts", "scale"),
    [
        ("sd1", "1", "epsilon", 0.18215),
        # The others have its parts.
        pytest.param("sd2", "2", "epsilon", 0.18215, marks=pytest.mark.slow),
        ("sd2-v", "2", "v_prediction", 0.18215),
        ("sdxl", "XL", "epsilon", 0.13025),
        pytest.param("sdxl-v", "XL", "v_prediction", 0.13025, marks=pytest.mark.slow),
        ("sdxl-flow", "XL", "flow_prediction", 0.13025),
    ],
)
def test_a_preset_states_schedule_prediction_scale_size_and_heads(
    hddm: Command, tmp_path: Path, preset: str, kind: str, predicts: str, scale: float
) -> None:
    source = _file(tmp_path / "in", kind)
    text = converted(hddm, source, tmp_path / "expert", "--preset", preset, "--no-verify", *SIDE)
    record = record_of(tmp_path / "expert")
    assert (record["prediction_type"], record["latent_scale"]) == (predicts, scale)
    assert f"schedule: preset {preset} (huggingface.co/" in text
    config = json.loads((tmp_path / "expert/config.json").read_text())
    assert config["attention_head_dim"] == {"1": 8, "2": [1, 2], "XL": [1, 1, 1]}[kind]
    if predicts == "flow_prediction":
        assert (record["schedule"], record["time_scale"]) == ({"name": "linear"}, 1000)
    else:
        found = library.load(tmp_path / "expert").schedule.alpha(torch.arange(1000))
        torch.testing.assert_close(found, (1 - SD).cumprod(0).sqrt(), rtol=0, atol=1e-5)
    shown = hddm("convert", source, "--out", tmp_path / "b", "--preset", preset, "--dry-run")[1]
    side = {"sd1": 64, "sd2": 64, "sd2-v": 96}.get(preset, 128)
    assert f"samples: 4×{side}×{side} latents" in shown
    # The network's own heads replace those of the preset.
    converted(
        *(hddm, source, tmp_path / "c", "--preset", preset, "--num-heads", 4, "--no-verify", *SIDE)
    )
    assert json.loads((tmp_path / "c/config.json").read_text())["attention_head_dim"] == 4


def test_a_preset_is_not_contradicted(hddm: Command, tmp_path: Path) -> None:
    xl = _file(tmp_path / "xl", "XL")
    one = _file(tmp_path / "one", "1", betas=SD, scale_factor=torch.tensor(0.18215))
    file = tmp_path / "other" / "scheduler_config.json"
    DDPMScheduler(beta_schedule="linear").save_pretrained(file.parent)
    for source, options, said in (
        (xl, ("--preset", "sd1"), "of Stable Diffusion XL, which contradicts --preset sd1, which"),
        (one, ("--preset", "sd2"), "those that fit are sd1"),
        (
            xl,
            ("--preset", "sdxl", "--prediction-type", "v_prediction"),
            "--prediction-type says v_prediction, which contradicts preset sdxl (hugg",
        ),
        (xl, ("--preset", "sdxl", "--schedule", file), f"of {file} contradicts preset sdxl (hugg"),
        (
            _file(tmp_path / "a", "1", scale_factor=torch.tensor(0.13025)),
            ("--preset", "sd1"),
            "its scale_factor is 0.13025, which contradicts preset sd1",
        ),
        (
            _file(tmp_path / "b", "1", betas=torch.linspace(1e-4, 0.02, 1000)),
            ("--preset", "sd1"),
            "the schedule of the betas in the file contradicts preset sd1",
        ),
        (
            _file(tmp_path / "c", "XL", **_zero("v_pred")),
            ("--preset", "sdxl"),
            "its tensor v_pred says v_prediction, which contradicts",
        ),
        (
            _file(tmp_path / "d", "XL", **_zero("ztsnr")),
            ("--preset", "sdxl-flow"),
            "its ztsnr says that it was trained down to zero signal, which contradicts",
        ),
        (
            _file(tmp_path / "e", "XL", {"modelspec.prediction_type": "v"}),
            ("--preset", "sdxl"),
            "contradicts modelspec.prediction_type in the header of sd.safetensors, which says v_pr",
        ),
        (
            _file(tmp_path / "f", "XL", {"ss_base_model_version": "sd_v1"}),
            ("--preset", "sdxl"),
            "XL, which contradicts ss_base_model_version in the header of sd.safetensors, which says 1",
        ),
        (
            _file(tmp_path / "g", "XL", {"ss_zero_terminal_snr": "True"}),
            ("--preset", "sdxl-flow"),
            "ss_zero_terminal_snr in the header of sd.safetensors says that it was trained down to",
        ),
    ):
        assert said in refused(hddm, source, *options, *SIDE), said
    text = converted(hddm, one, tmp_path / "expert", "--preset", "sd1", "--no-verify", *SIDE)
    assert "schedule: the betas in the file" in text
    save_file(dit_file(dit_network()), tmp_path / "dit.safetensors")
    error = refused(hddm, tmp_path / "dit.safetensors", "--preset", "sd1", "--num-heads", 4)
    assert "is no single file of Stable Diffusion; drop it" in error


@pytest.mark.parametrize("is_said", [True, False])
def test_markers_choose_the_rescaled_schedule_of_v_prediction(
    hddm: Command, tmp_path: Path, is_said: bool
) -> None:
    source = _file(tmp_path / "in", "XL", **_zero("v_pred"), **_zero("ztsnr"))
    options = (*(("--preset", "sdxl-v") if is_said else ()), "--no-verify", *SIDE)
    text = converted(hddm, source, tmp_path / "expert", *options)
    assert ("note: sdxl-v is its preset, by its own markers" in text) != is_said
    assert "note: the betas of sdxl-v are rescaled to no signal at their end by its ztsnr" in text
    record = record_of(tmp_path / "expert")
    assert record["prediction_type"] == "v_prediction"
    assert library.load(tmp_path / "expert").schedule.alpha(torch.tensor([999])) == 0
    without = _file(tmp_path / "without", "XL", **_zero("v_pred"))
    converted(hddm, without, tmp_path / "other", *options)
    assert library.load(tmp_path / "other").schedule.alpha(torch.tensor([999])) > 0


def test_what_a_whole_file_of_xl_does_not_say_is_told_at_once(
    hddm: Command, tmp_path: Path
) -> None:
    pipe = tiny_pipeline(tmp_path / "made", "XL")
    source = tmp_path / "in" / "sd.safetensors"
    source.parent.mkdir()
    save_file({name: one.contiguous() for name, one in whole_file(pipe, "XL").items()}, source)
    presets = "--preset sdxl, sdxl-v, sdxl-flow, playground-2.5 or cosxl"
    error = refused(hddm, source, "--tokenizer", tmp_path / "made/parts/tokenizer", *SIDE)
    assert f"does not say the scale of its latents; pass {presets}" in error
    assert f"on; pass {presets}, or --schedule" in error
    code, text, error = hddm("inspect", source)
    assert code == 0, error
    assert "components: vae, text_encoder, text_encoder_2" in text
    assert f"pass {presets}" in text


def _missing_added(hddm: Command, said: str, folders: dict[str, Path], out: Path) -> None:
    """Run the command that ``said`` gives for what is missing, with these folders."""
    (command,) = re.findall(r"missing for pictures: .*; all at once: hddm (.*)", said)
    words = []
    for word in command.split():
        if word == "FOLDER":
            word = folders[words[-1]]
        words.append(out if word == "ENSEMBLE" else word)
    code, _, error = hddm(*words)
    assert code == 0, error


@pytest.mark.integration
def test_all_that_a_source_lacks_for_pictures_is_added_by_the_command_that_is_printed(
    hddm: Command, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    unet = ldm_unet(tiny_pipeline(made, "1").unet)
    source = tmp_path / "unet.safetensors"
    save_file({name: one.contiguous() for name, one in unet.items()}, source)
    preset = ("--preset", "sd1", *SIDE, "--no-verify")
    said = converted(hddm, source, tmp_path / "expert", *preset)
    folders = {}
    for name in ("vae", "text-encoder", "tokenizer"):
        folders[f"--{name}"] = made / "parts" / name.replace("-", "_")
    _missing_added(hddm, said, folders, tmp_path / "whole")
    assert _pictures(hddm, tmp_path / "whole", tmp_path / "pictures").shape[0] == 2


def test_all_that_a_pipeline_lacks_is_named_at_once(hddm: Command, tmp_path: Path) -> None:
    tiny_pipeline(tmp_path / "made", "XL")
    pipe = tmp_path / "made/pipeline"
    for name in ("text_encoder", "text_encoder_2"):
        (pipe / name / "model.safetensors").unlink()
    said = converted(hddm, pipe, tmp_path / "expert", *SIDE, "--no-verify")
    lost = "text_encoder/model.safetensors and text_encoder_2/model.safetensors"
    assert f"text encoder: not recorded, since there is no {lost} beside" in said
    # With those of another pipeline, whoever assembles it says that they belong to it.
    tiny_pipeline(tmp_path / "again", "XL")
    folders = {"--text-encoder": tmp_path / "again/pipeline"}
    _missing_added(hddm, said, folders, tmp_path / "whole")
    for name in ("vae", "tokenizer", "text_encoder_2", "scheduler"):
        shutil.rmtree(pipe / name)
    error = refused(hddm, pipe, *SIDE)
    assert "no text_encoder_2/, tokenizer/, vae/, scheduler/ beside it" in error
    (command,) = re.findall(r"or do without: hddm convert (.*), its scheduler_config.json", error)
    assert command == f"{pipe / 'unet'} --out EXPERT --schedule FILE"
    schedule = tmp_path / "again/pipeline/scheduler/scheduler_config.json"
    assert "--schedule" not in refused(hddm, pipe, *SIDE, "--schedule", schedule)
    converted(hddm, pipe / "unet", tmp_path / "other", *SIDE, "--schedule", schedule)


@pytest.mark.parametrize("is_said", [True, False])
def test_files_of_edm_are_known_by_their_markers(
    hddm: Command, tmp_path: Path, is_said: bool
) -> None:
    ends = {"edm_vpred.sigma_max": torch.tensor(60.0), "edm_vpred.sigma_min": torch.tensor(0.01)}
    statistics = {name: torch.ones(1, 4, 1, 1) for name in ("edm_mean", "edm_std")}
    for name, markers, path, is_negated in (
        ("cosxl", ends, {"sigma_min": 0.01, "sigma_max": 60.0, "sigma_data": 1.0}, False),
        ("playground-2.5", statistics, {"sigma_max": 80.0, "sigma_data": 0.5}, True),
    ):
        source = _file(tmp_path / name, "XL", **markers)
        options = ("--preset", name, *SIDE) if is_said else SIDE
        converted(hddm, source, tmp_path / "out" / name, *options)
        record = record_of(tmp_path / "out" / name)
        assert record["prediction_type"] == "v_prediction"
        assert record.get("negated", False) == is_negated
        schedule = {"name": "edm", "sigma_min": 0.002} | path
        for key, value in schedule.items():
            assert record["schedule"][key] == pytest.approx(value)
        error = refused(hddm, source, "--preset", "sdxl", *SIDE)
        assert f"is of the preset {name}, which contradicts --preset sdxl" in error


def test_a_header_that_names_architecture_and_prediction_means_a_preset(
    hddm: Command, tmp_path: Path
) -> None:
    header = {
        "modelspec.architecture": "stable-diffusion-xl-v1-base",
        "modelspec.prediction_type": "epsilon",
        "modelspec.resolution": "64x64",
        "modelspec.title": "Seaside",
    }
    source = _file(tmp_path / "in", "XL", header)
    text = converted(hddm, source, tmp_path / "expert", "--no-verify")
    assert "note: sdxl is its preset" in text
    assert "note: samples of side 8 by modelspec.resolution in the header" in text
    assert "its modelspec.title is Seaside" in text
    assert record_of(tmp_path / "expert")["sample_shape"] == [4, 8, 8]
    kohya = {"ss_base_model_version": "sdxl_base_v1-0", "ss_v_parameterization": "True"}
    kohya |= {"ss_resolution": "(64, 64)", "ss_zero_terminal_snr": "True"}
    source = _file(tmp_path / "kohya", "XL", kohya)
    converted(hddm, source, tmp_path / "v", "--no-verify")
    assert record_of(tmp_path / "v")["prediction_type"] == "v_prediction"
    assert library.load(tmp_path / "v").schedule.alpha(torch.tensor([999])) == 0


def test_the_vocabulary_of_a_file_is_asked_for_and_checked(
    hddm: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tiny_pipeline(tmp_path / "made", "1")
    source = tmp_path / "in" / "sd.safetensors"
    source.parent.mkdir()
    content = {name: one.contiguous() for name, one in whole_file(pipe, "1").items()}
    save_file(content, source)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    error = refused(hddm, source, *SIDE)
    assert "does not state 3 things that a conversion needs" in error
    assert "pass --tokenizer, the folder tokenizer/ of any Stable Diffusion, or run pip" in error
    write_tokenizer(tmp_path / "more")
    (tmp_path / "more/added_tokens.json").write_text(json.dumps({"<cat>": 518}))
    preset = ("--preset", "sd1", *SIDE)
    error = refused(hddm, source, *preset, "--tokenizer", tmp_path / "more")
    assert "has 519 words, and a text encoder in" in error
    write_t5(tmp_path / "t5")
    error = refused(hddm, source, *preset, "--tokenizer", tmp_path / "t5/tokenizer")
    assert "holds a T5Tokenizer, and the text encoders of" in error
    words = ("--tokenizer", tmp_path / "made/parts/tokenizer")
    for name, tensor, said in (
        (
            "first_stage_model.loss.weight",
            torch.zeros(2),
            "left over first_stage_model.loss.weight",
        ),
        (
            "cond_stage_model.transformer.text_model.encoder.layers.0.more.weight",
            torch.zeros(2),
            "left over encoder.layers.0.more.weight",
        ),
        ("cond_stage_model.other.weight", torch.zeros(2), "left over cond_stage_model.other"),
        (
            "first_stage_model.encoder.mid.attn_1.q.weight",
            torch.zeros(32, 32, 3, 3),
            "is no layer of single pixels",
        ),
    ):
        save_file(content | {name: tensor}, source)
        assert said in refused(hddm, source, *preset, *words)
    save_file({name: one for name, one in content.items() if "quant_conv.b" not in name}, source)
    assert "missing post_quant_conv.bias" in refused(hddm, source, *preset, *words)


def test_the_vocabulary_of_open_clip_is_numbered_as_clip_numbers_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tokenizer(tmp_path / "words")
    merges = (tmp_path / "words/merges.txt").read_text().split("\n")[1:5]
    (tmp_path / "open_clip").mkdir()
    (tmp_path / "open_clip/__init__.py").write_text("raise RuntimeError")
    with gzip.open(tmp_path / "open_clip/bpe_simple_vocab_16e6.txt.gz", "wt") as file:
        file.write("\n".join(['"bpe_simple_vocab_16e6.txt#version: 0.2', *merges]))
    monkeypatch.syspath_prepend(tmp_path)
    found = file_text._clip_tokenizer(None, tmp_path)
    expected = CLIPTokenizer.from_pretrained(tmp_path / "words")
    text = ["a cat and dogs, naïve!"]
    assert found(text).input_ids == expected(text).input_ids
    assert found.model_max_length == 77
