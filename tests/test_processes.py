"""One training by several processes, as accelerate starts them."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hddm.model_folders import WEIGHTS
from hddm.training.expert import train_expert
from tests.artefacts import expert_settings


@pytest.mark.slow
def test_two_processes_train_as_one_does(whole: Path, tmp_path: Path) -> None:
    """Each takes half of every batch; only the order of a sum differs."""
    settings = expert_settings("flow", steps=8, batch_size=16, threads=1, device="cpu")
    alone = train_expert(whole, tmp_path / "one", settings)
    file = tmp_path / "run.yaml"
    file.write_text("".join(f"{k}: {v}\n" for k, v in settings.model_dump(exclude_none=True).items()))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    verb = ["-m", "hddm_cli", "train", "expert", whole, "--out", tmp_path / "two", "--config", file]
    ended = subprocess.run([*command, *map(str, verb)], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    one, two = (load_file(tmp_path / name / WEIGHTS) for name in ("one", "two"))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-6)
    checkpoints = tmp_path / "two.run" / "checkpoints" / "step_00000008"
    losses = load_file(checkpoints / "losses.safetensors")["losses"]
    assert losses.tolist() == pytest.approx(alone, rel=1e-5)
