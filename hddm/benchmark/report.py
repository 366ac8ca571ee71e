"""The report: one HTML page that needs no other file."""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from hddm.benchmark.plots import embedded, grid_path, loss_plot, use_plot
from hddm.benchmark.results import TABLES, Run, summarise
from hddm.benchmark.settings import QuickstartSettings

REPORT_FILE = "report.html"


def write_report(
    folder: Path, runs: Sequence[Run], settings: QuickstartSettings, results: dict[str, Any]
) -> None:
    """Write ``report.html`` into a quickstart's folder, from its runs and its sample grids."""
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(
        (files("hddm.benchmark") / "report.html.j2").read_text()
    )
    first = runs[0]
    seed_folder = folder / f"seed_{first.seed}"
    names = ["training images", *(row.name for row in first.tables["models"])]
    grids = {name: embedded(grid_path(seed_folder, name).read_bytes(), "png") for name in names}
    page = template.render(
        settings=settings,
        results=results,
        extractor=first.tables["models"][0].scores.extractor,
        tables={table: summarise(runs, table) for table in TABLES},
        grids=grids,
        losses=loss_plot(first.losses),
        use=use_plot(first.expert_use) if first.expert_use else None,
        seeds=len(runs),
        real=first.real,
    )
    (folder / REPORT_FILE).write_text(page)
