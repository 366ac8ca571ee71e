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


def test_looking_at_images_imports_nothing_heavy(images: Path, shards: Path) -> None:
    folders = (images, shards, shards / "shard_0")
    looks = [["data", "check", images], *(["inspect", one] for one in folders)]
    for code, output, heavy in in_a_fresh_process(looks):
        assert (code, heavy) == (0, set()), output
