"""The picture of the routing benchmark."""

import statistics

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from benchmarks.reports import COLOURS, Runs
from benchmarks.routing.settings import HELD_OUT_ROUTER, LONG_ROUTER, Settings

_PLAIN, _CALIBRATED = COLOURS[1], COLOURS[5]


def draw_picture(settings: Settings, runs: Runs) -> Canvas:
    """Calibration error over t, distance by strategy, distance by how often the router is asked."""
    canvas = Canvas(figsize=(12, 3.6), layout="constrained")
    errors, strategies, rarely = canvas.subplots(1, 3)
    _errors(errors, settings, runs)
    _strategies(strategies, settings, runs)
    _rarely(rarely, settings, runs)
    return canvas


def _errors(panel: Axes, settings: Settings, runs: Runs) -> None:
    for router, marker, label in (
        (HELD_OUT_ROUTER, "o-", "router"),
        (LONG_ROUTER, "s--", f"{settings.long_factor} × as long"),
    ):
        bins = [run["calibrations"][router]["calibration"]["time_bins"] for run in runs]
        middles = [(one["from"] + one["to"]) / 2 for one in bins[0]]
        for key, colour, kind in (
            ("ece_before", _PLAIN, "not calibrated"),
            ("ece_after", _CALIBRATED, "calibrated"),
        ):
            means = [statistics.fmean(one[k][key] for one in bins) for k in range(len(middles))]
            panel.plot(middles, means, marker, color=colour, markersize=4, label=f"{label}, {kind}")
    panel.set_xlabel("t")
    panel.set_ylabel("expected calibration error")
    panel.set_ylim(0)
    panel.legend(frameon=False, fontsize=8)


def _strategies(panel: Axes, settings: Settings, runs: Runs) -> None:
    names = list(settings.calibration_rows())
    for place, name in enumerate(names):
        values = _values(runs, name)
        colour = _CALIBRATED if name.endswith(", calibrated") else _PLAIN if "," in name else COLOURS[7]
        panel.barh(place, statistics.fmean(values), 0.7, color=colour, alpha=0.6)
        panel.plot(values, [place] * len(values), "o", color=COLOURS[0], markersize=3)
    panel.set_yticks(range(len(names)), names, fontsize=8)
    panel.invert_yaxis()
    panel.set_xlabel("Fréchet distance to held-out images")


def _rarely(panel: Axes, settings: Settings, runs: Runs) -> None:
    every = sorted(settings.every)
    for strategy, colour in zip(settings.every_strategies, COLOURS[2:], strict=False):
        names = [f"{strategy}, calibrated" if n == 1 else f"{strategy}, every {n}" for n in every]
        each = [_values(runs, name) for name in names]
        panel.plot(every, [statistics.fmean(one) for one in each], "-", color=colour, label=strategy)
        for n, values in zip(every, each, strict=True):
            panel.plot([n] * len(values), values, "o", color=colour, markersize=3)
    panel.set_xscale("log")
    panel.set_xticks(every, [str(n) for n in every])
    panel.minorticks_off()
    panel.set_xlabel("router asked every n steps")
    panel.set_ylabel("Fréchet distance to held-out images")
    panel.legend(frameon=False, fontsize=8)


def _values(runs: Runs, name: str) -> list[float]:
    return [run["rows"][name]["to_held_out"]["value"] for run in runs]
