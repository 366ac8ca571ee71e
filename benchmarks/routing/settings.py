"""What is trained, and which rows are sampled."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hddm.benchmark.quickstart import QuickstartSettings
from hddm.utils.errors import HddmError
from hddm.utils.files import read_json, write_json

SETTINGS_FILE = "settings.json"

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

    quickstart: QuickstartSettings = field(default_factory=QuickstartSettings)
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


def as_json(settings: Settings) -> dict[str, Any]:
    """``settings`` as a JSON file gives them back."""
    plain = {**asdict(settings), "quickstart": settings.quickstart.model_dump(mode="json")}
    content: dict[str, Any] = json.loads(json.dumps(plain))
    return content


def check_kept(folder: Path, settings: Settings) -> None:
    """Record ``settings`` beside the models and rows that are kept in ``folder`` by their names alone.

    Further rows may come.

    Raises:
        HddmError: for models or rows of other settings, or of settings that nothing says.
    """
    path, whole = folder / SETTINGS_FILE, as_json(settings)
    now = {key: whole[key] for key in ("quickstart", "long_factor")}
    now["rows"] = {name: asdict(row) for name, row in settings.rows().items()}
    before = read_json(path) if path.exists() else {}
    if not before and any(folder.glob("seed_*")):
        raise HddmError(
            f"{folder}: keeps models and rows, and no {SETTINGS_FILE} says of which settings; pass another "
            "--work, or delete that folder"
        )
    rows = before.get("rows", {})
    differing = _differing(before, now) if before else []
    if differing:
        raise HddmError(
            f"{folder}: keeps models and rows of other settings ({', '.join(differing)}); pass another "
            "--work, or delete that folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, {**now, "rows": {**rows, **now["rows"]}})


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What is not the same in both, but for rows that are in one alone."""
    found = []
    for part in ("quickstart", "rows"):
        one, other = before.get(part, {}), now[part]
        names = one.keys() & other.keys() if part == "rows" else one.keys() | other.keys()
        found += [f"{part}: {name}" for name in sorted(names) if one.get(name) != other.get(name)]
    if before.get("long_factor") != now["long_factor"]:
        found.append("long_factor")
    return found


FULL = Settings()
QUICK = Settings(
    QuickstartSettings(
        num_shards=2,
        steps=10,
        batch_size=16,
        size="tiny",
        router_batch_size=16,
        sampling_steps=2,
        num_images_per_strategy=80,
        resamples=3,
    ),
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
