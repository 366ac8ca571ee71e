"""A benchmark in miniature: 4×4 images, networks of two blocks, some steps."""

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from hddm.benchmark import counting, report, run, seed_run
from hddm.benchmark.counting import TrainingCost
from hddm.benchmark.file import BenchmarkFile
from hddm.benchmark.results import Results
from hddm.benchmark.verdicts import compare_rows
from hddm.evaluation import evaluate
from hddm.evaluation.score_records import Distance, SamplingRecord, SplitScores
from hddm.utils.records import parse_record
from hddm.utils.workers import Backend, Call, Event
from hddm_cli.lines import LINES
from tests.artefacts import killing, write_images
from tests.killed_runs import in_a_process

FLOW, MIXED, SINGLE = "homogeneous flow", "mixed 1:1", "single model"
THREE = {FLOW: [10.0, 10.1, 9.9], MIXED: [8.0, 8.1, 7.9], SINGLE: [9.0, 9.1, 8.9]}
"""Distances of three training seeds."""

CONTENT: dict[str, Any] = {
    "name": "miniature",
    "values": {"steps": 6, "images": 40},
    "defaults": {
        "partition": "--held-out 0.4",
        "train expert": "--optimizer adamw --steps $steps --batch-size 8 --learning-rate 3e-3 "
        "--ema-decay 0.9 --checkpoint-every 2 --threads 1",
        "assemble": "--router $router --strategy draw",
        "sample": "--solver euler --steps 2 --num-images $images",
    },
    "steps": {
        "parts": "partition $data/train --shards 2",
        "all": "partition $data/train --shards 1",
        "single": "train expert $all/shard_0 --objective flow --size tiny --steps 5",
        "flow-0": "train expert $parts/shard_0 --objective flow --size tiny",
        "flow-1": "train expert $parts/shard_1 --objective flow --size tiny",
        "ddpm-0": "train expert $parts/shard_0 --objective ddpm --size tiny",
        "router": "train router $parts --steps 4 --batch-size 8 --learning-rate 3e-3 --ema-decay 0.9 "
        "--calibrate --threads 1",
        "flow": "assemble $flow-0 $flow-1",
        "mixed": "assemble $ddpm-0 $flow-1",
        "part": "sample $mixed --expert 1 --num-images 3",
        "alone": "sample $flow-1 --num-images 3",
    },
    "rows": {SINGLE: "$single", FLOW: "$flow", MIXED: "$mixed"},
    "tables": {
        "models": {},
        "strategies": {"rows": [MIXED], "vary": {"strategy": ["draw", "top-1", "full"]}},
    },
    "evaluate": {
        "reference": "$all",
        "validation": "$all/held_out",
        "held_out": "$data/test",
        "features": "classifier",
        "domains": {"first": "columns", "second": "rows"},
        "options": "--allow-few --brief",
    },
    "compare": {"baselines": [FLOW, SINGLE]},
    "budgets": {"ensembles": [FLOW, MIXED], "all": [SINGLE, FLOW]},
    "same": {"an expert alone, and within the ensemble": ["alone", "part"]},
    "seeds": [0],
    "confirmation_seeds": [5],
    "workers": 1,
}


ALONE: dict[str, Any] = {"compare": {}, "budgets": {}}
"""Changes of `CONTENT` for tables without some of its rows."""


def file(**changes: Any) -> BenchmarkFile:
    """`CONTENT`, changed."""
    return parse_record(CONTENT | changes, BenchmarkFile, "miniature")


def write_sides(folder: Path) -> Path:
    """Images to train on and to hold out."""
    write_images(folder / "train", per_class=64)
    write_images(folder / "test", per_class=20, seed=10)
    return folder


@dataclass(frozen=True)
class Finished:
    """Where the images lie, and a benchmark that ran in one go."""

    data: Path
    out: Path
    file: BenchmarkFile
    results: Results


class Inline(Backend):
    """Workers that are this process."""

    def __init__(self, count: int) -> None:
        super().__init__(1, 0)

    def start(self, call: Call) -> None:
        self.result = call.function(**call.arguments, report=lambda part: None)

    def wait(self, seconds: float) -> list[Event]:
        return [(None, True, self.result)]

    def stop(self) -> None: ...


@contextlib.contextmanager
def inline(drawn: bool = False) -> Iterator[list[list[str]]]:
    """Block in which benchmarks run in this process; yields the command lines that they run.

    Operations are not counted, which takes long; nor are charts turned into SVG, unless they are ``drawn``.
    """
    told: list[list[str]] = []
    do = seed_run._do

    def note(**arguments: Any) -> Any:
        told.append(arguments["step"].command())
        return do(**arguments)

    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (run, "Workers", Inline),
            (seed_run, "_do", note),
            (evaluate, "RESAMPLES", 2),
            (counting, "count_training", lambda *_: TrainingCost(30, 1)),
            (counting, "count_sampling", lambda *_: 7),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        if not drawn:
            undrawn = mock.patch.object(report, "as_element", return_value="<svg></svg>")
            stack.enter_context(undrawn)
        yield told


def run_inline(
    chosen: BenchmarkFile,
    out: Path,
    data: Path | None = None,
    drawn: bool = False,
    **options: Any,
) -> Results:
    """The benchmark in this process alone; its charts are ``drawn`` or left out."""
    with inline(drawn):
        return run.run_benchmark(chosen, out, LINES, data=data, **options)


def finish(folder: Path) -> Finished:
    """A benchmark of `file` in ``folder``."""
    data, out, made = write_sides(folder / "data"), folder / "out", file()
    return Finished(data, out, made, run_inline(made, out, data, drawn=True))


def again(miniature: Finished, out: Path, chosen: BenchmarkFile) -> Results:
    """The benchmark of another file on the images and jobs of the miniature."""
    return run_inline(chosen, out, miniature.data, jobs=miniature.out / "jobs")


def life(chosen: BenchmarkFile, out: Path, data: Path, moment: tuple[str, str] | None) -> int:
    """Run, or go on, in a process of its own; how it ended.

    It is killed at ``moment``: an audit event of Python and a part of its arguments, as ("os.rename",
    "sample-").
    """
    process = in_a_process(live, chosen, out, data, moment)
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def live(chosen: BenchmarkFile, out: Path, data: Path, moment: tuple[str, str] | None) -> None:
    torch.set_num_threads(1)
    if moment is not None:
        sys.addaudithook(killing(*moment))
    run_inline(chosen, out, data)


def without_times(results: Results) -> dict[str, Any]:
    """Results without what differs between two runs: seconds, also those in a model's record, and folders."""
    times = ("seconds", "path", "source", "source_sha256")

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(one) for key, one in value.items() if key not in times}
        return [plain(one) for one in value] if isinstance(value, list) else value

    content: dict[str, Any] = plain(json.loads(results.model_dump_json()))
    return content


def more_seeds(
    results: Results,
    distances: dict[str, list[float]],
    fixed: tuple[str, ...] = (),
    few: tuple[str, ...] = (),
    **changes: Any,
) -> Results:
    """``results`` of more seeds, rows' distances being these by seed; all others are of 5.0.

    Models of the rows ``fixed`` are not trained anew, and those of ``few`` have too few images.
    """
    seeds = tuple(range(len(next(iter(distances.values())))))
    models = {one.model: one.of for one in results.scored}
    scored = []
    for one in results.scored:
        for seed in seeds:
            value = distances.get(one.of, [5.0] * len(seeds))[seed]
            distance = Distance(value=value, half_width=0.5, few_images=one.of in few)
            splits = (SplitScores(split=results.split, distance=distance),)
            source = one.model if one.of in fixed else f"{one.model} {seed}"
            sampling = SamplingRecord(source_sha256=source, steps=2)
            changed = {"splits": splits, "recognised": None, "sampling": sampling}
            evaluation = one.evaluation.model_copy(update=changed)
            new = {"seed": seed, "evaluation": evaluation, "samples": f"{one.samples} {seed}"}
            scored.append(one.model_copy(update=new))
    trained = [
        one.model_copy(
            update={"seed": seed}
            | ({} if models[one.model] in fixed else {"hash": f"{one.hash} {seed}"})
        )
        for seed in seeds
        for one in results.models
    ]
    new = {"scored": tuple(scored), "models": tuple(trained), "seeds": seeds}
    return compared(results.model_copy(update=new | changes))


def compared(results: Results) -> Results:
    """``results`` with the comparisons that follow from them."""
    return results.model_copy(update={"comparisons": tuple(compare_rows(results))})
