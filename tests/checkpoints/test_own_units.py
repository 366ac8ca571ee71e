"""Checkpoints with data of their own, and of EDM: converted, written back, verified and trained on."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import (
    DDPMScheduler,
    EDMDPMSolverMultistepScheduler,
    EDMEulerScheduler,
    SchedulerMixin,
)
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

import hddm as library
from hddm.experts.ensemble_folders import read_expert_record
from hddm.experts.records import FORMAT, ExpertRecord
from hddm.networks.vae import read_vae
from hddm.training.continuation import continue_expert
from hddm.utils.records import read_record
from tests.artefacts import Command, edit_json, expert_settings, printed, refusal
from tests.checkpoint_files import (
    call,
    conditions_of,
    converted,
    dit,
    pipeline,
    plain_unet,
    record_of,
    refused,
    text_unet,
    written_back,
)
from tests.component_files import write_vae
from tests.oracles import solved
from tests.shard_files import noise, write_shard

WEIGHTS = "diffusion_pytorch_model.safetensors"
RANGES = {"0,1": (0.5, 0.5), "-0.5,0.5": (0.5, 0.0), "0,255": (127.5, 127.5)}


def pixels(folder: Path, scheduler: SchedulerMixin | None = None) -> Path:
    """A pipeline of a network of colour pixels."""
    network = plain_unet(in_channels=3, out_channels=3)
    return pipeline(folder, network, scheduler or DDPMScheduler())


@pytest.mark.integration
@pytest.mark.parametrize("data_range", RANGES)
def test_a_stated_range_of_pixels_is_recorded_and_read(
    data_range: str, tmp_path: Path, hddm: Command
) -> None:
    d, b = RANGES[data_range]
    source, expert = pixels(tmp_path / "source"), tmp_path / "expert"
    text = converted(hddm, source, expert, "--data-range", data_range)
    low, high = data_range.split(",")
    assert f"own data: from {low} to {high}, where samples are from -1 to 1\n" in text
    record = record_of(expert)
    assert (record["format"], record["data_scale"]) == ("2.0", d)
    assert record.get("data_shift", []) == ([b] if b else [])
    assert record["source"]["options"]["data_range"] == [float(low), float(high)]
    network = plain_unet(in_channels=3, out_channels=3)
    kept = (1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)).cumprod(0)
    index = 400
    a, s = kept[index].sqrt(), (1 - kept[index]).sqrt()
    t = s / (a * d + s)
    z, eps = torch.randn(2, 1, 3, 8, 8, generator=torch.Generator().manual_seed(1)).double()
    y = a * (d * z + b) + s * eps
    output = call(network, y.float(), torch.tensor([float(index)]), {}).double()
    own, eps = solved("epsilon", output, y, a, s)
    expected = eps - (own - b) / d
    field = library.load(expert)
    found = field.velocity(((y - a * b) / (a * d + s)).float(), t[None])
    assert (found - expected).norm() < 2e-5 * expected.norm()
    printed(hddm, "inspect", expert)
    # It stays so in a second conversion, and samples are pictures.
    converted(hddm, expert, tmp_path / "again")
    assert record_of(tmp_path / "again")["data_scale"] == d
    printed(hddm, "sample", expert, "--out", tmp_path / "images", "--num-images", 2, "--steps", 2)
    assert len(list((tmp_path / "images").glob("*.png"))) == 2


def test_the_range_is_of_pixels_and_stated_once(tmp_path: Path, hddm: Command) -> None:
    latents = pipeline(tmp_path / "latents", dit())
    assert "is of pixels" in refused(hddm, latents, "--data-range", "0,1")
    expert = tmp_path / "expert"
    converted(hddm, pixels(tmp_path / "source"), expert)
    assert "drop --data-range" in refused(hddm, expert, "--data-range", "0,1")
    assert "--data-range 1,0: must be LOW,HIGH" in refused(hddm, expert, "--data-range", "1,0")


def test_earlier_releases_refuse_what_they_would_read_wrongly_and_nothing_else(
    tmp_path: Path, hddm: Command
) -> None:
    plain, own, edm = (tmp_path / name for name in ("plain", "own", "edm"))
    converted(hddm, pixels(tmp_path / "a"), plain)
    converted(hddm, pixels(tmp_path / "b"), own, "--data-range", "0,1")
    converted(hddm, pixels(tmp_path / "c", EDMEulerScheduler()), edm)
    for expert in (own, edm):
        said = refusal(read_record, expert / "expert.json", ExpertRecord, FORMAT)
        assert "format 2.0 is newer than 1.6; upgrade" in said
    record = record_of(plain)
    assert record["format"] == FORMAT
    assert not {"data_scale", "data_shift", "negated"} & record.keys()


def test_a_record_with_impossible_units_is_refused(tmp_path: Path, hddm: Command) -> None:
    expert = tmp_path / "expert"
    converted(hddm, pixels(tmp_path / "source"), expert, "--data-range", "0,1")
    path, record = expert / "expert.json", record_of(expert)
    for change, words in (
        ({"data_scale": 0}, "data_scale"),
        ({"data_shift": [1.0, 2.0]}, "2 channels"),
        ({"data_shift": [1e9]}, "data_shift"),
    ):
        path.write_text(json.dumps(record | change))
        said = refusal(read_expert_record, expert)
        assert said.startswith(f"{path}: ")
        assert words in said


EDM = {
    "Playground 2.5": EDMDPMSolverMultistepScheduler(),
    "CosXL": EDMEulerScheduler(sigma_max=120.0, sigma_data=1.0, prediction_type="v_prediction"),
}


def edm_velocity(output: Tensor, c_in_x: Tensor, sigma: float, sigma_data: float) -> Tensor:
    """Velocity from EDM's own F at x = x_0 + sigma eps, by its definition of the denoiser."""
    norm = math.hypot(sigma, sigma_data)
    x = c_in_x * norm
    x_0 = sigma_data**2 / norm**2 * x + sigma * sigma_data / norm * output
    return (x - x_0) / sigma - x_0


@pytest.mark.integration
@pytest.mark.parametrize("name", EDM)
def test_checkpoints_of_edm_come_in_and_go_back(name: str, tmp_path: Path, hddm: Command) -> None:
    scheduler, network = EDM[name], text_unet()
    source, expert = tmp_path / "source", tmp_path / "expert"
    text = converted(hddm, pipeline(source, network, scheduler), expert)
    assert "predicts: v_prediction\n" in text
    record, is_own = record_of(expert), name == "Playground 2.5"
    assert record["schedule"]["name"] == "edm"
    assert (record["format"], record.get("negated", False)) == ("2.0", is_own)
    sigma, sigma_data = 3.0, scheduler.config.sigma_data
    given = conditions_of(network)
    c_in_x = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    output = call(network, c_in_x, torch.tensor([math.log(sigma) / 4]), given).double()
    output = output if is_own else -output
    expected = edm_velocity(output, c_in_x.double(), sigma, sigma_data)
    x_t = c_in_x * math.hypot(sigma, sigma_data) / (1 + sigma)
    t = torch.tensor([sigma / (1 + sigma)], dtype=torch.float64)
    found = library.load(expert).velocity(x_t, t, **given)
    assert (found - expected).norm() < 2e-5 * expected.norm()
    back = written_back(hddm, expert, tmp_path / "back", "diffusers-unet2d-condition")
    for part in ("unet/config.json", "scheduler/scheduler_config.json"):
        assert json.loads((back / part).read_text()) == json.loads((source / part).read_text())
    first, again = (load_file(folder / "unet" / WEIGHTS) for folder in (source, back))
    assert all(first[key].equal(again[key]) for key in first)
    converted(hddm, back, tmp_path / "again")
    assert record_of(tmp_path / "again")["schedule"] == record["schedule"]


def test_what_edm_predicts_is_stated_in_the_words_of_its_schedulers(
    tmp_path: Path, hddm: Command
) -> None:
    source = pixels(tmp_path / "source")
    config = tmp_path / "edm.json"
    config.write_text(json.dumps({"_class_name": "EDMEulerScheduler", "sigma_data": 1.0}))
    for word, is_own in (("epsilon", True), ("v_prediction", False)):
        out = tmp_path / word
        converted(hddm, source, out, "--schedule", config, "--prediction-type", word)
        assert record_of(out).get("negated", False) == is_own
        assert record_of(out)["prediction_type"] == "v_prediction"
    options = ("--schedule", config, "--prediction-type", "sample")
    assert "EDM's schedulers know" in refused(hddm, source, *options)
    config.write_text(json.dumps({"_class_name": "EDMEulerScheduler", "sigma_data": 0}))
    assert "sigma_data is 0" in refused(hddm, source, "--schedule", config)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["ddpm", "flow"])
@pytest.mark.parametrize("kind", ["EDM", "pixels in [0, 1]"])
def test_training_goes_on_from_such_an_expert(
    kind: str, objective: str, tmp_path: Path, hddm: Command
) -> None:
    shard, init = tmp_path / "shard", tmp_path / "init"
    write_shard(shard, noise(24, 8))
    if kind == "EDM":
        converted(hddm, pixels(tmp_path / "source", EDMEulerScheduler()), init)
    else:
        converted(hddm, pixels(tmp_path / "source"), init, "--data-range", "0,1")
    out = tmp_path / "out"
    losses = continue_expert(init, shard, out, expert_settings(objective, steps=2))
    assert all(math.isfinite(loss) for loss in losses)
    before, after = record_of(init), record_of(out)
    for key in ("format", "data_scale", "data_shift", "negated", "schedule", "prediction_type"):
        assert before.get(key) == after.get(key)
    field = library.load(out)
    assert field.velocity(torch.randn(2, 3, 8, 8), torch.tensor(0.5)).isfinite().all()


def latent_expert(folder: Path, hddm: Command, **statistics: object) -> Path:
    """An expert of latents with its VAE, whose config has these entries."""
    source = pipeline(folder / "source", plain_unet(in_channels=4, out_channels=4), EDM["CosXL"])
    write_vae(source / "vae")
    edit_json(source / "vae" / "config.json", **statistics)
    edit_json(source / "model_index.json", vae=["diffusers", "AutoencoderKL"])
    converted(hddm, source, folder / "expert")
    return folder / "expert"


@pytest.mark.slow
def test_experts_whose_latents_have_statistics_of_each_channel_are_drawn_and_not_mixed(
    tmp_path: Path, hddm: Command
) -> None:
    own = latent_expert(
        tmp_path / "own",
        hddm,
        latents_mean=[-1.5, 2.0, -1.0, 2.5],
        latents_std=[8.0, 6.0, 6.5, 5.0],
        scaling_factor=0.5,
    )
    plain = latent_expert(tmp_path / "plain", hddm, scaling_factor=0.5)
    record = record_of(own)
    assert (record["format"], record["latent_scale"]) == ("2.0", 0.5)
    assert record["vae"]["mean"] == [-1.5, 2.0, -1.0, 2.5]
    assert "mean" not in record_of(plain)["vae"]
    shown = ("--num-images", 2, "--steps", 2)
    printed(hddm, "sample", own, "--out", tmp_path / "images", *shown)
    latents = library.sample(library.load(own), 2, steps=2)
    z = latents * torch.tensor([16.0, 12, 13, 10]).view(1, 4, 1, 1)
    z += torch.tensor([-1.5, 2.0, -1.0, 2.5]).view(1, 4, 1, 1)
    with torch.no_grad():
        expected = read_vae(tmp_path / "own" / "source" / "vae").decode(z).sample.clamp(-1, 1)
    for k, picture in enumerate(sorted((tmp_path / "images").glob("*.png"))):
        pixels = torch.from_numpy(np.array(Image.open(picture))).permute(2, 0, 1)
        assert (pixels - (expected[k] + 1) * 127.5).abs().max() < 1.1
    both = tmp_path / "both"
    printed(hddm, "assemble", own, plain, "--out", both, "--strategy", "draw")
    printed(hddm, "sample", both, "--out", tmp_path / "drawn", *shown)
    code, _, error = hddm(
        "assemble",
        own,
        plain,
        "--out",
        tmp_path / "mixed",
        "--strategy",
        "full",
        "--router",
        "moments",
    )
    assert code == 1
    assert "each by its own mean (-1.5, 2, -1, 2.5) and deviation (8, 6, 6.5, 5)" in error
    assert "so it can be drawn, without a router, and not mixed" in error
