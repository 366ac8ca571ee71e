"""Better, worse or within noise: rows against rows, paired by training seed.

A gap counts where its mean exceeds twice its standard deviation over seeds, which needs `FEWEST` seeds. Gaps
are paired since models of one seed share experts, noise and shards.
"""

from collections.abc import Iterator, Mapping, Sequence

from hddm.benchmark.results import Judgement, Record, Verdict, figure
from hddm.benchmark.schema import BenchmarkSettings

FEWEST = 3


def judge(
    settings: BenchmarkSettings, records: Mapping[str, Mapping[str, Sequence[Record]]], decides: str
) -> Iterator[Verdict]:
    """All verdicts of all tables.

    Args:
        settings: which models are candidates, and which baselines.
        records: by table and row, in one order of seeds.
        decides: the score, lower is better.
    """
    baselines = settings.compare.baselines
    candidates = settings.compare.candidates or tuple(
        model.name for model in settings.models if model.name not in baselines
    )
    for table, rows in records.items():
        firsts = {name: each[0] for name, each in rows.items()}
        for name, first in firsts.items():
            for baseline in baselines if first.model in candidates else ():
                for other, against in firsts.items():
                    if against.model == baseline and against.point == first.point:
                        yield _verdict(table, "model", name, other, rows, decides)
            reference = next(other for other, one in firsts.items() if one.model == first.model)
            if reference != name:
                yield _verdict(table, "setting", name, reference, rows, decides)


def judgement(gaps: Sequence[float]) -> Judgement:
    """What paired gaps say; lower is better."""
    if len(gaps) < FEWEST:
        return "no verdict"
    gap = figure(gaps)
    assert gap.spread is not None
    if abs(gap.mean) <= 2 * gap.spread:
        return "within noise"
    return "better" if gap.mean < 0 else "worse"


def _verdict(
    table: str, kind: str, row: str, against: str, rows: Mapping[str, Sequence[Record]], decides: str
) -> Verdict:
    ours, theirs = ([one.scores[decides]["value"] for one in rows[name]] for name in (row, against))
    gaps = [a - b for a, b in zip(ours, theirs, strict=True)]
    gap, found = figure(gaps), judgement(gaps)
    told: str = found
    if found == "no verdict":
        told = f"no verdict from {len(gaps)} training seed{'s' * (len(gaps) > 1)} ({FEWEST} or more give one)"
    elif gap.spread is not None:
        told = f"{found} (s {gap.spread:.1f})"
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
            "ratio": sum(ours) / sum(theirs) if sum(theirs) else None,
            "judgement": found,
            "sentence": f"{row} against {against}: {gap.mean:+.1f}, {told}",
        }
    )
