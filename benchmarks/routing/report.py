"""The tables and the paired gaps."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.reports import SCORES, Runs, about_scores, distance_gaps, figure, judged, score_cells, table
from benchmarks.routing.settings import CALIBRATED, HELD_OUT_ROUTER, Row, Settings

_MEASURES, _WHEN = ("ece", "cross_entropy"), ("before", "after")
_COSTS = {"experts_a_step": "experts a step", "mflop_a_step": "MFLOP a step"}


def lines(settings: Settings, content: Mapping[str, Any]) -> list[str]:
    """The report, its title first."""
    runs: Runs = content["runs"]
    return [
        "# Routing on digits: calibration, a router asked rarely, and p(k) of a class",
        *_method(settings, content),
        "## Is the router as often right as it says?",
        "",
        *_calibration(settings, runs),
        "## What do calibrated probabilities change in the samples?",
        "",
        *_scores(runs, settings.calibration_rows(), "strategy, router"),
        "",
        *_calibration_gaps(settings, runs),
        "",
        "## How often must the router be asked?",
        "",
        *_scores(runs, _with_every_step(settings), "strategy, router asked"),
        "",
        *_every_gaps(settings, runs),
        "",
        "## Which expert for which class?",
        "",
        *_scores(runs, settings.class_rows(), "class-conditional experts", accuracy=True),
        "",
        f"The classifier takes {content['real_accuracy']:.3f} of the real held-out images for what they are.",
        "",
        *_class_gaps(settings, runs),
    ]


def _method(settings: Settings, content: Mapping[str, Any]) -> list[str]:
    chosen, runs, point = settings.quickstart, content["runs"], settings.point
    expert, router, shards = chosen.expert("flow", 0), chosen.router(0), chosen.partition.shards
    some = next(iter(runs[0]["knots"][HELD_OUT_ROUTER].values()))
    return [
        f"{shards} shards of scikit-learn's digits and the quickstart's training: "
        f"{shards} flow experts (`{expert.size}`, {expert.steps:,} steps) and routers "
        f"(`{router.size}`, {router.steps:,} steps). One router of a seed keeps 15 % of every shard "
        f"({some['held_out_images']} images) from training; it is sampled with its temperatures "
        '("calibrated") and without ("not calibrated"): the same network. "Long" is another one, trained '
        f'{settings.long_factor} times as long to be too sure of itself; "nothing held out" is trained on '
        "all images. Calibration never changes what top-1 chooses, and draw asks no router. "
        f"{point.solver.capitalize()}, {point.steps} steps, {point.num_images:,} images a row from the "
        "same noise.",
        "",
        about_scores(content["real"], runs),
        "",
    ]


def _calibration(settings: Settings, runs: Runs) -> list[str]:
    labels = dict(zip(CALIBRATED, ("router", f"{settings.long_factor} × as long"), strict=True))
    columns = ["ECE before", "ECE after", "cross-entropy before", "cross-entropy after"]
    return [
        "Expected calibration error of the largest probability (15 bins) and cross-entropy, on noised images "
        'that the router was not trained on; "after" by temperatures fitted to the other half of these '
        "images.",
        "",
        *table(
            ["trained", "t", *columns, "temperatures, t = 0 … 1"],
            [row for name, label in labels.items() for row in _by_time(runs, name, label)],
        ),
        "",
        "How many temperatures? The gap is that of the cross-entropy to none.",
        "",
        *table(
            ["trained", "temperatures", "ECE after", "worst of 5 time bins", "cross-entropy after", "gap"],
            [row for name, label in labels.items() for row in _by_knots(settings, runs, name, label)],
        ),
        "",
    ]


def _by_time(runs: Runs, router: str, label: str) -> list[list[str]]:
    records = [run["calibrations"][router]["calibration"] for run in runs]
    tables = zip(*(run["calibrations"][router]["temperatures"] for run in runs), strict=True)
    rows = []
    for each in (records, *zip(*(record["time_bins"] for record in records), strict=True)):
        overall = each is records
        rows.append(
            [
                label,
                "all" if overall else f"{each[0]['from']:.1f} … {each[0]['to']:.1f}",
                *(_fine([one[f"{name}_{when}"] for one in each]) for name in _MEASURES for when in _WHEN),
                ", ".join(f"{statistics.fmean(one):.2f}" for one in tables) if overall else "",
            ]
        )
    return rows


def _by_knots(settings: Settings, runs: Runs, router: str, label: str) -> list[list[str]]:
    rows = []
    for number in settings.knots:
        each = [run["knots"][router][number] for run in runs]
        rows.append(
            [
                label,
                str(number),
                _fine([one["ece_after"] for one in each]),
                _fine([max(bin["ece_after"] for bin in one["time_bins"]) for one in each]),
                _fine([one["cross_entropy_after"] for one in each], 4),
                judged([one["cross_entropy_after"] - one["cross_entropy_before"] for one in each], 4),
            ]
        )
    return rows


def _scores(runs: Runs, rows: Mapping[str, Row], title: str, accuracy: bool = False) -> list[str]:
    body = []
    for name in rows:
        each = [run["rows"][name] for run in runs]
        costs = [f"{statistics.fmean(one[key] for one in each):.2f}" for key in _COSTS]
        extra = [_fine([one["label_accuracy"] for one in each])] if accuracy else []
        body.append([name, *extra, *score_cells(runs, name), *costs])
    return table([title, *(["label accuracy"] if accuracy else []), *SCORES, *_COSTS.values()], body)


def _calibration_gaps(settings: Settings, runs: Runs) -> list[str]:
    """Each calibrated row against its plain one, and full against what it loses to."""
    names, gaps = settings.calibration_rows(), []
    for name in names:
        plain = name.replace("calibrated", "not calibrated")
        if name.endswith(", calibrated"):
            gaps.append(f"- {name} against not: {distance_gaps(runs, name, plain)}")
    for name in (name for name in names if name.startswith("full")):
        for other in (name.replace("full", "top-2"), "draw"):
            gaps.append(f"- {name}, against {other.split(',')[0]}: {distance_gaps(runs, name, other)}")
    return gaps


def _every_gaps(settings: Settings, runs: Runs) -> list[str]:
    return [
        f"- {name} steps against every one: {distance_gaps(runs, name, f'{row.strategy}, calibrated')}"
        for name, row in settings.every_rows().items()
    ]


def _class_gaps(settings: Settings, runs: Runs) -> list[str]:
    known, found = "draw, p(k) of the class", []
    for name in settings.class_rows():
        if name != known:
            both = ([run["rows"][row]["label_accuracy"] for run in runs] for row in (known, name))
            accuracy = judged([a - b for a, b in zip(*both, strict=True)], 3)
            found.append(
                f"- {known} against {name}: label accuracy {accuracy}; {distance_gaps(runs, known, name)}"
            )
    return found


def _with_every_step(settings: Settings) -> dict[str, Row]:
    """The rows of rare asking, each strategy after its row of every step."""
    rows = {}
    for strategy in settings.every_strategies:
        rows[f"{strategy}, calibrated"] = Row(strategy, HELD_OUT_ROUTER)
        rows |= {name: row for name, row in settings.every_rows().items() if row.strategy == strategy}
    return rows


def _fine(values: Sequence[float], digits: int = 3) -> str:
    """Figures below one."""
    return figure(values).to(digits)
