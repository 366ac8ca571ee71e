"""A benchmark from its file to its results, resumed, shared, and repeated by hand."""

import json
import multiprocessing
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import yaml

from hddm.benchmark.plan import SeedPlan, Step, cost_key, count_sampling, count_training
from hddm.benchmark.results import Results, read_results
from hddm.training.settings import size_config
from hddm.utils.processes import end_with_parent
from hddm.utils.work import Work
from hddm_cli.app import run_words
from tests.artefacts import SIDE, edit_json, refusal
from tests.benchmark_files import (
    CONTENT,
    FLOW,
    MIXED,
    SINGLE,
    Finished,
    again,
    file,
    inline,
    life,
    run_inline,
    write_sides,
)


def _without_times(results: Results) -> dict[str, Any]:
    """Results without what differs between two runs: seconds, also those in a model's record, and folders."""
    times = ("seconds", "path", "source", "source_sha256")

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(one) for key, one in value.items() if key not in times}
        return [plain(one) for one in value] if isinstance(value, list) else value

    content: dict[str, Any] = plain(json.loads(results.model_dump_json()))
    return content


@pytest.mark.integration
def test_all_rows_are_sampled_measured_and_compared(miniature: Finished) -> None:
    results, out = miniature.results, miniature.out
    assert read_results(out) == results
    assert [row.name for row in results.first] == [SINGLE, FLOW, MIXED]
    assert [row.name for row in results.tables["strategies"]] == ["draw", "top-1", "full"]
    assert results.seeds == results.settings.seeds
    assert results.split == "validation"
    for row in results.first:
        (one,) = row.scored
        assert one.evaluation.images == 40
        assert [side.split for side in one.evaluation.splits] == ["training", "validation"]
        assert [domain.domain for domain in one.evaluation.domains] == ["first", "second"]
        assert sum(domain.share for domain in one.evaluation.domains) == pytest.approx(1)
    pairs = [(one.row, one.against, one.kind) for one in results.comparisons]
    assert pairs == [
        (MIXED, SINGLE, "model"),
        (MIXED, FLOW, "model"),
        ("top-1", "draw", "setting"),
        ("full", "draw", "setting"),
    ]
    assert results.same[0].images == results.same[0].equal == 3
    for name in ("results.json", "tables.md", "report.html", "benchmark.json"):
        assert (out / name).is_file()
    for name in ("parts", "samples/single-model", "scores/single-model.json"):
        assert (out / name).is_symlink()
        assert (out / name).exists()
    assert not list((out / "jobs").glob("*.run"))
    assert not list((out / "jobs").glob("*.features"))


def test_compute_is_of_all_that_was_trained_for_a_row(miniature: Finished) -> None:
    models = {one.model: one for one in miniature.results.models}
    # A step of an image counts 30 and an update 1 in the miniature.
    trained = {"single": 5 * (8 * 30 + 1), "flow": 12 * (8 * 30 + 1), "mixed": 12 * (8 * 30 + 1)}
    for name, flop in trained.items():
        model = models[name]
        calibration = model.calibration_flop or 0
        of_router = 0 if name == "single" else 4 * (8 * 30 + 1)
        assert model.training_flop == flop + of_router + calibration
    assert (models["single"].router_flop, models["flow"].router_flop) == (0, models["mixed"].router_flop)
    assert models["flow"].parts == ("flow-0", "flow-1", "router")
    assert (models["flow"].steps, models["flow"].batch_sizes) == ((6, 6, 4), (8, 8, 8))
    # Two experts of one size, and the router's own.
    assert (models["flow"].calibration_flop or 0) > 2 * (models["single"].calibration_flop or 0)
    ((budget, high, low, percent),) = miniature.results.unequal
    assert (budget, high, low) == ("all", FLOW, SINGLE)
    assert percent > 2


def test_what_was_there_before_is_not_counted(miniature: Finished, tmp_path: Path) -> None:
    results = again(miniature, tmp_path / "out", file(not_counted=["ddpm-0", "router"]))
    models = {one.model: one for one in results.models}
    assert (models["mixed"].parts, models["flow"].parts) == (("flow-1",), ("flow-0", "flow-1"))
    assert "the training of ddpm-0, router is not counted" in (tmp_path / "out/tables.md").read_text()


def test_started_again_it_does_nothing_and_keeps_its_date(
    miniature: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (miniature.out / "results.json").read_bytes()
    with inline() as told:
        run_inline(miniature.file, miniature.out, miniature.data)
    assert told == []
    assert (miniature.out / "results.json").read_bytes() == before
    assert "was finished on 20" in capsys.readouterr().err


@pytest.mark.integration
def test_results_of_other_settings_are_not_replaced_unasked(miniature: Finished, tmp_path: Path) -> None:
    out = Path(shutil.copytree(miniature.out, tmp_path / "out", symlinks=True))
    changed = file(values={"steps": 7, "images": 40})
    told = refusal(run_inline, changed, out, miniature.data)
    assert "has results of other settings" in told
    assert "values.steps: was 6, is 7" in told
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "note").write_text("precious")
    assert "has no benchmark.json of" in refusal(run_inline, changed, tmp_path / "mine", miniature.data)


@pytest.mark.integration
def test_a_failing_step_is_named_and_the_others_stay(miniature: Finished, tmp_path: Path) -> None:
    rows = {**CONTENT["rows"], "broken": "$flow --strategy top-3"}
    told = refusal(again, miniature, tmp_path / "out", file(rows=rows))
    assert "step 'samples/broken' (hddm sample flow --strategy top-3" in told
    assert not (tmp_path / "out" / "results.json").exists()
    assert again(miniature, tmp_path / "out", file()).seeds == (0,)


@pytest.mark.integration
def test_a_damaged_record_is_refused_and_half_a_step_is_done_again(
    miniature: Finished, tmp_path: Path
) -> None:
    out = Path(shutil.copytree(miniature.out, tmp_path / "out", symlinks=True))
    record = next((out / "jobs").glob("partition-*.done.json"))
    content = record.read_text()
    record.write_text(content.replace('"seconds"', '"second"'))
    assert "was changed after it was written" in refusal(run_inline, miniature.file, out, miniature.data)
    # Killed between the end of a step and its record.
    record.unlink()
    with inline() as told:
        run_inline(miniature.file, out, miniature.data)
    assert [words[0] for words in told] == ["partition"]


@pytest.mark.slow
@pytest.mark.parametrize("written", ["sample-", "train-expert-", "evaluate-", "results.json"])
def test_killed_at_any_moment_it_comes_to_the_same_results(
    written: str, miniature: Finished, tmp_path: Path
) -> None:
    moment = ("os.rename", written)
    assert life(miniature.file, tmp_path / "out", miniature.data, moment) == -signal.SIGKILL
    assert life(miniature.file, tmp_path / "out", miniature.data, None) == 0
    assert _without_times(read_results(tmp_path / "out")) == _without_times(miniature.results)
    assert not [path for path in (tmp_path / "out" / "jobs").iterdir() if ".part-" in path.name]


@pytest.mark.integration
def test_its_commands_give_the_same_by_hand(miniature: Finished, tmp_path: Path) -> None:
    """Any row can be repeated in an empty folder by the commands of --dry-run."""
    plan = SeedPlan(miniature.file, 0, Work(Path("jobs")), miniature.data)
    (tmp_path / "scores").mkdir()
    with pytest.MonkeyPatch.context() as patch, inline():
        patch.chdir(tmp_path)
        for step in plan.rows[2].scores.upstream:
            run_words(shlex.split(step.shown)[1:])
    ours = json.loads((tmp_path / "scores/mixed-1-1.json").read_text())
    theirs = json.loads((miniature.out / "scores/mixed-1-1.json").read_text())
    assert ours["splits"] == theirs["splits"]
    assert ours["data"]["images"]["hash"] == theirs["data"]["images"]["hash"]


TINY = size_config("tiny")
WIDTH, DEPTH, PATCH = TINY["hidden_size"], TINY["depth"], TINY["patch_size"]
TOKENS = (SIDE // PATCH) ** 2
FREQUENCIES = 256


def _linear(rows: int, inside: int, outside: int) -> int:
    return 2 * rows * inside * outside


def _forward() -> tuple[int, int]:
    """Operations of the tiny network for an image, and those that need no gradient of their input."""
    embed = _linear(TOKENS, PATCH**2, WIDTH)
    first = _linear(1, FREQUENCIES, WIDTH)
    time = _linear(1, WIDTH, WIDTH) + _linear(1, WIDTH, 6 * WIDTH)
    # Scores and their product with the values.
    attention = 2 * (2 * TOKENS * TOKENS * WIDTH)
    block = _linear(TOKENS, WIDTH, 3 * WIDTH) + attention + _linear(TOKENS, WIDTH, WIDTH)
    block += 2 * _linear(TOKENS, WIDTH, 4 * WIDTH)
    return embed + first + time + DEPTH * block + _linear(TOKENS, WIDTH, PATCH**2), embed + first


@pytest.mark.integration
@pytest.mark.parametrize("objective", ["flow", "ddpm"])
def test_a_training_step_costs_its_forward_and_twice_that_backward(objective: str, shards: Path) -> None:
    words = ["train", "expert", str(shards / "shard_0"), "--objective", objective, "--size", "tiny"]
    forward, idle = _forward()
    step = 3 * forward - idle
    assert count_training([*words, "--optimizer", "adamw", "--steps", "90"], run_words) == (step, 0)

    def update(m: int, n: int) -> int:
        """Five iterations, for G of shape (m, n), n <= m: G^T G, its square, and the product with G."""
        return 5 * (2 * _linear(n, m, n) + _linear(n, n, n))

    muon = DEPTH * (update(3 * WIDTH, WIDTH) + update(WIDTH, WIDTH) + 2 * update(4 * WIDTH, WIDTH))
    muon += update(FREQUENCIES, WIDTH) + update(WIDTH, WIDTH) + update(6 * WIDTH, WIDTH)
    assert count_training([*words, "--optimizer", "muon", "--batch-size", "64"], run_words) == (step, muon)


@pytest.mark.integration
def test_a_sample_costs_its_forwards(flow_expert: Path) -> None:
    sample = ["sample", str(flow_expert), "--solver", "euler", "--steps", "3"]
    assert count_sampling(sample, run_words) == pytest.approx(3 * _forward()[0], rel=0.02)


def test_students_of_one_and_of_two_steps_are_counted_apart(flow_expert: Path, tmp_path: Path) -> None:
    keys = set()
    for steps in (1, 2):
        student: Any = SimpleNamespace(path=shutil.copytree(flow_expert, tmp_path / str(steps)))
        edit_json(student.path / "expert.json", sampling_steps=steps)
        keys.add(
            cost_key(
                Step("images", "sample", ("$student",), {"student": student}, None, None, Work(tmp_path))
            )
        )
    assert len(keys) == 2


def _work(connection: Connection) -> None:
    end_with_parent()
    connection.send(os.getpid())
    time.sleep(600)


def _lead(connection: Connection) -> None:
    multiprocessing.get_context("fork").Process(target=_work, args=(connection,)).start()
    time.sleep(600)


def test_a_worker_ends_when_its_parent_is_killed() -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    parent = context.Process(target=_lead, args=(there,))
    parent.start()
    worker = here.recv()
    assert parent.pid is not None
    os.kill(parent.pid, signal.SIGKILL)
    parent.join()
    _, left = psutil.wait_procs([psutil.Process(worker)] if psutil.pid_exists(worker) else [], timeout=10)
    for process in left:
        process.kill()
    assert not left


def _until(condition: Callable[[], bool], process: "subprocess.Popen[bytes]") -> None:
    for _ in range(60_000):
        if condition():
            return
        assert process.poll() is None
        time.sleep(0.02)
    raise AssertionError("it did not come so far")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_with_workers_it_goes_on_whatever_stopped_it(number: signal.Signals, tmp_path: Path) -> None:
    path, jobs = tmp_path / "mine.yaml", tmp_path / "out" / "jobs"
    long = CONTENT | {"values": {"steps": 60, "images": 40}, "workers": 2}
    path.write_text(yaml.safe_dump(long, sort_keys=False))
    data = write_sides(tmp_path / "data")
    command = [sys.executable, "-m", "hddm_cli", "benchmark", str(path), "--data", str(data)]
    command += ["--out", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, env=environment)
    _until(lambda: any(jobs.glob("train-expert-*.run/checkpoints/step_*")), process)
    process.send_signal(number)
    code = process.wait(120)
    assert code == (-9 if number == signal.SIGKILL else 128 + number)
    assert not (tmp_path / "out" / "results.json").exists()
    assert subprocess.run(command, env=environment, check=False).returncode == 0
    results = read_results(tmp_path / "out")
    assert results.seeds == (0,)
    assert torch.equal(*(torch.tensor(one.steps[:2]) for one in results.models[1:3]))
    assert not list(jobs.glob(".*"))
