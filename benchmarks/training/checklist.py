"""One run of all that only a GPU can show: speed, precision, offload, routing, resume and students.

Every check has a process of its own, so that one that fails is told and the others go on. On a CPU all is
small, and what needs a GPU is left out.
"""

import gc
import json
import math
import signal
import statistics
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from diffusers.utils import logging
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, schedule

from benchmarks.harness import Start, apart, digit_shards
from benchmarks.inference import models, times
from benchmarks.inference.memory import ALL, load_even, peak, write_ensembles
from benchmarks.reports import met, table
from benchmarks.timing import between, name_of, now, ratios, spread
from benchmarks.training.loops import OwnLoop
from benchmarks.training.networks import CUDA, QUICK, Settings, expert
from benchmarks.training.report import TARGETS, gain_line, times_table, wait_line
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
DONE, BROKEN, NO_GPU = "done", "not as promised", "needs a GPU"
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


@dataclass(frozen=True)
class Found:
    """What a check tells, in lines and in numbers, and whether it is as promised."""

    lines: Sequence[str]
    values: Mapping[str, Any] = field(default_factory=dict)
    is_fine: bool = True


def measure_checklist(
    start: Start, device: str, threads: int, quick: bool = False
) -> tuple[Path, bool]:
    """Run all checks; returns the Markdown file, and whether all ran and found what is promised.

    The file is written after each check: a run that is cut off leaves those that it has made.
    """
    is_gpu = _is_gpu(device)
    sizes = replace(SMALL, name=f"{LARGE.name}-quick") if quick else LARGE if is_gpu else SMALL
    content: dict[str, Any] = {
        "device": device,
        "accelerator": torch.cuda.get_device_name(device) if is_gpu else None,
        "threads": threads,
        "settings": asdict(sizes),
        "checks": {},
    }
    told: dict[str, tuple[str, Sequence[str]]] = {}
    lines: Sequence[str]
    written, is_fine = Path(), True
    for name, check in _checks(sizes, device).items():
        values: Mapping[str, Any] = {}
        if name in NEED_GPU and not is_gpu:
            outcome, lines = NO_GPU, []
        else:
            try:
                found = apart(threads, check, device)
            # Whatever a check ends with, the others go on.
            except Exception as error:
                traceback.print_exception(error)
                first = next(iter(str(error).splitlines()), "")
                outcome, lines, is_fine = "failed", [f"`{type(error).__name__}: {first}`"], False
            else:
                outcome, lines, values = (
                    DONE if found.is_fine else BROKEN,
                    found.lines,
                    found.values,
                )
                is_fine &= found.is_fine
        told[name] = outcome, lines
        content["checks"][name] = {"outcome": outcome, "lines": list(lines), **values}
        print(f"{name}: {outcome}", flush=True)
        written = start.write(
            name_of(sizes, device, False), _lines(told, means=sizes is LARGE), content
        )
    return written, is_fine


def _is_gpu(device: str) -> bool:
    return torch.device(device).type == "cuda"


def _lines(told: Mapping[str, tuple[str, Sequence[str]]], means: bool) -> list[str]:
    text = ["# Checks on a GPU"]
    if not means:
        text += ["Small, to see that every check runs: **its numbers mean nothing for a GPU**.", ""]
    text += table(["check", "outcome"], [[name, outcome] for name, (outcome, _) in told.items()])
    for name, (_, lines) in told.items():
        if lines:
            text += ["", f"## {name.capitalize() if name.islower() else name}", "", *lines]
    return text


def _checks(sizes: Sizes, device: str) -> dict[str, Callable[[str], Found]]:
    """All checks, of a device, by name."""
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


def step_times(settings: Settings, device: str) -> Found:
    """Time steps of hddm's loop, with its wait for inputs, and of a plain one around diffusers' DiT."""
    compiled = _is_gpu(device)
    taken, weights, waited = measure_times(settings, device, "bfloat16", compiled, (DIFFUSERS, OWN))
    target = TARGETS["cuda", "bfloat16"] if compiled else None
    lines = [
        f"Width {settings.hidden_size}, depth {settings.depth}, {'×'.join(map(str, settings.shape))} in "
        f"patches of {settings.patch}, batch {settings.batch}, {settings.classes} classes, bfloat16, "
        f"{'compiled' if compiled else 'eager'}:",
        "",
        *times_table(settings, weights, taken),
        "",
        gain_line(taken, target),
        wait_line(waited),
    ]
    if compiled and (goal := SPEEDS.get(settings.name)):
        speed = statistics.median(settings.batch / one.seconds for one in taken[OWN])
        lines.append(
            f"- {speed:,.0f} images/s; goal on an H100: {goal:,}: {met(speed, goal, at_most=False)}."
        )
    seconds = {way: [one.seconds for one in each] for way, each in taken.items()}
    return Found(lines, {"seconds": seconds, "million_parameters": weights, "waited": waited})


def _loop(
    settings: Settings, device: str, dtype: str = "bfloat16", compiled: bool = False
) -> OwnLoop:
    return OwnLoop(expert(settings, "single"), settings, device, dtype, compiled)


def idle(settings: Settings, device: str) -> Found:
    """Measure which share of the time no kernel runs on the device in hddm's loop."""
    loop = _loop(settings, device, compiled=_is_gpu(device))
    profiler, wall = watched(loop, device, ProfilerActivity.CUDA)
    running = covered(traced(profiler, "kernel"))
    if not running:
        raise RuntimeError(
            "the profiler saw no kernel; it may lack the right to read the device's counters"
        )
    share = 1 - running / wall
    line = (
        f"- No kernel runs for {share:.1%} of {PROFILED} steps of {1000 * wall / PROFILED:.1f} ms; the "
        "profiler's own work is in this share."
    )
    return Found([line], {"share": share, "seconds_a_step": wall / PROFILED})


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


def traced(profiler: profile, kind: str) -> list[tuple[float, float]]:
    """Begin and end, in seconds, of each event of a ``kind`` that a profiler recorded; it tells them once."""
    with tempfile.TemporaryDirectory() as place:
        profiler.export_chrome_trace(f"{place}/trace.json")
        events = json.loads(Path(place, "trace.json").read_text())["traceEvents"]
    return [
        (one["ts"] / 1e6, (one["ts"] + one["dur"]) / 1e6)
        for one in events
        if one.get("cat") == kind
    ]


def covered(intervals: Sequence[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    length, reached = 0.0, -math.inf
    for begins, ends in sorted(intervals):
        length += max(0.0, ends - max(begins, reached))
        reached = max(reached, ends)
    return length


def half_precision(settings: Settings, device: str) -> Found:
    """Train in fp16; every loss is finite."""
    scales: list[float] = []

    def step_done(report: StepReport) -> None:
        scales.append(report.state.scaler.get_scale())

    losses = _loop(settings, device, "float16").fit(HALF_STEPS, [step_done]).state.losses
    finite = sum(map(math.isfinite, losses))
    lowered = sum(after < before for before, after in pairwise(scales))
    line = (
        f"- {finite} of {HALF_STEPS} losses are finite, {losses[0]:.3f} at first and {losses[-1]:.3f} at "
        f"last; the scale is {scales[-1]:g} at the end, and was lowered {lowered} times after the first step."
    )
    values = {"losses": losses, "scales": scales}
    return Found([line], values, finite == HALF_STEPS)


def offloading(sizes: Sizes, device: str) -> Found:
    """Sample an ensemble whose idle experts wait in the CPU's memory, and one that is all on the device."""
    with tempfile.TemporaryDirectory() as place:
        write_ensembles(sizes.ensemble, Path(place))
        found = {way: _sampled(f"{place}/{ALL}", way, sizes, device) for way in ("none", "ram")}
    is_same = torch.equal(found["none"][0], found["ram"][0])
    seconds, peaks = ({way: one[k] for way, one in found.items()} for k in (1, 2))
    rows = [[way, f"{seconds[way]:.3f}", f"{peaks[way] / 1e6:,.0f}"] for way in found]
    lines = [
        f"{sizes.ensemble.experts} experts in float32, top-1, {IMAGES} images in {SAMPLING_STEPS} steps:",
        "",
        *table(["offload", "time, s", "peak memory, MB"], rows),
        "",
        f"- The images have {'the same' if is_same else '**other**'} bytes; ram takes "
        f"{seconds['ram'] / seconds['none']:.2f} × the time.",
    ]
    return Found(lines, {"seconds": seconds, "peak_bytes": peaks, "same_bytes": is_same}, is_same)


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


def routed(settings: models.Settings, compiled: bool, device: str) -> Found:
    """Time a step of a routed ensemble beside one model."""
    # It warns of casting a whole model.
    logging.set_verbosity_error()
    taken = times.measure_times(settings, device, "bfloat16", compiled)
    ways = (times.SINGLE, times.TOP_1, times.TOP_2, times.FULL)
    milliseconds = {way: [1000 * one.seconds for one in taken[way]] for way in ways}
    rows = [
        [way, spread(milliseconds[way], 2), spread(ratios(taken, way, times.SINGLE), 2)]
        for way in ways
    ]
    lines = [
        f"{settings.experts} experts of width {settings.size.hidden_size}, batch {settings.batch}, bfloat16:",
        "",
        *table(["a step", "wall, ms", "× single model"], rows),
    ]
    return Found(lines, {"milliseconds": milliseconds})


def _of_expert(sizes: Sizes, device: str, **changes: Any) -> dict[str, Any]:
    same = {"size": sizes.expert, "steps": sizes.steps, "batch_size": 64, "device": device}
    return same | {"mixed_precision": "bf16" if _is_gpu(device) else "no", **changes}


def resuming(sizes: Sizes, device: str) -> Found:
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
    lines = [
        f"- {name}: losses of {sizes.steps} steps "
        + ("are bit-equal." if gap == 0 else f"differ by at most {gap:.2g}.")
        for name, gap in gaps.items()
    ]
    # Kernels of a GPU may sum in another order each time; on a CPU both are 0.
    return Found(lines, {"largest_difference": gaps}, gaps["resumed"] <= NOISE * gaps["run twice"])


def students(sizes: Sizes, device: str) -> Found:
    """Distil a routed teacher of two experts into students of two and of one step."""
    common = partial(_of_expert, sizes, device)
    rows, each, is_finite = [], {}, True
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
            is_finite &= fine
            rows.append([str(number), f"{1000 * taken:.1f}", "yes" if fine else "**no**"])
            each[str(number)] = {"seconds_a_step": taken, "finite": fine}
    columns = ["steps of the student", "ms a step", "losses and samples finite"]
    return Found(table(columns, rows), {"students": each}, is_finite)
