"""What a training says of itself as it runs, and in the end."""

import io
import json
import math
import re
import sys
import time
from pathlib import Path

import pytest

from hddm.training.expert import train_expert
from hddm.training.loop import summary_of
from hddm.training.settings import RunOptions
from hddm.training.state import Run, TrainingState
from hddm.utils import progress
from hddm.utils.progress import TrainingProgress
from tests.artefacts import expert_settings


@pytest.fixture(autouse=True)
def _no_work_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_SHORT", 0.0)


Captured = pytest.CaptureFixture[str]


def _lines(capsys: Captured) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_a_line_says_the_step_the_mean_loss_the_rate_and_what_is_left(capsys: Captured) -> None:
    """A step of 8 images takes a quarter of a second, and in the second half a minute."""
    with TrainingProgress(20, 8, "train") as told:
        for step in range(1, 21):
            told.reach(step, float(step), 0.25 if step <= 10 else 60)
    lines = _lines(capsys)
    assert len(lines) == 10
    assert lines[0] == "train: 10 %, step 2 of 20, loss 1.5000, 32 images/s, 4 s left"
    assert lines[1] == "train: 20 %, step 4 of 20, loss 3.5000, 32 images/s, 4 s left"
    assert lines[5] == "train: 60 %, step 12 of 20, loss 11.5000, 0.133 images/s, 8 min left"
    assert lines[9] == "train: 100 %, step 20 of 20, loss 19.5000, 0.133 images/s"


def test_time_is_told_in_seconds_minutes_or_hours(capsys: Captured) -> None:
    for seconds in (0.001, 1, 60, 3600):
        with TrainingProgress(20, 1000, "train") as told:
            for step in (1, 2):
                told.reach(step, 0.0, seconds)
    assert [line.split(", ", 3)[3] for line in _lines(capsys)] == [
        "1000000 images/s, 1 s left",
        "1000 images/s, 18 s left",
        "16.7 images/s, 18 min left",
        "0.278 images/s, 18 h 00 min left",
    ]


def test_losses_that_come_for_several_steps_count_as_often(capsys: Captured) -> None:
    """As an island tells them, which is killed after step 60 and goes on from step 40."""
    with TrainingProgress(100, 8, "expert_0") as told:
        for step, loss in ((1, 4.0), (9, 2.0), (20, 1.0), (60, math.nan), (41, 7.0), (50, 3.0)):
            told.reach(step, loss, math.nan)
    # One step of 4, eight of 2 and eleven of 1; nothing of the steps that were not finite.
    assert [re.findall(r"step (\d+) of 100(?:, loss ([\d.]+))?", line)[0] for line in _lines(capsys)] == [
        ("20", "1.5500"),
        ("60", ""),
        ("41", "7.0000"),
        ("50", "3.0000"),
    ]


def test_a_training_that_goes_on_begins_with_what_it_knows(capsys: Captured) -> None:
    with TrainingProgress(20, 8, "train") as told:
        for step in range(11, 15):
            told.reach(step, float(step), 1)
    assert _lines(capsys) == [
        "train: 55 %, step 11 of 20, loss 11.0000",
        "train: 60 %, step 12 of 20, loss 12.0000, 8 images/s, 8 s left",
        "train: 70 %, step 14 of 20, loss 13.5000, 8 images/s, 6 s left",
    ]


def test_a_rate_leaves_out_what_comes_before_between_and_after_steps(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint after every fourth step, which the rate of the next line does not know of."""
    save, now = Run.save, [0.0]

    def clock() -> float:
        now[0] += 0.001
        return now[0]

    def slowly(kept: Run, state: TrainingState) -> None:
        now[0] += 100
        save(kept, state)

    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr(Run, "save", slowly)
    settings, run = expert_settings("flow", steps=10, threads=1), RunOptions(checkpoint_every=4)
    with TrainingProgress(settings.steps, settings.batch_size, "train") as told:
        train_expert(whole, tmp_path / "out", settings, on_step=told.reach, run=run)
    rates = [float(rate) for rate in re.findall(r"([\d.]+) images/s", capsys.readouterr().err)]
    assert len(rates) == 9
    assert min(rates) > settings.batch_size
    record = json.loads((tmp_path / "out" / "expert.json").read_text())["training"]
    assert record["seconds"] < 1


def test_what_takes_less_than_five_seconds_has_no_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(progress, "_SHORT", 5.0)
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[-1])
    for seconds, lines in ((4.9, 0), (5.1, 10)):
        with progress.Progress(100, "check") as advance:
            for _ in range(100):
                now.append(now[-1] + seconds / 100)
                advance(1)
        assert len(_lines(capsys)) == lines
    # The rest turns out to take long.
    with progress.Progress(10, "check") as advance:
        for seconds in (0.1, 0.1, 9.8):
            now.append(now[-1] + seconds)
            advance(1)
    assert _lines(capsys) == ["check: 30 %"]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_a_bar_counts_images_from_where_the_training_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "120")
    with TrainingProgress(10_000, 8, "train") as told:
        for step in range(9_991, 10_001):
            told.reach(step, float(step), 0.02)
            time.sleep(0.02)
        at_its_end = terminal.getvalue()
        time.sleep(0.1)
    # What follows the last step, as a calibration, is neither timed nor drawn.
    assert terminal.getvalue() == at_its_end
    last = at_its_end.split("\r")[-1]
    assert "100%" in last
    assert "step 10000, loss 9995.5" in last
    # Ten steps were made here; all of them in this time would be a rate of 400,000 images a second.
    rate = re.search(r"([\d.]+) images/s", last)
    assert rate is not None
    assert float(rate[1]) <= 8 / 0.02


def test_the_end_of_a_training_is_told_by_means_and_not_by_single_steps() -> None:
    losses = [3.0] * 50 + [1.0] * 1900 + [0.5] * 50
    losses[0], losses[-1], losses[60] = 1000.0, math.nan, math.inf
    first, last = (1000 + 49 * 3 + 49) / 99, (50 + 49 * 0.5) / 99
    assert summary_of(losses) == (
        f"trained for 2000 steps, loss {first:.4f} → {last:.4f} (means of the first and the last 100 steps)"
    )
    assert summary_of([1.0] * 60 + [0.25] * 60, "cross-entropy") == (
        "trained for 120 steps, cross-entropy 1.0000 → 0.2500 (means of the first and the last 12 steps)"
    )


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([], ""),
        ([1.0], "trained for 1 step, loss 1.0000 (mean of all steps)"),
        ([*[9.0] * 97, math.inf, 8.0], "trained for 99 steps, loss 8.9898 (mean of all steps)"),
        ([math.nan] * 499 + [3.0], "trained for 500 steps, loss 3.0000 (mean of all steps)"),
        ([math.nan] * 500, "trained for 500 steps"),
    ],
    ids=["none", "one", "few", "one finite", "none finite"],
)
def test_of_too_few_steps_to_compare_the_mean_of_all_is_told(losses: list[float], expected: str) -> None:
    assert summary_of(losses) == expected
