"""Values of options as people type them."""

from collections.abc import Callable

import pytest

from hddm.ensemble import Strategy
from hddm.utils.errors import HddmError, UsageError
from hddm_cli.options import StrategyOption, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("6GB", 6e9), ("6G", 6e9), ("1.5 GiB", 1.5 * 2**30), ("500mb", 5e8), ("4K", 4000), ("12", 12)],
)
def test_amounts_of_memory(text: str, size: float) -> None:
    assert parse_size(text, "--max-memory") == size


@pytest.mark.parametrize("text", ["", "0GB", "-1GB", "6 TB", "GB", "6G B", "1e9"])
def test_other_amounts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="write it as 6GB"):
        parse_size(text, "--max-memory")


STRATEGIES = (
    "full draw top-1 top-02 threshold-0.1 nucleus-1 nucleus-1e-1 "
    "top-0 top- top-1.5 threshold-0 nucleus-1.1 nucleus-nan nucleus- best full-1"
)


@pytest.mark.parametrize("name", STRATEGIES.split())
def test_the_command_line_knows_the_strategies_of_the_library(name: str) -> None:
    def knows(check: Callable[[str], object]) -> bool:
        try:
            check(name)
        except HddmError:
            return False
        return True

    assert knows(StrategyOption().callback) == knows(Strategy.parse)
