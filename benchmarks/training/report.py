"""The tables, and whether what was wanted is there."""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.conversion.report import finite, table
from benchmarks.inference.report import met
from benchmarks.inference.times import Times, quartiles
from benchmarks.training.settings import Settings
from benchmarks.training.times import DIFFUSERS, OWN, OWN_PRODUCTS, PRODUCTS
from hddm.utils.files import write_json

TARGETS = {("cpu", "float32"): 1.05, ("cpu", "bfloat16"): 1.2, ("cuda", "bfloat16"): 1.25}
"""Images a second over those of diffusers' DiT, at least; on a GPU compiled."""


def write_training(
    folder: Path, settings: Settings, content: Mapping[str, Any], times: Mapping[str, Times]
) -> Path:
    """Write ``<date>-<name>-speed-<device>`` as .md and .json; return the first."""
    folder.mkdir(parents=True, exist_ok=True)
    compiled = "-compiled" if content["compiled"] else ""
    device = content["device"].replace(":", "-")
    stem = folder / f"{content['measured_on']['date']}-{settings.name}-speed-{device}{compiled}"
    lines = [
        "# Training: images a second, beside a plain loop around diffusers' DiT",
        "",
        *_head(content),
        *_method(settings, content),
    ]
    for dtype, each in times.items():
        target = TARGETS.get((content["device"].split(":")[0], dtype))
        lines += [f"{dtype}:", "", *_times(settings, content, each), "", *_verdicts(each, target), ""]
    stem.with_suffix(".md").write_text("\n".join(lines).rstrip() + "\n")
    write_json(stem.with_suffix(".json"), finite(content))
    return stem.with_suffix(".md")


def speed_ups(times: Times, name: str) -> list[float]:
    """Images a second of one way over those of diffusers' DiT, round by round."""
    return [base.seconds / one.seconds for base, one in zip(times[DIFFUSERS], times[name], strict=True)]


def _head(content: Mapping[str, Any]) -> list[str]:
    facts = content["measured_on"]
    packages = ", ".join(f"{name} {number}" for name, number in facts["packages"].items())
    command = f"python -m benchmarks.training {content['command']}".strip()
    return [
        f"{facts['date']} · `{command}` · {facts['cores']} cores ({facts['processor']}), "
        f"threads: {content['threads']}, {content['accelerator'] or 'no accelerator'} · "
        f"{facts['platform']} · Python {facts['python']}, {packages} · {content['seconds']:,.0f} s. "
        f"Load average when it began: {facts['load_average'][0]}, when it ended: {content['load_at_end']}.",
        "",
    ]


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
        f"{settings.steps + 1} steps on end the first does not count, of the others the median does. Medians "
        "over rounds, in brackets quartiles; ratios of wall times are taken within a round. Processor time "
        "is that of all threads.",
        "",
    ]


def _times(settings: Settings, content: Mapping[str, Any], times: Times) -> list[str]:
    rows = []
    base = statistics.median(one.processor for one in times[DIFFUSERS])
    for name, each in times.items():
        weights = content["million_parameters"].get(name)
        processor = statistics.median(one.processor for one in each)
        rows.append(
            [
                name,
                "" if weights is None else f"{weights:.1f}",
                _spread([one.seconds for one in each], 3),
                f"{statistics.median(settings.batch / one.seconds for one in each):,.1f}",
                _spread(speed_ups(times, name), 2),
                f"{base / processor:.2f}",
            ]
        )
    columns = ["a step", "weights, 10⁶", "wall, s", "images/s", "× diffusers", "by processor time"]
    return table(columns, rows)


def _verdicts(times: Times, target: float | None) -> list[str]:
    low, gain, high = quartiles(speed_ups(times, OWN))
    aim = "" if target is None else f"; target at least {target:g}: {met(gain, target, at_most=False)}"
    shares = [
        statistics.median(p.seconds / one.seconds for p, one in zip(times[part], times[whole], strict=True))
        for part, whole in ((PRODUCTS, DIFFUSERS), (OWN_PRODUCTS, OWN))
    ]
    return [
        f"- {OWN} takes in {gain:.2f} [{low:.2f}, {high:.2f}] × the images a second of {DIFFUSERS}{aim}.",
        f"- Matrix products and attention are {shares[0]:.0%} of a step of diffusers' DiT, and "
        f"{shares[1]:.0%} of {OWN}'s.",
    ]


def _spread(values: list[float], digits: int) -> str:
    low, median, high = quartiles(values)
    return f"{median:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"
