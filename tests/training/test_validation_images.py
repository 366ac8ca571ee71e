"""Pictures of a training: what they show, and that the training does not notice them."""

import contextlib
import io
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

import hddm
from hddm.data.images import to_bytes
from hddm.data.shards import open_shard
from hddm.sampling import sample
from hddm.schedules import LinearSchedule
from hddm.training.expert import train_expert
from hddm.training.loop import Fitted, Inputs, StepReport, Task, train
from hddm.training.settings import RunOptions
from hddm.training.state import Ema, TrainingState
from hddm.training.watching import undisturbed, watching
from hddm.utils.errors import Stopped
from hddm.velocity import VelocityField
from tests.artefacts import expert_settings, recipe
from tests.killed_runs import checkpoint


def _read(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path))


def _cells(grid: np.ndarray, side: int, num: int) -> np.ndarray:
    """The images (num, side, side, …) of a grid of four columns, with a border of 1, made small again."""
    scale = (grid.shape[1] // 4 - 2) // side
    wide = side * scale + 2
    starts = [(n // 4 * wide + 1, n % 4 * wide + 1) for n in range(num)]
    cells = [grid[y : y + wide - 2 : scale, x : x + wide - 2 : scale] for y, x in starts]
    return np.stack(cells)


@pytest.mark.integration
@pytest.mark.parametrize("objective", ["flow", "ddpm"])
def test_pictures_change_no_bit_of_the_training_and_show_the_expert_that_it_ends_with(
    objective: str, whole: Path, tmp_path: Path
) -> None:
    settings = expert_settings(objective, steps=6, class_conditional=True)
    train_expert(whole, tmp_path / "plain", settings, run=RunOptions())
    train_expert(whole, tmp_path / "shown", settings, run=RunOptions(sample_every=3, log_every=2))
    assert checkpoint(tmp_path / "shown.run") == checkpoint(tmp_path / "plain.run")

    samples = tmp_path / "shown.run" / "samples"
    names = [f"step_{step:08d}_{which}.png" for step in (3, 6) for which in ("ema", "raw")]
    assert sorted(path.name for path in samples.iterdir()) == names
    assert len({(samples / name).read_bytes() for name in names}) == 4

    field = hddm.load(tmp_path / "shown")
    assert isinstance(field, VelocityField)
    field.calibration = None
    expected = to_bytes(sample(field, 16, seed=0, steps=30, class_labels=torch.arange(16) % 2))
    found = _cells(_read(samples / "step_00000006_ema.png"), 4, 16)
    assert np.abs(found.astype(int) - expected[:, 0].numpy()).max() <= 1

    events = EventAccumulator(str(tmp_path / "shown.run" / "logs"), {"images": 0})
    events.Reload()
    for which in ("raw", "ema"):
        logged = events.Images(f"samples/{which}")
        assert [event.step for event in logged] == [3, 6]
        for event in logged:
            pixels = np.asarray(Image.open(io.BytesIO(event.encoded_image_string)).convert("L"))
            assert np.array_equal(pixels, _read(samples / f"step_{event.step:08d}_{which}.png"))


class _Velocity(nn.Module):
    """v = w x, which signals its own process at the ``signals``-th call that wants no gradient."""

    def __init__(self, signals: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.5))
        self.calls, self._signals = 0, signals

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            self.calls += 1
            if self.calls == self._signals:
                os.kill(os.getpid(), signal.SIGUSR1)
        return self.w * x


@pytest.mark.parametrize("signals", [7, 43])
def test_a_signal_while_pictures_are_drawn_ends_that_within_a_solver_step(
    signals: int, whole: Path, tmp_path: Path
) -> None:
    """Thirty steps are the raw weights' and thirty the averaged ones'."""
    network, shard = _Velocity(signals), open_shard(whole)
    field = VelocityField(network, LinearSchedule(), "flow_prediction", sample_shape=shard.shape)
    chosen = recipe(steps=4, batch_size=4, ema_decay=0.5, learning_rate=0.01)

    def draw(rows: Tensor, noise: torch.Generator, own: slice) -> Inputs:
        return {"x_0": shard.take(rows)}

    task = Task(
        network, len(shard), draw, lambda n, i: n(i["x_0"], torch.ones(4)).square().flatten(1).mean(1)
    )

    def write(draft: Path, fitted: Fitted) -> None:
        raise AssertionError("was stopped")

    given = {"run": RunOptions(sample_every=2), "watch": watching(field, shard)}
    with pytest.raises(Stopped, match="after step 2 of 4"):
        train(task, chosen, tmp_path / "out", "x.json", write, {}, **given)
    assert network.calls == signals
    assert not (tmp_path / "out.run" / "samples").exists()
    assert (tmp_path / "out.run" / "checkpoints" / "step_00000002").is_dir()


def test_a_network_is_left_as_it_was() -> None:
    """Modes that differ, compiled layers, and a layer that draws from torch's generator."""
    graphs: list[object] = []
    network = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Linear(2, 2))
    network[0].compile(backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    network.train()
    network[2].eval()
    modes = [module.training for module in network.modules()]
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    with contextlib.suppress(KeyError), undisturbed(network):
        assert not any(module.training for module in network.modules())
        network(torch.rand(5, 2))
        raise KeyError
    assert not graphs
    assert [module.training for module in network.modules()] == modes
    assert torch.equal(torch.random.get_rng_state(), before)


def _report(network: nn.Module) -> StepReport:
    state = TrainingState(network, Ema(network, 0.9), torch.optim.AdamW(network.parameters()))
    return StepReport(1, torch.zeros(1), torch.zeros(1), 0.0, 0.0, (), 0.0, 0.0, state, lambda: False)
