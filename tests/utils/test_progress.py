"""Lines of a training as it runs, and in the end."""

import importlib
import io
import math
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hddm.training.loop import summary_of
from hddm.utils import progress
from hddm.utils.progress import TrainingProgress


@pytest.fixture(autouse=True)
def _no_work_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_SHORT", 0.0)


Lines = Callable[..., list[str]]


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Lines:
    """Lines of a training of so many steps, batch by batch of this size, that says (step, loss, seconds)."""

    def written(steps: int, size: int, *reached: tuple[int, float, float]) -> list[str]:
        with TrainingProgress(steps, size, "train") as progress:
            for step, loss, seconds in reached:
                progress.reach(step, loss, seconds)
        return capsys.readouterr().err.splitlines()

    return written


def test_a_line_says_the_step_the_mean_loss_and_the_rate(lines: Lines) -> None:
    """A step of 8 images takes a quarter of a second, and in the second half a minute."""
    reached = [(step, float(step), 0.25 if step <= 10 else 60) for step in range(1, 21)]
    written = lines(20, 8, *reached)
    assert len(written) == 10
    assert written[0] == "train: 10 %, step 2 of 20, loss 1.5000, 32 images/s"
    assert written[1] == "train: 20 %, step 4 of 20, loss 3.5000, 32 images/s"
    assert written[5] == "train: 60 %, step 12 of 20, loss 11.5000, 0.133 images/s"
    assert written[9] == "train: 100 %, step 20 of 20, loss 19.5000, 0.133 images/s"


def test_losses_that_come_for_several_steps_count_as_often(lines: Lines) -> None:
    """As an island sends them, which is killed after step 60 and goes on from step 40."""
    losses = ((1, 4.0), (9, 2.0), (20, 1.0), (60, math.nan), (41, 7.0), (50, 3.0))
    # One step of 4, eight of 2 and eleven of 1; nothing of the steps that were not finite.
    assert lines(100, 8, *((step, loss, math.nan) for step, loss in losses)) == [
        "train: 20 %, step 20 of 100, loss 1.5500",
        "train: 60 %, step 60 of 100",
        "train: 41 %, step 41 of 100, loss 7.0000",
        "train: 50 %, step 50 of 100, loss 3.0000",
    ]


Clock = Callable[[float], float]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Let seconds pass; returns the time."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[-1])

    def passing(seconds: float) -> float:
        now.append(now[-1] + seconds)
        return now[-1]

    return passing


def _left(line: str) -> float | None:
    """Seconds that a line says are left."""
    found = re.search(r"(\d+) (s|min) left", line)
    return found and int(found[1]) * {"s": 1, "min": 60}[found[2]]


def test_time_left_is_right_for_work_that_gets_slower_or_faster(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    """After two fifths of the work a unit takes another time, which a quarter of the work later is known."""
    for before, after in ((0.1, 1.0), (1.0, 0.1)):
        with progress.Progress(200, "encode") as advance:
            for unit in range(1, 201):
                clock(before if unit <= 80 else after)
                advance(1)
                said = _left(capsys.readouterr().err)
                if said is not None and unit <= 80:
                    assert said == pytest.approx(before * (200 - unit), abs=30.1, rel=0.05)
                if said is not None and unit >= 160:
                    assert said == pytest.approx(after * (200 - unit), abs=1, rel=0.25)


def test_time_left_includes_the_waits_of_a_training_and_nothing_that_follows_it(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step computes for half a second, and waits for one and a half."""
    with TrainingProgress(60, 8, "train") as training:
        for step in range(1, 61):
            clock(2.0)
            training.reach(step, 1.0, 0.5)
        written = capsys.readouterr().err.splitlines()
        clock(100.0)
    assert "train: 50 %, step 30 of 60, loss 1.0000, 16 images/s, 60 s left" in written
    assert written[-1] == "train: 100 %, step 60 of 60, loss 1.0000, 16 images/s"


def test_no_time_left_is_said_before_there_is_evidence(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    # A step that takes long begins, and the first counts say nothing of it.
    with progress.Progress(1000, "benchmark", is_even=False) as advance:
        for _ in range(4):
            clock(6.0)
            advance(5)
        assert "left" not in capsys.readouterr().err
        clock(8.0)
        advance(480)
        assert capsys.readouterr().err == "benchmark: 50 %, 8 s left\n"
    with progress.Progress(100, "encode") as advance:
        advance(0)
        clock(4.0)
        advance(50)
        assert capsys.readouterr().err == "encode: 50 %, 4 s so far\n"


def test_what_was_done_before_this_start_says_nothing_of_the_pace(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress.Progress(100, "sample") as advance:
        advance.skip(40)
        for _ in range(10):
            clock(2.0)
            advance(1)
        advance.skip(9)
        clock(2.0)
        advance(1)
    assert capsys.readouterr().err.splitlines()[-1] == "sample: 60 %, 80 s left"


class _Log(io.StringIO):
    """A log that tells when a line is complete, and a clock."""

    def __init__(self) -> None:
        super().__init__()
        self.spoken, self.now = threading.Semaphore(0), [0.0]

    def write(self, text: str) -> int:
        count = super().write(text)
        if text.endswith("\n"):
            self.spoken.release()
        return count


def _logged(monkeypatch: pytest.MonkeyPatch) -> _Log:
    """What is spoken from here on, also while nothing is counted."""
    made = _Log()
    monkeypatch.setattr(sys, "stderr", made)
    monkeypatch.setattr(progress, "_BEAT", 0.001)
    monkeypatch.setattr(progress.time, "perf_counter", lambda: made.now[-1])
    return made


SLOW = """
import sys
sys.stderr.now.append(10.5)
assert sys.stderr.spoken.acquire(timeout=60)
"""


def test_the_first_line_of_a_command_says_which_library_it_loads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = _logged(monkeypatch)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "slow_library").mkdir()
    (tmp_path / "slow_library/__init__.py").write_text("from slow_library import part")
    (tmp_path / "slow_library/part.py").write_text(SLOW)
    with progress.Startup("hddm train"):
        importlib.import_module("slow_library")
        log.now.append(21.0)
        assert log.spoken.acquire(timeout=60)
    assert log.getvalue().splitlines() == [
        "hddm train: loading slow_library, 10 s so far",
        "hddm train: preparing, 21 s so far",
    ]


def test_short_work_has_no_lines(
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
        assert capsys.readouterr().err.count("\n") == lines
    # The rest turns out to take long.
    with progress.Progress(10, "check") as advance:
        for seconds in (0.1, 0.1, 9.8):
            now.append(now[-1] + seconds)
            advance(1)
    assert capsys.readouterr().err == "check: 30 %, 69 s left\n"


def test_long_work_speaks_less_often_later(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now, spoke = [0.0], list[float]()
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[-1])
    with progress.Progress(1000, "encode", more=lambda: [f"{len(now) - 1} files"]) as advance:
        for _ in range(60):
            now.append(now[-1] + 6)
            advance(1)
            if lines := capsys.readouterr().err.splitlines():
                (line,) = lines
                spoke.append(now[-1])
    # Counted every 6 seconds, so that a line is due at every other count.
    assert spoke == [*range(12, 180, 12), 228, 288, 348]
    assert line == "encode: 5 %, 1 h 34 min left, 58 files"
    advance.say("a line of its own")
    assert capsys.readouterr().err == "a line of its own\n"


def test_work_that_counts_nothing_speaks_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    log = _logged(monkeypatch)
    with progress.Progress(None, "hash weights"):
        for seconds in (10.5, 71.0):
            log.now.append(seconds)
            assert log.spoken.acquire(timeout=60)
    with progress.Progress(4, "score", more=lambda: ["2 h in all"]) as advance:
        log.now.append(72.0)
        advance(1)
        log.now.append(81.0)
        assert log.spoken.acquire(timeout=60)
        log.now.append(100.0)
        advance(1)
    assert log.getvalue().splitlines() == [
        "hash weights: 10 s so far",
        "hash weights: 71 s so far",
        "score: 25 %, 1 s so far, 2 h in all",
        "score: 50 %, 56 s left, 2 h in all",
    ]


def _spoken(
    work: progress.Progress, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> dict[float, str]:
    """Lines of the first 300 seconds of a work that counts nothing, by the second."""
    spoke: dict[float, str] = {}
    with work as advance:
        begun = clock(0.0)
        for _ in range(300):
            now = clock(1.0)
            advance(0)
            if lines := capsys.readouterr().err.splitlines():
                (spoke[now - begun],) = lines
    return spoke


def test_the_time_so_far_differs_from_line_to_line(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    often = {float(seconds): f"convert: 0 %, {seconds} s so far" for seconds in range(10, 180, 10)}
    assert _spoken(progress.Progress(9, "convert"), clock, capsys) == {
        **often,
        230: "convert: 0 %, 4 min so far",
        290: "convert: 0 %, 5 min so far",
    }


class _Hanging(progress.Progress):
    def _details(self) -> list[str]:
        return ["waits"]


def test_a_line_that_says_the_same_as_the_one_before_is_left_out_for_a_minute(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    spoke = _spoken(_Hanging(9, "convert"), clock, capsys)
    assert spoke == dict.fromkeys((10, 70, 130, 190, 250), "convert: 0 %, waits")


def test_a_worker_leaves_progress_to_the_process_that_started_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    heard: list[float] = []
    with progress.heard(heard.append):
        with progress.Progress(10, "features") as advance:
            advance(4)
            advance(6)
        with progress.Progress(None, "write"):
            pass
        # As an evaluation does it, which is not done with the first features.
        with progress.Progress(2, "train a classifier") as advance:
            advance(1)
            with progress.Progress(2, "within it") as inner:
                inner(2)
            advance(1)
    assert capsys.readouterr().err == ""
    assert heard == pytest.approx([0.36, 0.9, 0.945, 0.99])


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_a_bar_counts_from_where_the_training_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "120")
    with TrainingProgress(10_000, 8, "train") as shown:
        for step in range(9_991, 10_001):
            shown.reach(step, float(step), 0.02)
            time.sleep(0.02)
        at_its_end = terminal.getvalue()
        time.sleep(0.1)
    # What follows the last step, as a calibration, is neither timed nor drawn.
    assert terminal.getvalue() == at_its_end
    last = at_its_end.split("\r")[-1]
    # Seconds that the steps took here; all 10,000 in this time would be another rate.
    assert last.startswith("train: 100 %, step 10000 of 10000, loss 9995.5000, 400 images/s |")
    assert last.endswith("|\n")


ODD = [1000.0, *[3.0] * 49, math.inf, *[1.0] * 1899, *[0.5] * 49, math.nan]


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        (
            ODD,
            "trained for 2000 steps, loss 12.0808 → 0.7525 (means of the first and the last 100 steps)",
        ),
        ([*[9.0] * 97, math.inf, 8.0], "trained for 99 steps, loss 8.9898 (mean of all steps)"),
    ],
    ids=["many", "few"],
)
def test_a_training_ends_with_the_means_of_its_losses(losses: list[float], expected: str) -> None:
    assert summary_of(losses) == expected
