"""Report of a run: one page beside its checkpoints, renewed at each of them.

It shows what the run's folder holds already: the figures of its TensorBoard log and the grids of samples.
"""

import fnmatch
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hddm.experts.shard_images import evenly_spaced
from hddm.training.resume import RUN_FILE, read_run
from hddm.utils.errors import optional
from hddm.utils.files import write_whole
from hddm.utils.pages import COLOURS, as_element, charts, data_address, plain_numbers, templates

REPORT_FILE = "report.html"
LOGS, SAMPLES = "logs", "samples"
"""Folders of a run."""
_POINTS = 1000
"""Of a curve, at most."""
_GRIDS = 6
_SPACING = 50
"""Times as long as a page took, the next one waits."""
_USED = "the report of a run", "train"
"""What needs matplotlib and tensorboard, and the extra that has them."""
_RATE = "train/images_per_second"

_PANELS = (
    ("Training loss", "train/loss"),
    ("Training loss by noise level t", "train/loss_by_noise/*"),
    # Of the weights and of their averages, "raw" and "ema".
    ("Velocity error on held-out images", "held_out/???"),
    ("Velocity error on held-out images by t", "held_out_by_noise/*"),
)
"""Titles of charts, and patterns of the figures that they show."""

Curves = Mapping[str, tuple[list[float], list[float]]]
"""Steps and values of figures, by name."""


class RunReport:
    """The page of a run, renewed after checkpoints, as long as that takes little of the time."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._due: tuple[int, int] | None = None
        self._next = 0.0

    def put_off(self, step: int, batch_size: int) -> None:
        """Renew the page once the checkpoint of ``step`` is saved; see `write_run_report`."""
        self._due = step, batch_size

    def renew(self, is_last: bool = False) -> None:
        """Write the page, if it is due; raises as `write_run_report`."""
        begun = time.monotonic()
        if self._due is not None and (is_last or begun >= self._next):
            write_run_report(self._run, *self._due)
            self._due, self._next = None, begun + _SPACING * (time.monotonic() - begun)


def write_run_report(run: Path, step: int, batch_size: int) -> None:
    """Write ``report.html`` into the folder of a ``run`` that has taken ``step`` steps.

    ``batch_size`` is this process's part of a batch, whose images per second are logged. Raises `HddmError`
    without tensorboard or matplotlib, `OSError` for a folder that cannot be written.
    """
    record = read_run(run / RUN_FILE)
    logged = _logged(run / LOGS)
    rate = logged[_RATE][1][-1] if _RATE in logged else None
    steps = record["settings"]["steps"]
    page = templates(is_html=True).get_template("training/report.html.j2")
    left = None if rate is None else (steps - step) * batch_size / rate
    head = {"name": run.name, "step": step, "steps": steps, "rate": rate, "seconds_left": left}
    panels: list[dict[str, Any]] = []
    for title, pattern in _PANELS:
        panel = _panel(title, pattern, logged)
        if panel is not None:
            panels.append(panel)
    settings = {key: value for key, value in record["settings"].items() if value is not None}
    text = page.render(**head, panels=panels, grids=_grids(run / SAMPLES), settings=settings)
    write_whole(run / REPORT_FILE, lambda draft: draft.write_text(text, encoding="utf-8"))


def _logged(folder: Path) -> Curves:
    """What was logged, also from processes before this one."""
    reader = optional("tensorboard.backend.event_processing.event_accumulator", *_USED)
    events = reader.EventAccumulator(str(folder), {"scalars": _POINTS, "images": 1})
    events.Reload()
    curves: dict[str, tuple[list[float], list[float]]] = {}
    for name in events.Tags()["scalars"]:
        found = events.Scalars(name)
        curves[name] = ([one.step for one in found], [one.value for one in found])
    return curves


def _panel(title: str, pattern: str, logged: Curves) -> dict[str, Any] | None:
    """A chart over steps, and its legend of colours and names; None where nothing was logged."""
    names: list[str] = []
    curves = []
    for name in sorted(fnmatch.filter(logged, pattern)):
        names.append(name.split("/")[-1])
        curves.append(logged[name])
    if not curves:
        return None
    colours = list(COLOURS)
    if len(curves) > 2:
        # Noise levels have an order, and so have their colours.
        shades = optional("matplotlib", *_USED).colormaps["viridis"]
        colours = []
        for k in range(len(curves)):
            red, green, blue, _ = shades(0.95 * k / (len(curves) - 1), bytes=True)
            colours.append(f"#{red:02x}{green:02x}{blue:02x}")
    with charts() as figure:
        canvas = figure(figsize=(4.0, 2.9), layout="constrained")
        axes = canvas.subplots()
        for colour, (steps, values) in zip(colours, curves, strict=False):
            marker = "o" if len(steps) < 3 else None
            axes.plot(steps, values, color=colour, marker=marker, markersize=3)
        axes.set(yscale="log", xlabel="step")
        axes.set_title(title, loc="left")
        plain_numbers(axes.yaxis)
        chart = as_element(canvas, re.sub(r"\W+", "-", pattern), f"{title}, over steps.")
    return {"chart": chart, "legend": list(zip(colours, names, strict=False))}


def _grids(folder: Path) -> list[dict[str, str]]:
    """Grids of the averaged weights from all over the training, the newest included."""
    paths = sorted(folder.glob("step_*_ema.png"))
    grids: list[dict[str, str]] = []
    for k in evenly_spaced(paths, _GRIDS).tolist():
        step = int(paths[k].name.split("_")[1])
        grids.append({"step": f"{step:,}", "address": data_address(paths[k].read_bytes())})
    return grids
