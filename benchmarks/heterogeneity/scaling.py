"""Crossover: where the rows of a preset are ahead of one model, over sizes of network and budgets.

Every cell is the preset itself with another size and all steps times a factor, so that all rows of a cell
have the same counted compute. Learning rates follow the width, since the preset's was chosen at its own.
"""

import math
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from benchmarks.harness import Start, digit_shards
from benchmarks.reports import COLOURS
from hddm.benchmark.counting import count_training
from hddm.benchmark.file import BenchmarkFile, read_benchmark
from hddm.benchmark.results import PERCENT_UNEQUAL
from hddm.benchmark.run import run_benchmark
from hddm.calibration import LEVELS, STATES
from hddm.networks.sizes import size_config
from hddm.training.router_temperatures import NOISED
from hddm.utils.records import parse_record
from hddm_cli.app import run_words
from hddm_cli.lines import LINES

SINGLE = "single model"
SHARDS, BATCH = 4, 32


@dataclass(frozen=True)
class Sweep:
    """Sizes of the experts, and factors on the steps of all trainings of the preset ``digits``."""

    name: str
    sizes: tuple[str, ...]
    factors: tuple[float, ...]
    seeds: tuple[int, ...]
    num_images: int
    max_rate: float = 0.016


DIGITS = Sweep("scaling-digits", ("4x24/4", "mini"), (0.25, 1.0), (5, 6), 1000)
SHORT = Sweep("scaling-short", ("2x24/4",), (0.0025, 0.005), (5,), 100)


@dataclass(frozen=True)
class Cell:
    """Distances to held-out images by row and seed, of one size and budget (counted operations)."""

    size: str
    budget: float
    single: tuple[float, ...]
    rows: Mapping[str, tuple[float, ...]]
    learned: Mapping[str, bool]
    """By row, one model included: False for a model that did not learn (`Row.why_not_learned`)."""

    def ratios(self, row: str) -> list[float]:
        """Distance of a row over the distance of one model, per seed."""
        return [ours / one for ours, one in zip(self.rows[row], self.single, strict=True)]


def scaling(sweep: Sweep, start: Start) -> Path:
    """Run the benchmark of every cell, or resume it, and write table and chart."""
    cells, place = [], start.work / sweep.name
    for size in sweep.sizes:
        shared = shared_cost(size)
        for factor in sweep.factors:
            file = file_of(sweep, size, factor, shared, start.workers)
            typer.echo(file.name, err=True)
            out = place / f"{size.replace('/', '-')}_{factor:g}"
            results = run_benchmark(file, out, LINES, jobs=place / "jobs")
            distances = {
                row.name: tuple(row.figure(results.decides).values.values())
                for row in results.first
            }
            learned = {row.name: row.has_learned for row in results.first}
            budget = (
                next(row.training_flop for row in results.first if row.name == SINGLE) or math.nan
            )
            cells.append(Cell(size, budget, distances.pop(SINGLE), distances, learned))
    lines = [
        "# Where experts are ahead of one model of equal counted compute",
        "",
        *_table(sweep, cells),
    ]
    content = {"settings": vars(sweep), "cells": [vars(cell) for cell in cells]}
    return start.write(sweep.name, lines, content, chart(sweep, cells))


def shared_cost(size: str) -> float:
    """What a step of the router costs, in steps of an expert of this ``size``, with as many images."""
    with tempfile.TemporaryDirectory() as folder:
        shards = digit_shards(Path(folder), SHARDS)
        words = ["train", "expert", str(shards / "shard_0"), "--objective", "flow", "--size", size]
        expert = count_training(LINES.read([*words, "--optimizer", "adamw"]), run_words)
        words = ["train", "router", str(shards), "--optimizer", "adamw"]
        router = count_training(LINES.read(words), run_words)
    return router.image / expert.image


def file_of(
    sweep: Sweep, size: str, factor: float, router_cost: float, workers: int
) -> BenchmarkFile:
    """The preset ``digits``, at another size and with ``factor`` times the steps, on held-out images."""
    preset = read_benchmark("digits", held_out=True)
    values: dict[str, Any] = dict(preset.values)
    widths = [size_config(str(one))["hidden_size"] for one in (values["size"], size)]
    rate = min(sweep.max_rate, float(values["rate"]) * widths[0] / widths[1])
    for name in ("steps", "ddpm_steps", "flow_steps", "router_steps"):
        values[name] = max(1, round(factor * int(values[name])))
    # A router has batches of twice the size. Calibrations are evaluations; a step of an image costs three.
    single = SHARDS * values["steps"] + 2 * router_cost * values["router_steps"]
    single += ((SHARDS - 1) * LEVELS * STATES + router_cost * NOISED) / (3 * BATCH)
    values |= {
        "size": size,
        "rate": rate,
        "single_steps": max(1, round(single)),
        "images": sweep.num_images,
    }
    changes = {
        "name": f"{size}, {factor:g} times the steps",
        "values": values,
        "tables": {"models": {}},
        "compare": {},
        "evaluate": preset.evaluate.model_dump() | {"options": "--brief"},
        "seeds": sweep.seeds,
        "workers": workers,
    }
    return parse_record(preset.model_dump() | changes, BenchmarkFile, sweep.name)


def _table(sweep: Sweep, cells: list[Cell]) -> Iterator[str]:
    yield (
        f"Fréchet distance to held-out images, {sweep.num_images:,} samples, one expert per image, "
        "features of a classifier that was trained apart: mean of training seeds "
        f"{', '.join(map(str, sweep.seeds))}; in brackets each seed's ratio to one model. A row in "
        "parentheses did not learn, by the rule of docs/guides/benchmark.md. Budgets of a cell "
        f"differ by {PERCENT_UNEQUAL:g} % or its report says so."
    )
    yield ""
    names = list(cells[0].rows)
    yield f"| network | budget, TFLOP | one model | {' | '.join(names)} |"
    yield f"|---|---:|---:|{'---:|' * len(names)}"
    for cell in cells:
        rows = [
            f"{statistics.fmean(cell.rows[name]):.3g} ({', '.join(f'{r:.2f}' for r in cell.ratios(name))})"
            for name in names
        ]
        rows = [
            text if cell.learned[name] else f"({text})"
            for name, text in zip(names, rows, strict=True)
        ]
        budget = f"{cell.budget / 1e12:.2g}"
        yield f"| {cell.size} | {budget} | {statistics.fmean(cell.single):.3g} | {' | '.join(rows)} |"


def chart(sweep: Sweep, cells: list[Cell]) -> Figure:
    """Ratio of distances over budget: one panel per size, one line per row."""
    figure = Figure(figsize=(3.6 * len(sweep.sizes) + 0.6, 4.2), layout="constrained")
    panels = figure.subplots(1, len(sweep.sizes), sharey=True, squeeze=False)[0]
    for size, panel in zip(sweep.sizes, panels, strict=True):
        _draw(panel, [cell for cell in cells if cell.size == size])
        shape = size_config(size)
        panel.set_title(f"{shape['depth']} blocks of width {shape['hidden_size']}", fontsize=10)
        panel.set_xlabel("training budget, TFLOP")
    panels[0].set_ylabel("distance / distance of one model")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=3, fontsize=9, frameon=False)
    return figure


def _draw(panel: Axes, cells: list[Cell]) -> None:
    panel.axhspan(0.01, 1, color="#eef6ee", zorder=0)
    panel.axhline(1, color="#777777", linewidth=0.8)
    budgets = [cell.budget / 1e12 for cell in cells]
    every = []
    for colour, row in zip(COLOURS[1:], cells[0].rows, strict=False):
        means = [math.exp(statistics.fmean(map(math.log, cell.ratios(row)))) for cell in cells]
        panel.plot(budgets, means, color=colour, marker="o", markersize=4, label=row)
        for place, cell in zip(budgets, cells, strict=True):
            panel.plot(
                [place] * len(cell.single), cell.ratios(row), color=colour, linewidth=0.8, alpha=0.5
            )
        every += [ratio for cell in cells for ratio in cell.ratios(row)]
    panel.set(
        xscale="log", yscale="log", ylim=(min(0.5, 0.9 * min(every)), max(2, 1.1 * max(every)))
    )
    panel.xaxis.set_major_locator(FixedLocator(budgets))
    panel.yaxis.set_major_locator(FixedLocator([0.25, 0.35, 0.5, 0.7, 1, 1.4, 2, 2.8, 4]))
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter("{x:.2g}")
