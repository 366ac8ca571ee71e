"""Steps in every cell, and what compiling costs and gains: eager, the whole network, and one block."""

import itertools
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor, nn

from benchmarks.harness import Start, apart
from benchmarks.reports import table
from benchmarks.timing import DTYPES, quartiles, ratios, spread, timed
from benchmarks.training.networks import Settings, expert, settings_for
from benchmarks.training.times import DIFFUSERS, OWN, OWN_PRODUCTS, measure_times
from hddm.networks.wrappers import compile_blocks

EAGER, WHOLE, BLOCK = "eager", "whole network", "one block"
COLUMNS = ["width", "threads", "dtype", "eager: images/s", "× diffusers", "bound"]
COLUMNS += ["compiled: images/s", "× diffusers", "bound"]
GOALS = {"float32": 1.1, "bfloat16": 1.3}
"""Least ratio to diffusers' DiT."""
BATCHES = (16, 32, 24)
"""Sizes of batches, one after the other."""


@dataclass(frozen=True)
class Compiled:
    """Seconds of the first call and of later ones with each size, and graphs that were compiled."""

    start: float
    seconds: list[float]
    graphs: int


def measure_compiling(kind: str, way: str, settings: Settings, calls: int) -> Compiled:
    """Time one network, ``kind`` of `KINDS`, compiled in one ``way``; for a process of its own."""
    network, conditions, shape, trains = KINDS[kind](settings)
    if way == BLOCK:
        compile_blocks(network, dynamic=True)
    elif way == WHOLE:
        network.compile(dynamic=True)
    marks: dict[int, list[float]] = {}
    noise = torch.Generator().manual_seed(0)
    for size in BATCHES:
        x, times = (
            torch.randn(size, *shape, generator=noise),
            torch.rand(size, generator=noise) * 1000,
        )
        given = {name: value[:size] for name, value in conditions.items()}
        for _ in range(calls):
            began = time.perf_counter()
            with torch.set_grad_enabled(trains):
                found = network(x, times, **given)
                output: Tensor = found if isinstance(found, Tensor) else found[0]
                if trains:
                    output.square().mean().backward()
                    network.zero_grad()
            marks.setdefault(size, []).append(time.perf_counter() - began)
    first, *later = marks[BATCHES[0]]
    counted = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return Compiled(
        first, later + [one for size in BATCHES[1:] for one in marks[size][1:]], counted
    )


def _trained(settings: Settings) -> tuple[nn.Module, dict[str, Tensor], tuple[int, ...], bool]:
    labels = torch.arange(max(BATCHES)) % settings.classes
    return expert(settings, "single").train(), {"class_labels": labels}, settings.shape, True


def _sampled(settings: Settings) -> tuple[nn.Module, dict[str, Tensor], tuple[int, ...], bool]:
    network, conditions, shape, _ = _trained(settings)
    return network.eval(), conditions, shape, False


def _text_unet(settings: Settings) -> tuple[nn.Module, dict[str, Tensor], tuple[int, ...], bool]:
    from diffusers import UNet2DConditionModel

    width = settings.hidden_size // 3
    network = UNet2DConditionModel(
        sample_size=settings.side,
        in_channels=4,
        out_channels=4,
        block_out_channels=(width, 2 * width),
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        attention_head_dim=8,
        cross_attention_dim=64,
        norm_num_groups=16,
    )
    text = torch.randn(max(BATCHES), 16, 64)
    return network.eval(), {"encoder_hidden_states": text}, (4, settings.side, settings.side), False


KINDS: Mapping[
    str, Callable[[Settings], tuple[nn.Module, dict[str, Tensor], tuple[int, ...], bool]]
] = {
    "train an expert": _trained,
    "sample an expert": _sampled,
    "sample a UNet with text": _text_unet,
}


def compiling_table(found: Mapping[tuple[str, str], Compiled]) -> list[str]:
    """The table, and how one block compares with the whole network."""
    rows: list[list[Any]] = []
    for (kind, way), one in found.items():
        base = statistics.median(found[kind, EAGER].seconds)
        low, middle, high = (base / seconds for seconds in reversed(quartiles(one.seconds)))
        rows.append(
            [
                kind,
                way,
                f"{one.start:.1f}",
                f"{middle:.2f} [{low:.2f}, {high:.2f}]",
                str(one.graphs),
            ]
        )
    lines = table(["", "compiled", "first call, s", "speed, × eager", "graphs"], rows)
    for kind in KINDS:
        whole, block = found[kind, WHOLE], found[kind, BLOCK]
        speed = statistics.median(whole.seconds) / statistics.median(block.seconds)
        lines += [
            "",
            f"- {kind}: one block has {speed:.2f} × the speed of the whole network, after ",
        ]
        lines[-1] += (
            f"{block.start / whole.start:.2f} of its start (goals: at least 0.95, at most 0.33)."
        )
    return lines


def measure_table(start: Start, rounds: int, quick: bool) -> Path:
    """Measure hddm's step over diffusers' DiT in every cell; return the report."""
    rows, cells, base = [], [], settings_for("cpu", quick)
    names = (DIFFUSERS, OWN, OWN_PRODUCTS)
    met = 0
    widths, cores = (base.hidden_size,) if quick else (192, 384), sorted({1, os.cpu_count() or 1})
    for width, threads, dtype in itertools.product(widths, cores, DTYPES):
        settings = replace(base, rounds=rounds, hidden_size=width, num_heads=max(width // 64, 1))
        row = [str(width), str(threads), dtype]
        for compiled in (False, True):
            times, *_ = apart(threads, measure_times, settings, "cpu", dtype, compiled, names)
            speed = statistics.median(settings.batch / one.seconds for one in times[OWN])
            bound = statistics.median(ratios(times, DIFFUSERS, OWN_PRODUCTS))
            met += statistics.median(ratios(times, DIFFUSERS, OWN)) >= GOALS[dtype]
            row += [f"{speed:,.1f}", spread(ratios(times, DIFFUSERS, OWN), 2), f"{bound:.2f}"]
            cells.append(
                {
                    "width": width,
                    "compiled": compiled,
                    **timed(settings, "cpu", compiled, threads, {dtype: times}),
                }
            )
        rows.append(row)
        typer.echo(" | ".join(row), err=True)
    text = [
        "# Training steps in every cell",
        "",
        "Images per second of hddm's loop, and their ratio to a plain loop around diffusers' DiT (median and "
        f"quartiles of {rounds} alternating rounds). The bound is that ratio if a step of hddm were only its "
        "matrix products and attention, eager. hddm compiles one block, the plain loop the whole "
        f"network. Depth {base.depth}, batch {base.batch}, {base.tokens} tokens.",
        "",
        *table(COLUMNS, rows),
        "",
        f"{met} of {len(cells)} ratios reach their goal: {', '.join(f'{k} {v}' for k, v in GOALS.items())}.",
    ]
    return start.write("training-table", text, {"cells": cells})


def measure_gains(start: Start, quick: bool) -> Path:
    """Measure what compiling the whole network, or one block, costs and gains; return the report."""
    settings, threads = settings_for("cpu", quick), os.cpu_count() or 1
    calls = 3 if quick else 8
    found = {}
    for kind, way in itertools.product(KINDS, (EAGER, WHOLE, BLOCK)):
        found[kind, way] = apart(threads, measure_compiling, kind, way, settings, calls)
    text = [
        "# What compiling gains",
        "",
        f"Width {settings.hidden_size}, depth {settings.depth}, {settings.tokens} tokens, float32, compiled "
        f"with dynamic batches. Each row is a process of its own, with batches of "
        f"{', '.join(map(str, BATCHES))} one after the other.",
        "",
        *compiling_table(found),
    ]
    content = {
        "threads": threads,
        "settings": asdict(settings),
        "compiling": [[*key, asdict(one)] for key, one in found.items()],
    }
    return start.write("training-compiled", text, content)
