"""The fidelity result as tables and a picture."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from benchmarks.reports import COLOURS, mean_spread, table

_PANELS = (
    ("mixtures", "errors", "relative error, closed-form mixtures"),
    ("networks", "errors", "relative difference from exact, network"),
    ("networks", "losses", "flow-matching loss, held-out images"),
)


def lines(settings: Any, content: Mapping[str, Any]) -> list[str]:
    """The report, its title first."""
    training = settings.training
    seeds = len({row["seed"] for row in content["mixtures"]})
    text = [
        "# Velocity error over t, by conversion",
        "An expert that predicts noise, read as a velocity on the common path x = (1 - t) x_0 + t eps:",
        "",
        "- exact: native time of the same log-SNR, state (a + s) x, v = (eps - x)/(1 - t); outside the noise "
        "levels of the schedule the rule of `hddm/velocity.py`; no calibration;",
        "- same x, same t: network(x, t), t counted as the share of native time (1000 t for the cosine, "
        "index 999 t for the betas), v = (eps - x)/(1 - t);",
        "- round(999 t), own coefficients: network(x, round(999 t)), x_0 = (x - s eps)/max(a, 0.01) with the "
        "expert's own (a, s) there, bounded to ±20, v = eps - x_0: the inference of arXiv:2603.06741;",
        "- round(999 t), read as velocity: v = network(x, round(999 t)): its checkpoint recipe, had it kept "
        "the head. With the fresh head v is 0 and the relative error 1 at every t.",
        "",
        f"Mixtures of 6 Gaussians in {' and '.join(map(str, settings.dimensions))} dimensions, {seeds} of "
        f"each, {settings.states:,} states a time, against the closed-form velocity. Error: root mean "
        'square of the difference over that of the true velocity. Mean over mixtures, "s" their standard '
        "deviation. The betas cover t = 0.0099 to 0.9937; beyond, no network output says what is asked, so "
        "that exact is not 0 there.",
    ]
    for schedule in _schedules(content):
        rows = _select(content["mixtures"], schedule)
        text += ["", f"{schedule}, mixtures, relative error:", "", *_over_t(content, rows, "errors")]
    text += [
        "",
        f"Networks: {training.size}, trained on digits ({training.steps:,} steps at batch "
        f"{training.batch_size}), {seeds} seeds; held-out images, 4 noises each. Their true velocity is "
        "not known: the first table is the difference from their own exact conversion, the second the "
        "flow-matching loss ||v - (eps - x_0)||² a number, where lower is better whatever the conversion.",
    ]
    for schedule in _schedules(content):
        rows = _select(content["networks"], schedule)
        text += ["", f"{schedule}, network, relative difference:", "", *_over_t(content, rows, "errors")]
        text += ["", f"{schedule}, network, flow-matching loss:", "", *_over_t(content, rows, "losses")]
    return text


def _schedules(content: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(row["schedule"] for row in content["mixtures"]))


def _select(rows: Sequence[Mapping[str, Any]], schedule: str) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["schedule"] == schedule]


def _over_t(content: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], figure: str) -> list[str]:
    ways = list(rows[0][figure])
    lines = []
    for k, t in enumerate(content["times"]):
        lines.append([f"{t:g}", *(mean_spread([row[figure][way][k] for row in rows]) for way in ways)])
    return table(["t", *ways], lines)


def picture(content: Mapping[str, Any]) -> Figure:
    """Errors and losses over t, a line of panels a schedule."""
    names = _schedules(content)
    canvas = Figure(figsize=(12, 3.4 * len(names)), layout="constrained")
    grid = canvas.subplots(len(names), len(_PANELS), squeeze=False)
    for line, schedule in zip(grid, names, strict=True):
        for panel, (source, figure, label) in zip(line, _PANELS, strict=True):
            rows = _select(content[source], schedule)
            for colour, way in zip(COLOURS, rows[0][figure], strict=False):
                # Rounding would open the axis by twelve decades.
                each = [
                    [max(row[figure][way][k], 1e-4) for row in rows] for k in range(len(content["times"]))
                ]
                if source == "networks" and figure == "errors" and way == "exact":
                    continue
                panel.plot(content["times"], [statistics.fmean(one) for one in each], color=colour, label=way)
                low, high = [min(one) for one in each], [max(one) for one in each]
                panel.fill_between(content["times"], low, high, color=colour, alpha=0.15)
            panel.set_yscale("log")
            panel.set_xlabel("t")
            panel.set_title(f"{schedule}: {label}", fontsize=8)
            panel.tick_params(labelsize=8)
    handles = {
        label: handle
        for panel in grid.flat
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    canvas.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=5, fontsize=8, frameon=False
    )
    return canvas
