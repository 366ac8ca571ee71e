"""Samples without a calibration, and a calibrated copy of an expert."""

import json
import shutil
from pathlib import Path

import torch

from hddm.calibration import FILE_NAME
from hddm.utils.files import sha256_of
from tests.artefacts import Command, load_images
from tests.conftest import Trio


def test_calibrations_can_be_left_out(ddpm_expert: Path, tmp_path: Path, hddm: Command) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(ddpm_expert, bare)
    common = ["--num-images", 4, "--steps", 3, "--device", "cpu"]
    found = {}
    for name in ("experts+router", "router", "none"):
        assert hddm("sample", ddpm_expert, *common, "--calibration", name, "--out", tmp_path / name)[0] == 0
        found[name] = load_images(tmp_path / name).pixels
    assert torch.equal(found["router"], found["none"])
    assert not torch.equal(found["experts+router"], found["none"])
    record = json.loads((tmp_path / "none" / "sampling.json").read_text())
    assert (record["calibration"], record["router_temperature"]) == ("none", 1.0)


def test_the_temperature_of_a_router_moves_its_choices(trio: Trio, tmp_path: Path, hddm: Command) -> None:
    grown = tmp_path / "grown"
    assert hddm("assemble", *trio.experts, "--router", trio.router, "--out", grown)[0] == 0
    common = ["--num-images", 6, "--steps", 3, "--strategy", "full", "--device", "cpu"]
    for name, factor in (("one", 1), ("flat", 1000)):
        line = ["sample", grown, *common, "--router-temperature", factor, "--out", tmp_path / name]
        assert hddm(*line)[0] == 0
    sharp, flat = (
        json.loads((tmp_path / name / "sampling.json").read_text())["expert_use"]["shares"]
        for name in ("one", "flat")
    )
    assert max(flat) - min(flat) < 0.01 < max(sharp) - min(sharp)


def test_a_calibrated_copy_leaves_the_expert_alone(
    ddpm_expert: Path, shards: Path, tmp_path: Path, hddm: Command
) -> None:
    before = {path.name: sha256_of(path) for path in ddpm_expert.iterdir() if path.is_file()}
    out, line = tmp_path / "copy", ["calibrate", ddpm_expert, "--num-images", 16, "--steps", 2]
    code, shown, _ = hddm(*line, "--seed", 3, "--out", out)
    assert (code, shown) == (0, f"{out}: calibrated on 16 samples of its own\n")
    assert {path.name: sha256_of(path) for path in ddpm_expert.iterdir() if path.is_file()} == before
    assert sha256_of(out / FILE_NAME) != before[FILE_NAME]
    assert (
        sha256_of(out / "diffusion_pytorch_model.safetensors")
        == before["diffusion_pytorch_model.safetensors"]
    )
    assert hddm("sample", out, "--num-images", 2, "--steps", 2, "--out", tmp_path / "samples")[0] == 0
    assert "exists" in hddm(*line, "--out", out)[2]
    assert not list(tmp_path.glob(".*"))
