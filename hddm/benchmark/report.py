"""The report: one HTML page that needs no other file."""

from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from hddm.benchmark.jobs import ExpertUse
from hddm.benchmark.markdown import scientific
from hddm.benchmark.plots import embedded, grid_path, loss_plot, use_plot
from hddm.benchmark.results import Results

REPORT_FILE = "report.html"


def write_report(folder: Path, results: Results) -> None:
    """Write ``report.html`` into a benchmark's folder, from its results and its sample grids."""
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(
        (files("hddm.benchmark") / "report.html.j2").read_text()
    )
    first = results.seeds[0]
    names = dict.fromkeys(one.model for one in results.records)
    grids = {name: grid_path(folder / f"seed_{first}", name) for name in names}
    use = _use(results, first)
    page = template.render(
        results=results,
        scientific=scientific,
        grids={name: embedded(path.read_bytes(), "png") for name, path in grids.items()},
        losses=loss_plot(_losses(results, first)),
        use=use_plot(use) if use else None,
        settings=results.settings.model_dump_json(indent=2),
    )
    (folder / REPORT_FILE).write_text(page)


def _losses(results: Results, seed: int) -> dict[str, tuple[float, ...]]:
    named = {}
    for one in results.losses:
        if one.seed == seed:
            name = one.kind if one.kind != "expert" else f"{one.objective}/{one.shard}"
            named[name] = tuple(loss for _, loss in one.loss)
    return named


def _use(results: Results, seed: int) -> dict[str, list[ExpertUse]]:
    """Of the rows of one model at which a router was asked, in the first table that has any."""
    for table, rows in results.tables.items():
        model = rows[-1].model
        asked = {
            one.row: [
                ExpertUse(entry["t"], entry["probabilities"], entry["weights"], entry["largest"])
                for entry in one.use
            ]
            for one in results.records
            if (one.table, one.model, one.seed) == (table, model, seed) and "largest" in one.use[0]
        }
        if asked:
            return asked
    return {}
