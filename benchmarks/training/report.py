"""The tables, and whether what was wanted is there."""

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.reports import met, table
from benchmarks.timing import Times, processor, quartiles, ratios, spread
from benchmarks.training.networks import Settings
from benchmarks.training.times import DIFFUSERS, OWN, OWN_PRODUCTS, PRODUCTS

TARGETS = {("cpu", "float32"): 1.05, ("cpu", "bfloat16"): 1.2, ("cuda", "bfloat16"): 1.25}
"""Images a second over those of diffusers' DiT, at least; on a GPU compiled."""

MOST_WAIT = 3
"""Per cent of a step that hddm's loop waits for its inputs, at most."""


def lines(settings: Settings, content: Mapping[str, Any], times: Mapping[str, Times]) -> list[str]:
    """The report, its title first."""
    text = ["# Training: images per second, beside a plain loop around diffusers' DiT"]
    text += _method(settings, content)
    for dtype, each in times.items():
        target = TARGETS.get((content["device"].split(":")[0], dtype))
        text += [
            f"{dtype}:",
            "",
            *times_table(settings, content["million_parameters"], each),
            "",
            *_verdicts(each, target),
            wait_line(content["waited"][dtype]),
            "",
        ]
    return text


def wait_line(share: float) -> str:
    """Share of a step that hddm's loop waits for its inputs, and whether that is little enough."""
    aim = met(100 * share, MOST_WAIT, at_most=True)
    return (
        f"- {OWN} waits {share:.2%} of a step for its inputs; target at most {MOST_WAIT} %: {aim}."
    )


def _method(settings: Settings, content: Mapping[str, Any]) -> list[str]:
    how = "`torch.compile` compiled every network" if content["compiled"] else "Eager, not compiled"
    image = "×".join(map(str, settings.shape))
    return [
        f"Width {settings.hidden_size}, depth {settings.depth}, {settings.num_heads} heads, {image} in "
        f"patches of {settings.patch} ({settings.tokens} tokens), batch {settings.batch}, {settings.classes} "
        f"classes, flow matching on random images. {how}. bfloat16 is autocast over float32 weights. "
        "Every way has AdamW (fused), gradients clipped to a norm, and a float32 EMA.",
        "",
        f"- {OWN}: `hddm.training.loop.fit` and `ExpertTransformer`, as `hddm train expert` has them (one "
        "modulation for all blocks: AdaLN-Single);",
        "- diffusers: `DiTTransformer2DModel` in a loop written by hand: autocast, `clip_grad_norm_` and EMA "
        "by foreach kernels, gradients set to None, one wait for the device a step. Ours in the plain loop "
        "stand in that same one;",
        "- adaLN-Zero: ours with a modulation for every block, as diffusers' DiT has. DiT is the larger "
        "network at equal width, depth, tokens and batch, and embeds time and label in every block anew; "
        "this row shows what of the gain does not come from fewer modulation weights;",
        "- products alone: every matrix product, convolution and attention of one step, forward and "
        "backward, computed again on the same tensors, and nothing else. A step cannot be "
        "quicker than its own.",
        "",
        f"All ways in turn, in a new order each of {settings.rounds} rounds, after a warm-up; of "
        f"{settings.steps + 2} steps on end, without the first and the last, the median counts. Medians "
        "over rounds, in brackets quartiles; ratios of wall times are taken within a round. Processor time "
        "is that of all threads.",
        "",
    ]


def times_table(settings: Settings, sizes: Mapping[str, float], times: Times) -> list[str]:
    """Times of steps; ``sizes`` are millions of parameters by the name of the way."""
    rows, base = [], processor(times, DIFFUSERS)
    for name, each in times.items():
        weights = sizes.get(name)
        rows.append(
            [
                name,
                "" if weights is None else f"{weights:.1f}",
                spread([one.seconds for one in each], 3),
                f"{statistics.median(settings.batch / one.seconds for one in each):,.1f}",
                spread(ratios(times, DIFFUSERS, name), 2),
                f"{base / processor(times, name):.2f}",
            ]
        )
    columns = ["a step", "weights, 10⁶", "wall, s", "images/s", "× diffusers", "by processor time"]
    return table(columns, rows)


def gain_line(times: Times, target: float | None) -> str:
    """Images a second of hddm's loop over those of diffusers' DiT, and whether they reach ``target``."""
    low, gain, high = quartiles(ratios(times, DIFFUSERS, OWN))
    aim = (
        ""
        if target is None
        else f"; target at least {target:g}: {met(gain, target, at_most=False)}"
    )
    return f"- {OWN} takes in {gain:.2f} [{low:.2f}, {high:.2f}] × the images per second of {DIFFUSERS}{aim}."


def _verdicts(times: Times, target: float | None) -> list[str]:
    products, own = (
        statistics.median(ratios(times, *both))
        for both in ((PRODUCTS, DIFFUSERS), (OWN_PRODUCTS, OWN))
    )
    return [
        gain_line(times, target),
        f"- Matrix products and attention are {products:.0%} of a step of diffusers' DiT, and "
        f"{own:.0%} of {OWN}'s.",
    ]
