"""Packages that take seconds to import are imported only where the work needs them."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.artefacts import HEAVY, in_a_fresh_process


def _imported(code: str) -> set[str]:
    """Names of all modules that are there when ``code`` has run."""
    command = [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def test_importing_hddm_or_reading_a_record_imports_nothing_heavy() -> None:
    light = ["hddm", "hddm.utils.records", "hddm.utils.files", "hddm.data.shard_records", "hddm.data.check"]
    assert not _imported(f"import {', '.join(light)}") & HEAVY


@pytest.mark.integration
def test_loading_a_model_imports_no_network_of_diffusers() -> None:
    """The class that a folder names is imported when the folder is opened."""
    # A function stays what it is when its module has been imported.
    imported = _imported("import hddm.experts.loading; assert callable(hddm.load) and callable(hddm.sample)")
    assert "hddm.networks.wrappers" in imported
    networks = {f"diffusers.models.{name}" for name in ("transformers", "unets", "autoencoders")}
    assert not imported & (networks | {"diffusers.pipelines", "hddm.checkpoints"})


@pytest.mark.integration
def test_all_public_names_can_be_imported_at_once() -> None:
    _imported("from hddm import *\nassert Ensemble and load and schedules.LinearSchedule")


def test_looking_at_images_imports_nothing_heavy(images: Path, shards: Path) -> None:
    folders = (images, shards, shards / "shard_0")
    looks = [["data", "check", images], *(["inspect", one] for one in folders)]
    for code, output, heavy in in_a_fresh_process(looks):
        assert (code, heavy) == (0, set()), output


def test_what_paths_decide_is_refused_before_anything_heavy_is_imported(
    images: Path, shards: Path, tmp_path: Path
) -> None:
    there, pickled, pipeline = tmp_path / "there", tmp_path / "weights.ckpt", tmp_path / "unet"
    for folder in (there / "expert_0", tmp_path / "run.run", pipeline):
        folder.mkdir(parents=True)
    pickled.write_bytes(b"PK\x03\x04")
    (pipeline / "diffusion_pytorch_model.bin").write_bytes(b"PK\x03\x04")
    (tmp_path / "run.run" / "run.json").write_text("{}")
    flow = f"train expert {images} --objective flow --steps 2"
    verbs = ["benchmark digits", "quickstart", flow, f"train router {images} --steps 2"]
    verbs += [f"assemble {images}", f"convert {pickled}", f"encode {images}", f"sample {images}"]
    verbs += [f"distill {images} --data {images} --steps 2", f"evaluate {images} --reference {images}"]
    verbs += [f"partition {images} --shards 2", f"merge {images} {images}"]
    lines = [(f"{verb} --out {there}", f"{there} exists") for verb in verbs] + [
        (f"{flow} --out {tmp_path / 'run'}", "holds a run"),
        (f"convert {pickled} --out {tmp_path / 'new'}", "weights.ckpt: is a pickle (torch-zip)"),
        (f"convert {pipeline} --out {tmp_path / 'new'}", "pytorch_model.bin: is a pickle (torch-zip)"),
        (f"inspect {pickled}", "weights.ckpt: is a pickle (torch-zip)"),
    ]
    found = in_a_fresh_process([line.split() for line, _ in lines])
    for (line, told), (code, output, heavy) in zip(lines, found, strict=True):
        assert (code, heavy) == (1, set()), (line, output)
        assert told in output
