"""Time a step of each way: hddm's loop, a plain one, and the products of a step alone."""

import statistics
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from benchmarks.timing import Taken, Times, between, in_turn, now
from benchmarks.training.loops import OwnLoop, PlainLoop
from benchmarks.training.networks import (
    Settings,
    call_dit,
    call_expert,
    diffusers_dit,
    expert,
    millions,
)

DIFFUSERS = "diffusers' DiT, plain loop"
OWN = "hddm"
PLAIN = "hddm's network, plain loop"
ZERO = "the same with adaLN-Zero"
PRODUCTS = "products of diffusers' DiT alone"
OWN_PRODUCTS = "products of hddm's network alone"
WAYS = (DIFFUSERS, OWN, PLAIN, ZERO, PRODUCTS, OWN_PRODUCTS)


class Way(Protocol):
    """What is timed."""

    def run(self, steps: int, on_step: Callable[[], None]) -> None:
        """``steps`` steps, with a call after each."""


Recorded = list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]


class _Recording(TorchDispatchMode):
    """Keeps every call that has a count of operations in torch: products, convolutions and attention."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Recorded = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in flop_registry:
            self.calls.append((func, args, kwargs or {}))
        return result


class Products:
    """The products of one ``step``, computed again on the tensors that it computed them on.

    Everything else of a step is left out: norms, activations, sums, casts, optimiser and EMA. An attention
    gradient that is written out counts with its products alone.
    """

    def __init__(self, step: Callable[[], object]) -> None:
        # A first step makes what is made once.
        step()
        with _Recording() as recording:
            step()
        self.calls = recording.calls

    @torch.no_grad()
    def run(self, steps: int, on_step: Callable[[], None]) -> None:
        """``steps`` times, with a call after each."""
        for _ in range(steps):
            for function, args, keywords in self.calls:
                function(*args, **keywords)
            on_step()


def measure_times(
    settings: Settings, device: str, dtype: str, compiled: bool, names: Collection[str] = WAYS
) -> tuple[Times, dict[str, float], float]:
    """Seconds a step, one value a round, after a warm-up; millions of parameters; and hddm's mean wait.

    That is the share of a step in which it waits for its inputs. ``names`` are the ways, hddm's among them.
    """
    ways, sizes = ways_of(settings, device, dtype, compiled, names)
    for way in ways.values():
        way.run(2, lambda: None)
    timed = {name: partial(_taken, way, settings.steps, device) for name, way in ways.items()}
    times = in_turn(timed, settings.rounds)
    own = ways[OWN]
    assert isinstance(own, OwnLoop)
    return times, sizes, statistics.fmean(own.waits)


def ways_of(
    settings: Settings, device: str, dtype: str, compiled: bool, names: Collection[str] = WAYS
) -> tuple[dict[str, Way], dict[str, float]]:
    """The ways of these names, and the millions of parameters of those that have a network."""

    def plain(zero: bool, compiled: bool = compiled) -> PlainLoop:
        network = expert(settings, "zero" if zero else "single")
        return PlainLoop(network, call_expert, settings, device, dtype, compiled)

    def dit(compiled: bool = compiled) -> PlainLoop:
        return PlainLoop(diffusers_dit(settings), call_dit, settings, device, dtype, compiled)

    makers: dict[str, Callable[[], PlainLoop | OwnLoop | Products]] = {
        DIFFUSERS: dit,
        OWN: lambda: OwnLoop(expert(settings, "single"), settings, device, dtype, compiled),
        PLAIN: lambda: plain(zero=False),
        ZERO: lambda: plain(zero=True),
        PRODUCTS: lambda: Products(dit(compiled=False).step),
        OWN_PRODUCTS: lambda: Products(plain(zero=False, compiled=False).step),
    }
    ways = {name: makers[name]() for name in names}
    sizes = {
        name: millions(way.network) for name, way in ways.items() if not isinstance(way, Products)
    }
    return dict(ways), sizes


def _taken(way: Way, steps: int, device: str) -> Taken:
    """The median step. The first, which makes what the others find made, does not count, nor does the last.

    hddm's loop reports a step while the next one is computed, so its last two reports come together.
    """
    marks: list[Taken] = []
    way.run(2 + steps, lambda: marks.append(now(device)))
    return Taken.middle([between(*both) for both in pairwise(marks[:-1])])
