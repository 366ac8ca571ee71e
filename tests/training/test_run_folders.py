"""Runs beside what they make: resumed, refused, changed, out of disk, out of numbers, never two at once."""

import contextlib
import itertools
import json
import logging
import math
import platform
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend, sdpa_kernel

from hddm.experts.records import EXPERT_FILE
from hddm.training import state
from hddm.training.expert import train_expert
from hddm.training.loader import StepInputs
from hddm.training.loop import Task, fit
from hddm.training.resume import run_folder_of, value_at, with_changes
from hddm.training.settings import ExpertSettings, RunOptions
from hddm.training.state import open_run
from hddm.utils.errors import HddmError
from hddm.utils.records import WEIGHTS
from tests.artefacts import (
    Command,
    Died,
    contents,
    ending_at,
    expert_settings,
    killed_at_every_change,
    largest_file,
    recipe,
)
from tests.killed_runs import checkpoint

SETTINGS = ExpertSettings(objective="flow", steps=4, size="tiny", batch_size=8, threads=1)


def _command(shard: Path, out: Path, *more: object) -> list[object]:
    """The command line of `SETTINGS`; an option in ``more`` stands in place of its own."""
    given = {
        "--objective": "flow",
        "--size": "tiny",
        "--batch-size": 8,
        "--threads": 1,
        "--steps": 4,
    }
    words: list[object] = ["train", "expert", shard, "--out", out]
    for option, value in given.items():
        if option not in more:
            words += [option, value]
    return [*words, *more]


@pytest.fixture(scope="module")
def finished(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "out"
    train_expert(whole, out, SETTINGS, run=RunOptions())
    return out


@pytest.fixture
def started(finished: Path, tmp_path: Path) -> Path:
    """A run of four steps that was finished, and whose expert was taken away."""
    shutil.copytree(run_folder_of(finished), tmp_path / "out.run")
    return tmp_path / "out"


def test_a_run_that_is_there_is_neither_forgotten_nor_resumed_unasked(
    started: Path, whole: Path, hddm: Command
) -> None:
    before = contents(started.with_name("out.run"))
    code, _, error = hddm(*_command(whole, started))
    assert code == 1
    assert "out.run: already holds a run of" in error
    assert "--resume continues it, --overwrite starts again" in error
    assert contents(started.with_name("out.run")) == before
    # Half a record that a killed process left is removed.
    half = started.with_name("out.run") / f".run.json.part-{platform.node()}-{2**22 + 1}"
    half.write_text("{")
    code, _, error = hddm(*_command(whole, started, "--resume"))
    assert (code, half.exists()) == (0, False), error


def test_every_changed_setting_is_told_and_stops_a_resume(
    started: Path, whole: Path, hddm: Command
) -> None:
    changed = _command(whole, started, "--steps", 6, "--learning-rate", 0.5, "--resume")
    code, _, error = hddm(*changed)
    assert code == 1
    assert "pass --allow-config-change" in error
    assert "settings.steps: was 4, is 6" in error
    assert "settings.learning_rate: was 0.00625, is 0.5" in error
    assert "batch_size" not in error
    assert not started.exists()
    code, _, error = hddm(*changed, "--allow-config-change")
    assert code == 0, error
    assert (started / "expert.json").exists()


def test_another_shard_or_objective_is_never_resumed(
    started: Path, shards: Path, hddm: Command
) -> None:
    before = contents(started.with_name("out.run"))
    changed = ("--objective", "ddpm", "--resume", "--allow-config-change")
    code, _, error = hddm(*_command(shards / "shard_0", started, *changed))
    assert code == 1
    assert "used other data, another objective or network; choose another --out" in error
    assert "pass --allow-config-change" not in error
    assert error.count("settings.objective: was 'flow', is 'ddpm'") == 1
    assert error.count("data.shard: was") == 1
    assert contents(started.with_name("out.run")) == before


def test_a_folder_that_only_has_the_name_of_a_run_is_left_alone(
    whole: Path, tmp_path: Path, hddm: Command
) -> None:
    (tmp_path / "out.run" / "photos").mkdir(parents=True)
    (tmp_path / "out.run" / "photos" / "one.txt").write_text("mine")
    for option in ("--overwrite", "--resume"):
        code, _, error = hddm(*_command(whole, tmp_path / "out", option))
        assert (code, "has files, but no run.json" in error) == (1, True)
    assert (tmp_path / "out.run" / "photos" / "one.txt").read_text() == "mine"


def test_overwriting_a_run_removes_links_in_it_and_not_what_they_lead_to(
    started: Path, whole: Path, tmp_path: Path, hddm: Command
) -> None:
    run, scratch = started.with_name("out.run"), tmp_path / "scratch"
    (run / "logs").rename(scratch)
    (run / "logs").symlink_to(scratch)
    before = contents(scratch)
    code, _, error = hddm(*_command(whole, started, "--overwrite"))
    assert code == 0, error
    assert not (run / "logs").is_symlink()
    assert contents(scratch) == before


@pytest.mark.integration
def test_a_kill_while_a_run_is_overwritten_leaves_one_that_can_be_overwritten(
    started: Path, tmp_path: Path
) -> None:
    run = started.with_name("out.run")
    kept = tmp_path / "kept"
    shutil.copytree(run, kept)

    def overwrite() -> None:
        with open_run(started, {}, RunOptions(), overwrite=True):
            pass

    def check() -> None:
        overwrite()
        shutil.rmtree(run)
        shutil.copytree(kept, run)

    assert killed_at_every_change(overwrite, check, ("os.remove", "os.rmdir")) > 5


@pytest.mark.integration
def test_a_full_disk_ends_a_run_and_leaves_the_checkpoint_before(
    whole: Path, tmp_path: Path
) -> None:
    settings = expert_settings("flow", steps=9, threads=1)
    keep = RunOptions(checkpoint_every=3, resume=True)
    train_expert(whole, tmp_path / "plain", settings, run=keep)
    message = r"step_00000006: cannot be written \(File too large\); free some space; .* step 3 is complete"
    disk = contextlib.ExitStack()

    def fill(step: int, loss: float, seconds: float) -> None:
        if step == 5:
            disk.enter_context(largest_file(20_000))

    with disk, pytest.raises(HddmError, match=message):
        train_expert(whole, tmp_path / "full", settings, on_step=fill, run=keep)
    folder = tmp_path / "full.run" / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["step_00000003"]
    assert not (tmp_path / "full").exists()
    train_expert(whole, tmp_path / "full", settings, run=keep)
    assert checkpoint(tmp_path / "full.run") == checkpoint(tmp_path / "plain.run")


@pytest.mark.integration
def test_a_checkpoint_is_saved_after_two_minutes_and_changes_nothing(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hddm")
    settings, out = expert_settings("flow", steps=9, threads=1), tmp_path / "out"
    losses = train_expert(whole, tmp_path / "plain", settings, run=RunOptions())
    seconds = itertools.count(0, 50)
    clock = SimpleNamespace(now=next(seconds))
    monkeypatch.setattr(state, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def tick(step: int, loss: float, of_step: float) -> None:
        clock.now = next(seconds)
        ending_at(8)(step, loss, of_step)

    with pytest.raises(Died):
        train_expert(whole, out, settings, on_step=tick, run=RunOptions(resume=True))
    assert f"{out}.run: has no checkpoint; the training starts at step 1" in caplog.text
    # After the third step 150 seconds were over, and since the fourth one less than 120 were.
    assert [path.name for path in (tmp_path / "out.run" / "checkpoints").iterdir()] == [
        "step_00000004"
    ]
    caplog.clear()
    assert train_expert(whole, out, settings, run=RunOptions(resume=True)) == losses
    assert f"{out}.run: continuing from step 4" in caplog.text
    assert checkpoint(tmp_path / "out.run") == checkpoint(tmp_path / "plain.run")
    assert (out / WEIGHTS).read_bytes() == (tmp_path / "plain" / WEIGHTS).read_bytes()


@pytest.mark.parametrize(("seconds", "good"), [(120.0, 4), (0.0, 7)])
def test_a_run_that_stays_without_a_finite_loss_keeps_its_good_checkpoint(
    seconds: float, good: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "LATEST", seconds)
    monkeypatch.setattr(state, "_SPACING", 0)
    point, calls = torch.nn.Linear(1, 1), iter(range(1, 1000))

    def loss(network: torch.nn.Module, inputs: StepInputs) -> torch.Tensor:
        return network(inputs["x"])[:, 0].square() * (math.nan if next(calls) > 7 else 1)

    task = Task(point, 50, lambda rows, noise, own: {"x": rows[:, None].float()}, loss)
    chosen, keep = recipe(steps=40, max_non_finite=3), RunOptions(checkpoint_every=4)
    with (
        open_run(tmp_path / "out", {}, keep) as run,
        pytest.raises(HddmError, match=r"step 10: loss nan.*the last 3 steps were not finite"),
    ):
        fit(task, chosen, run)
    kept = sorted(path.name for path in (tmp_path / "out.run" / "checkpoints").iterdir())
    assert kept[0] == f"step_{good:08d}"


def test_a_batch_in_parts_learns_as_one_batch_does(whole: Path, tmp_path: Path) -> None:
    losses = {
        parts: train_expert(
            whole,
            tmp_path / str(parts),
            expert_settings("ddpm", steps=4, threads=1, gradient_accumulation_steps=parts),
        )
        for parts in (1, 4)
    }
    assert losses[4] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.integration
def test_bfloat16_learns_alike_with_weights_and_averages_in_float32(
    whole: Path, tmp_path: Path
) -> None:
    settings = expert_settings(
        "flow", steps=12, batch_size=32, threads=1, prediction="flow_prediction"
    )
    plain = train_expert(whole, tmp_path / "no", settings)
    half = settings.model_copy(update={"mixed_precision": "bf16"})
    found = train_expert(whole, tmp_path / "bf16", half, run=RunOptions())
    assert found == pytest.approx(plain, rel=2e-2)
    assert found != plain
    (last,) = (tmp_path / "bf16.run" / "checkpoints").iterdir()
    for name in ("weights", "ema"):
        tensors = load_file(last / f"{name}.safetensors").values()
        assert {tensor.dtype for tensor in tensors} == {torch.float32}
        # Not one of them is a bfloat16 number that was widened.
        assert any(not torch.equal(one, one.bfloat16().float()) for one in tensors)


def _change(step: int, key: str, was: object, now: object) -> dict[str, object]:
    return {"step": step, "key": key, "was": was, "is": now}


def _train(
    shard: Path, out: Path, until: int | None = None, every: int = 2, **changes: Any
) -> None:
    """Go on with a training of nine steps, as far as its step ``until``."""
    settings = expert_settings("flow", **{"steps": 9, "threads": 1, **changes})
    options = RunOptions(resume=True, allow_config_change=True, checkpoint_every=every)
    with contextlib.suppress(Died):
        train_expert(shard, out, settings, on_step=until and ending_at(until), run=options)


def _record(out: Path) -> Any:
    return json.loads((run_folder_of(out) / "run.json").read_text())


@pytest.mark.integration
def test_settings_that_were_changed_on_the_way_are_told_with_their_steps(
    whole: Path, tmp_path: Path, hddm: Command
) -> None:
    """None before the first checkpoint."""
    out = tmp_path / "out"
    _train(whole, out, until=1, learning_rate=1e-3)
    _train(whole, out, until=3)
    before = _record(out)
    assert before["changes"] == []
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

    assert "step=6, key=learning_rate, was=0.001, is=0.0005\n" in hddm("inspect", out)[1]


def test_steps_that_are_made_again_are_made_with_what_is() -> None:
    """The checkpoint of step 50 was damaged, and its steps are computed again from step 20 on."""
    before, new = [_change(10, "a", 1, 2), _change(50, "a", 2, 3)], [_change(20, "a", 3, 4)]
    changes = with_changes(before, new, 20)
    assert [one["step"] for one in changes] == [10, 20, 20]
    assert [value_at(step, "a", 4, changes) for step in (10, 11, 20, 21)] == [1, 2, 2, 4]
    assert with_changes(before, new, 0) == []


def test_a_run_records_its_attention_kernel(shards: Path, tmp_path: Path) -> None:
    train_expert(
        shards / "shard_0", tmp_path / "out", expert_settings("flow", steps=1), run=RunOptions()
    )
    kernel = _record(tmp_path / "out")["environment"]["default_attention"]
    with sdpa_kernel(getattr(SDPBackend, kernel.upper())):
        q = torch.randn(1, 2, 64, 64, requires_grad=True)
        assert torch.nn.functional.scaled_dot_product_attention(q, q, q).isfinite().all()
