"""Time a step of each way, all in turn in one run."""

import random
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Protocol

from benchmarks.inference.times import Taken, Times, synchronise
from benchmarks.training.loops import OwnLoop, PlainLoop
from benchmarks.training.networks import call_dit, call_expert, diffusers_dit, expert, millions
from benchmarks.training.products import Products
from benchmarks.training.settings import Settings

DIFFUSERS = "diffusers' DiT, plain loop"
OWN = "hddm"
PLAIN = "hddm's network, plain loop"
ZERO = "the same with adaLN-Zero"
PRODUCTS = "products of diffusers' DiT alone"
OWN_PRODUCTS = "products of hddm's network alone"


class Way(Protocol):
    """What is timed."""

    def run(self, steps: int, on_step: Callable[[], None]) -> None:
        """``steps`` steps, with a call after each."""


def measure_times(
    settings: Settings, device: str, dtype: str, compiled: bool
) -> tuple[Times, dict[str, float]]:
    """Seconds a step, one value a round, and millions of parameters; each round has an order of its own."""
    ways, sizes = ways_of(settings, device, dtype, compiled)
    for way in ways.values():
        way.run(2, lambda: None)
    shuffled, order = random.Random(0), list(ways)
    found: Times = {name: [] for name in ways}
    for _ in range(settings.rounds):
        shuffled.shuffle(order)
        for name in order:
            found[name].append(_taken(ways[name], settings.steps, device))
    return found, sizes


def ways_of(
    settings: Settings, device: str, dtype: str, compiled: bool
) -> tuple[dict[str, Way], dict[str, float]]:
    """All ways, and the millions of parameters of those that have a network."""

    def plain(zero: bool, compiled: bool = compiled) -> PlainLoop:
        network = expert(settings, "zero" if zero else "single")
        return PlainLoop(network, call_expert, settings, device, dtype, compiled)

    def dit(compiled: bool = compiled) -> PlainLoop:
        return PlainLoop(diffusers_dit(settings), call_dit, settings, device, dtype, compiled)

    loops: dict[str, PlainLoop | OwnLoop] = {
        DIFFUSERS: dit(),
        OWN: OwnLoop(expert(settings, "single"), settings, device, dtype, compiled),
        PLAIN: plain(zero=False),
        ZERO: plain(zero=True),
    }
    products = {
        PRODUCTS: Products(dit(compiled=False).step),
        OWN_PRODUCTS: Products(plain(zero=False, compiled=False).step),
    }
    return {**loops, **products}, {name: millions(loop.network) for name, loop in loops.items()}


def _taken(way: Way, steps: int, device: str) -> Taken:
    """The median step; the first, which makes what the others find made, does not count."""
    marks: list[tuple[float, float]] = []

    def mark() -> None:
        synchronise(device)
        marks.append((time.perf_counter(), time.process_time()))

    way.run(1 + steps, mark)
    each = [(late[0] - early[0], late[1] - early[1]) for early, late in pairwise(marks)]
    return Taken(median(one for one, _ in each), median(one for _, one in each))
