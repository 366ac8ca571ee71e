"""The Paris release in small."""

from pathlib import Path

import pytest

from tests.paris_files import write_paris


@pytest.fixture
def release(tmp_path: Path) -> Path:
    write_paris(tmp_path / "paris")
    return tmp_path / "paris"
