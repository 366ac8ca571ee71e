"""The tables, the paired gaps and the picture."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.conversion.report import finite, table
from benchmarks.provenance import provenance
from benchmarks.routing.picture import Runs, draw_picture
from benchmarks.routing.settings import CALIBRATED, HELD_OUT_ROUTER, Row, Settings
from benchmarks.summary import figure
from hddm.utils.files import write_json

_SIDES = {"to_training": "to training images", "to_held_out": "to held-out images"}
_MEASURES, _WHEN = ("ece", "cross_entropy"), ("before", "after")
_COSTS = {"experts_a_step": "experts a step", "mflop_a_step": "MFLOP a step"}


def write_routing(folder: Path, settings: Settings, command: str, content: Mapping[str, Any]) -> Path:
    """Write ``<date>-routing-<name>`` as .md, .json and .png; return the first."""
    folder.mkdir(parents=True, exist_ok=True)
    runs: Runs = content["runs"]
    stem = folder / f"{content['measured_on']['date']}-routing-{settings.name}"
    draw_picture(settings, runs).savefig(stem.with_suffix(".png"), dpi=130, metadata={"Software": None})
    lines = [
        "# Routing on digits: calibration, a router asked rarely, and p(k) of a class",
        "",
        provenance("routing", content, command),
        "",
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
        "",
        f"![routing]({stem.name}.png)",
    ]
    stem.with_suffix(".md").write_text("\n".join(lines).rstrip() + "\n")
    write_json(stem.with_suffix(".json"), finite(content))
    return stem.with_suffix(".md")


def judged(gaps: Sequence[float], digits: int = 1) -> str:
    """A mean gap between two rows of the same trainings, and whether it is more than noise."""
    gap = figure(gaps)
    if gap.spread is None:
        return f"{gap.mean:+.{digits}f}, one training, no verdict"
    clear = abs(gap.mean) > 2 * gap.spread
    return f"{gap.mean:+.{digits}f} (s {gap.spread:.{digits}f}), {'clear' if clear else 'within noise'}"


def _method(settings: Settings, content: Mapping[str, Any]) -> list[str]:
    chosen, runs = settings.quickstart, content["runs"]
    some = next(iter(runs[0]["knots"][HELD_OUT_ROUTER].values()))
    return [
        f"{chosen.num_shards} shards of scikit-learn's digits and the quickstart's training: "
        f"{chosen.num_shards} flow experts (`{chosen.size}`, {chosen.steps:,} steps) and routers "
        f"(`{chosen.router_size}`, {chosen.steps:,} steps). One router of a seed keeps 15 % of every shard "
        f"({some['held_out_images']} images) from training; it is sampled with its temperatures "
        '("calibrated") and without ("not calibrated"): the same network. "Long" is another one, trained '
        f'{settings.long_factor} times as long to be too sure of itself; "nothing held out" is trained on '
        "all images. Calibration never changes what top-1 chooses, and draw asks no router. "
        f"Euler, {chosen.sampling_steps} steps, {chosen.num_images_per_strategy:,} images a row from the "
        "same noise.",
        "",
        'Fréchet distances on 64 features of a small classifier, **not comparable with published FID**. "±" '
        f'is the 95 % half-width over samples, "s" the standard deviation over {len(runs)} trainings; gaps '
        "are paired by training, and clear where their mean exceeds twice their s. Real held-out images are "
        f"at {content['real']['value']:.1f} from the training images.",
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
        whole = each is records
        rows.append(
            [
                label,
                "all" if whole else f"{each[0]['from']:.1f} … {each[0]['to']:.1f}",
                *(_fine([one[f"{name}_{when}"] for one in each]) for name in _MEASURES for when in _WHEN),
                ", ".join(f"{statistics.fmean(one):.2f}" for one in tables) if whole else "",
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
                _fine([max(part["ece_after"] for part in one["time_bins"]) for one in each]),
                _fine([one["cross_entropy_after"] for one in each], 4),
                judged([one["cross_entropy_after"] - one["cross_entropy_before"] for one in each], 4),
            ]
        )
    return rows


def _scores(runs: Runs, rows: Mapping[str, Row], title: str, accuracy: bool = False) -> list[str]:
    body = []
    for name in rows:
        each = [run["rows"][name] for run in runs]
        distances = [
            figure([one[side]["value"] for one in each], [one[side]["half_width"] for one in each])
            for side in _SIDES
        ]
        others = [figure([one[key] for one in each]) for key in ("diversity", "nearest_ratio")]
        costs = [f"{statistics.fmean(one[key] for one in each):.2f}" for key in _COSTS]
        extra = [_fine([one["label_accuracy"] for one in each])] if accuracy else []
        body.append([name, *extra, *map(str, (*distances, *others)), *costs])
    columns = [title, *(["label accuracy"] if accuracy else []), *_SIDES.values()]
    return table([*columns, "diversity", "nearest-image ratio", *_COSTS.values()], body)


def _calibration_gaps(settings: Settings, runs: Runs) -> list[str]:
    """Each calibrated row against its plain one, and full against what it loses to."""
    names, lines = settings.calibration_rows(), []
    for name in names:
        plain = name.replace("calibrated", "not calibrated")
        if name.endswith(", calibrated"):
            lines.append(f"- {name} against not: {_gap(runs, name, plain)}")
    for name in (name for name in names if name.startswith("full")):
        for other in (name.replace("full", "top-2"), "draw"):
            lines.append(f"- {name}, against {other.split(',')[0]}: {_gap(runs, name, other)}")
    return lines


def _every_gaps(settings: Settings, runs: Runs) -> list[str]:
    return [
        f"- {name} steps against every one: {_gap(runs, name, f'{row.strategy}, calibrated')}"
        for name, row in settings.every_rows().items()
    ]


def _class_gaps(settings: Settings, runs: Runs) -> list[str]:
    known, lines = "draw, p(k) of the class", []
    for name in settings.class_rows():
        if name != known:
            gaps = [
                run["rows"][known]["label_accuracy"] - run["rows"][name]["label_accuracy"] for run in runs
            ]
            lines.append(
                f"- {known} against {name}: label accuracy {judged(gaps, 3)}; {_gap(runs, known, name)}"
            )
    return lines


def _gap(runs: Runs, name: str, other: str) -> str:
    parts = []
    for side, label in _SIDES.items():
        gaps = [run["rows"][name][side]["value"] - run["rows"][other][side]["value"] for run in runs]
        parts.append(f"{label} {judged(gaps)}")
    return "; ".join(parts)


def _with_every_step(settings: Settings) -> dict[str, Row]:
    """The rows of rare asking, each strategy after its row of every step."""
    rows = {}
    for strategy in settings.every_strategies:
        rows[f"{strategy}, calibrated"] = Row(strategy, HELD_OUT_ROUTER)
        rows |= {name: row for name, row in settings.every_rows().items() if row.strategy == strategy}
    return rows


def _fine(values: Sequence[float], digits: int = 3) -> str:
    """Figures below one."""
    found = figure(values)
    return f"{found.mean:.{digits}f}" + ("" if found.spread is None else f" (s {found.spread:.{digits}f})")
