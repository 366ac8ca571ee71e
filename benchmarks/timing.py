"""Seconds a step of several ways, all in turn in one run, for the experiments that time."""

import random
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Annotated, Any

import torch
import typer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
A_ROUND = 3
"""Times a round that a way is timed which is timed often; its median counts."""


class DType(StrEnum):
    """Choices of --dtype."""

    float32 = "float32"
    bfloat16 = "bfloat16"


DeviceOption = Annotated[str, typer.Option("--device", help="cpu or cuda.")]
DTypeOption = Annotated[
    list[DType] | None, typer.Option("--dtype", help="Once or twice; default both.")
]
CompileOption = Annotated[bool, typer.Option("--compile", help="torch.compile every network.")]


@dataclass(frozen=True)
class Taken:
    """Seconds that a step took, on the clock and of the processor (all threads of this process)."""

    seconds: float
    processor: float

    @classmethod
    def middle(cls, each: Sequence["Taken"]) -> "Taken":
        """Both medians."""
        seconds = statistics.median(one.seconds for one in each)
        return cls(seconds, statistics.median(one.processor for one in each))


Times = Mapping[str, Sequence[Taken]]
"""One a round, by the name of the way."""


def now(device: str) -> Taken:
    """Both clocks, once the device is done; the CPU is never ahead."""
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize()
    return Taken(time.perf_counter(), time.process_time())


def between(began: Taken, ended: Taken, steps: int = 1) -> Taken:
    """A step of ``steps``."""
    return Taken(
        (ended.seconds - began.seconds) / steps, (ended.processor - began.processor) / steps
    )


def in_turn(
    ways: Mapping[str, Callable[[], Taken]], rounds: int, often: Collection[str] = ()
) -> Times:
    """Times of every way, one a round; each round takes all of them in an order of its own."""
    shuffled = random.Random(0)
    found: dict[str, list[Taken]] = {name: [] for name in ways}
    order = [name for name in ways for _ in range(A_ROUND if name in often else 1)]
    for _ in range(rounds):
        shuffled.shuffle(order)
        once: dict[str, list[Taken]] = {name: [] for name in ways}
        for name in order:
            once[name].append(ways[name]())
        for name, each in once.items():
            found[name].append(Taken.middle(each))
    return found


def ratios(times: Times, name: str, base: str) -> list[float]:
    """Wall time of one way over that of another, round by round."""
    return [a.seconds / b.seconds for a, b in zip(times[name], times[base], strict=True)]


def processor(times: Times, name: str) -> float:
    """Median processor time of a way."""
    return Taken.middle(times[name]).processor


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def spread(values: Sequence[float], digits: int) -> str:
    """Median, and in brackets the quartiles."""
    low, median, high = quartiles(values)
    return f"{median:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def timed(
    settings: Any, device: str, compiled: bool, threads: int, times: Mapping[str, Times]
) -> dict[str, Any]:
    """What a result says of times by dtype, and how they were taken."""
    return {
        "device": device,
        "accelerator": torch.cuda.get_device_name(device) if device.startswith("cuda") else None,
        "threads": threads,
        "compiled": compiled,
        "settings": asdict(settings),
        "times": {
            dtype: {way: [asdict(one) for one in each] for way, each in ways.items()}
            for dtype, ways in times.items()
        },
    }


def name_of(settings: Any, device: str, compiled: bool, what: str = "") -> str:
    """The name of a result."""
    return f"{settings.name}{what}-{device.replace(':', '-')}{'-compiled' if compiled else ''}"
