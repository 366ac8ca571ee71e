"""The report: one HTML page that needs no other file, made of ``results.json`` and the grids beside it."""

from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from hddm.benchmark import charts_of_experts, charts_of_quality, report_details, report_tables, report_words
from hddm.benchmark.report_comparable import comparable
from hddm.benchmark.results import Results
from hddm.benchmark.strips import read_strips
from hddm.utils.files import write_whole

REPORT_FILE = "report.html"
_CONTENTS = (
    ("models", "Models"),
    ("comparable", "Comparable or not"),
    ("papers", "The papers’ ratios"),
    ("samples", "Samples"),
    ("measures", "Memorisation and diversity"),
    ("cost", "Quality against cost"),
    ("use", "Experts and router"),
    ("errors", "Error by noise level"),
    ("losses", "Convergence"),
    ("tried", "What was tried"),
    ("settings", "Settings"),
)


def write_report(folder: Path, results: Results) -> None:
    """Write ``report.html`` into a benchmark's folder.

    Args:
        folder: that holds the sample grids (`hddm.benchmark.samples.grid_path`) of the first seed.
        results: those of the folder, as `hddm.benchmark.results.read_results` reads them.
    """
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(_text("report.html.j2"))
    first, *others = results.tables
    page = template.render(
        css=_text("report.css"),
        js=_text("report.js"),
        contents=_CONTENTS,
        results=results,
        answers=report_words.answers(results),
        unanswered=report_words.why_no_answer(results),
        about_mark=report_words.about_mark(results),
        choice=report_words.about_choice(results),
        comparable=list(comparable(results)),
        ratios=report_words.ratios(results),
        about_measures=report_words.about_measures(results),
        effort=report_words.effort(results),
        real=report_words.real_distance(results),
        headline=report_tables.comparison(results, first),
        others=[report_tables.comparison(results, name) for name in others],
        measures=report_tables.measures(results),
        shards=report_tables.shard_distances(results),
        used=report_details.expert_use(results),
        router=report_details.router_table(results),
        by_shard=report_details.expert_errors(results),
        tried=report_details.tried(results),
        made=report_details.models_table(results),
        ranges=charts_of_quality.ranges(results),
        costs=charts_of_quality.costs(results),
        use=charts_of_experts.use(results),
        reliability=charts_of_experts.reliability(results),
        errors=charts_of_experts.errors(results),
        losses=charts_of_experts.losses(results),
        strips=read_strips(folder, results),
        records=[
            (title, report_details.facts(content))
            for title, content in (
                ("Hashes", results.hashes),
                ("Features and samples", results.features | results.sampled_as),
                ("Machine and versions", results.machine),
            )
        ],
        settings=results.settings.model_dump_json(indent=2),
    )
    write_whole(folder / REPORT_FILE, lambda draft: draft.write_text(page, encoding="utf-8"))


def _text(name: str) -> str:
    return (files("hddm.benchmark") / name).read_text()
