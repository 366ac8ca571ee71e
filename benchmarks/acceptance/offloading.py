"""Whether the weights of an offloaded expert arrive while another one computes.

A step in which all experts take their turn costs ``compute`` with all of them on the device, and the copies
of their weights alone cost ``copy``. If both happen at the same time, a step with offloading takes as long
as the longer one; if one waits for the other, it takes the sum.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.acceptance.stages import Kit
from benchmarks.figures import Figure, Result, at_most, told
from benchmarks.inference import models
from benchmarks.inference.memory import ALL, load_even, write_ensembles
from benchmarks.timing import between, now
from benchmarks.training.checklist import covered, events_of, of_kind, shared, times_of
from hddm.sampling import integrate, time_grid

GOAL = 1.15
"""Time of a step with offloading over the longer one of copying and computing, at most."""
ROUNDS, STEPS = 3, 3
ROOM = 2
"""Experts that the device has room for: the one that runs, and the next one."""
Seconds = Callable[[], float]


def judged(compute: float, copy: float, offloaded: float, is_judged: bool = True) -> list[Figure]:
    """Figures of one way to offload, from seconds of a step."""
    ideal = max(compute, copy)
    what = "step with offloading over the longer of copy and compute"
    ratio = offloaded / ideal
    return [
        told("computing, all experts on the device", 1000 * compute, " ms a step"),
        told("copying the experts' weights alone", 1000 * copy, " ms a step"),
        told("with offloading", 1000 * offloaded, " ms a step"),
        told("with offloading over the sum of both", offloaded / (compute + copy)),
        at_most(what, ratio, GOAL)
        if is_judged
        else told(what, ratio, goal="judged on a GPU alone"),
    ]


def measured(ways: Mapping[str, Seconds], rounds: int) -> dict[str, float]:
    """Median seconds of each way; all in turn, after a warm-up."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    for _ in range(rounds):
        for name, way in ways.items():
            found[name].append(way())
    return {name: statistics.median(each) for name, each in found.items()}


def offloading(kit: Kit) -> Result:
    """Measure hddm's own offloading on a GPU; a stand-in on a CPU, where no copy is apart from computing."""
    if not kit.is_gpu:
        return stand_in(ReadsAhead)
    with tempfile.TemporaryDirectory(dir=kit.work) as place:
        settings = models.CUDA
        size, router = write_ensembles(settings, Path(place))
        limit = ROOM * size + router
        step = partial(integrated, f"{place}/{ALL}", settings, kit.device)
        whole, coming = step(), step(offload="ram", max_memory=limit)
        found = measured({"none": whole, "ram": coming}, ROUNDS)
        trace = traced(coming)
        bandwidth = bytes_per_second(size, kit.device)
    copied = trace.copied / STEPS
    notes = [
        f"{settings.experts} experts of {size / 1e6:,.0f} MB in float32 take turns at each call; the device "
        f"has room for {ROOM} of them."
    ]
    if not copied:
        copied = float(settings.experts * size)
        notes.append("The profiler saw no copy: each expert is taken to be copied once a step.")
    figures = judged(found["none"], copied / bandwidth, found["ram"])
    figures += [
        told("copied to the device", copied / 1e6, " MB a step"),
        told("from pinned memory alone", bandwidth / 1e9, " GB/s"),
    ]
    if trace.share is not None:
        share = 100 * trace.share
        figures.append(told("copies while a kernel computes, share of their time", share, " %"))
    return Result(figures, notes)


def integrated(path: str, settings: models.Settings, device: str, **how: Any) -> Seconds:
    """Seconds of a step of an ensemble that is loaded so."""
    shape = (settings.channels, settings.memory_side, settings.memory_side)
    x, times = torch.randn(settings.batch, *shape).to(device), time_grid(STEPS)
    model = load_even(path, torch.float32, device, **how)

    def seconds() -> float:
        began = now(device)
        integrate(model, x, times)
        return between(began, now(device), STEPS).seconds

    return seconds


def bytes_per_second(size: int, device: str) -> float:
    """How fast ``size`` bytes come to the device from pinned memory."""
    held = torch.empty(size, dtype=torch.uint8)
    if torch.device(device).type == "cuda":
        held = held.pin_memory()

    def copied() -> float:
        began = now(device)
        held.to(device, non_blocking=True, copy=True)
        return between(began, now(device)).seconds

    return size / measured({"copy": copied}, ROUNDS)["copy"]


@dataclass(frozen=True)
class Trace:
    """Bytes that came to the device, and the share of that time in which a kernel computed."""

    copied: int = 0
    share: float | None = None

    @classmethod
    def of(cls, events: Sequence[Mapping[str, Any]]) -> "Trace":
        """Of the events of a profiler; nothing where it saw no copy or no kernel."""
        copies, kernels = of_kind(events, "gpu_memcpy", "Memcpy HtoD"), of_kind(events, "kernel")
        if not copies or not kernels:
            return cls()
        size = sum(int(one["args"]["bytes"]) for one in copies)
        times = times_of(copies)
        return cls(size, shared(times, times_of(kernels)) / covered(times))


def traced(step: Seconds) -> Trace:
    """Watch a step by a profiler."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
    return Trace.of(events_of(profiler))


@dataclass(frozen=True)
class Waits:
    """An offloader in small: it waits for each expert's weights, then computes with them.

    Copying and computing are waits of so many seconds, so that both can happen at once on any machine.
    """

    copy: float = 0.01
    compute: float = 0.015
    experts: int = 12

    def step(self) -> None:
        """All experts take their turn."""
        for _ in range(self.experts):
            time.sleep(self.copy)
            time.sleep(self.compute)


class ReadsAhead(Waits):
    """One that fetches the weights of the next expert while the last one computes."""

    def step(self) -> None:
        with ThreadPoolExecutor(1) as pool:
            coming: Future[None] = pool.submit(time.sleep, self.copy)
            for number in range(self.experts):
                coming.result()
                if number + 1 < self.experts:
                    coming = pool.submit(time.sleep, self.copy)
                time.sleep(self.compute)


def stand_in(kind: type[Waits]) -> Result:
    """What the stage makes of an offloader in small; it says nothing about hddm's."""
    offloader = kind()

    def seconds(call: Callable[[], None]) -> float:
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    def waits(wait: float) -> None:
        for _ in range(offloader.experts):
            time.sleep(wait)

    found = measured(
        {
            "none": partial(seconds, partial(waits, offloader.compute)),
            "ram": partial(seconds, offloader.step),
            "copy": partial(seconds, partial(waits, offloader.copy)),
        },
        ROUNDS,
    )
    notes = [
        "An offloader of the kit's own, in which copying and computing are waits; hddm's is measured on a "
        "GPU alone."
    ]
    return Result(judged(found["none"], found["copy"], found["ram"]), notes, is_stand_in=True)
