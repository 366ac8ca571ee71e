"""Files are spoiled, as `tests.soak` does for hours."""

from pathlib import Path

import pytest

from tests.soak import attack_reading


@pytest.mark.slow
def test_spoiled_files_are_read_or_refused_in_one_line(tmp_path: Path) -> None:
    found = attack_reading(
        tmp_path, tmp_path / "kept", seed=0, goes_on=lambda number: number < 250, quick=True
    )
    assert not found.surprises, found
    # Most changes make a file wrong: where all passed, nothing would be tried.
    assert 100 < found.refused.total() < found.tried.total() == 250
