"""What is trained, and which rows are sampled."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.harness import QUICKSTART, as_json, short_quickstart
from hddm.benchmark.settings import BenchmarkSettings, SamplingPoint, points_of

FLOW, CLASSES = "flow", "classes"
"""Folders of experts: without and with class labels."""
HELD_OUT_ROUTER, LONG_ROUTER, WHOLE_ROUTER = "router", "router-long", "router-all"
"""Folders of routers: on 85 % of each shard, with temperatures from the rest; so, and five times as long; on
all of it, without temperatures."""
CALIBRATED = (HELD_OUT_ROUTER, LONG_ROUTER)


@dataclass(frozen=True)
class Row:
    """One way to sample the experts of a training seed."""

    strategy: str
    router: str = HELD_OUT_ROUTER
    calibrated: bool = True
    router_every: int = 1
    experts: str = FLOW
    class_prior: bool = False
    """Draw from p(k) of the class; with another strategy, correct the router by it."""


@dataclass(frozen=True)
class Settings:
    """Of the benchmark; training, solver and scores are the quickstart's."""

    quickstart: BenchmarkSettings = QUICKSTART
    strategies: Sequence[str] = ("top-1", "top-2", "nucleus-0.9", "full")
    whole_strategies: Sequence[str] = ("nucleus-0.9",)
    long_strategies: Sequence[str] = ("top-2", "full")
    long_factor: int = 5
    """How much longer the router is trained that is to be too sure of itself."""
    every: Sequence[int] = (1, 2, 5, 10, 30)
    every_strategies: Sequence[str] = ("top-2", "nucleus-0.9")
    class_strategies: Sequence[str] = ("top-1", "top-2")
    knots: Sequence[int] = (1, 2, 3, 5, 11)
    name: str = "digits"

    @property
    def point(self) -> SamplingPoint:
        """How all rows are sampled but for the strategy: as the quickstart's second table."""
        return points_of(self.quickstart, self.quickstart.tables[1])[0]

    def calibration_rows(self) -> dict[str, Row]:
        """Strategies with and without temperatures; ``draw`` has no router, ``top-1`` the same choice."""
        rows = {"draw": Row("draw", calibrated=False)}
        for strategy in self.strategies:
            if strategy == "top-1":
                rows[strategy] = Row(strategy, calibrated=False)
                continue
            rows[f"{strategy}, not calibrated"] = Row(strategy, calibrated=False)
            rows[f"{strategy}, calibrated"] = Row(strategy)
        for strategy in self.whole_strategies:
            rows[f"{strategy}, nothing held out"] = Row(strategy, WHOLE_ROUTER, calibrated=False)
        for strategy in self.long_strategies:
            rows[f"{strategy}, long, not calibrated"] = Row(strategy, LONG_ROUTER, calibrated=False)
            rows[f"{strategy}, long, calibrated"] = Row(strategy, LONG_ROUTER)
        return rows

    def every_rows(self) -> dict[str, Row]:
        """Calibrated routers that are asked at every n-th step; those of n = 1 are calibration rows."""
        return {
            f"{strategy}, every {n}": Row(strategy, router_every=n)
            for strategy in self.every_strategies
            for n in self.every
            if n > 1
        }

    def class_rows(self) -> dict[str, Row]:
        """Class-conditional experts."""
        return {
            "draw, p(k)": Row("draw", experts=CLASSES),
            "draw, p(k) of the class": Row("draw", experts=CLASSES, class_prior=True),
            **{
                f"{strategy}, {label}": Row(strategy, experts=CLASSES, class_prior=corrected)
                for strategy in self.class_strategies
                for label, corrected in (("router as it is", False), ("router × p(k) of the class", True))
            },
        }

    def rows(self) -> Mapping[str, Row]:
        """All of them."""
        return {**self.calibration_rows(), **self.every_rows(), **self.class_rows()}

    def kept(self) -> dict[str, Any]:
        """What the models and rows of a folder depend on; further rows may come."""
        whole = as_json(self)
        rows = {name: asdict(row) for name, row in self.rows().items()}
        return {"quickstart": whole["quickstart"], "long_factor": self.long_factor, "rows": rows}


FULL = Settings()
QUICK = Settings(
    short_quickstart(),
    strategies=("top-1", "top-2"),
    whole_strategies=("top-2",),
    long_strategies=("top-2",),
    long_factor=2,
    every=(1, 2),
    every_strategies=("top-2",),
    class_strategies=("top-1",),
    knots=(1, 2),
    name="digits-quick",
)
