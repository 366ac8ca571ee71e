"""Verdicts of a benchmark by the objective: errors and bits on held-out images, which need no features.

Gaps are paired: by training seed where there are enough seeds, and corrected with all others of their table
(`hddm.evaluation.compare`). With one seed they are paired image by image, which says nothing about other
trainings.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hddm.benchmark.results import ObjectiveComparison, Results, Row, read_results
from hddm.benchmark.steps import SCORES
from hddm.benchmark.verdicts import Pair, pairs_of, sampled_differently, why_fixed
from hddm.evaluation.compare import Contrast, GapVerdict, judged, verdicts
from hddm.objective.compare import ScoresGroup
from hddm.objective.records import (
    BITS,
    MEAN_ERROR,
    HeldOutScores,
    difference,
    read_scores,
    values_of,
)
from hddm.utils.records import RESULTS_FILE

JUDGED = (MEAN_ERROR, BITS)
"""Figures that verdicts are about; levels of noise are shown beside them."""
_SEEN = ("strategy", "class_labels", "prompts")
"""Sampling settings that have to do with what the objective measures."""


def compare_objective(
    results: Results, scores: Mapping[str, HeldOutScores]
) -> Iterator[ObjectiveComparison]:
    """Compare the rows that `compare_rows` compares by their objective.

    ``scores`` are the results by step. Rows that share one are the same model here, and not compared.
    """
    for table, rows in results.tables.items():
        found: list[tuple[Pair, str]] = []
        for pair in pairs_of(results, rows):
            _, ours, base = pair
            if _steps(ours) == _steps(base):
                continue
            for figure in JUDGED:
                if ours.objective(figure) is not None and base.objective(figure) is not None:
                    found.append((pair, figure))
        contrasts = [_contrast(results, *one) for one in found]
        of_seeds = verdicts(contrasts)
        for (pair, figure), contrast, verdict in zip(found, contrasts, of_seeds, strict=True):
            kind, ours, base = pair
            is_over_images = len(results.seeds) == 1 and contrast.why is None
            if is_over_images:
                verdict = _over_images(figure, scores[_steps(ours)[0]], scores[_steps(base)[0]])
            a, b = contrast.ours.values, contrast.base.values
            yield ObjectiveComparison(
                table=table,
                kind=kind,
                row=ours.name,
                against=base.name,
                gaps={int(seed): a[seed] - b[seed] for seed in a},
                ratio=None,
                verdict=verdict,
                figure=figure,
                over="images" if is_over_images else "seeds",
            )


def _steps(row: Row) -> list[str]:
    """The steps that scored a row, by seed."""
    return [one.objective.step for one in row.scored if one.objective is not None]


def _contrast(results: Results, pair: Pair, figure: str) -> Contrast:
    kind, ours, base = pair
    why = why_fixed(ours, base)
    if why is None and kind == "model":
        why = sampled_differently(ours, base, results.settings.compare.varies, _SEEN)
    own, other = ours.objective(figure), base.objective(figure)
    assert own is not None
    assert other is not None
    return Contrast(own, other, "lower", why)


def _over_images(figure: str, ours: HeldOutScores, base: HeldOutScores) -> GapVerdict:
    """The gap of one training each, with its interval over images."""
    found = values_of([("ours", ours), ("base", base)])[figure]
    gap = difference(found["ours"], found["base"])
    return GapVerdict(gap=gap.value, interval=gap.interval, judgement=judged(gap.interval))


def read_objectives(paths: Sequence[Path]) -> dict[str, list[ScoresGroup] | str]:
    """Scores by the objective of the rows that `read_compared` compares, or why a row has none to compare.

    Empty where no benchmark has any. Rows without scores for a stated reason are left out.
    """
    folders = []
    for path in paths:
        folder = path if path.is_dir() else path.parent
        if not (folder / RESULTS_FILE).is_file():
            return {}
        folders.append(folder)
    rows = {folder: {row.name: row for row in read_results(folder).first} for folder in folders}
    found: dict[str, list[ScoresGroup] | str] = {}
    for name in rows[folders[0]]:
        others = [own[name] for own in rows.values() if name in own]
        if len(others) < len(rows) or not any(map(_steps, others)):
            continue
        found[name] = _groups(dict(zip(rows, others, strict=True)))
    return found


def _groups(rows: Mapping[Path, Row]) -> list[ScoresGroup] | str:
    """A row of each benchmark as `hddm.objective.compare.compared` compares it."""
    groups = []
    for folder, row in rows.items():
        results = {}
        for one in row.scored:
            scores = one.objective
            if scores is None or not scores.step:
                why = "the benchmark has none" if scores is None else scores.why_none
                return f"{folder}: no errors and bits: {why}"
            file = folder / f"{scores.step}{SCORES}"
            if not file.is_file():
                return f"{file}: is not there, so errors and bits are not compared"
            results[str(one.seed)] = read_scores(file)
        groups.append(ScoresGroup(str(folder), results))
    return groups
