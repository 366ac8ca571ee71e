"""Files are spoiled and verbs killed, as `tests.soak` does for hours."""

from pathlib import Path

import pytest

from tests.soak import attack_reading, attack_writing


@pytest.mark.integration
def test_spoiled_files_are_read_or_refused_in_one_line(tmp_path: Path) -> None:
    found = attack_reading(
        tmp_path, tmp_path / "kept", seed=0, goes_on=lambda number: number < 250, quick=True
    )
    assert not found.surprises, found
    # Most changes make a file wrong: where all passed, nothing would be tried.
    assert 100 < found.refused.total() < found.tried.total() == 250


@pytest.mark.slow
def test_killed_verbs_leave_nothing_half_written_and_end_when_run_again(tmp_path: Path) -> None:
    found = attack_writing(tmp_path, tmp_path / "kept", seed=0, goes_on=lambda number: number < 40)
    assert not found.surprises, found
    assert found.tried.total() > 40
