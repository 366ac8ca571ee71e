"""What the report says in words: verdicts, how it was measured, the papers' ratios beside ours."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hddm.benchmark.conversions import EXACT
from hddm.benchmark.numbers import number, span
from hddm.benchmark.results import MARK, ErrorCurve, Record, Results, Row, Verdict
from hddm.benchmark.settings import SamplingPoint
from hddm.utils.errors import counted

JUDGEMENTS = ("better", "worse", "within noise", "no verdict")


@dataclass(frozen=True)
class Answer:
    """All candidates against one baseline: a sentence, and a line each."""

    judgement: str
    sentence: str
    lines: tuple[tuple[str, str], ...]
    """Judgement and sentence."""


def answers(results: Results) -> list[Answer]:
    """How the candidates of the first table stand against each baseline, in the order of the settings."""
    table = next(iter(results.tables))
    found: dict[str, list[Verdict]] = {}
    for one in results.verdicts:
        if one.table == table and one.kind == "model":
            found.setdefault(one.against, []).append(one)
    return [_answer(results, table, baseline, group) for baseline, group in found.items()]


def why_no_answer(results: Results) -> str:
    """What keeps `answers` from having any."""
    baselines = results.settings.compare.baselines
    if not baselines:
        return "No verdict: the settings name no baseline."
    table, rows = next(iter(results.tables.items()))
    if not {row.model for row in rows} & {*baselines}:
        return f"No verdict: the first table, {table}, has no row of {' or '.join(baselines)}."
    return f"No verdict: the first table, {table}, has no candidate that is sampled as a baseline is."


def _answer(results: Results, table: str, baseline: str, group: Sequence[Verdict]) -> Answer:
    distance = {row.name: row.figures[results.decides].mean for row in results.tables[table]}
    against = f"{baseline} ({number(distance[baseline])})"
    whys = [one.why for one in group]
    if whys[0] is not None and len(set(whys)) == 1:
        lines = tuple((one.judgement, _line(one, distance, "")) for one in group)
        return Answer("no verdict", f"Against {against}: {whys[0]}.", lines)
    if len(group) == 1:
        one = group[0]
        over = f"gap {_gap(one)} over {len(one.seeds)} paired training seeds"
        sentence = f"{one.row} against {against}: {one.judgement}, {number(distance[one.row])} ({over})."
        return Answer(one.judgement, sentence, ())
    lines = tuple(
        (one.judgement, _line(one, distance, f"{why or one.judgement}, "))
        for one, why in zip(group, whys, strict=True)
    )
    counts = {name: sum(one.judgement == name for one in group) for name in JUDGEMENTS}
    told = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    only = [name for name, count in counts.items() if count == len(group)]
    over = f", over {len(group[0].seeds)} paired training seeds" if None in whys else ""
    sentence = f"Against {against}{over}: of {len(group)} candidates {told}."
    return Answer(only[0] if only else "mixed", sentence, lines)


def _line(one: Verdict, distance: dict[str, float], judged: str) -> str:
    return f"{one.row}: {judged}{number(distance[one.row])}, gap {_gap(one)}"


def _gap(one: Verdict) -> str:
    mark = MARK if one.one_model else ""
    spread = "" if one.gap.spread is None else f"s {number(one.gap.spread)}{mark}"
    if one.interval is not None:
        spread = f"95 % interval {span(one.interval)}, {spread}"
    ratio = "" if one.ratio is None else f"ratio {one.ratio:.3f}"
    return f"{number(one.gap.mean, signed=True)}, {', '.join(filter(None, (spread, ratio)))}".rstrip(", ")


def about_mark(results: Results) -> str:
    """What `MARK` says of spreads; nothing where none bears it."""
    names = [one.name for one in results.settings.models if one.name in results.one_model]
    if not names or len(results.seeds) < 2:
        return ""
    return (
        f"{MARK} One set of weights in every seed: {', '.join(names)}. Spreads so marked are over other "
        "samples of such a model, not over other trainings."
    )


def used_experts(results: Results) -> list[ErrorCurve]:
    """Errors of the experts that a model is made of: those that were trained on later are not among them."""
    used = {name for one in results.models for name in one.experts}
    return [one for one in results.errors if one.expert in used]


def about_choice(results: Results) -> str:
    """Whether these figures chose something, or confirm it."""
    if results.score_on == "validation":
        return (
            "These are validation images, by which settings are chosen: the best of many is partly luck. "
            "What counts is the confirmation on fresh seeds and held-out images (--held-out)."
        )
    if not results.settings.data.validation_share:
        return "Scored on held-out images; there were no validation images to choose settings by."
    return "A confirmation: fresh training seeds, and held-out images that nothing was chosen by."


def real_distance(results: Results) -> str:
    """Of the split's own images to the training images, with its interval."""
    found = results.real["to_training"]
    half = "" if found["half_width"] is None else f" ± {number(found['half_width'])}"
    return f"{number(found['value'])}{half}"


def effort(results: Results) -> str:
    """How much was tried to get here, and how it came out."""
    models, rows = len(results.settings.models), sum(map(len, results.tables.values()))
    counts = {name: sum(one.judgement == name for one in results.verdicts) for name in JUDGEMENTS}
    told = ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "none"
    seeds = counted(len(results.seeds), "training seed")
    return (
        f"{models} models, {len(results.losses)} trainings, {rows} rows over {seeds}. "
        f"Judged: {told}. Of many comparisons of equals some differ by chance."
    )


def about_measures(results: Results) -> str:
    """What the figures of memorisation and diversity mean, as they were measured here."""
    told = (
        f"Nearest-image ratio: distance to the nearest training image, over that of {results.score_on} "
        "images; 1 is as far as fresh images are, well below 1 means memorising, above 1 off the data. "
        f"Share near: of samples nearer to a training image than 95 % of {results.score_on} images are; 0.05 "
        "for fresh images."
    )
    scores = [one.scores for one in results.records]
    found = [one["memorisation"] for one in scores if one["memorisation"]]
    copies = max((one["copies"] for one in found), default=0)
    if any(one.get("mirrored") for one in found):
        told += " Trained on mirrored images too: of a training image and its mirror image the nearer counts."
    else:
        told += " A mirrored copy of a training image is not seen."
    if copies:
        told += f" {copies} {results.score_on} images are training images too, and flatter both."
    within = next((one["within_conditions"] for one in scores if one["within_conditions"]), None)
    if within:
        why = f" ({within['why_not_lpips']})" if within["why_not_lpips"] else ""
        told += f" Within a condition: mean distance of two images, by {within['distance']}{why}."
    return told


@dataclass(frozen=True)
class Ratio:
    """One of the papers' ratios and ours of the same kind."""

    question: str
    theirs: str
    ours: tuple[str, ...]


def ratios(results: Results) -> list[Ratio]:
    """What HDDM (arXiv 2603.06741) reports, beside rows of ours that ask the same.

    Both are of one run. The first is the abstract's, for 8 experts of DiT-XL/2 at guidance 7.5 and 50 steps;
    the second is of DiT-B/2.
    """
    return [
        Ratio(
            "2 DDPM : 6 flow against 8 flow",
            "11.88 / 12.45 = 0.954 (FID-50K, DiT-XL/2, 11M LAION-Aesthetics images, one run)",
            tuple(_mixtures(results))
            or ("not measured here: no mixture beside a homogeneous flow ensemble",),
        ),
        Ratio(
            "top-2 against one model",
            "22.60 / 29.64 = 0.763 (FID-50K, DiT-B/2, 3.9M LAION-Art images, one run)",
            tuple(_top_two(results))
            or (
                "not measured here: no table samples top-2 and a single model with the same solver and steps",
            ),
        ),
    ]


def _mixtures(results: Results) -> Iterator[str]:
    rows = next(iter(results.tables.values()))
    kinds = {one.name: one for one in results.settings.models}
    # Those that are chosen by error differ from seed to seed.
    mixed = {one.model for one in results.models if set(one.objectives) == {"ddpm", "flow"}}
    flow_only = {
        one.model
        for one in results.models
        if set(one.objectives) == {"flow"} and kinds[one.model].objectives == "flow"
    }
    flows = [row for row in rows if row.model in flow_only and kinds[row.model].kind == "ensemble"]
    for row in rows:
        if row.model in mixed:
            flow = next((one for one in flows if one.point == row.point), None)
            if flow is not None:
                yield _ratio(results, row, flow)


def _top_two(results: Results) -> Iterator[str]:
    usual = results.settings.sampling.model_copy(update={"conversion": EXACT})
    rows = [
        row for rows in results.tables.values() for row in rows if _differs_in_cost_alone(row.point, usual)
    ]
    single = {one.name for one in results.settings.models if one.kind == "single"}
    alone = [row for row in rows if row.model in single]
    seen = set()
    for row in rows:
        if row.point.strategy == "top-2" and row.model not in single and (row.model, row.point) not in seen:
            seen.add((row.model, row.point))
            other = next((one for one in alone if _same_cost(one, row)), None)
            if other is not None:
                yield _ratio(results, row, other)


_OF_COST = ("solver", "steps", "num_images", "guidance_scale")


def _differs_in_cost_alone(point: SamplingPoint, usual: SamplingPoint) -> bool:
    """Whether a row is of top-2 as it comes, without another temperature, calibration or conversion."""
    own = {*_OF_COST, "strategy"}
    return point.model_dump(exclude=own) == usual.model_dump(exclude=own)


def _same_cost(one: Row, other: Row) -> bool:
    return all(getattr(one.point, name) == getattr(other.point, name) for name in _OF_COST)


def _ratio(results: Results, ours: Row, theirs: Row) -> str:
    a, b = ours.figures[results.decides].mean, theirs.figures[results.decides].mean
    pairs = [x / y for x, y in zip(_by_seed(results, ours), _by_seed(results, theirs), strict=True) if y]
    label = ours.model + (f" {ours.point.strategy}" if ours.point.strategy != "draw" else "")
    told = f"{label} against {theirs.model}: {number(a)} / {number(b)}"
    if not b:
        return f"{told}, no ratio"
    return f"{told} = {a / b:.3f}" + (
        f" (by seed {min(pairs):.3f} … {max(pairs):.3f})" if len(pairs) > 1 else ""
    )


def _by_seed(results: Results, row: Row) -> list[float]:
    found: dict[int, Record] = {}
    for one in results.records:
        if (one.row, one.model, one.point) == (row.name, row.model, row.point):
            found.setdefault(one.seed, one)
    return [float(found[seed].scores[results.decides]["value"]) for seed in results.seeds]
