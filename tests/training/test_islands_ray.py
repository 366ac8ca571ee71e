"""Islands on a Ray cluster of two local nodes: a worker dies, a node dies, and the result is the same."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hddm.networks.folders import WEIGHTS
from hddm.training.islands import make_islands, train_island, train_islands
from hddm.training.resume import run_folder_of
from hddm.training.settings import RunOptions
from hddm.utils.errors import HddmError
from hddm.utils.ray_workers import RayWorkers
from tests.artefacts import expert_settings
from tests.killed_runs import checkpoint, holder

STEPS = 600


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    # Ray's workers make way for all others, so that a busy machine would never finish this.
    monkeypatch.setenv("RAY_worker_niceness", "0")
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    small = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=small)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def _parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks Linux who started a process")
@pytest.mark.slow
def test_a_dead_worker_and_a_dead_node_change_nothing(shards: Path, tmp_path: Path, cluster: Any) -> None:
    """Also: a shard that cannot be read fails alone."""
    second = cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20)
    raylets = [node.all_processes["raylet"][0].process.pid for node in (cluster.head_node, second)]
    settings = {name: expert_settings(name, steps=STEPS, threads=1) for name in ("ddpm", "flow")}
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
        if not 20 < step < STEPS or raylet not in raylets or raylet in died:
            return
        died[raylet] = step
        if raylet == raylets[1]:
            cluster.remove_node(second, allow_graceful=False)
        else:
            os.kill(holder(islands[index].out), signal.SIGKILL)

    outcomes = train_islands(islands, RayWorkers(), on_step)
    assert sorted(died) == sorted(raylets)
    assert all(0 < step < STEPS for step in died.values())
    for one, own in zip(islands[:2], plain, strict=True):
        assert checkpoint(run_folder_of(one.out)) == checkpoint(run_folder_of(own.out))
        assert (one.out / WEIGHTS).read_bytes() == (own.out / WEIGHTS).read_bytes()
    assert all(isinstance(one, str) for one in outcomes[:2])
    assert "no such folder" in str(outcomes[2])


def test_a_cluster_that_does_not_answer_is_an_error_of_one_line(shards: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    islands = make_islands(
        [shards / "shard_0"], tmp_path, ["flow"], {"flow": expert_settings("flow")}, RunOptions()
    )
    with pytest.raises(HddmError, match=r"^`ray` nonsense: no cluster answers there"):
        train_islands(islands, RayWorkers("nonsense"))


def test_a_cluster_that_asks_nobody_for_a_token_is_refused(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Ray starts; TLS would do as well."""
    pytest.importorskip("ray")
    islands = make_islands(
        [shards / "shard_0"], tmp_path, ["flow"], {"flow": expert_settings("flow")}, RunOptions()
    )
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(HddmError, match=r"^RAY_AUTH_MODE=disabled: Ray would run the code of whoever"):
        train_islands(islands, RayWorkers())
    monkeypatch.setenv("RAY_USE_TLS", "1")
    with pytest.raises(HddmError, match=r"^`ray` nonsense: no cluster answers there"):
        train_islands(islands, RayWorkers("nonsense"))
