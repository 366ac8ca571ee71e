"""Trackers: which are known, and a real run of Trackio."""

import json
import sqlite3
from pathlib import Path

import pytest

from hddm.training.expert import train_expert
from hddm.training.settings import TRACKERS, RunOptions, parse_tracker
from hddm.training.trackers import TRACKER_LOGS
from hddm.utils.errors import HddmError
from hddm.utils.records import OPTIONS, parse_record
from tests.artefacts import Died, contents, ending_at, expert_settings


def test_every_tracker_that_can_be_named_has_a_log() -> None:
    assert set(TRACKER_LOGS) == set(TRACKERS)


def test_a_tracker_is_named_with_its_project() -> None:
    assert parse_tracker("trackio:birds") == ("trackio", "birds")
    # A project of another owner at W&B is OWNER/PROJECT, and may hold a colon.
    assert parse_tracker("wandb:me/birds: 2") == ("wandb", "me/birds: 2")


@pytest.mark.parametrize("text", ["trackio", "trackio:", "mlflow:birds", ":birds", ""])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(HddmError, match="must be trackio:PROJECT or wandb:PROJECT"):
        parse_record({"tracker": text}, RunOptions, OPTIONS)


def test_a_name_of_a_run_that_no_tracker_shows_is_refused() -> None:
    with pytest.raises(HddmError, match="`run_name` names a run of a `tracker`"):
        parse_record({"run_name": "night"}, RunOptions, OPTIONS)


@pytest.mark.integration
def test_experts_are_on_one_dashboard_of_trackio_and_a_resumed_one_goes_on_in_its_run(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trackio = pytest.importorskip("trackio")
    folder = tmp_path / "trackio"
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", folder)
    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", folder)
    settings = expert_settings("flow", steps=6)
    every = {"tracker": "trackio:birds", "log_every": 1, "checkpoint_every": 2, "sample_every": 6}
    train_expert(whole, tmp_path / "bare", settings)
    with pytest.raises(Died):
        train_expert(whole, tmp_path / "a", settings, on_step=ending_at(4), run=RunOptions(**every))
    train_expert(whole, tmp_path / "a", settings, run=RunOptions(resume=True, **every))
    train_expert(whole, tmp_path / "b", settings, run=RunOptions(run_name="night", **every))
    assert trackio.context_vars.current_run.get() is None
    assert "Trackio" not in capsys.readouterr().out

    (file,) = folder.glob("*.db")
    rows = sqlite3.connect(file).execute("select run_name, run_id, step, metrics from metrics")
    losses: dict[str, dict[int, float]] = {}
    pictures, numbers = set(), set()
    for name, number, step, logged in rows.fetchall():
        entry = json.loads(logged)
        numbers.add((name, number))
        # A step that two processes have logged is the same in both.
        assert (
            losses.setdefault(name, {}).setdefault(step, entry["train/loss"]) == entry["train/loss"]
        )
        pictures |= {key for key in entry if key.startswith("samples/")}
    assert {name for name, _ in numbers} == {"a", "night"}
    assert len(numbers) == 2
    assert [sorted(one) for one in losses.values()] == [[*range(1, 7)]] * 2
    assert losses["a"] == losses["night"]
    assert pictures == {"samples/raw", "samples/ema"}
    weights = "diffusion_pytorch_model.safetensors"
    assert contents(tmp_path / "a")[weights] == contents(tmp_path / "bare")[weights]
