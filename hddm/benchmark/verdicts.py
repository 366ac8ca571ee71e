"""Better, worse or within noise: rows against rows, paired by training seed.

A gap counts where its mean exceeds twice s, its standard deviation over seeds, and the 95 % interval of that
mean, ± t s/n^½ with Student's t, excludes 0; this needs `FEWEST` seeds. Of three seeds the interval is the
wider of the two, from four on it is the narrower. Gaps are paired since models of one seed share experts,
noise and shards.

A model that is one set of weights in every seed has no spread over trainings, and nothing is judged by it;
nor by distances of too few images for the features, or of unequal numbers of images. Nor are rows judged that
are one, as objectives chosen by error may make them.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

from scipy.stats import t as student

from hddm.benchmark.numbers import number, span
from hddm.benchmark.results import Judgement, ModelRecord, Record, Verdict, figure, one_set_of_weights
from hddm.benchmark.settings import BenchmarkSettings
from hddm.utils.errors import counted

FEWEST = 3


def judge(
    settings: BenchmarkSettings,
    models: Sequence[ModelRecord],
    records: Mapping[str, Mapping[str, Sequence[Record]]],
    decides: str,
) -> Iterator[Verdict]:
    """All verdicts of all tables.

    Args:
        settings: which models are candidates, and which baselines.
        models: those of all seeds.
        records: by table and row, in one order of seeds.
        decides: the score, lower is better.
    """
    baselines = settings.compare.baselines
    candidates = settings.compare.candidates or tuple(
        model.name for model in settings.models if model.name not in baselines
    )
    fixed = one_set_of_weights(models)
    single = {model.name for model in settings.models if model.kind == "single"}
    for table, rows in records.items():
        firsts = {name: each[0] for name, each in rows.items()}
        for name, first in firsts.items():
            for baseline in baselines if first.model in candidates else ():
                for other, against in firsts.items():
                    if against.model == baseline and _compares(first, against, baseline in single):
                        yield _verdict(table, "model", name, other, rows, decides, fixed)
            reference = next(other for other, one in firsts.items() if one.model == first.model)
            if reference != name:
                yield _verdict(table, "setting", name, reference, rows, decides, fixed)


def interval(gaps: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % interval of the mean of paired gaps."""
    gap = figure(gaps)
    if gap.spread is None:
        return None
    half = float(student.ppf(0.975, len(gaps) - 1)) * gap.spread / len(gaps) ** 0.5
    return gap.mean - half, gap.mean + half


def judgement(gaps: Sequence[float]) -> Judgement:
    """What paired gaps say; lower is better."""
    if len(gaps) < FEWEST:
        return "no verdict"
    gap, within = figure(gaps), interval(gaps)
    assert gap.spread is not None
    assert within is not None
    if abs(gap.mean) <= 2 * gap.spread or within[0] <= 0 <= within[1]:
        return "within noise"
    return "better" if gap.mean < 0 else "worse"


def _incomparable(
    ours: Sequence[Record], theirs: Sequence[Record], decides: str, one_model: Sequence[str]
) -> str | None:
    """Why no number of seeds would give a verdict, None where enough would."""
    if all(one.samples == other.samples for one, other in zip(ours, theirs, strict=True)):
        return "the same samples in every seed"
    counts = ours[0].point.num_images, theirs[0].point.num_images
    if counts[0] != counts[1]:
        return f"{counts[0]:,} images against {counts[1]:,}: distances fall with that number"
    if any(one.scores[decides]["few_images"] for one in (*ours, *theirs)):
        return "too few images for the features"
    if one_model:
        each = "is" if len(one_model) == 1 else "are each"
        return (
            f"{' and '.join(one_model)} {each} one set of weights in every seed: the spread says nothing of "
            "another training"
        )
    return None


def _compares(one: Record, other: Record, has_no_router: bool) -> bool:
    """Whether two rows were sampled alike; a model without a router has no strategy to differ in."""
    routing = {"strategy", "calibration", "router_temperature"} if has_no_router else set()
    return one.point.model_dump(exclude=routing) == other.point.model_dump(exclude=routing)


def _verdict(
    table: str,
    kind: str,
    row: str,
    against: str,
    rows: Mapping[str, Sequence[Record]],
    decides: str,
    fixed: Collection[str],
) -> Verdict:
    ours, theirs = ([one.scores[decides]["value"] for one in rows[name]] for name in (row, against))
    gaps = [a - b for a, b in zip(ours, theirs, strict=True)]
    models = dict.fromkeys(rows[name][0].model for name in (row, against))
    one_model = [name for name in models if name in fixed]
    incomparable = _incomparable(rows[row], rows[against], decides, one_model)
    gap, within = figure(gaps), None if incomparable else interval(gaps)
    found: Judgement = "no verdict" if incomparable else judgement(gaps)
    told, why = str(found), None
    if incomparable:
        told = why = f"no verdict ({incomparable})"
    elif found == "no verdict":
        told = why = f"no verdict from {counted(len(gaps), 'training seed')} ({FEWEST} or more give one)"
    elif gap.spread is not None and within is not None:
        told = f"{found} (95 % interval {span(within)}, s {number(gap.spread)})"
    return Verdict.model_validate(
        {
            "table": table,
            "kind": kind,
            "row": row,
            "against": against,
            "figure": decides,
            "seeds": [one.seed for one in rows[row]],
            "gaps": gaps,
            "gap": gap,
            "interval": within,
            "ratio": sum(ours) / sum(theirs) if sum(theirs) else None,
            "judgement": found,
            "why": why,
            "one_model": one_model,
            "sentence": f"{row} against {against}: {number(gap.mean, signed=True)}, {told}",
        }
    )
