"""Values of options as people type them."""

import pytest

from hddm.utils.errors import HddmError
from hddm.utils.settings import parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("6GB", 6e9), ("6G", 6e9), ("1.5 GiB", 1.5 * 2**30), ("500mb", 5e8), ("4K", 4000), ("12", 12)],
)
def test_amounts_of_memory(text: str, size: float) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0GB", "-1GB", "6 TB", "GB", "6G B", "1e9"])
def test_other_amounts_are_refused(text: str) -> None:
    with pytest.raises(HddmError, match="write it as 6GB"):
        parse_size(text)
