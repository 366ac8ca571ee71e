"""W&B: asked for or not there, offline without a question, one run over resumes, never in the way."""

import json
import logging
from pathlib import Path

import pytest
import wandb

from hddm.networks.folders import WEIGHTS
from hddm.training.expert import train_expert
from hddm.training.settings import RunOptions
from hddm.training.wandb_log import RECORD, _mode
from tests.artefacts import contents, expert_settings


@pytest.fixture
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder without keys, and no W&B variables; what needs a network would fail."""
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(home / "wandb"))
    return home


def test_a_resumed_training_goes_on_in_the_same_run(
    whole: Path, nobody: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was logged before the death is not logged again."""
    monkeypatch.setenv("WANDB_MODE", "offline")

    class Killed(BaseException):
        pass

    def die(step: int, loss: float, seconds: float) -> None:
        if step == 8:
            raise Killed

    out, folder = tmp_path / "expert", tmp_path / "expert.run"
    settings = expert_settings("flow", steps=12)
    every = {"wandb": "project", "log_every": 1, "checkpoint_every": 5, "sample_every": 6}
    with pytest.raises(Killed):
        train_expert(whole, out, settings, on_step=die, run=RunOptions(**every))
    first = json.loads((folder / RECORD).read_text())
    assert first["step"] == 7
    train_expert(whole, out, settings, run=RunOptions(resume=True, **every))
    assert json.loads((folder / RECORD).read_text()) == {"id": first["id"], "step": 12}
    assert wandb.run is None
    names = sorted(path.name for path in (folder / "wandb").glob(f"offline-run-*-{first['id']}*"))
    assert names
    pictures = sorted(
        path.name.split("_")[1] for path in (folder / "wandb").rglob("*.png") if "raw" in path.name
    )
    assert pictures == ["12", "6"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["expert", "expert.run", "home"]


def test_a_run_of_wandb_that_fails_is_one_warning(
    whole: Path, nobody: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def in_the_way(step: int, loss: float, seconds: float) -> None:
        if step == 1:
            (tmp_path / "out.run" / "wandb").write_text("")

    settings = expert_settings("flow", steps=4)
    train_expert(whole, tmp_path / "bare", settings)
    options = RunOptions(wandb="project", log_every=1)
    train_expert(whole, tmp_path / "out", settings, on_step=in_the_way, run=options)
    assert contents(tmp_path / "out")[WEIGHTS] == contents(tmp_path / "bare")[WEIGHTS]
    (warning,) = [
        r.getMessage() for r in caplog.records if r.name.startswith("hddm") and r.levelno >= logging.WARNING
    ]
    assert warning.startswith("W&B: [Errno 20] Not a directory")
    assert warning.endswith("the training goes on without it")


def test_without_a_key_nothing_is_asked_and_one_line_says_so(
    nobody: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.INFO):
        assert _mode() == "offline"
    (line,) = caplog.messages
    assert "no API key in WANDB_API_KEY or ~/.netrc, so the run is written offline" in line
    monkeypatch.setenv("WANDB_MODE", "online")
    assert _mode() == "offline"


@pytest.mark.parametrize(
    ("netrc", "mode"),
    [
        ("machine api.wandb.ai\n login user\n password " + 40 * "0" + "\n", "online"),
        ("machine example.org\n login user\n password secret\n", "offline"),
        ("machine\n", "offline"),
    ],
    ids=["of W&B", "of another host", "broken"],
)
def test_a_key_is_looked_for_in_netrc(netrc: str, mode: str, nobody: Path) -> None:
    (nobody / ".netrc").write_text(netrc)
    (nobody / ".netrc").chmod(0o600)
    assert _mode() == mode


def test_a_variable_holds_a_key_or_turns_it_off(nobody: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", 40 * "0")
    assert _mode() == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert _mode() == "disabled"
