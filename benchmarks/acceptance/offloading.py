"""Whether the weights of an offloaded expert arrive while another one computes.

A step in which all experts take their turn costs ``compute`` with all of them on the device, and the copies
of their weights alone cost ``copy``. If both happen at the same time, a step with offloading takes as long
as the longer one; if one waits for the other, it takes the sum.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.acceptance.stages import Kit
from benchmarks.figures import Figure, Result, at_least, at_most, told
from benchmarks.inference import models
from benchmarks.inference.memory import ALL, load_even, write_ensembles
from benchmarks.timing import between, now
from benchmarks.training.checklist import Intervals, covered, events_of, of_kind, shared, times_of
from hddm.ensemble import Ensemble
from hddm.networks.offload import StoredNetwork
from hddm.sampling import integrate, time_grid

GOAL = 1.15
"""Time of a step with offloading over the longer one of copying and computing, at most."""
ROUNDS, STEPS = 3, 3
ROOM = 2
"""Experts that the device has room for: the one that runs, and the next one."""
READING, COMPUTING = 0.03, 0.045
"""Seconds that a file and a call of a network take on a CPU, where both are waits."""
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
    """Measure hddm's offloading: from main memory to a GPU, or from slow files on a CPU."""
    if not kit.is_gpu:
        return with_waits(kit)
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
    return timed(load_even(path, torch.float32, device, **how), settings, device)


def timed(model: Ensemble, settings: models.Settings, device: str) -> Seconds:
    """Seconds of a step of this ensemble."""
    shape = (settings.channels, settings.memory_side, settings.memory_side)
    x, times = torch.randn(settings.batch, *shape).to(device), time_grid(STEPS)

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


def with_waits(kit: Kit) -> Result:
    """Time hddm's offloading on a CPU, with files that are slow to read and networks that are slow to run.

    Both are waits of so many seconds, so that they can happen at once on any machine.
    """
    with tempfile.TemporaryDirectory(dir=kit.work) as place:
        settings = models.QUICK
        size, router = write_ensembles(settings, Path(place))
        limit = ROOM * size + router
        of = partial(load_even, f"{place}/{ALL}", torch.float32, kit.device)
        whole, coming = of(), of(offload="disk", max_memory=limit)
        slow_down(whole)
        reads, calls = slow_down(coming)
        ways = {
            "none": timed(whole, settings, kit.device),
            "disk": timed(coming, settings, kit.device),
        }
        found = measured(ways, ROUNDS)
    copy = sum(end - begin for begin, end in reads) / (STEPS * (1 + ROUNDS))
    share = 100 * shared(reads, calls) / covered(reads)
    notes = [
        f"hddm's own shelf with room for {ROOM} of {settings.experts} tiny experts, whose files take "
        f"{1000 * READING:g} ms to read and whose calls {1000 * COMPUTING:g} ms, as waits; copies to a "
        "device are measured on a GPU alone."
    ]
    figures = judged(found["none"], copy, found["disk"], is_judged=False)
    figures.append(at_least("reads while a network computes, share of their time", share, 70, " %"))
    return Result(figures, notes, is_stand_in=True)


def slow_down(model: Ensemble) -> tuple[Intervals, Intervals]:
    """Make experts slow to read and to run; when they were read, and when they ran, from now on."""
    reads, calls = Intervals(), Intervals()
    for field in model.experts:
        network = field.network
        assert isinstance(network, StoredNetwork)
        network._read = partial(_read_slowly, network._read, reads)
        network.network.register_forward_pre_hook(lambda *_: _wait(COMPUTING, calls))
    return reads, calls


def _read_slowly(read: Callable[[torch.dtype], Any], reads: Intervals, dtype: torch.dtype) -> Any:
    _wait(READING, reads)
    return read(dtype)


def _wait(seconds: float, waits: Intervals) -> None:
    began = time.perf_counter()
    time.sleep(seconds)
    waits.append((began, time.perf_counter()))
