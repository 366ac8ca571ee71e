"""What of a benchmark compares with what, and why the rest does not."""

from collections.abc import Collection, Iterator

from hddm.benchmark.results import Results

INCEPTION = "inception"
PERCENT_UNEQUAL = 2.0
PERCENT_BESIDE = 20.0
PUBLISHED = 50_000


def comparable(results: Results) -> Iterator[tuple[bool, str]]:
    """What of this compares with what: whether it does, and why."""
    features = results.features
    if features.get("option") != INCEPTION or features.get("is_classifier"):
        yield (
            False,
            f"With published FID: no. Distances are on features of {features['name']} "
            f"({features['dimensions']} dimensions; {features['choice']}).",
        )
    elif results.settings.sampling.num_images != PUBLISHED:
        yield (
            False,
            f"With published FID of {PUBLISHED:,} samples: no. These are of "
            f"{results.settings.sampling.num_images:,}, and distances fall with that number.",
        )
    few = {one.row for one in results.records if one.scores[results.decides]["few_images"]}
    if few:
        yield (
            False,
            f"Too few images for the features: {len(few)} rows have no more images than the features have "
            "dimensions, and compare with nothing, not even with each other.",
        )
    numbers: dict[int, list[str]] = {}
    for table, rows in results.tables.items():
        for count in sorted({row.point.num_images for row in rows}):
            numbers.setdefault(count, []).append(table)
    if len(numbers) > 1:
        told = "; ".join(f"{count:,} in {', '.join(tables)}" for count, tables in numbers.items())
        yield False, f"Rows of different numbers of images ({told}): distances fall with that number."
    models = results.settings.models
    finished = [one.name for one in models if one.kind == "finished"]
    begun = [one.name for one in models if one.init is not None]
    if len(finished) + len(begun) < len(models):
        which = "Rows of models trained here from the start, of" if finished or begun else "Rows of"
        same = "same training images, seeds, features and split"
        yield True, f"{which} one table with one number of images: {same}."
    if finished:
        yield False, f"Not trained here: {', '.join(finished)}. Their data and compute are not known."
    if begun:
        yield (
            False,
            f"Trained on from weights that were there (init): {', '.join(begun)}. The data and compute of "
            "those weights are neither known nor counted.",
        )
    budget = _budgets(results, begun)
    if budget is not None:
        percent, cheapest, dearest, is_all = budget
        yield (
            percent <= PERCENT_UNEQUAL,
            f"Training compute, counted, router included: {dearest} costs {percent:.2g} % more than "
            f"{cheapest}{', and all others lie between' if is_all else ''}.",
        )
    yield from _beside_steps(results)
    choosing = [one.name for one in models if one.chooses and one.blended is None]
    if choosing:
        yield (
            False,
            f"Choosing is not counted: {' and '.join(choosing)} took experts of both objectives on every "
            "shard, of which the table counts those that are used.",
        )
    if not results.complete:
        done, all_seeds = len(results.seeds), len(results.settings.seeds)
        yield False, f"Not finished: {done} of {all_seeds} training seeds are in."


def _beside_steps(results: Results) -> Iterator[tuple[bool, str]]:
    """What of an ensemble's compute is not for steps of its experts, which the single model has instead."""
    shares = [
        (one.calibration_flop / one.training_flop, one.router_flop / one.training_flop, one.model)
        for one in results.models
        if one.training_flop and one.router_flop and one.calibration_flop is not None
    ]
    if shares:
        calibration, router, model = max(shares, key=lambda one: one[0] + one[1])
        yield (
            100 * (calibration + router) <= PERCENT_BESIDE,
            f"Of the training compute of {model}, {100 * calibration:.2g} % went into the calibration of its "
            f"experts and {100 * router:.2g} % into the router, not into steps of experts.",
        )


def _budgets(results: Results, begun: Collection[str]) -> tuple[float, str, str, bool] | None:
    """Percent, the cheapest and the dearest of the first table's models, and whether all costs are known."""
    rows = next(iter(results.tables.values()))
    costs = {
        row.model: row.training_flop.mean
        for row in rows
        if row.training_flop is not None and row.model not in begun
    }
    if len(costs) < 2:
        return None
    cheapest, dearest = min(costs, key=lambda name: costs[name]), max(costs, key=lambda name: costs[name])
    is_all = costs.keys() >= {row.model for row in rows}
    return 100 * (costs[dearest] / costs[cheapest] - 1), cheapest, dearest, is_all
