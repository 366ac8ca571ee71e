"""The tables, and whether what was wanted is there."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.inference.memory import ALL, FEW, STORED_DTYPE
from benchmarks.inference.models import Settings
from benchmarks.inference.times import EVERY, LOOP, SINGLE, TOP_1, TOP_2
from benchmarks.reports import met, table
from benchmarks.timing import A_ROUND, Times, processor, quartiles, ratios, spread

LIMITS = {TOP_1: 1.15, TOP_2: 2.25}
"""Times that of the single model a step at most, the router included."""
LEAST_GAIN = 5.0
"""Of top-1 over the loop over all experts."""


def lines(
    settings: Settings,
    content: Mapping[str, Any],
    times: Mapping[str, Times],
    memory: Mapping[str, tuple[int, Sequence[Mapping[str, Any]]]],
) -> list[str]:
    """The report, its title first."""
    text = ["# Inference: what routing costs a step, and what an ensemble takes of memory"]
    text += ["## Time a step", "", *_method(settings, content)]
    for dtype, each in times.items():
        text += [f"{dtype}:", "", *_times(each), "", *_verdicts(each), ""]
    if memory:
        text += ["## Memory", "", *_memory_method(settings, content["device"])]
    for dtype, (size, rows) in memory.items():
        text += [
            f"{dtype}:",
            "",
            *_memory(settings, size, rows),
            "",
            _memory_verdict(settings, rows),
            "",
        ]
    return text


def _method(settings: Settings, content: Mapping[str, Any]) -> list[str]:
    expert, router = content["mflop"]
    size, asked, side = settings.size, settings.router, settings.side
    how = "`torch.compile` compiled every network" if content["compiled"] else "Eager, not compiled"
    return [
        f"{settings.experts} experts of random weights (`ExpertTransformer`, width {size.hidden_size}, depth "
        f"{size.depth}, {size.num_heads} heads, patch {settings.patch}: {expert:,.0f} MFLOP a sample), every "
        "other one a DDPM that is converted exactly, held as `hddm.load` holds them. "
        f"{settings.batch} samples {settings.channels}×{side}×{side} ({settings.tokens} tokens), no "
        f"gradients, no guidance. {how}. A step is one call of the velocity:",
        "",
        "- single model: expert 0 as a `VelocityField`; below it the forward of its network alone;",
        "- diffusers: one pass of the loop of its `DiTPipeline` at guidance_scale 1 (`scale_model_input`, "
        "`DiTTransformer2DModel` of the same width, depth, heads and patch, `DDIMScheduler.step`). That "
        "network does not go without labels, so all are the null class; every block embeds time and label "
        "anew;",
        f"- ensemble: the router (`RouterTransformer`, width {asked.hidden_size}, depth {asked.depth}: "
        f"{router / expert:.1%} of an expert's operations) runs, and then its choice is replaced by one "
        f"that gives every expert {settings.batch // settings.experts} samples at top-1, twice as many at "
        "top-2;",
        "- loop: the router runs, then every expert on the whole batch;",
        f"- router at every n: {settings.solver_steps} Euler steps of `hddm.sampling.integrate`.",
        "",
        f"All ways in turn, in a new order each of {settings.repeats} rounds, after a warm-up; the single "
        f"model, top-1 and top-2 {A_ROUND} times a round, of which the median counts. Medians over rounds, "
        "in brackets quartiles; ratios of wall times are taken within a round. Processor time is that of all "
        "threads; it depends less on what else the machine does.",
        "",
    ]


def _times(times: Times) -> list[str]:
    rows, single = [], processor(times, SINGLE)
    for name, each in times.items():
        rows.append(
            [
                name,
                spread([one.seconds for one in each], 3),
                spread(ratios(times, name, SINGLE), 2),
                f"{processor(times, name):.3f}",
                f"{processor(times, name) / single:.2f}",
            ]
        )
    return table(["a step", "wall, s", "× single model", "processor, s", "× single model"], rows)


def _verdicts(times: Times) -> list[str]:
    found = []
    for name, limit in LIMITS.items():
        low, median, high = quartiles(ratios(times, name, SINGLE))
        found.append(
            f"- {name}: {median:.2f} [{low:.2f}, {high:.2f}] × the single model; target at most {limit}: "
            f"{met(median, limit)}."
        )
    low, gain, high = quartiles(ratios(times, LOOP, TOP_1))
    found.append(
        f"- {TOP_1} is {gain:.1f} [{low:.1f}, {high:.1f}] × as fast as the {LOOP}; target at least "
        f"{LEAST_GAIN:g}: {met(gain, LEAST_GAIN, at_most=False)}."
    )
    rare = [name for name in times if name.startswith(EVERY)]
    often = ", ".join(
        f"{spread(ratios(times, name, rare[0]), 2)} at every {name[-1]}" for name in rare[1:]
    )
    return [*found, f"- Time a step beside a router asked at every step: {often}."]


_ON_CPU = (
    "Resident is the peak of all resident pages (VmHWM) above those of the process when it has imported "
    "everything and run a tiny network. Pages of mapped weights count in it, although the kernel may drop "
    "them; own is the peak of anonymous pages alone (RssAnon, sampled every 2 ms), which it may not drop. "
    "In the dtype of the files weights are mapped, not copied. On the CPU `ram` keeps all that it has read "
    "where it is used, so that it frees nothing. The page cache is warm. "
)
_ON_CUDA = "Resident and own both are what torch's allocator of the accelerator gave out at most. "


def _memory_method(settings: Settings, device: str) -> list[str]:
    size = settings.stored
    return [
        f"Ensemble folders of {settings.few} and of {settings.experts} experts (width {size.hidden_size}, "
        f"depth {size.depth}, {STORED_DTYPE} on disk) with the router, each loaded by `hddm.load` in a fresh "
        f"process; top-1, {settings.memory_batch} samples shared out evenly among all experts, "
        f"{settings.memory_steps} steps. {_ON_CUDA if device.startswith('cuda') else _ON_CPU}"
        '"Opened" is the peak before any expert ran, records and the router read.',
        "",
    ]


def _memory(settings: Settings, size: int, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    body = []
    for row in rows:
        limit = "" if row["room"] is None else f", max_memory {row['max_memory'] / 1e6:,.0f} MB"
        above = row["resident"] - row["resident_opened"]
        count = settings.experts if row["folder"] == ALL else settings.few
        body.append(
            [
                f"{count} experts, {row['offload']}{limit}",
                f"{row['resident_opened'] / 1e6:,.0f}",
                f"{row['resident'] / 1e6:,.0f}",
                f"{above / size:.2f}",
                f"{row['own'] / 1e6:,.0f}",
                f"{row['seconds_a_step']:.2f}",
            ]
        )
    columns = [
        "ensemble, offload",
        "opened, MB",
        "resident, MB",
        f"less opened, in experts of {size / 1e6:.0f} MB",
        "own, MB",
        "last step, s",
    ]
    return table(columns, body)


def _memory_verdict(settings: Settings, rows: Sequence[Mapping[str, Any]]) -> str:
    few = next(row["resident"] for row in rows if row["folder"] == FEW)
    disk = next(row["resident"] for row in rows if (row["folder"], row["offload"]) == (ALL, "disk"))
    return (
        f"- {settings.experts} experts with offload disk peak at {disk / 1e6:,.0f} MB, {settings.few} loaded "
        f"ones at {few / 1e6:,.0f} MB; target less: {met(disk, few)}."
    )
