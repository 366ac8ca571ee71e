"""What a run's record says after its settings were changed on the way, and how it is kept."""

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hddm import load
from hddm.experts.records import EXPERT_FILE
from hddm.training.expert import train_expert
from hddm.training.resume import run_folder_of, with_changes
from hddm.training.settings import RunOptions
from tests.artefacts import Command, edit_json, expert_settings


class _Enough(Exception):
    """Ends a training."""


def _change(step: int, key: str, was: object, now: object) -> dict[str, object]:
    return {"step": step, "key": key, "was": was, "is": now}


def _train(shard: Path, out: Path, until: int | None = None, every: int = 2, **changes: Any) -> None:
    """Go on with a training of nine steps, as far as its step ``until``."""

    def end(step: int, loss: float, seconds: float) -> None:
        if step == until:
            raise _Enough

    settings = expert_settings("flow", **{"steps": 9, "threads": 1, **changes})
    options = RunOptions(resume=True, allow_config_change=True, checkpoint_every=every)
    with contextlib.suppress(_Enough):
        train_expert(shard, out, settings, on_step=end, run=options)


def _record(out: Path) -> Any:
    return json.loads((run_folder_of(out) / "run.json").read_text())


def test_settings_that_were_changed_on_the_way_are_told_with_their_steps(
    whole: Path, tmp_path: Path, hddm: Command
) -> None:
    out = tmp_path / "out"
    _train(whole, out, until=3)
    assert _record(out)["changes"] == []
    _train(whole, out, until=7, learning_rate=1e-3, batch_size=8)
    rate, batch = _change(2, "learning_rate", 3e-3, 1e-3), _change(2, "batch_size", 16, 8)
    assert sorted(_record(out)["changes"], key=str) == sorted([rate, batch], key=str)
    _train(whole, out, learning_rate=5e-4, batch_size=8)
    record, training = _record(out), json.loads((out / EXPERT_FILE).read_text())["training"]
    assert record["changes"] == training["changes"]
    assert training["changes"][-1] == _change(6, "learning_rate", 1e-3, 5e-4)
    assert len(training["changes"]) == 3
    assert record["settings"]["learning_rate"] == training["learning_rate"] == 5e-4
    assert training["images_seen"] == 2 * 16 + 7 * 8

    assert json.loads(hddm("inspect", out, "--json")[1])["changes"] == training["changes"]
    _, told = hddm("inspect", out)[1].split("\nchanges:\n")
    assert told.splitlines()[2] == "  step=6, key=learning_rate, was=0.001, is=0.0005"


def test_a_folder_that_says_nothing_of_changes_is_an_experts_too(
    whole: Path, tmp_path: Path, hddm: Command
) -> None:
    out = tmp_path / "out"
    _train(whole, out, until=3)
    before = _record(out)
    path = run_folder_of(out) / "run.json"
    path.write_text(json.dumps({key: before[key] for key in ("settings", "data", "environment")}))
    _train(whole, out)
    assert _record(out) == before
    training = json.loads((out / EXPERT_FILE).read_text())["training"]
    assert training.pop("changes") == []
    edit_json(out / EXPERT_FILE, training=training)
    assert load(out).velocity(torch.zeros(1, 1, 4, 4), torch.tensor([0.5])).isfinite().all()
    assert "changes" not in hddm("inspect", out)[1]


def test_what_no_step_was_made_with_is_no_change(whole: Path, tmp_path: Path) -> None:
    """Before the first checkpoint, and there and back between two."""
    out = tmp_path / "out"
    _train(whole, out, until=1, learning_rate=1e-3)
    _train(whole, out, until=3)
    assert _record(out)["changes"] == []
    _train(whole, out, until=3, seed=5)
    assert _record(out)["changes"] == [_change(2, "seed", 7, 5)]
    _train(whole, out)
    assert _record(out)["changes"] == []


@pytest.mark.parametrize(
    ("before", "new", "step", "expected"),
    [
        # The checkpoint of step 50 was damaged, so that its steps are made again, as today's settings say.
        ([(50, "a", 1, 2)], [], 20, [(20, "a", 1, 2)]),
        ([(10, "a", 1, 2), (50, "a", 2, 3)], [], 20, [(10, "a", 1, 2), (20, "a", 2, 3)]),
        ([(20, "a", 1, 2), (50, "a", 2, 3)], [], 20, [(20, "a", 1, 3)]),
        ([(50, "a", 1, 2)], [(20, "a", 2, 1)], 20, []),
        ([(50, "a", 1, 2)], [(20, "b", 5, 6)], 20, [(20, "a", 1, 2), (20, "b", 5, 6)]),
        ([(50, "a", 1, 2)], [], 0, []),
    ],
)
def test_steps_that_are_made_again_are_made_with_what_is(
    before: list[Any], new: list[Any], step: int, expected: list[Any]
) -> None:
    given, fresh = [_change(*one) for one in before], [_change(*one) for one in new]
    assert with_changes(given, fresh, step) == [_change(*one) for one in expected]


def test_a_run_records_how_it_is_kept_and_may_be_kept_otherwise(
    whole: Path, tmp_path: Path, hddm: Command
) -> None:
    command = ("train", "expert", whole, "--out", tmp_path / "out", "--objective", "flow", "--size", "tiny")
    command += ("--steps", 4, "--batch-size", 8, "--threads", 1)
    config = tmp_path / "run.yaml"
    config.write_text("keep: 3\nlog_every: 2\n")
    assert hddm(*command, "--config", config, "--checkpoint-every", 2, "--sample-every", 4)[0] == 0
    assert _record(tmp_path / "out")["keeping"] == {
        "checkpoint_every": 2,
        "keep": 3,
        "log_every": 2,
        "sample_every": 4,
        "wandb": None,
    }
    shutil.rmtree(tmp_path / "out")
    code, _, error = hddm(*command, "--resume")
    assert code == 0, error
    assert "checkpoint_every" not in error
    record = _record(tmp_path / "out")
    assert (record["keeping"]["checkpoint_every"], record["changes"]) == (500, [])
