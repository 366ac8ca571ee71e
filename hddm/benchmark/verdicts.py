"""Verdicts of a benchmark: which rows of a table are compared, and what is said of each pair.

Candidates are compared with baselines, and settings of a model with its first. Pairs that would compare
unlike things get no verdict, and the reason.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

from hddm.benchmark.file import ROUTING
from hddm.benchmark.results import Comparison, Results, Row, ScoredRow
from hddm.evaluation.compare import Contrast, verdicts
from hddm.evaluation.results import sampling_fields

_OF_MODEL = frozenset({"expert", "model_shift", "weights", "vae", "device", "metadata"})
"""Fields of the sampling record that say which model was sampled, or that change nothing in an image."""
_NOT_SET = "none"

Pair = tuple[Literal["model", "setting"], "Row", "Row"]
"""Two models sampled alike, or two settings of one model; the second row is the baseline."""


def compare_rows(results: Results, path: str | None = None) -> Iterator[Comparison]:
    """Compare candidates with baselines in all tables, and each setting with the first.

    The score is the one at ``path``, by default the one that decides. Models with one set of weights in every
    seed, and rows of the same samples, get no verdict.
    """
    path = path or results.decides
    for table, rows in results.tables.items():
        pairs = pairs_of(results, rows)
        judged = verdicts([_contrast(results, path, *pair) for pair in pairs])
        for (kind, ours, base), verdict in zip(pairs, judged, strict=True):
            a = ours.measured(path).values
            b = base.measured(path).values
            yield Comparison(
                table=table,
                kind=kind,
                row=ours.name,
                against=base.name,
                gaps={int(seed): a[seed] - b[seed] for seed in a},
                ratio=sum(a.values()) / sum(b.values()) if sum(b.values()) else None,
                verdict=verdict,
            )


def pairs_of(results: Results, rows: Sequence[Row]) -> list[Pair]:
    """Rows of one table to compare: models with baselines, and settings of a model with its first."""
    chosen = results.settings.compare
    pairs: list[Pair] = []
    for row in rows:
        of = row.one.of
        for other in rows:
            if chosen.has(of, other.one.of) and _are_alike(row, other):
                pairs.append(("model", row, other))
        first = next(one for one in rows if one.one.of == of)
        if first is not row:
            pairs.append(("setting", row, first))
    return pairs


def _are_alike(ours: Row, base: Row) -> bool:
    """True if a table varies two rows in one way, except in what a network alone does not have."""
    differing = {name for name, _ in ours.one.varied.items() ^ base.one.varied.items()}
    if ours.is_alone or base.is_alone:
        differing -= ROUTING
    return not differing


def sampled_differently(
    ours: Row, base: Row, varies: Sequence[str], among: Sequence[str] | None = None
) -> str | None:
    """The settings that two models were sampled with, where they differ; None where they do not.

    ``among`` are settings of which alone it asks, by default all.
    """
    free = {*varies, *_OF_MODEL}
    if ours.is_alone or base.is_alone:
        free |= ROUTING
    found: dict[str, str] = {}
    for one, other in zip(ours.scored, base.scored, strict=True):
        settings, others = _sampled_with(one), _sampled_with(other)
        for name in {**settings, **others}:
            if among is not None and name not in among:
                continue
            if name not in free and settings.get(name) != others.get(name):
                values = f"{settings.get(name, _NOT_SET)} against {others.get(name, _NOT_SET)}"
                found.setdefault(name, f"{name} {values}")
    if not found:
        return None
    return (
        f"not sampled alike: {', '.join(found.values())}; compare.varies frees what is on purpose"
    )


def _sampled_with(row: ScoredRow) -> dict[str, str]:
    """Settings of a row's samples; a shift that is the model's own is none."""
    fields = sampling_fields(row.evaluation)
    if fields.get("shift") == fields.get("model_shift"):
        fields.pop("shift", None)
    return fields


def _contrast(results: Results, path: str, kind: str, ours: Row, base: Row) -> Contrast:
    why = _why_not_judged(ours, base)
    if why is None and kind == "model":
        why = sampled_differently(ours, base, results.settings.compare.varies)
    return Contrast(ours.measured(path), base.measured(path), "lower", why)


def _why_not_judged(ours: Row, base: Row) -> str | None:
    """The reason why two rows get no verdict, if there is one."""
    # A dictionary, since the order counts, and a name that both rows have is said once.
    failed: dict[str, str] = {}
    for row in (ours, base):
        lacking = row.why_not_learned
        if lacking is not None:
            failed[row.name] = f"{row.name}: did not learn, since {lacking}"
    if all(a.samples == b.samples for a, b in zip(ours.scored, base.scored, strict=True)):
        return "the same samples in every seed"
    if failed:
        return "; ".join(failed.values())
    fixed = why_fixed(ours, base)
    if fixed is not None:
        return fixed
    own = ours.one.evaluation.images
    other = base.one.evaluation.images
    return f"{own:,} against {other:,} samples" if own != other else None


def why_fixed(ours: Row, base: Row) -> str | None:
    """Rows that are of one set of weights in every seed, which say nothing about other trainings."""
    fixed: dict[str, None] = {}
    for row in (ours, base):
        if row.group.is_one_model:
            fixed[row.one.of] = None
    if not fixed:
        return None
    names = " and ".join(fixed)
    return f"{names}: one set of weights in every seed, so no other training is judged"
