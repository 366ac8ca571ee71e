"""Calls in worker processes: in order, with errors and progress coming back; and signals."""

import contextlib
import itertools
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hddm.utils.errors import HddmError
from hddm.utils.processes import SIGNALS, Interrupted, StopRequest, interruptible
from hddm.utils.workers import Call, Workers
from tests.artefacts import killing
from tests.utils import chores


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(2) as pool:
        yield pool


@pytest.mark.integration
def test_results_come_in_the_order_of_the_calls(workers: Workers) -> None:
    advances: list[tuple[str, int]] = []
    durations = [0.3, 0.0, 0.1, 0.0]
    calls = [
        Call(chores.square, {"value": n, "seconds": seconds}, f"call {n}", n)
        for n, seconds in enumerate(durations, 1)
    ]
    told: list[tuple[str, int]] = []
    results = workers.run(
        calls,
        lambda call, units: advances.append((call.name, units)),
        lambda call: told.append(("begins", call.units)),
        lambda call, result: told.append(("ends", result)),
    )
    assert results == [1, 4, 9, 16]
    assert sorted(advances) == [(f"call {n}", n) for n in (1, 2, 3, 4)]
    # Two at a time, and each in its turn.
    assert [number for what, number in told if what == "begins"] == [1, 2, 3, 4]
    assert sorted(number for what, number in told if what == "ends") == [1, 4, 9, 16]
    under_way = list(itertools.accumulate(1 if what == "begins" else -1 for what, _ in told))
    assert (max(under_way), under_way[-1]) == (2, 0)


@pytest.mark.integration
def test_a_call_starts_once_those_before_it_have_ended(workers: Workers) -> None:
    calls = [
        Call(chores.square, {"value": 1, "seconds": 0.5}, "long"),
        Call(chores.square, {"value": 2, "seconds": 0}, "last", after=frozenset({"long", "free"})),
        Call(chores.square, {"value": 3, "seconds": 0}, "free"),
    ]
    told: list[str] = []
    results = workers.run(
        calls,
        on_start=lambda call: told.append(call.name),
        on_end=lambda call, result: told.append(f"{call.name} ended"),
    )
    assert results == [1, 4, 9]
    assert told == ["long", "free", "free ended", "long ended", "last", "last ended"]


@pytest.mark.integration
def test_a_call_waits_for_one_that_is_started_again(tmp_path: Path) -> None:
    told: list[str] = []
    calls = [
        Call(chores.fail, {"path": tmp_path / "starts"}, "first"),
        Call(chores.touch, {"path": tmp_path / "second"}, "second", after=frozenset({"first"})),
    ]
    with Workers(2, retries=1) as pool:
        pool.run(
            calls,
            on_start=lambda call: told.append(call.name),
            on_end=lambda call, _: told.append("end"),
        )
    assert told == ["first", "end", "second", "end"]


@pytest.mark.integration
def test_an_error_comes_back_as_it_is_and_stops_what_did_not_start(
    workers: Workers, tmp_path: Path
) -> None:
    later = [Call(chores.touch, {"path": tmp_path / str(n)}, "a call") for n in range(20)]
    with pytest.raises(HddmError, match=r"^a file is missing: add it$"):
        workers.run([Call(chores.refuse, {}, "a call"), *later])
    time.sleep(0.5)
    assert len(list(tmp_path.iterdir())) < 10
    assert workers.run([Call(chores.square, {"value": 3, "seconds": 0}, "a call")]) == [9]


@pytest.mark.integration
def test_workers_that_are_told_to_stop_begin_nothing_more(tmp_path: Path) -> None:
    def interrupt(call: Call, units: int) -> None:
        raise KeyboardInterrupt

    calls = [Call(chores.stay_until_told, {"path": tmp_path / str(n)}, "a call") for n in range(4)]
    with contextlib.suppress(KeyboardInterrupt), Workers(1) as pool:
        pool.run(calls, interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


@pytest.mark.integration
def test_a_worker_that_dies_is_quoted(capfd: pytest.CaptureFixture[str]) -> None:
    with (
        pytest.raises(
            HddmError, match=r"^a call: its process ended with exit code 3 \(no more room\)$"
        ),
        Workers(2) as pool,
    ):
        pool.run(
            [
                Call(chores.square, {"value": 1, "seconds": 60}, "a call"),
                Call(chores.give_up, {}, "a call"),
            ]
        )
    assert capfd.readouterr().err.count("where it was\nno more room\n") == 1
    with (
        pytest.raises(HddmError, match="was killed by SIGKILL, probably because memory"),
        Workers(1) as pool,
    ):
        pool.run([Call(chores.die, {}, "a call")])


@pytest.mark.integration
def test_a_call_that_fails_is_started_again_and_quoted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls = [
        Call(chores.fail, {"path": tmp_path / "a"}, "a call"),
        Call(chores.touch, {"path": tmp_path / "b"}, "another"),
    ]
    with Workers(1, retries=1) as pool:
        assert pool.run(calls) == [5, None]
        assert "a call: its process failed (KeyError: 'x'); restarting it (1 of 1)" in caplog.text
        error, other = pool.run(calls, keep_going=True)
    assert other is None
    assert error.message == "a call: its process failed (KeyError: 'x'), 2 times in all"
    assert "in fail" in error.__cause__.__notes__[0]


@pytest.mark.integration
def test_a_process_that_dies_of_the_signal_that_stops_all_is_not_started_again(
    tmp_path: Path,
) -> None:
    with pytest.raises(Interrupted, match="SIGTERM"), Workers(1, retries=3) as pool:
        pool.run([Call(chores.die_with_all, {"path": tmp_path / "starts"}, "a call")])
    assert (tmp_path / "starts").read_text() == "."


@pytest.mark.parametrize("number", SIGNALS, ids=lambda one: one.name)
def test_a_signal_to_a_verb_leaves_nothing_half_written(
    number: signal.Signals, images: Path, tmp_path: Path
) -> None:
    from hddm_cli.app import app

    if (child := os.fork()) == 0:
        sys.addaudithook(killing("os.link", "", number))
        with (tmp_path / "log").open("w") as sys.stderr:
            sys.argv = [
                "hddm",
                "partition",
                str(images),
                "--shards",
                "2",
                "--out",
                str(tmp_path / "out"),
            ]
            try:
                app()
            except SystemExit as ended:
                sys.stderr.flush()
                os._exit(int(ended.code or 0))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + number
    last = (tmp_path / "log").read_text().splitlines()[-1]
    assert last == f"hddm: {tmp_path / 'out'}: stopped; all is as it was before"
    left = {path.name for path in tmp_path.iterdir()}
    assert "out" not in left
    assert not any(name.startswith(".out") for name in left)


def test_what_only_notes_signals_is_not_interrupted_by_the_command_line_s_own_handler() -> None:
    with interruptible():
        with StopRequest() as stop:
            signal.raise_signal(signal.SIGTERM)
            assert stop.number == signal.SIGTERM
        with pytest.raises(Interrupted) as stopped:
            signal.raise_signal(signal.SIGINT)
        assert stopped.value.number == signal.SIGINT


def test_an_interrupt_that_a_library_replaces_by_an_error_of_its_own_is_one_still() -> None:
    """As safetensors does when a signal comes while it reads."""

    def read() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except BaseException as error:
            raise ValueError("could not determine the shape") from error

    with pytest.raises(Interrupted, match="SIGINT"), interruptible():
        read()
