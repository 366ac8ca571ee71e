"""What --dry-run says of a training, held against the objects and the memory of real steps."""

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hddm.training.continuation import continued_training
from hddm.training.distill import needs_of_student, student_training
from hddm.training.expert import new_training
from hddm.training.loop import (
    AHEAD,
    Draw,
    Loader,
    Order,
    StepInputs,
    StepReport,
    Training,
    fit,
)
from hddm.training.needs import needs_of_training
from hddm.training.router import router_training
from hddm.training.settings import DistillSettings, RunOptions
from hddm.utils.machine import Room
from hddm.utils.needs import Needs
from tests.artefacts import Command, expert_settings, router_settings

pytestmark = pytest.mark.integration


def training_of(shard: Path, **changes: Any) -> Training:
    return new_training(shard, expert_settings("flow", **changes))


def sizes(needs: Needs) -> dict[str, int | None]:
    return {one.name: one.size for one in needs.memory}


def live_sizes(training: Training) -> dict[str, int]:
    """Bytes of everything that two real steps leave, by the names of a dry run."""
    found: dict[str, int] = {}

    def look(report: StepReport) -> None:
        state = report.state
        parameters = list(state.network.parameters())
        moments: list[Tensor] = []
        for one in state.optimizer.state.values():
            moments += [value for value in one.values() if isinstance(value, Tensor)]
        gradients = [p.grad for p in parameters if p.grad is not None]
        found["weights"] = total([*parameters, *state.network.buffers()])
        found["gradients"] = total(gradients)
        found["optimizer state"] = total(moments)
        found["average of weights"] = total(list(state.ema.tensors().values()))
        if state.weak:
            found["weak model"] = total(list(state.weak.values()))

    short = training.recipe.model_copy(update={"steps": 2})
    fit(replace(training.task, weak_step=min(training.task.weak_step, 1)), short, None, [look])
    return found


def total(tensors: list[Tensor]) -> int:
    return sum(one.numel() * one.element_size() for one in tensors)


def same(training: Training, again: Training) -> None:
    said = sizes(needs_of_training(training))
    for name, size in live_sizes(again).items():
        assert said[name] == size, name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("weak_at", [0.0, 0.25])
def test_what_stays_in_memory_is_that_of_a_real_training_to_the_byte(
    shards: Path, optimizer: str, weak_at: float
) -> None:
    shard = shards / "shard_0"
    same(*(training_of(shard, optimizer=optimizer, weak_at=weak_at) for _ in range(2)))


def test_of_an_adapter_only_the_factors_have_gradients_and_moments(
    shards: Path, flow_expert: Path, tmp_path: Path
) -> None:
    settings = expert_settings("flow", lora_rank=2, size="small").model_copy()
    fields = settings.model_dump(exclude_unset=True) | {"optimizer": "adamw"}
    fields.pop("size")
    of = type(settings).model_validate(fields)
    made = []
    for _ in range(2):
        made.append(continued_training(flow_expert, shards / "shard_1", tmp_path / "out", of))
    same(*made)
    said = sizes(needs_of_training(made[0]))
    assert 0 < (said["gradients"] or 0) < (said["weights"] or 0)


def test_a_router_is_counted_like_an_expert(shards: Path, tmp_path: Path) -> None:
    same(*(router_training(shards, tmp_path / "out", router_settings()) for _ in range(2)))


def test_a_student_is_counted_with_its_teacher_and_its_trajectories(
    shards: Path, ensemble: Path, flow_expert: Path, tmp_path: Path
) -> None:
    common = {"steps": 4, "batch_size": 8, "seed": 1}
    plain = DistillSettings.model_validate(common | {"size": "tiny"})
    same(*(student_training(ensemble, shards, plain, {}) for _ in range(2)))
    needs = needs_of_student(ensemble, shards, tmp_path / "out", plain, RunOptions())
    weights = sizes(needs)["weights"] or 0
    assert (sizes(needs)["teacher"] or 0) > weights
    many = {"sampling_steps": 2, "trajectories": 1000, "teacher": "routed"}
    few = DistillSettings.model_validate(common | many)
    needs = needs_of_student(ensemble, shards, tmp_path / "out", few, RunOptions(), flow_expert)
    # 1,000 trajectories of 13 states of 1×4×4 in float32.
    assert sizes(needs)["trajectories"] == 1000 * 13 * 16 * 4
    assert next(one.calls for one in needs.work if one.name == "trajectories") == 1000


def saved_bytes(training: Training, number: int) -> int:
    """Bytes that the forward pass of ``number`` samples keeps for the backward pass, without weights."""
    task = training.task
    own = {p.untyped_storage().data_ptr() for p in task.network.parameters()}
    kept: dict[int, int] = {}

    def keep(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return value

    inputs = task.draw(torch.arange(number), torch.Generator().manual_seed(0), slice(None))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        # Kept alive, so that no memory is counted as another's.
        losses = task.loss(task.network, inputs)
    assert losses.shape == (number,)
    return sum(kept.values())


def allocated_peak(training: Training, number: int, folder: Path) -> int:
    """Most bytes that torch's allocator held in a forward and backward pass, by its profiler."""
    task = training.task
    inputs = task.draw(torch.arange(number), torch.Generator().manual_seed(0), slice(None))
    task.loss(task.network, inputs).mean().backward()
    with torch.profiler.profile(profile_memory=True) as profiled:
        task.loss(task.network, inputs).mean().backward()
    profiled.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    memory = [one for one in events if one.get("name") == "[memory]"]
    alive = most = 0
    for one in sorted(memory, key=lambda event: event["ts"]):
        alive += one["args"]["Bytes"]
        most = max(most, alive)
    return most


@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_are_near_what_the_backward_pass_keeps_and_the_allocator_holds(
    shards: Path, tmp_path: Path, checkpointing: bool
) -> None:
    number = 24
    changes = {"batch_size": number, "gradient_checkpointing": checkpointing, "size": "small"}
    one, other = (training_of(shards / "shard_0", **changes) for _ in range(2))
    if checkpointing:
        other.task.network.enable_gradient_checkpointing()
    other.task.network.train()
    said = sizes(needs_of_training(one))["activations"] or 0
    kept = saved_bytes(other, number)
    assert kept <= said <= (12 if checkpointing else 2) * kept
    held = allocated_peak(other, number, tmp_path)
    assert 0.7 * held <= said <= 1.4 * held


def test_parts_of_a_batch_share_the_memory_of_activations(shards: Path) -> None:
    shard = shards / "shard_0"
    whole = sizes(needs_of_training(training_of(shard, batch_size=16)))["activations"] or 0
    parts = training_of(shard, batch_size=16, gradient_accumulation_steps=4)
    assert (sizes(needs_of_training(parts))["activations"] or 0) < 0.5 * whole


@pytest.mark.parametrize("steps", [10, 40])
def test_time_is_finite_and_in_proportion_to_the_steps(shards: Path, steps: int) -> None:
    needs = needs_of_training(training_of(shards / "shard_0", steps=steps))
    work = next(one for one in needs.work if one.name == "training")
    assert work.seconds is not None
    assert 0 < work.seconds < math.inf
    assert work.total == steps * work.seconds
    assert needs.seconds >= work.total


class Ahead(Loader):
    """Draws ahead, as beside a GPU, and takes so many ``seconds`` to start."""

    seconds = 0.0

    def __init__(self, order: Order, draw: Draw, last: int, own: slice, ahead: int) -> None:
        self.is_new = True

        def slow(rows: Tensor, noise: torch.Generator, part: slice) -> StepInputs:
            if self.is_new:
                time.sleep(self.seconds)
            self.is_new = False
            return draw(rows, noise, part)

        super().__init__(order, slow, last, own, AHEAD)


@pytest.mark.parametrize("steps", [1, 2, 10])
def test_a_short_training_is_measured_where_batches_are_drawn_ahead(
    shards: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    monkeypatch.setattr("hddm.training.loop.Loader", Ahead)
    needs = needs_of_training(training_of(shards / "shard_0", steps=steps, batch_size=8))
    assert next(one.seconds for one in needs.work if one.name == "training")


def test_the_start_of_a_loader_is_no_part_of_a_step(
    shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hddm.training.loop.Loader", Ahead)
    monkeypatch.setattr(Ahead, "seconds", 0.5)
    needs = needs_of_training(training_of(shards / "shard_0", steps=10, batch_size=2))
    work = next(one for one in needs.work if one.name == "training")
    assert work.seconds is not None
    assert work.seconds < 0.4


def test_what_does_not_fit_is_not_measured_and_says_so(
    shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hddm.training.needs.room_on", lambda device: Room("a thimble", 1000, 900))
    needs = needs_of_training(training_of(shards / "shard_0"))
    assert sizes(needs)["activations"] is None
    said = "\n".join(needs.lines())
    assert "activations            not measured     what is counted above does not fit" in said
    assert "does not fit: take a smaller `size`" in said


def test_a_dry_run_writes_nothing_and_nothing_is_in_its_way(
    hddm: Command, shards: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "expert"
    verbs = [
        ("train", "expert", shards / "shard_0", "--objective", "flow", "--batch-size", 4),
        ("train", "router", shards, "--batch-size", 4),
    ]
    for verb in verbs:
        words = (*verb, "--out", out, "--steps", 8, "--size", "tiny", "--dry-run")
        code, said, told = hddm(*words)
        assert code == 0, told
        assert "dry run: nothing is written" in said
        assert "dry run: runs steps of one sample" in caplog.text
        assert list(tmp_path.iterdir()) == []
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    assert hddm(*words)[0] == 0
    assert [path.name for path in tmp_path.rglob("*")] == ["expert", "mine.txt"]


def test_one_of_several_processes_does_not_measure(
    shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="measures one process"):
        needs_of_training(training_of(shards / "shard_0"))
