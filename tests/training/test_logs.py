"""What a training shows while it runs: figures, pictures, and errors on held-out images."""

import io
import itertools
import logging
import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import wandb
from PIL import Image
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer
from torch import Tensor, nn

import hddm
from hddm.data.images import to_bytes
from hddm.data.partition import partition
from hddm.data.shards import open_shard
from hddm.experts.denoising import velocity_errors
from hddm.networks.transformers import ExpertTransformer
from hddm.sampling import sample
from hddm.training.expert import train_expert
from hddm.training.loader import StepInputs
from hddm.training.loop import OnTrainingStep, StepReport, Task, fit
from hddm.training.settings import RunOptions
from hddm.training.state import open_run
from hddm.training.trackers import _mode
from hddm.training.watching import SEED, STRATA, watching
from hddm.utils.errors import Stopped
from hddm.utils.files import read_json
from hddm.utils.records import WEIGHTS
from hddm.utils.streams import Use, generator
from hddm.velocity import VelocityField
from tests.artefacts import (
    Died,
    contents,
    ending_at,
    expert_settings,
    recipe,
    refusal,
    write_images,
)
from tests.killed_runs import checkpoint

Scalars = dict[str, list[tuple[int, float]]]
OF_A_PROCESS = ("train/images_per_second", "train/seconds_waited", "train/loss_by_noise")


def _scalars(logs: Path) -> Scalars:
    """Steps and values by tag, as TensorBoard shows them."""
    read = EventAccumulator(str(logs), {"scalars": 0, "images": 0})
    read.Reload()
    return {tag: [(e.step, e.value) for e in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def _lasting(scalars: Scalars) -> Scalars:
    return {tag: values for tag, values in scalars.items() if not tag.startswith(OF_A_PROCESS)}


def _at(step: int, act: Callable[[], None]) -> OnTrainingStep:
    def on_step(number: int, loss: float, seconds: float) -> None:
        if number == step:
            act()

    return on_step


def _torn(logs: Path) -> None:
    """Half a record at the end of the newest file, as a killed process leaves it."""
    newest = max(logs.iterdir(), key=lambda path: path.name)
    whole = newest.read_bytes()
    newest.write_bytes(whole + whole[-40:-15])


@pytest.mark.integration
def test_a_run_that_was_killed_and_stopped_reads_as_the_uninterrupted_one(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints and the signal fall between entries, and those killed had logged beyond their last.

    Only what is summed by noise level starts again with each process.
    """
    seconds = itertools.count(int(time.time()))
    monkeypatch.setattr(event_file_writer, "time", SimpleNamespace(time=lambda: next(seconds)))
    settings, every = expert_settings("flow", steps=23), {"log_every": 4, "checkpoint_every": 5}
    train_expert(whole, tmp_path / "whole", settings, run=RunOptions(**every))
    out, logs = tmp_path / "parts", tmp_path / "parts.run" / "logs"
    go_on = RunOptions(resume=True, **every)
    for last, entries in ((9, [4, 8]), (15, [4, 8, 12])):
        with pytest.raises(Died):
            train_expert(whole, out, settings, on_step=ending_at(last), run=go_on)
        _torn(logs)
        assert [step for step, _ in _scalars(logs)["train/loss"]] == entries
    stopping = _at(14, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    with pytest.raises(Stopped):
        train_expert(whole, out, settings, on_step=stopping, run=go_on)
    train_expert(whole, out, settings, run=go_on)
    found, expected = _scalars(logs), _scalars(tmp_path / "whole.run" / "logs")
    assert _lasting(found) == _lasting(expected)
    assert [step for step, _ in found["train/loss"]] == [4, 8, 12, 16, 20]
    assert len(found["train/loss_by_noise/0.4-0.6"]) == 5
    assert len(list(logs.iterdir())) == 4
    assert all(value > 0 for _, value in found["train/images_per_second"])


def test_figures_are_those_of_the_steps_since_the_last_entry(tmp_path: Path) -> None:
    """Recomputed from the samples' losses by numpy; times leave bins empty, and one step is not finite."""
    place = nn.Linear(1, 1)
    seen: list[StepReport] = []
    steps = itertools.count(1)

    def draw(rows: Tensor, noise: torch.Generator, own: slice) -> StepInputs:
        t = torch.rand(len(rows), generator=noise) * 0.55
        return {"t": torch.where(t > 0.5, 1.0, t), "rows": rows.float()}

    def loss(network: nn.Module, inputs: StepInputs) -> Tensor:
        each = (network(inputs["rows"][:, None])[:, 0] - inputs["t"]).square()
        return each * (math.nan if next(steps) == 5 else 1)

    chosen = recipe(steps=12, batch_size=32, learning_rate=1e-3, warmup=3)
    with open_run(tmp_path / "out", {}, RunOptions(log_every=3)) as run, watching()(run) as watch:
        fit(Task(place, 50, draw, loss), chosen, run, [seen.append, watch])
    found = _scalars(tmp_path / "out.run" / "logs")
    assert [step for step, _ in found["train/loss"]] == [3, 6, 9, 12]
    for end in (3, 6, 9, 12):
        reports = [r for r in seen[end - 3 : end] if math.isfinite(r.loss)]
        assert len(reports) == (2 if end == 6 else 3)
        values = dict.fromkeys(found, math.nan) | {
            tag: dict(entries)[end] for tag, entries in found.items() if end in dict(entries)
        }
        losses, t = (
            torch.cat([getattr(r, key) for r in reports]).numpy() for key in ("losses", "t")
        )
        assert values["train/loss"] == pytest.approx(losses.mean(), rel=1e-5)
        sums, _ = np.histogram(t, bins=5, range=(0, 1), weights=losses)
        counts, _ = np.histogram(t, bins=5, range=(0, 1))
        names = ["0.0-0.2", "0.2-0.4", "0.4-0.6", "0.8-1.0"]
        expected = (sums / np.maximum(counts, 1))[[0, 1, 2, 4]]
        bins = [values[f"train/loss_by_noise/{name}"] for name in names]
        assert bins == pytest.approx(list(expected), rel=1e-5)
        assert values["train/gradient_norm"] == pytest.approx(seen[end - 1].grad_norm, rel=1e-6)
        rates = [values[f"train/{name}learning_rate"] for name in ("", "muon_")]
        assert rates == pytest.approx(seen[end - 1].learning_rates, rel=1e-6)
    assert "train/loss_by_noise/0.6-0.8" not in found


@pytest.fixture
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder without keys, and no W&B variables; what needs a network would fail."""
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(home / "wandb"))
    return home


@pytest.mark.slow
def test_a_resumed_training_goes_on_in_the_same_run(
    whole: Path, nobody: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    out, folder = tmp_path / "expert", tmp_path / "expert.run"
    settings = expert_settings("flow", steps=12)
    every = {"tracker": "wandb:project", "log_every": 1, "checkpoint_every": 5, "sample_every": 6}
    with pytest.raises(Died):
        train_expert(whole, out, settings, on_step=ending_at(8), run=RunOptions(**every))
    name = (folder / "wandb.id").read_text()
    train_expert(whole, out, settings, run=RunOptions(resume=True, **every))
    assert (folder / "wandb.id").read_text() == name
    assert wandb.run is None
    assert list((folder / "wandb").glob(f"offline-run-*-{name}*"))
    assert [path for path in (folder / "wandb").rglob("*.png") if "raw" in path.name]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["expert", "expert.run", "home"]


def test_logs_that_fail_are_a_warning_each_and_change_nothing_in_the_training(
    whole: Path,
    nobody: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor does a training without a run leave anything but its folder."""
    settings = expert_settings("flow", steps=4)
    train_expert(whole, tmp_path / "bare", settings)
    assert {path.name for path in tmp_path.iterdir()} == {"bare", "home"}

    def fails(*_: object, **__: object) -> None:
        raise OSError("Not a directory")

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", fails)
    monkeypatch.setattr(wandb, "init", fails)
    train_expert(
        whole, tmp_path / "out", settings, run=RunOptions(tracker="wandb:project", log_every=1)
    )
    assert contents(tmp_path / "out")[WEIGHTS] == contents(tmp_path / "bare")[WEIGHTS]
    logged = [
        r for r in caplog.records if r.name.startswith("hddm") and r.levelno >= logging.WARNING
    ]
    text = "Not a directory; the training goes on without"
    assert [one.getMessage() for one in logged] == [
        f"TensorBoard ({tmp_path / 'out.run' / 'logs'}): {text}",
        f"wandb: {text}",
    ]


def test_without_a_key_nothing_is_asked_and_one_line_says_so(
    nobody: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.INFO):
        assert _mode() == "offline"
    assert "the run is written offline" in caplog.text
    monkeypatch.setenv("WANDB_API_KEY", 40 * "0")
    assert _mode() == "online"


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A shard, and one of other images of the same kind."""
    folder = tmp_path_factory.mktemp("held_out")
    partition(write_images(folder / "images", per_class=40), folder / "shards", 1, held_out=0.4)
    return folder / "shards" / "shard_0", folder / "shards" / "held_out" / "shard_0"


def test_the_training_stays_as_it_is_and_the_errors_are_those_of_its_weights(
    parts: tuple[Path, Path], tmp_path: Path
) -> None:
    """Also of a run that was resumed."""
    shard, held_out = parts
    settings = expert_settings("flow", steps=12)
    losses = train_expert(shard, tmp_path / "plain", settings)
    options = {"held_out": held_out, "validate_every": 4, "checkpoint_every": 5}
    assert train_expert(shard, tmp_path / "watched", settings, run=RunOptions(**options)) == losses
    with pytest.raises(Died):
        train_expert(
            shard, tmp_path / "cut", settings, on_step=ending_at(9), run=RunOptions(**options)
        )
    train_expert(shard, tmp_path / "cut", settings, run=RunOptions(resume=True, **options))
    plain, watched = (load_file(tmp_path / name / WEIGHTS) for name in ("plain", "watched"))
    assert all(torch.equal(plain[name], watched[name]) for name in plain)
    entries, resumed = (
        read_json(tmp_path / name / "expert.json")["training"]["held_out"]
        for name in ("watched", "cut")
    )
    assert resumed == entries
    assert [one["step"] for one in entries] == [4, 8, 12]
    field, images = hddm.load(tmp_path / "watched"), open_shard(held_out)
    field.calibration = None
    # The cost allows two images.
    rows = torch.tensor([0, len(images) - 1])
    times = [(k + 0.5) / STRATA for k in range(STRATA)]
    expected = velocity_errors(field, images.take(rows), {}, times, generator(SEED, Use.DENOISING))
    assert entries[-1]["ema"] == pytest.approx(expected[:, 0].mean(1).tolist(), rel=1e-5)
    assert entries[-1]["raw"] != entries[-1]["ema"]


def test_the_partition_stands_for_the_images_that_it_holds_out_of_the_shard(
    parts: tuple[Path, Path], tmp_path: Path
) -> None:
    shard, held_out = parts
    settings, found = expert_settings("flow", steps=2), []
    for number, place in enumerate((held_out, held_out.parent, shard.parent)):
        out = tmp_path / str(number)
        train_expert(shard, out, settings, run=RunOptions(held_out=place, validate_every=2))
        found.append(read_json(out / "expert.json")["training"]["held_out"])
    assert found[0] == found[1] == found[2]


def test_images_that_are_trained_on_are_refused_before_the_first_step(
    parts: tuple[Path, Path], tmp_path: Path
) -> None:
    settings = expert_settings("flow", steps=2)
    for place in (parts[0], parts[0] / "images"):
        said = refusal(
            train_expert, parts[0], tmp_path / "out", settings, run=RunOptions(held_out=place)
        )
        assert (
            f"`held_out` {place}: all its images are also training images of {parts[0]}, such as"
            in said
        )
    assert not list(tmp_path.glob("out*"))


def test_the_run_has_a_page_with_all_that_was_logged(
    parts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hddm.training.watching.SHORTEST", 0.0)
    shard, held_out = parts
    run = RunOptions(
        held_out=held_out, validate_every=3, log_every=2, sample_every=6, checkpoint_every=4
    )
    train_expert(shard, tmp_path / "expert", expert_settings("flow", steps=12), run=run)
    page = (tmp_path / "expert.run" / "report.html").read_text()
    assert "expert.run: step 12 of 12" in page
    assert 'aria-label="Velocity error on held-out images by t, over steps."' in page
    # Two grids of samples, and nothing from elsewhere.
    assert page.count("data:image/png") == 2
    assert "http" not in page.replace("http://www.w3.org", "")


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
def test_pictures_change_no_bit_of_the_training_and_show_the_expert_that_it_ends_with(
    whole: Path, tmp_path: Path
) -> None:
    settings = expert_settings("ddpm", steps=6, class_conditional=True)
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


def test_a_signal_while_pictures_are_drawn_ends_that_within_a_solver_step(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the 13th of thirty steps by the averaged weights, which come after thirty by the raw ones."""
    calls, forward = itertools.count(1), ExpertTransformer.forward

    def signalled(self: ExpertTransformer, *given: Any, **conditions: Any) -> Any:
        if not torch.is_grad_enabled() and next(calls) == 43:
            os.kill(os.getpid(), signal.SIGUSR1)
        return forward(self, *given, **conditions)

    monkeypatch.setattr(ExpertTransformer, "forward", signalled)
    with pytest.raises(Stopped, match="after step 2 of 4"):
        train_expert(
            whole,
            tmp_path / "out",
            expert_settings("flow", steps=4),
            run=RunOptions(sample_every=2),
        )
    assert next(calls) == 44
    assert not (tmp_path / "out.run" / "samples").exists()
    assert (tmp_path / "out.run" / "checkpoints" / "step_00000002").is_dir()


@pytest.mark.slow
def test_a_training_on_few_images_shows_that_it_overfits(tmp_path: Path) -> None:
    """The held-out error has its minimum early, and rises while the training loss still falls."""
    images = write_images(tmp_path / "images", per_class=100, side=8)
    partition(images, tmp_path / "shards", 1, held_out=0.8)
    settings = expert_settings("flow", steps=3000, batch_size=40, size="mini", ema_decay=0.9)
    run = RunOptions(held_out=tmp_path / "shards" / "held_out" / "shard_0", validate_every=100)
    shard = tmp_path / "shards" / "shard_0"
    assert 30 <= len(open_shard(shard)) <= 45
    losses = train_expert(shard, tmp_path / "expert", settings, run=run)
    entries = read_json(tmp_path / "expert" / "expert.json")["training"]["held_out"]
    errors = [sum(one["ema"]) / STRATA for one in entries]
    best = errors.index(min(errors))
    assert best < len(errors) // 2
    assert errors[-1] > 1.2 * errors[best]
    early, late = (sum(losses[end - 300 : end]) for end in (100 * (best + 1) + 300, 3000))
    assert late < early
