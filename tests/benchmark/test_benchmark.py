"""A benchmark from its file to its results, resumed, shared, and repeated by hand."""

import json
import multiprocessing
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml

from hddm.benchmark.costs import cost_key
from hddm.benchmark.counting import count_sampling, count_training
from hddm.benchmark.plan import SeedPlan
from hddm.benchmark.results import read_results
from hddm.networks.sizes import size_config
from hddm.utils.files import alone
from hddm.utils.processes import end_with_parent
from hddm.utils.records import HASHES
from hddm.utils.work import Work
from hddm_cli.app import run_words
from hddm_cli.lines import LINES
from tests.artefacts import SIDE, edit_json, refusal, write_images
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
    without_times,
    write_sides,
)


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
    assert (models["single"].router_flop, models["flow"].router_flop) == (
        0,
        models["mixed"].router_flop,
    )
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
    assert "What was there before: ddpm-0, router." in (tmp_path / "out/tables.md").read_text()


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
def test_results_of_other_settings_are_not_replaced_unasked(
    miniature: Finished, tmp_path: Path
) -> None:
    out = Path(shutil.copytree(miniature.out, tmp_path / "out", symlinks=True))
    changed = file(values={"steps": 7, "images": 40})
    told = refusal(run_inline, changed, out, miniature.data)
    assert "has results of other settings" in told
    assert "values.steps: was 6, is 7" in told
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "note").write_text("precious")
    assert "has no benchmark.json of" in refusal(
        run_inline, changed, tmp_path / "mine", miniature.data
    )


@pytest.mark.integration
def test_a_failing_step_is_named_and_the_others_stay(miniature: Finished, tmp_path: Path) -> None:
    rows = {**CONTENT["rows"], "broken": "$flow --guidance-rescale 0.5"}
    told = refusal(again, miniature, tmp_path / "out", file(rows=rows))
    assert "step 'samples/broken' (hddm sample flow --guidance-rescale 0.5" in told
    assert not (tmp_path / "out" / "results.json").exists()
    assert again(miniature, tmp_path / "out", file()).seeds == (0,)


def _damage_record(jobs: Path) -> None:
    record = next(jobs.glob("partition-*.done.json"))
    record.write_text(record.read_text().replace('"seconds"', '"second"'))


def _edit_weights(jobs: Path) -> None:
    weights = next(jobs.glob("train-expert-*/diffusion_pytorch_model.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)


def _edit_scores(jobs: Path) -> None:
    scores = next(
        path for path in jobs.glob("evaluate-*.json") if not path.name.endswith(".done.json")
    )
    scores.write_text(scores.read_text().replace('"value": ', '"value": 1'))


def _remove_samples(jobs: Path) -> None:
    shutil.rmtree(next(path for path in jobs.glob("sample-*") if path.is_dir()))


def _add_a_sample(jobs: Path) -> None:
    samples = next(path for path in jobs.glob("sample-*") if path.is_dir())
    shutil.copy(next(samples.glob("*.png")), samples / "another.png")


def _remove_record(jobs: Path) -> None:
    # As a kill between the end of a step and its record does.
    next(jobs.glob("partition-*.done.json")).unlink()


@pytest.mark.integration
@pytest.mark.parametrize(
    ("change", "verb"),
    [
        (_damage_record, "partition"),
        (_edit_weights, "train"),
        (_edit_scores, "evaluate"),
        (_remove_samples, "sample"),
        (_add_a_sample, "sample"),
        (_remove_record, "partition"),
    ],
)
def test_what_was_changed_or_removed_after_a_step_is_made_again(
    change: Callable[[Path], None], verb: str, miniature: Finished, tmp_path: Path
) -> None:
    out = Path(shutil.copytree(miniature.out, tmp_path / "out", symlinks=True))
    change(out / "jobs")
    with inline() as told:
        results = run_inline(miniature.file, out, miniature.data)
    assert [words[0] for words in told] == [verb]
    assert without_times(results) == without_times(miniature.results)


@pytest.mark.integration
def test_two_starts_with_one_output_folder_take_turns(miniature: Finished, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with alone(out):
        told = refusal(run_inline, file(), out, miniature.data, jobs=tmp_path / "jobs")
    assert "another process is writing it" in told
    assert not (tmp_path / "jobs").exists()


def test_steps_read_the_store_and_never_the_links_for_people(miniature: Finished) -> None:
    plan = SeedPlan(file(), 0, Work(miniature.out / "jobs"), LINES, miniature.data)
    for step in plan.all:
        places = [word for word in step.command() if str(miniature.out) in word]
        assert all(word.startswith(str(miniature.out / "jobs")) for word in places)


@pytest.mark.integration
def test_a_folder_of_a_start_that_was_killed_before_its_record_goes_on(
    miniature: Finished, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / f".benchmark.json.part-{platform.node()}-4194303").write_text("{")
    assert again(miniature, out, file()).seeds == (0,)


@pytest.mark.integration
def test_rows_whose_names_have_one_slug_are_measured_apart(
    miniature: Finished, tmp_path: Path
) -> None:
    """And equal steps and rows are found under each of their names."""
    changes: dict[str, Any] = {
        "steps": {**CONTENT["steps"], "mixed-again": "assemble $ddpm-0 $flow-1"},
        "rows": {"one": "$mixed", "other": "$mixed-again", "ONE": "$mixed --steps 3"},
        "tables": {
            "A": {"rows": ["one", "ONE"], "sample": "--num-images 20"},
            "a": {"rows": ["one"], "sample": "--steps 4 --num-images 20"},
            "equal": {"rows": ["one", "other"]},
            "all": {"rows": ["one"]},
        },
        "compare": {},
        "budgets": {},
    }
    out = tmp_path / "out"
    results = again(miniature, out, file(**changes))
    steps = {}
    for table, rows in results.tables.items():
        steps |= {(table, row.name): row.setting("steps") for row in rows}
    assert steps == {
        ("A", "one"): 2,
        ("A", "ONE"): 3,
        ("a", "one"): 4,
        ("equal", "one"): 2,
        ("equal", "other"): 2,
        ("all", "one"): 2,
    }
    hashes = {}
    for one in results.scored:
        folder = out / shlex.split(one.command)[-1]
        assert len(list(folder.glob("*.png"))) == one.evaluation.images
        hashes[one.table, one.row] = one.evaluation.data.images.hash
    assert len({hashes[key] for key in (("A", "one"), ("A", "ONE"), ("a", "one"))}) == 3
    assert hashes["equal", "one"] == hashes["equal", "other"] == hashes["all", "one"]
    assert (out / "mixed-again").resolve().is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("written", ["sample-", "train-expert-", "evaluate-", "results.json"])
def test_killed_at_any_moment_it_comes_to_the_same_results(
    written: str, miniature: Finished, tmp_path: Path
) -> None:
    moment = ("os.rename", written)
    assert life(miniature.file, tmp_path / "out", miniature.data, moment) == -signal.SIGKILL
    assert life(miniature.file, tmp_path / "out", miniature.data, None) == 0
    assert without_times(read_results(tmp_path / "out")) == without_times(miniature.results)
    assert not [path for path in (tmp_path / "out" / "jobs").iterdir() if ".part-" in path.name]


@pytest.mark.slow
def test_its_commands_give_the_same_by_hand(miniature: Finished, tmp_path: Path) -> None:
    """Any row can be repeated in an empty folder by the commands of --dry-run."""
    plan = SeedPlan(miniature.file, 0, Work(Path("jobs")), LINES, miniature.data)
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
def test_a_training_step_costs_its_forward_and_twice_that_backward(
    objective: str, shards: Path
) -> None:
    words = ["train", "expert", str(shards / "shard_0"), "--objective", objective, "--size", "tiny"]
    forward, idle = _forward()
    step = 3 * forward - idle
    adamw = LINES.read([*words, "--optimizer", "adamw", "--steps", "90"])
    assert count_training(adamw, run_words) == (step, 0, 0)

    def update(m: int, n: int) -> int:
        """Five iterations, for G of shape (m, n), n <= m: G^T G, its square, and the product with G."""
        return 5 * (2 * _linear(n, m, n) + _linear(n, n, n))

    muon = DEPTH * (update(3 * WIDTH, WIDTH) + update(WIDTH, WIDTH) + 2 * update(4 * WIDTH, WIDTH))
    muon += update(FREQUENCIES, WIDTH) + update(WIDTH, WIDTH) + update(6 * WIDTH, WIDTH)
    by_muon = LINES.read([*words, "--optimizer", "muon", "--batch-size", "64"])
    assert count_training(by_muon, run_words) == (step, muon, 0)


@pytest.mark.integration
def test_a_sample_costs_its_forwards(flow_expert: Path) -> None:
    sample = LINES.read(["sample", str(flow_expert), "--solver", "euler", "--steps", "3"])
    assert count_sampling(sample, run_words) == pytest.approx(3 * _forward()[0], rel=0.02)


def _costs(folder: Path, data: Path, **steps: str) -> dict[str, str]:
    """Keys of the costs of steps."""
    plan = SeedPlan(file(steps={**CONTENT["steps"], **steps}), 0, Work(folder), LINES, data)
    return {name: cost_key(plan.steps[name]) for name in steps}


@pytest.mark.integration
def test_operations_are_shared_by_trainings_of_one_shape_alone(
    shards: Path, flow_expert: Path, tmp_path: Path
) -> None:
    large = tmp_path / "large"
    write_images(large, per_class=8, side=8)
    run_words(["partition", str(large), "--shards", "1", "--out", str(tmp_path / "x8")])
    students = {}
    for steps in (1, 2):
        students[steps] = shutil.copytree(flow_expert, tmp_path / f"student_{steps}")
        edit_json(students[steps] / "expert.json", sampling_steps=steps)
    train = "train expert --threads 2 {} --size tiny --objective flow"
    config = tmp_path / "mine.yaml"
    config.write_text("seed: 5\n")
    keys = _costs(
        tmp_path / "jobs",
        large,
        first=train.format(shards / "shard_0"),
        second=train.format(shards / "shard_1") + " --seed=5",
        third=train.format(shards / "shard_1") + f" --config {config}",
        large=train.format(tmp_path / "x8" / "shard_0"),
        small=train.format(shards / "shard_0").replace("--size tiny", "--size=mini"),
        router=f"train router {shards} --steps 4",
        router_of_one=f"train router {tmp_path / 'x8'} --steps 4",
        one=f"sample {students[1]}",
        two=f"sample {students[2]}",
    )
    assert keys["first"] == keys["second"] == keys["third"]
    assert len(set(keys.values())) == len(keys) - 2


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
    _, left = psutil.wait_procs(
        [psutil.Process(worker)] if psutil.pid_exists(worker) else [], timeout=10
    )
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
def test_with_workers_it_goes_on_whatever_stopped_it(
    number: signal.Signals, tmp_path: Path
) -> None:
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
    # The second start may have kept hashes that it verified, and no drafts.
    assert {path.name for path in jobs.glob(".*")} <= {HASHES}
