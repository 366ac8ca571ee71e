"""Images and jobs that tests of small benchmarks share."""

from pathlib import Path

import pytest

from tests.benchmark.small import small
from tests.benchmark_files import run_inline, write_sides


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sides(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def jobs(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """Jobs of the small benchmark, to which tests add their own."""
    folder = tmp_path_factory.mktemp("jobs")
    run_inline(small(rows={"one": "$one", "pair": "$pair"}), folder / "out", data)
    return folder / "out" / "jobs"
