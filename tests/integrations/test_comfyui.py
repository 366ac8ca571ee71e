"""The nodes in a real ComfyUI: ``COMFYUI=folder make test ARGS="-m slow tests/integrations"``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.skipif("COMFYUI" not in os.environ, reason="COMFYUI names no folder of a ComfyUI")
def test_all_checks_in_a_real_comfyui_are_met(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.comfyui", "--results", str(tmp_path)]
    if "COMFYUI_PYTHON" in os.environ:
        command += ["--python", os.environ["COMFYUI_PYTHON"]]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
