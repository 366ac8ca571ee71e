"""Errors on held-out images during a training: exact, by noise level, and without an effect on it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import hddm
from hddm.data.partition import partition
from hddm.data.shards import open_shard
from hddm.networks.folders import WEIGHTS
from hddm.training.denoising import velocity_errors
from hddm.training.expert import train_expert
from hddm.training.settings import RunOptions
from hddm.training.state import read_held_out
from hddm.training.watching import SEED, STRATA
from hddm.utils.files import read_json
from hddm.utils.streams import Use, generator
from tests.artefacts import Died, ending_at, expert_settings, refusal, write_images


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A shard, and one of other images of the same kind."""
    folder = tmp_path_factory.mktemp("held_out")
    partition(write_images(folder / "images", per_class=40), folder / "shards", 1, held_out=0.4)
    return folder / "shards" / "shard_0", folder / "shards" / "held_out" / "shard_0"


def test_the_training_stays_as_it_is_and_the_errors_are_those_of_its_weights(
    parts: tuple[Path, Path], tmp_path: Path
) -> None:
    shard, held_out = parts
    settings = expert_settings("flow", steps=12)
    losses = train_expert(shard, tmp_path / "plain", settings)
    run = RunOptions(held_out=held_out, validate_every=4)
    assert train_expert(shard, tmp_path / "watched", settings, run=run) == losses
    plain, watched = (load_file(tmp_path / name / WEIGHTS) for name in ("plain", "watched"))
    assert all(torch.equal(plain[name], watched[name]) for name in plain)
    entries = read_json(tmp_path / "watched" / "expert.json")["training"]["held_out"]
    assert [one["step"] for one in entries] == [4, 8, 12]
    field, images = hddm.load(tmp_path / "watched"), open_shard(held_out)
    field.calibration = None
    # The cost allows two images.
    rows = torch.tensor([0, len(images) - 1])
    times = [(k + 0.5) / STRATA for k in range(STRATA)]
    expected = velocity_errors(field, images.take(rows), {}, times, generator(SEED, Use.DENOISING))
    assert entries[-1]["ema"] == pytest.approx(expected[:, 0].mean(1).tolist(), rel=1e-5)
    assert entries[-1]["raw"] != entries[-1]["ema"]


def test_a_resumed_run_has_the_errors_of_the_uninterrupted_one(
    parts: tuple[Path, Path], tmp_path: Path
) -> None:
    shard, held_out = parts
    settings = expert_settings("flow", steps=12)
    options = {"held_out": held_out, "validate_every": 3, "checkpoint_every": 4}
    train_expert(shard, tmp_path / "whole", settings, run=RunOptions(**options))
    with pytest.raises(Died):
        train_expert(shard, tmp_path / "cut", settings, on_step=ending_at(7), run=RunOptions(**options))
    assert [one["step"] for one in read_held_out(tmp_path / "cut.run")] == [3, 6]
    train_expert(shard, tmp_path / "cut", settings, run=RunOptions(resume=True, **options))
    assert read_held_out(tmp_path / "cut.run") == read_held_out(tmp_path / "whole.run")


def test_the_shard_itself_and_images_of_another_shape_are_refused_before_the_first_step(
    parts: tuple[Path, Path], tmp_path: Path
) -> None:
    shard, _ = parts
    (large,) = partition(write_images(tmp_path / "large", side=8), tmp_path / "large-shards", 1)
    for folder, words in ((shard, "is the shard that is trained on"), (large, "not of (1, 4, 4)")):
        settings = expert_settings("flow", steps=2)
        said = refusal(train_expert, shard, tmp_path / "out", settings, run=RunOptions(held_out=folder))
        assert words in said
        assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("value", [OSError("no space left"), torch.full((STRATA, 3, 2), torch.nan)])
def test_a_measurement_that_fails_does_not_end_the_training(
    parts: tuple[Path, Path],
    tmp_path: Path,
    value: OSError | torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> torch.Tensor:
        if isinstance(value, OSError):
            raise value
        return value

    monkeypatch.setattr("hddm.training.watching.velocity_errors", fail)
    shard, held_out = parts
    run = RunOptions(held_out=held_out, validate_every=2)
    assert len(train_expert(shard, tmp_path / "out", expert_settings("flow", steps=4), run=run)) == 4
    assert "held_out" not in read_json(tmp_path / "out" / "expert.json")["training"]
    assert sum("the training goes on without" in one.message for one in caplog.records) == 1


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
    errors = [sum(one["ema"]) / STRATA for one in read_held_out(tmp_path / "expert.run")]
    best = errors.index(min(errors))
    assert best < len(errors) // 2
    assert errors[-1] > 1.2 * errors[best]
    early, late = (sum(losses[end - 300 : end]) for end in (100 * (best + 1) + 300, 3000))
    assert late < early


def test_the_run_has_a_page_with_all_that_was_logged(
    parts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hddm.training.watching.SHORTEST", 0.0)
    shard, held_out = parts
    run = RunOptions(held_out=held_out, validate_every=3, log_every=2, sample_every=6, checkpoint_every=4)
    train_expert(shard, tmp_path / "expert", expert_settings("flow", steps=12), run=run)
    page = (tmp_path / "expert.run" / "report.html").read_text()
    assert "expert.run: step 12 of 12" in page
    assert "Finished" in page
    for chart in (
        "Training loss",
        "Training loss by noise level t",
        "Velocity error on held-out images by t",
    ):
        assert f'aria-label="{chart}, over steps."' in page
    # Two grids of samples, and nothing from elsewhere.
    assert page.count("data:image/png") == 2
    assert "http" not in page.replace("http://www.w3.org", "")
