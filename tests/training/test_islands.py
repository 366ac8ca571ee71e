"""Islands: trainings in processes of their own, or on Ray, that lose nothing and go on without each other."""

import fcntl
import json
import logging
import multiprocessing
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hddm.training.islands import Island, make_islands, prepare, train_island, train_islands
from hddm.training.resume import run_folder_of
from hddm.training.settings import RunOptions, parse_objectives
from hddm.utils.errors import HddmError, Stopped
from hddm.utils.files import write_json
from hddm.utils.ray_workers import RayWorkers
from hddm.utils.records import WEIGHTS
from hddm.utils.workers import Workers
from tests.artefacts import Command, contents, copied, expert_settings, refusal
from tests.killed_runs import checkpoint, holder

STEPS = 200


def _island(shard: Path, out: Path, **run: object) -> Island:
    settings = expert_settings("flow", steps=STEPS, threads=1)
    return Island(
        0, shard, out, settings, RunOptions.model_validate({"checkpoint_every": 20, **run})
    )


def test_objectives_are_given_by_shard_and_those_that_leave_a_doubt_are_refused() -> None:
    assert parse_objectives("0=ddpm,3=ddpm,*=flow", 5) == ["ddpm", "flow", "flow", "ddpm", "flow"]
    assert parse_objectives("1=flow, 0=ddpm", 2) == ["ddpm", "flow"]
    assert parse_objectives("flow", 3) == ["flow"] * 3
    for text in ("0=ddpm,4=flow,*=flow", "0=ddpm,2=flow", "0=ddpm,0=flow,*=flow", "0=dpm"):
        told = f"`objective` {text}: name ddpm or flow once for each of shards 0 to 3"
        assert told in refusal(parse_objectives, text, 4)


def test_folders_in_the_way_and_runs_worked_on_are_told_at_once_and_nothing_starts(
    whole: Path, tmp_path: Path
) -> None:
    islands = [_island(whole, tmp_path / name) for name in "ab"]
    runs = [run_folder_of(one.out) for one in islands]
    for run in runs:
        run.mkdir()
        (run / "run.json").write_text('{"format": "3.0", "settings": {"threads": 3}}')
    islands[0].out.mkdir()
    write_json(islands[0].out / "notes.json", {})
    with pytest.raises(HddmError, match="2 of 2 experts cannot be trained as requested") as refused:
        train_islands(islands)
    present, run = refused.value.details
    assert present.startswith(f"a: {islands[0].out} exists")
    assert run.startswith(f"b: {runs[1]}: already holds a run")
    prepare([_island(whole, tmp_path / "b", resume=True)])
    shutil.rmtree(islands[0].out)
    islands = [replace(one, overwrite=True) for one in islands]
    with (runs[1] / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "b: another process is training it" in refusal(prepare, islands)
    assert (runs[0] / "run.json").exists()
    prepare(islands)
    assert not (runs[0] / "run.json").exists()


def test_settings_that_one_shard_does_not_allow_are_told_before_the_first_is_trained(
    shards: Path, flow_expert: Path, tmp_path: Path
) -> None:
    def island(
        index: int, objective: str = "flow", init: Path | None = None, **settings: object
    ) -> Island:
        shard, out = shards / f"shard_{min(index, 1)}", tmp_path / f"expert_{index}"
        of = expert_settings(objective, **settings)
        return Island(index, shard, out, of, RunOptions(), init=init)

    islands = [island(0), island(1, size="4x24/16"), island(2, "ddpm", flow_expert)]
    first, size, objective = refusal(train_islands, islands).splitlines()
    assert "2 of 3 experts cannot be trained as requested, so none was" in first
    assert "expert_1: images are 4×4; `size` 4x24/16 takes squares divisible by 16" in size
    assert f"expert_2: {flow_expert}: was trained with flow matching" in objective
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_killed_process_goes_on_and_a_signal_saves_and_ends_all(
    whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, "hddm")
    plain, island = _island(whole, tmp_path / "plain"), _island(whole, tmp_path / "expert_0")
    train_island(plain)
    killed: list[int] = []
    """First the process of the training, then this one, which takes it more kindly."""

    def on_step(index: int, step: int, loss: float, seconds: float) -> None:
        if not killed and step > 20:
            killed.append(holder(island.out))
            os.kill(killed[0], signal.SIGKILL)
        elif len(killed) == 1 and step < STEPS and holder(island.out) != killed[0]:
            killed.append(os.getpid())
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped) as stopped:
        train_islands([island], on_step=on_step)
    assert stopped.value.exit_code == 143
    assert not multiprocessing.active_children()
    assert not island.out.exists()
    assert "was killed by SIGKILL, probably because memory ran out" in caplog.text
    assert "expert_0.run: continuing from step" in capfd.readouterr().err

    (outcome,) = train_islands([_island(whole, island.out, resume=True)])
    assert isinstance(outcome, str)
    assert outcome
    assert checkpoint(run_folder_of(island.out)) == checkpoint(run_folder_of(plain.out))
    assert (island.out / WEIGHTS).read_bytes() == (plain.out / WEIGHTS).read_bytes()
    assert train_islands([_island(whole, island.out, resume=True)], Workers()) == [""]


@pytest.mark.slow
def test_all_experts_are_trained_from_the_command_line_and_fit(
    shards: Path, tmp_path: Path, hddm: Command
) -> None:
    """A bad shard fails alone; once it is mended --resume trains it, and the experts are assembled."""
    folder = copied(shards, tmp_path)
    image = next((folder / "shard_1" / "images").rglob("*.png"))
    good = image.read_bytes()
    image.unlink()
    image.write_bytes(good[:-1])
    out = tmp_path / "experts"
    settings = ("--steps", 3, "--batch-size", 8, "--size", "tiny", "--threads", 1)
    command = ("train", "all", "--shards", folder, "--out", out, *settings)
    objective = ("--objective", "0=ddpm,*=flow")
    code, printed, err = hddm(*command, *objective, "--parallel", 2)
    assert code == 1
    assert f"{out / 'expert_0'}: trained for 3 steps" in printed
    assert "1 of 2 experts failed" in err
    assert f"expert_1: {folder / 'shard_1'}" in err
    assert image.name in err
    assert "restarting" not in err

    image.write_bytes(good)
    first = contents(out / "expert_0")
    code, printed, err = hddm(*command, *objective, "--resume")
    assert code == 0, err
    assert f"{out / 'expert_1'}: trained for 3 steps" in printed
    assert contents(out / "expert_0") == first
    experts = [out / "expert_0", out / "expert_1"]
    facts = [json.loads((one / "expert.json").read_text()) for one in experts]
    assert [one["objective"] for one in facts] == ["ddpm", "flow"]
    assert hddm("assemble", *experts, "--out", tmp_path / "ensemble")[0] == 0


RAY_STEPS = 600


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    # Ray's workers make way for all others, so that a busy machine would never finish this.
    monkeypatch.setenv("RAY_worker_niceness", "0")
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    small = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 100 * 2**20}
    handler = signal.getsignal(signal.SIGTERM)
    cluster = Cluster(initialize_head=True, head_node_args=small)
    ray.init(address=cluster.address, log_to_driver=False)
    # Ray's own would end the tests that signal this process.
    signal.signal(signal.SIGTERM, handler)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def _parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks Linux who started a process")
@pytest.mark.slow
def test_a_dead_worker_and_a_dead_node_change_nothing(
    shards: Path, tmp_path: Path, cluster: Any
) -> None:
    """Also: a shard that cannot be read fails alone."""
    second = cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20)
    raylets = [node.all_processes["raylet"][0].process.pid for node in (cluster.head_node, second)]
    settings = {
        name: expert_settings(name, steps=RAY_STEPS, threads=1) for name in ("ddpm", "flow")
    }
    run = RunOptions(checkpoint_every=20)
    folders, objectives = [shards / "shard_0", shards / "shard_1"], ["ddpm", "flow"]
    plain = make_islands(folders, tmp_path / "plain", objectives, settings, run)
    for island in plain:
        train_island(island)
    bad = [*folders, tmp_path / "none"]
    islands = make_islands(bad, tmp_path / "experts", [*objectives, "flow"], settings, run)
    died: dict[int, int] = {}

    def on_step(index: int, step: int, loss: float, seconds: float) -> None:
        """After its first checkpoint a training loses its worker, or the node where that is the second."""
        try:
            raylet = _parent(holder(islands[index].out))
        except FileNotFoundError:
            # It is dead already, and reported before.
            return
        if not 20 < step < RAY_STEPS or raylet not in raylets or raylet in died:
            return
        died[raylet] = step
        if raylet == raylets[1]:
            cluster.remove_node(second, allow_graceful=False)
        else:
            os.kill(holder(islands[index].out), signal.SIGKILL)

    outcomes = train_islands(islands, RayWorkers(), on_step)
    assert sorted(died) == sorted(raylets)
    assert all(0 < step < RAY_STEPS for step in died.values())
    for one, own in zip(islands[:2], plain, strict=True):
        assert checkpoint(run_folder_of(one.out)) == checkpoint(run_folder_of(own.out))
        assert (one.out / WEIGHTS).read_bytes() == (own.out / WEIGHTS).read_bytes()
    assert all(isinstance(one, str) for one in outcomes[:2])
    assert "no such folder" in str(outcomes[2])


def test_a_cluster_that_asks_nobody_for_a_token_is_refused(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Ray starts; TLS would do as well."""
    pytest.importorskip("ray")
    islands = make_islands(
        [shards / "shard_0"], tmp_path, ["flow"], {"flow": expert_settings("flow")}, RunOptions()
    )
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(
        HddmError, match=r"^RAY_AUTH_MODE=disabled: Ray would run the code of whoever"
    ):
        train_islands(islands, RayWorkers())
    monkeypatch.setenv("RAY_USE_TLS", "1")
    with pytest.raises(HddmError, match=r"^`ray` nonsense: no cluster answers there"):
        train_islands(islands, RayWorkers("nonsense"))
