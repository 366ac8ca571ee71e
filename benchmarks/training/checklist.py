"""What only a GPU can show of training and sampling: speed, precision, offload, routing, resume, students.

`benchmarks.acceptance` runs these checks. On a CPU all is small, and what needs a GPU is left out.
"""

import gc
import json
import math
import signal
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from diffusers.utils import logging
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, schedule

from benchmarks.figures import Result, at_least, at_most, holds, told
from benchmarks.harness import digit_shards
from benchmarks.inference import models, times
from benchmarks.inference.memory import ALL, load_even, peak, write_ensembles
from benchmarks.timing import between, now, ratios, spread
from benchmarks.training.loops import OwnLoop
from benchmarks.training.networks import CUDA, QUICK, Settings, expert
from benchmarks.training.report import MOST_WAIT, TARGETS
from benchmarks.training.times import DIFFUSERS, OWN, measure_times
from hddm.experts.assembly import assemble
from hddm.experts.loading import load
from hddm.networks.sizes import size_config
from hddm.sampling import sample
from hddm.training.distill import distill
from hddm.training.expert import train_expert
from hddm.training.loop import StepReport
from hddm.training.router import train_router
from hddm.training.settings import DistillSettings, ExpertSettings, RouterSettings, RunOptions
from hddm.utils.errors import Stopped

WARM_UP, PROFILED = 5, 20
"""Steps before the device is watched, and those that it is watched for."""
HALF_STEPS = 50
IMAGES, SAMPLING_STEPS = 64, 10
NOISE = 10
"""Times the difference of two trainings that a resumed one differs from the first at most."""
IDLE, HALF = "idle device", "fp16"
NEED_GPU = (IDLE, HALF)


@dataclass(frozen=True)
class Sizes:
    """Of all checks; ``expert`` is the size of experts that are trained on digits in so many ``steps``."""

    networks: Mapping[str, Settings]
    loop: Settings
    ensemble: models.Settings
    expert: str
    steps: int
    name: str = "checklist"


def _network(size: str, batch: int) -> Settings:
    config = size_config(size)
    shape = {"patch": config.pop("patch_size"), **config}
    return replace(CUDA, name=size, batch=batch, rounds=5, **shape)


SPEEDS = {"S/2": 4000, "B/2": 1500, "XL/2": 400}
"""Images per second of hddm, at least, on one H100; 400 with XL/2 is as fast as public code, 500 faster."""
LARGE = Sizes(
    # Networks, optimisers and activations of both ways together stay below 80 GB.
    {size: _network(size, batch) for size, batch in (("S/2", 256), ("B/2", 128), ("XL/2", 64))},
    _network("B/2", 128),
    models.CUDA,
    "12x384/2",
    200,
)
SMALL = Sizes({"quick": QUICK}, QUICK, models.QUICK, "tiny", 12)


def _is_gpu(device: str) -> bool:
    return torch.device(device).type == "cuda"


def checks(device: str) -> dict[str, Callable[[str], Result]]:
    """All checks of a device, by name."""
    sizes = LARGE if _is_gpu(device) else SMALL
    # On a CPU compiling takes longer than all checks.
    ways = ["eager", "compiled"] if _is_gpu(device) else ["eager"]
    return {
        **{f"step time, {name}": partial(step_times, one) for name, one in sizes.networks.items()},
        IDLE: partial(idle, sizes.loop),
        HALF: partial(half_precision, sizes.loop),
        "offload": partial(offloading, sizes),
        **{
            f"routed inference, {way}": partial(routed, sizes.ensemble, way == "compiled")
            for way in ways
        },
        "resume": partial(resuming, sizes),
        "students of few steps": partial(students, sizes),
    }


def step_times(settings: Settings, device: str) -> Result:
    """Time steps of hddm's loop, with its wait for inputs, and of a plain one around diffusers' DiT."""
    compiled = _is_gpu(device)
    taken, weights, waited = measure_times(settings, device, "bfloat16", compiled, (DIFFUSERS, OWN))
    gain = statistics.median(ratios(taken, DIFFUSERS, OWN))
    waits = 100 * waited
    shape = "×".join(map(str, settings.shape))
    notes = [
        f"Width {settings.hidden_size}, depth {settings.depth}, {shape} in patches of {settings.patch}, "
        f"batch {settings.batch}, {settings.classes} classes, bfloat16, "
        f"{'compiled' if compiled else 'eager'}."
    ]
    figures = []
    for way, each in taken.items():
        seconds = [one.seconds for one in each]
        figures.append(
            told(f"a step of {way}, wall", spread(seconds, 3), goal="median and quartiles")
        )
    what = f"images per second over {DIFFUSERS}"
    speed = statistics.median(settings.batch / one.seconds for one in taken[OWN])
    if compiled:
        figures.append(at_least(what, gain, TARGETS["cuda", "bfloat16"]))
        figures.append(at_most("wait for inputs, share of a step", waits, MOST_WAIT, " %"))
    else:
        figures += [told(what, gain), told("wait for inputs, share of a step", waits, " %")]
    goal = SPEEDS.get(settings.name)
    if goal is not None:
        figures.append(at_least("images per second (goal on an H100)", speed, goal))
    else:
        figures.append(told("images per second", speed))
    figures += [told(f"weights of {way}", number, " million") for way, number in weights.items()]
    return Result(figures, notes, not compiled)


def _loop(
    settings: Settings, device: str, dtype: str = "bfloat16", compiled: bool = False
) -> OwnLoop:
    return OwnLoop(expert(settings, "single"), settings, device, dtype, compiled)


def idle(settings: Settings, device: str) -> Result:
    """Measure which share of the time no kernel runs on the device in hddm's loop."""
    loop = _loop(settings, device, compiled=_is_gpu(device))
    profiler, wall = watched(loop, device, ProfilerActivity.CUDA)
    running = covered(times_of(of_kind(events_of(profiler), "kernel")))
    if not running:
        raise RuntimeError(
            "the profiler saw no kernel; it may lack the right to read the device's counters"
        )
    share = 1 - running / wall
    figures = [
        told(f"no kernel runs, share of {PROFILED} steps", 100 * share, " %"),
        told("a step", 1000 * wall / PROFILED, " ms"),
    ]
    return Result(figures, ["The profiler's own work is in the share."])


def watched(loop: OwnLoop, device: str, activity: ProfilerActivity) -> tuple[profile, float]:
    """Record `PROFILED` steps of a loop after a warm-up; the record, and the seconds of these steps."""
    marks = []
    steps = schedule(wait=0, warmup=WARM_UP, active=PROFILED, repeat=1)
    with profile(activities=[activity], schedule=steps) as profiler:

        def step_done() -> None:
            ended = now(device)
            # Begins to record after the warm-up, and ends after the last step.
            profiler.step()
            marks.append((ended, now(device)))

        loop.run(WARM_UP + PROFILED, step_done)
    return profiler, between(marks[WARM_UP - 1][1], marks[-1][0]).seconds


Intervals = list[tuple[float, float]]
"""Begin and end, in seconds."""


def events_of(profiler: profile) -> list[dict[str, Any]]:
    """What a profiler recorded, event by event; it tells them once."""
    with tempfile.TemporaryDirectory() as place:
        profiler.export_chrome_trace(f"{place}/trace.json")
        events: list[dict[str, Any]] = json.loads(Path(place, "trace.json").read_text())[
            "traceEvents"
        ]
    return events


def times_of(events: Sequence[Mapping[str, Any]]) -> Intervals:
    """Begin and end of each event."""
    return [(one["ts"] / 1e6, (one["ts"] + one["dur"]) / 1e6) for one in events]


def of_kind(
    events: Sequence[Mapping[str, Any]], category: str, beginning: str = ""
) -> list[Mapping[str, Any]]:
    """Events of a category, such as ``kernel``, whose names begin so."""
    found = []
    for one in events:
        if one.get("cat") == category and one["name"].startswith(beginning):
            found.append(one)
    return found


def covered(intervals: Sequence[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    length, reached = 0.0, -math.inf
    for begins, ends in sorted(intervals):
        length += max(0.0, ends - max(begins, reached))
        reached = max(reached, ends)
    return length


def shared(some: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> float:
    """Length of the time in which one of ``some`` and one of ``others`` are there."""
    return covered(some) + covered(others) - covered([*some, *others])


def half_precision(settings: Settings, device: str) -> Result:
    """Train in fp16; every loss is finite."""
    scales: list[float] = []

    def step_done(report: StepReport) -> None:
        scales.append(report.state.scaler.get_scale())

    losses = _loop(settings, device, "float16").fit(HALF_STEPS, [step_done]).state.losses
    finite = sum(map(math.isfinite, losses))
    lowered = sum(after < before for before, after in pairwise(scales))
    figures = [
        at_least(f"finite losses of {HALF_STEPS}", finite, HALF_STEPS),
        told("first loss", losses[0]),
        told("last loss", losses[-1]),
        told("scale of the gradients at the end", scales[-1]),
        told("times that it was lowered", float(lowered)),
    ]
    return Result(figures)


def offloading(sizes: Sizes, device: str) -> Result:
    """Sample an ensemble whose idle experts wait in the CPU's memory, and one that is all on the device."""
    with tempfile.TemporaryDirectory() as place:
        write_ensembles(sizes.ensemble, Path(place))
        found = {way: _sampled(f"{place}/{ALL}", way, sizes, device) for way in ("none", "ram")}
    is_same = torch.equal(found["none"][0], found["ram"][0])
    seconds, peaks = ({way: one[k] for way, one in found.items()} for k in (1, 2))
    figures = [
        holds("images with and without offloading have the same bytes", is_same),
        told("time with offloading over without", seconds["ram"] / seconds["none"]),
    ]
    for way in found:
        figures.append(told(f"time, {way}", seconds[way], " s"))
        figures.append(told(f"peak memory, {way}", peaks[way] / 1e6, " MB"))
    notes = [
        f"{sizes.ensemble.experts} experts in float32, top-1, {IMAGES} images in {SAMPLING_STEPS} steps."
    ]
    return Result(figures, notes, not _is_gpu(device))


def _sampled(path: str, offload: str, sizes: Sizes, device: str) -> tuple[Tensor, float, int]:
    """Images, seconds of a second time, and peak memory."""
    # The ensemble before may still be there.
    gc.collect()
    with peak(device) as before:
        pass
    with peak(device) as taken:
        model = load_even(path, torch.float32, device, offload=offload)
        images = sample(model, IMAGES, steps=SAMPLING_STEPS).cpu()
        began = now(device)
        sample(model, IMAGES, steps=SAMPLING_STEPS)
        seconds = between(began, now(device)).seconds
    return images, seconds, taken[0] - before[0]


def routed(settings: models.Settings, compiled: bool, device: str) -> Result:
    """Time a step of a routed ensemble beside one model."""
    # It warns of casting a whole model.
    logging.set_verbosity_error()
    taken = times.measure_times(settings, device, "bfloat16", compiled)
    ways = (times.SINGLE, times.TOP_1, times.TOP_2, times.FULL)
    milliseconds = {way: [1000 * one.seconds for one in taken[way]] for way in ways}
    figures = []
    for way in ways:
        figures.append(told(f"a step, {way}", spread(milliseconds[way], 2), goal="ms"))
        shown = spread(ratios(taken, way, times.SINGLE), 2)
        figures.append(told(f"{way} over a single model", shown))
    notes = [
        f"{settings.experts} experts of width {settings.size.hidden_size}, batch {settings.batch}, bfloat16."
    ]
    return Result(figures, notes, not _is_gpu(device))


def _of_expert(sizes: Sizes, device: str, **changes: Any) -> dict[str, Any]:
    same = {"size": sizes.expert, "steps": sizes.steps, "batch_size": 64, "device": device}
    return same | {"mixed_precision": "bf16" if _is_gpu(device) else "no", **changes}


def resuming(sizes: Sizes, device: str) -> Result:
    """Stop a training by a signal and resume it, beside two that are not stopped."""
    settings = ExpertSettings(objective="flow", **_of_expert(sizes, device))

    def stop(step: int, loss: float, seconds: float) -> None:
        if step == sizes.steps // 2:
            signal.raise_signal(signal.SIGTERM)

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        shard = digit_shards(place, 2) / "shard_0"
        whole, again = (train_expert(shard, place / name, settings) for name in ("whole", "again"))
        try:
            train_expert(shard, place / "stopped", settings, on_step=stop, run=RunOptions())
        except Stopped:
            resumed = train_expert(shard, place / "stopped", settings, run=RunOptions(resume=True))
        else:
            raise RuntimeError("the training did not stop after a signal")
    gaps = {
        name: max(abs(a - b) for a, b in zip(losses, whole, strict=True))
        for name, losses in (("resumed", resumed), ("run twice", again))
    }
    # Kernels of a GPU may sum in another order each time; on a CPU both are 0.
    limit = NOISE * gaps["run twice"]
    figures = [
        told("largest difference of losses, run twice", gaps["run twice"]),
        at_most("largest difference of losses, resumed", gaps["resumed"], limit),
    ]
    return Result(figures, is_stand_in=not _is_gpu(device))


def students(sizes: Sizes, device: str) -> Result:
    """Distil a routed teacher of two experts into students of two and of one step."""
    common = partial(_of_expert, sizes, device)
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        shards = digit_shards(place, 2)
        experts = [place / str(k) for k in range(2)]
        for k, out in enumerate(experts):
            train_expert(shards / f"shard_{k}", out, ExpertSettings(objective="flow", **common()))
        train_router(shards, place / "router", RouterSettings(**common(size="tiny")))
        assemble(experts, place / "teacher", place / "router", strategy="full")
        for number in (2, 1):
            seconds: list[float] = []
            settings = DistillSettings(
                **common(teacher="routed", sampling_steps=number, trajectories=8 * sizes.steps)
            )
            out = place / f"student {number}"
            losses = distill(
                place / "teacher",
                shards,
                out,
                settings,
                on_step=lambda step, loss, taken, kept=seconds: kept.append(taken),  # type: ignore[misc]
                init=experts[0],
            )
            # The first step makes what the others find made.
            taken = statistics.median(seconds[1:])
            images = sample(load(out, device=device), IMAGES)
            fine = all(map(math.isfinite, losses)) and bool(images.isfinite().all())
            what = f"student of {number} steps"
            figures.append(holds(f"{what}: losses and samples are finite", fine))
            figures.append(told(f"{what}: a step", 1000 * taken, " ms"))
    return Result(figures, is_stand_in=not _is_gpu(device))
