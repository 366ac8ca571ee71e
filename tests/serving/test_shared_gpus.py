"""A service on a cluster whose GPU is declared only: Ray shares it out, and networks run on the CPU."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ensemble_files import flow_expert, write_ensemble
from tests.serving.test_cluster import MARK, serving

pytestmark = pytest.mark.slow


@pytest.fixture
def address() -> Iterator[str]:
    from ray.cluster_utils import Cluster

    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", MARK: str(os.getpid())}
    handler = signal.getsignal(signal.SIGTERM)
    cluster = Cluster()
    try:
        cluster.add_node(num_cpus=5, num_gpus=1, include_dashboard=False)
        signal.signal(signal.SIGTERM, handler)
        yield cluster.address
    finally:
        cluster.shutdown()


def test_three_experts_and_the_front_share_a_gpu(address: str, tmp_path: Path) -> None:
    """One worker would have taken all of it, and the others would have waited for ever."""
    folder = write_ensemble(tmp_path, [flow_expert(seed, num_classes=3) for seed in range(3)])
    with serving(folder, tmp_path / "log", address, 8437) as service:
        assert len(service.ask(prompt="cat", seed=1, n=4, steps=2)) == 4
