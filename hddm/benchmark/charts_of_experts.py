"""Charts of what a model is made of: use of experts, router, errors by noise level, losses."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from hddm.benchmark.report_words import used_experts
from hddm.benchmark.results import Curve, ErrorCurve, Results, SeedRow
from hddm.benchmark.svg import GREY, HEIGHT, SYMBOLS, Chart, colour, panel, plain_ticks

_LOW = HEIGHT * 0.85


def use(results: Results) -> tuple[str, Chart] | None:
    """Mean weight of each expert over t, a panel a strategy, of the model with most of them."""
    asked: dict[str, dict[str, list[SeedRow]]] = {}
    for one in results.records:
        if one.use and "largest" in one.use[0]:
            strategies = asked.setdefault(one.model, {})
            others = strategies.setdefault(one.point.strategy, [])
            if not others or (others[0].table, others[0].row) == (one.table, one.row):
                others.append(one)
    if not asked:
        return None
    model = max(asked, key=lambda name: len(asked[name]))
    experts = len(next(iter(asked[model].values()))[0].use[0]["weights"])

    def paint(axes: Axes, strategy: str, records: Sequence[SeedRow]) -> None:
        times = [entry["t"] for entry in records[0].use]
        weights = np.mean([[entry["weights"] for entry in one.use] for one in records], axis=0)
        certain = np.mean([[entry["largest"] for entry in one.use] for one in records], axis=0)
        axes.stackplot(times, weights.T, colors=[colour(k) for k in range(experts)], alpha=0.75)
        axes.plot(times, certain, "k--", linewidth=1.2)
        axes.set_xlim(max(times), min(times))
        axes.set_ylim(0, 1)
        axes.set_xlabel("t, from noise to data")
        axes.set_ylabel("mean weight")
        axes.set_title(strategy, loc="left")

    panels = []
    for place, (strategy, records) in enumerate(asked[model].items()):
        shares = np.mean([entry["weights"] for one in records for entry in one.use], axis=0)
        said = ", ".join(f"expert {k} {share:.0%}" for k, share in enumerate(shares))
        alt = f"Weight of each expert over time with {strategy}. Means over time: {said}."
        panels.append(panel(f"use{place}", alt, partial(paint, strategy=strategy, records=records), _LOW))
    legend = [(colour(k), "■", f"expert {k}") for k in range(experts)]
    legend.append(("black", "╌", "the router's largest probability, mean over samples"))
    return model, Chart(tuple(panels), tuple(legend))


def reliability(results: Results) -> Chart | None:
    """What the router says against what is so, over all seeds; and its calibration error over t."""
    if not results.routers:
        return None
    kinds = (("raw", GREY, "s"), ("calibrated", colour(0), "o"))

    def outcomes(axes: Axes) -> None:
        axes.plot([0, 1], [0, 1], color=GREY, linestyle=":", linewidth=1)
        for kind, shade, marker in kinds:
            said, so = _pooled([getattr(one, kind)["bins"] for one in results.routers])
            axes.plot(said, so, color=shade, marker=marker, markersize=4)
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
        axes.set_xlabel("probability that the router says")
        axes.set_ylabel("share that is so")
        axes.set_title("reliability", loc="left")

    def over_time(axes: Axes) -> None:
        for kind, shade, marker in kinds:
            bins = [getattr(one, kind)["time_bins"] for one in results.routers]
            middle = [(one["from"] + one["to"]) / 2 for one in bins[0]]
            axes.plot(middle, _mean_of(bins, "ece"), color=shade, marker=marker, markersize=4)
        axes.set_xlim(0, 1)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("t")
        axes.set_ylabel("expected calibration error")
        axes.set_title("calibration error over t", loc="left")

    errors = {kind: np.mean([getattr(one, kind)["ece"] for one in results.routers]) for kind, *_ in kinds}
    said = f"Expected calibration error {errors['raw']:.3f} raw, {errors['calibrated']:.3f} calibrated."
    first = panel("reliability", f"Said probabilities against outcomes. {said}", outcomes)
    second = panel("ece", f"Calibration error of the router by time. {said}", over_time)
    legend = tuple((shade, SYMBOLS[marker], kind) for kind, shade, marker in kinds)
    return Chart((first, second), (*legend, (GREY, "┄", "perfectly calibrated")))


def errors(results: Results) -> Chart | None:
    """Velocity error by noise level, a curve an objective: mean and range over its experts and seeds."""
    found = used_experts(results)
    if not found:
        return None
    groups: dict[str, list[ErrorCurve]] = {}
    for one in found:
        groups.setdefault("single model" if one.shard is None else one.objective, []).append(one)

    def paint(axes: Axes, kind: str) -> None:
        for place, curves in enumerate(groups.values()):
            t, levels = _levels(curves, kind, "expert")
            axes.fill_between(t, levels.min(0), levels.max(0), color=colour(place), alpha=0.15, linewidth=0)
            axes.plot(t, levels.mean(0), color=colour(place), marker="o", markersize=3)
        t, plain = _levels(found, kind, "gaussian")
        axes.plot(t, plain.mean(0), color=GREY, linestyle="--", linewidth=1.2)
        axes.set_yscale("log")
        plain_ticks(axes)
        axes.set_xlabel("t, from data to noise")
        axes.set_ylabel("squared velocity error")
        axes.set_title("as sampled" if kind == "calibrated" else "networks alone", loc="left")

    means = {name: np.mean([one.calibrated["mean"] for one in curves]) for name, curves in groups.items()}
    said = ", ".join(f"{name} {mean:.3f}" for name, mean in means.items())
    panels = [
        panel(
            f"errors-{kind}",
            f"Velocity error by noise level, {kind}. Means over t: {said}.",
            partial(paint, kind=kind),
        )
        for kind in ("calibrated", "raw")
    ]
    legend = [(colour(k), "●", name) for k, name in enumerate(groups)]
    return Chart(tuple(panels), (*legend, (GREY, "╌", "best linear denoiser")))


def losses(results: Results) -> Chart:
    """Training losses, a panel a kind of training, a line a training."""
    groups: dict[str, list[Curve]] = {}
    for one in results.losses:
        name = one.kind if one.kind != "expert" else f"{one.objective} experts"
        groups.setdefault({"single": "single model"}.get(name, name), []).append(one)

    def paint(axes: Axes, title: str, curves: Iterable[Curve]) -> None:
        for one in curves:
            steps, values = zip(*one.loss, strict=True)
            smooth = _smooth(values)
            axes.plot(
                steps[len(steps) - len(smooth) :], smooth, color=colour(one.shard or 0), lw=0.9, alpha=0.7
            )
        axes.set_yscale("log")
        plain_ticks(axes)
        axes.set_xlabel("step")
        axes.set_ylabel("cross-entropy" if title == "router" else "loss")
        axes.set_title(title, loc="left")

    panels = []
    for place, (title, curves) in enumerate(groups.items()):
        last = np.mean([one.loss[-1][1] for one in curves])
        alt = f"Training loss of {title}: {len(curves)} trainings, {last:.3g} on average at the end."
        panels.append(panel(f"loss{place}", alt, partial(paint, title=title, curves=curves), _LOW))
    shards = sorted({one.shard for one in results.losses if one.shard is not None})
    return Chart(tuple(panels), tuple((colour(k), "━", f"shard {k}") for k in shards))


def _pooled(seeds: Sequence[Sequence[Mapping[str, float]]]) -> tuple[list[float], list[float]]:
    """Means and outcomes of bins, those of seeds put together by the tenth that they lie in."""
    sums: dict[int, list[float]] = {}
    for bins in seeds:
        for one in bins:
            total = sums.setdefault(min(int(one["mean"] * 10), 9), [0.0, 0.0, 0.0])
            for place, value in enumerate(
                (one["mean"] * one["count"], one["outcome"] * one["count"], one["count"])
            ):
                total[place] += value
    pooled = [sums[key] for key in sorted(sums)]
    return [said / count for said, _, count in pooled], [so / count for _, so, count in pooled]


def _mean_of(seeds: Sequence[Sequence[Mapping[str, float]]], key: str) -> list[float]:
    return [float(np.mean([one[key] for one in bins])) for bins in zip(*seeds, strict=True)]


def _levels(
    curves: Sequence[ErrorCurve], kind: str, which: str
) -> tuple[list[float], "np.ndarray[Any, Any]"]:
    levels = [getattr(one, kind)["levels"] for one in curves]
    return [level["t"] for level in levels[0]], np.array([[level[which] for level in one] for one in levels])


def _smooth(values: Sequence[float]) -> "np.ndarray[Any, Any]":
    window = max(len(values) // 40, 1)
    return np.convolve(values, np.ones(window) / window, mode="valid")
