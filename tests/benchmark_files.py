"""A benchmark in miniature: 4×4 images, networks of two blocks, some steps."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from hddm.benchmark import run
from hddm.benchmark.presets import parse_settings
from hddm.benchmark.results import Results, compare_rows
from hddm.benchmark.settings import BenchmarkSettings
from hddm.utils.processes import Call, Report
from tests.artefacts import killing, write_images
from tests.killed_runs import in_a_process

FLOW, MIXED, SINGLE = "homogeneous flow", "mixed 1:1", "single model"
THREE = {FLOW: [10.0, 10.1, 9.9], MIXED: [8.0, 8.1, 7.9], SINGLE: [9.0, 9.1, 8.9]}
"""Distances of three training seeds."""

CONTENT: dict[str, Any] = {
    "name": "miniature",
    "data": {"source": "folder", "training": "train", "held_out": "test", "validation_share": 0.4},
    "partition": {"shards": 2},
    "training": {
        "expert": {"steps": 6, "batch_size": 8, "learning_rate": 3e-3, "ema_decay": 0.9, "size": "tiny"},
        "router": {"steps": 4, "batch_size": 8, "learning_rate": 3e-3, "ema_decay": 0.9, "calibrate": True},
        "single": {"steps": 5},
        "checkpoint_every": 2,
    },
    "models": [
        {"name": "single model", "kind": "single"},
        {"name": "homogeneous flow", "objectives": "flow"},
        {"name": "mixed 1:1", "objectives": "1:1"},
    ],
    "compare": {"baselines": ["homogeneous flow", "single model"]},
    "sampling": {"strategy": "draw", "solver": "euler", "steps": 2, "num_images": 40},
    "tables": [
        {"name": "models"},
        {"name": "strategies", "models": ["mixed 1:1"], "vary": {"strategy": ["draw", "top-1", "full"]}},
    ],
    "seeds": [0],
    "confirmation_seeds": [5],
    "resamples": 2,
    "complete": False,
    "allow_few": True,
    "workers": 1,
}


def settings(**changes: Any) -> BenchmarkSettings:
    """`CONTENT`, changed."""
    return parse_settings(CONTENT | changes, "miniature")


def of_models(*models: dict[str, Any], **changes: Any) -> BenchmarkSettings:
    """`CONTENT` with these models in one table, compared with nothing; or changed further."""
    return settings(**{"models": list(models), "compare": {}, "tables": [{"name": "models"}]} | changes)


def write_sides(folder: Path) -> Path:
    """Images to train on and to hold out."""
    write_images(folder / "train", per_class=64)
    write_images(folder / "test", per_class=20)
    return folder


@dataclass(frozen=True)
class Finished:
    """Where the images lie, and a benchmark that ran in one go."""

    data: Path
    out: Path
    settings: BenchmarkSettings
    results: Results


class Inline:
    """Workers that are this process."""

    def __init__(self, count: int) -> None: ...

    def __enter__(self) -> "Inline":
        return self

    def __exit__(self, *ended: object) -> None: ...

    running: tuple[str, ...] = ()

    def run(
        self,
        calls: Sequence[Call],
        on_progress: Report,
        on_start: Callable[[Call], object] | None = None,
        on_end: Callable[[Call, Any], object] | None = None,
    ) -> list[Any]:
        results = []
        for call in calls:
            if on_start is not None:
                on_start(call)
            results.append(call.function(**call.arguments, report=on_progress))
            if on_end is not None:
                on_end(call, results[-1])
        return results


def run_inline(chosen: BenchmarkSettings, out: Path, data: Path, **options: Any) -> Results:
    """The benchmark in this process alone, without its page."""
    with mock.patch.object(run, "Workers", Inline), mock.patch.object(run, "write_report"):
        return run.run_benchmark(chosen, out, data, **options)


def finish(folder: Path) -> Finished:
    """A benchmark of `settings` in ``folder``."""
    data, out, made = write_sides(folder / "data"), folder / "out", settings()
    return Finished(data, out, made, run_inline(made, out, data))


def again(miniature: Finished, out: Path, chosen: BenchmarkSettings) -> Results:
    """The benchmark of other settings on the images and jobs of the miniature."""
    return run_inline(chosen, out, miniature.data, jobs=miniature.out / "jobs")


def life(chosen: BenchmarkSettings, out: Path, data: Path, moment: tuple[str, str] | None) -> int:
    """Run, or go on, in a process of its own; how it ended.

    It is killed at ``moment``: an audit event of Python and a part of its arguments, as ("os.rename",
    "samples-").
    """
    process = in_a_process(_live, chosen, out, data, moment)
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _live(chosen: BenchmarkSettings, out: Path, data: Path, moment: tuple[str, str] | None) -> None:
    torch.set_num_threads(1)
    if moment is not None:
        sys.addaudithook(killing(*moment))
    run_inline(chosen, out, data)


def more_seeds(
    results: Results,
    distances: dict[str, list[float]],
    fixed: tuple[str, ...] = (),
    few: tuple[str, ...] = (),
    **changes: Any,
) -> Results:
    """``results`` of more seeds, models' distances being these by seed.

    ``fixed`` are not trained anew, and ``few`` have too few images.
    """
    seeds = tuple(range(len(next(iter(distances.values())))))
    scored = []
    for one in results.scored:
        for seed in seeds:
            scores = json.loads(json.dumps(one.scores))
            scores["to_validation"]["few_images"] = one.model in few
            if one.model in distances:
                scores["to_validation"]["value"] = distances[one.model][seed]
            scored.append(one.model_copy(update={"seed": seed, "scores": scores}))
    models = [
        one.model_copy(update={"seed": seed} | ({} if one.model in fixed else {"hash": f"{one.hash} {seed}"}))
        for seed in seeds
        for one in results.models
    ]
    new = {"scored": tuple(scored), "models": tuple(models), "seeds": seeds}
    return compared(results.model_copy(update=new | changes))


def compared(results: Results) -> Results:
    """``results`` with the comparisons that follow from them."""
    return results.model_copy(update={"comparisons": tuple(compare_rows(results))})
