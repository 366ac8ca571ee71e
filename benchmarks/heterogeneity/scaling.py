"""Iso-FLOP sweep: at which sizes and budgets K experts together are ahead of one model.

A cell is a size of network and a counted training budget, router included. All models take batches of 32
images, and each of K experts, of the same size, 1/K of one model's steps on its own shard; K experts are
sampled by one of them per sample (draw), and by the router's first choice in each step (top-1). All learn by
AdamW, since Muon's update would cost more than a step on 32 such small images. Its rate is a constant over
the width, bounded; one model and experts, which are short of steps, were given their own.
"""

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from benchmarks.harness import Start
from benchmarks.reports import COLOURS
from hddm.benchmark.compute import counting
from hddm.benchmark.presets import parse_settings
from hddm.benchmark.results import Results
from hddm.benchmark.run import run_benchmark
from hddm.benchmark.settings import BenchmarkSettings
from hddm.networks.transformers import ExpertTransformer, RouterTransformer
from hddm.training.expert import new_network
from hddm.training.settings import size_config

SINGLE, EXPERTS = "one model", "experts"
BATCH, ROUTER_BATCH, ROUTER_SHARE = 32, 64, 0.02
WAYS = ("draw", "top-1")


@dataclass(frozen=True)
class Sweep:
    """Sizes, budgets in operations, and numbers of experts of one data set, images of ``shape``."""

    name: str
    shape: tuple[int, int, int]
    data: Mapping[str, Any]
    sizes: tuple[str, ...]
    budgets: tuple[float, ...]
    counts: tuple[int, ...]
    seeds: tuple[int, ...]
    num_images: int
    rates: tuple[float, float]
    """Of one model and of experts: peak learning rate times width, where that is not above ``max_rate``."""
    max_rate: float
    learning: Mapping[str, Any]
    network: Mapping[str, Any]
    """Prediction and positions, of one model too."""


DIGITS = Sweep(
    "scaling-digits",
    (1, 8, 8),
    {"source": "digits"},
    ("2x24/2", "4x32/2", "4x64/2", "4x128/2"),
    (0.25e12, 0.75e12, 2.25e12),
    (4, 8),
    (0, 1),
    1000,
    (1.0, 0.5),
    0.016,
    {"ema_decay": 0.99},
    {"prediction": "sample", "rotary": True},
)
SHORT = replace(
    DIGITS,
    name="scaling-short",
    sizes=("2x24/4",),
    budgets=(2e10, 4e10),
    counts=(2,),
    seeds=(0,),
    num_images=100,
    learning={"ema_decay": 0.9},
)


@dataclass(frozen=True)
class Cell:
    """Distances to held-out images of one size and budget, by seed: of one model, and of K experts by way."""

    size: str
    budget: float
    count: int
    single: tuple[float, ...]
    experts: Mapping[str, tuple[float, ...]]

    def ratios(self, way: str) -> list[float]:
        """Distance of the experts over that of one model, a seed each."""
        return [ours / one for ours, one in zip(self.experts[way], self.single, strict=True)]


def scaling(sweep: Sweep, start: Start) -> Path:
    """Run the benchmark of every cell, or resume it, and write table and chart."""
    cells = []
    for size in sweep.sizes:
        for budget in sweep.budgets:
            first: Results | None = None
            for count in sweep.counts:
                settings = settings_of(sweep, size, budget, count, start.workers)
                typer.echo(settings.name, err=True)
                out = start.work / sweep.name / f"{size.replace('/', '-')}_{budget:g}_{count}"
                results = run_benchmark(settings, out, None, start.work / sweep.name / "jobs")
                first = first or results
                ways = {way: _distances(results, EXPERTS, way) for way in WAYS}
                cells.append(Cell(size, budget, count, _distances(first, SINGLE, WAYS[0]), ways))
    lines = ["# Where experts are ahead of one model of equal counted compute", "", *_table(sweep, cells)]
    content = {"settings": vars(sweep), "cells": [vars(cell) for cell in cells]}
    return start.write(sweep.name, lines, content, chart(sweep, cells))


def settings_of(sweep: Sweep, size: str, budget: float, count: int, workers: int) -> BenchmarkSettings:
    """Settings of a cell; only that of the fewest experts has the one model, which gets its exact budget."""
    of_experts, of_router = (
        _image_flop(sweep, size),
        _image_flop(sweep, _router_size(sweep), count),
    )
    steps = max(1, round(budget * (1 - ROUTER_SHARE) / (BATCH * count * of_experts)))
    width = size_config(size)["hidden_size"]
    of_one, of_each = (min(sweep.max_rate, rate / width) for rate in sweep.rates)
    expert = {
        "steps": steps,
        "batch_size": BATCH,
        "size": size,
        "optimizer": "adamw",
        "learning_rate": of_each,
        "weak_at": 0,
        **sweep.learning,
        **sweep.network,
    }
    router = {
        "steps": max(1, round(budget * ROUTER_SHARE / (ROUTER_BATCH * of_router))),
        "batch_size": ROUTER_BATCH,
        "size": _router_size(sweep),
        "optimizer": "adamw",
        "learning_rate": 0.004,
        **sweep.learning,
    }
    single = [{"name": SINGLE, "kind": "single"}] if count == sweep.counts[0] else []
    content = {
        "name": f"{size}, {budget:g} FLOP, {count} experts",
        "data": dict(sweep.data),
        "partition": {"shards": count},
        "training": {
            "expert": expert,
            "single": {"batch_size": BATCH, "learning_rate": of_one},
            "router": router,
            "checkpoint_every": 100_000,
        },
        "models": [*single, {"name": EXPERTS}],
        "compare": {"candidates": [], "baselines": []},
        "sampling": {"strategy": WAYS[0], "num_images": sweep.num_images},
        "tables": [
            {"name": WAYS[0]},
            {
                "name": WAYS[1],
                "models": [EXPERTS],
                "base": {"strategy": WAYS[1], "solver": "euler", "steps": 50},
            },
        ],
        "score_on": "held-out",
        "seeds": list(sweep.seeds),
        "workers": workers,
        "complete": False,
    }
    return parse_settings(content, sweep.name)


def _router_size(sweep: Sweep) -> str:
    return "2x24/2" if sweep.shape[1] < 16 else "2x32/4"


def _image_flop(sweep: Sweep, size: str, num_experts: int | None = None) -> int:
    """Operations of a step of one image, forward and backward; of a router for ``num_experts``."""
    if num_experts is None:
        network: torch.nn.Module = _network(sweep, size)
    else:
        network = new_network(RouterTransformer, size, sweep.shape, 0, num_experts=num_experts)
    with counting() as counter:
        network(torch.zeros(1, *sweep.shape), torch.full((1,), 0.5)).sum().backward()
    return int(counter.get_total_flops())


def _distances(results: Results, model: str, way: str) -> tuple[float, ...]:
    found = {one.seed: one.scores for one in results.scored if (one.model, one.table) == (model, way)}
    return tuple(found[seed]["to_held_out"]["value"] for seed in results.seeds)


def _table(sweep: Sweep, cells: list[Cell]) -> Iterator[str]:
    yield (
        f"Fréchet distance to held-out images, {sweep.num_images:,} samples, features of a classifier that "
        f"was trained apart; mean of training seeds {', '.join(map(str, sweep.seeds))}, in brackets each "
        "seed's ratio to one model."
    )
    yield ""
    yield "| network | parameters | budget, TFLOP | one model | experts | draw | top-1 |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for cell in cells:
        ways = [
            f"{statistics.fmean(cell.experts[way]):.3g} ({', '.join(f'{r:.2f}' for r in cell.ratios(way))})"
            for way in WAYS
        ]
        yield (
            f"| {cell.size} | {parameters(sweep, cell.size):,} | {cell.budget / 1e12:g} | "
            f"{statistics.fmean(cell.single):.3g} | {cell.count} | {' | '.join(ways)} |"
        )


def parameters(sweep: Sweep, size: str) -> int:
    """Weights of a network of the sweep."""
    return sum(one.numel() for one in _network(sweep, size).parameters())


def _network(sweep: Sweep, size: str) -> ExpertTransformer:
    return new_network(ExpertTransformer, size, sweep.shape, 0, rotary=sweep.network["rotary"])


def chart(sweep: Sweep, cells: list[Cell]) -> Figure:
    """Ratio of distances over budget, a line a size, a panel for each number of experts and way to sample."""
    rows = len(sweep.counts)
    figure = Figure(figsize=(7.5, 0.6 + 2.7 * rows), layout="constrained")
    panels = figure.subplots(rows, len(WAYS), sharex=True, sharey=True, squeeze=False)
    for count, row in zip(sweep.counts, panels, strict=True):
        for way, panel in zip(WAYS, row, strict=True):
            _draw(panel, sweep, [cell for cell in cells if cell.count == count], way)
            panel.set_title(f"{count} experts, {way}", fontsize=10)
    ratios = [ratio for cell in cells for way in WAYS for ratio in cell.ratios(way)]
    panels[0][0].set_ylim(min(0.8, 0.9 * min(ratios)), max(1.25, 1.1 * max(ratios)))
    for panel in panels[-1]:
        panel.set_xlabel("training budget, TFLOP")
    figure.supylabel("distance of experts / of one model", fontsize=10)
    handles, names = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=4, fontsize=9, frameon=False)
    return figure


def _draw(panel: Axes, sweep: Sweep, cells: list[Cell], way: str) -> None:
    panel.axhspan(0.01, 1, color="#eef6ee", zorder=0)
    panel.axhline(1, color="#777777", linewidth=0.8)
    for colour, size in zip(COLOURS[1:], sweep.sizes, strict=False):
        own = [cell for cell in cells if cell.size == size]
        x = [cell.budget / 1e12 for cell in own]
        means = [math.exp(statistics.fmean(map(math.log, cell.ratios(way)))) for cell in own]
        label = f"{parameters(sweep, size) / 1000:,.0f} k weights"
        panel.plot(x, means, color=colour, marker="o", markersize=4, label=label)
        for place, cell in zip(x, own, strict=True):
            ratios = cell.ratios(way)
            panel.plot([place] * len(ratios), ratios, color=colour, linewidth=0.8, alpha=0.6)
    panel.set(xscale="log", yscale="log")
    panel.xaxis.set_major_locator(FixedLocator([budget / 1e12 for budget in sweep.budgets]))
    panel.yaxis.set_major_locator(FixedLocator([0.25, 0.35, 0.5, 0.7, 1, 1.4, 2, 2.8, 4]))
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter("{x:g}")
