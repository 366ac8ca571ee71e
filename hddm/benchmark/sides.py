"""Results of benchmarks as sides of a comparison: row against row of the same name, over training seeds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hddm.benchmark.results import LARGEST, Results, SeedRow, read_results
from hddm.evaluation.results import Result, Side, read_sides
from hddm.utils.errors import HddmError
from hddm.utils.files import read_json
from hddm.utils.records import RESULTS_FILE


def compared_sides(paths: Sequence[Path]) -> dict[str, list[Side]]:
    """What ``hddm compare`` holds side by side: evaluations under "", or of benchmarks a row at a time.

    Rows are those of the first tables that all of the benchmarks have, in the first one's order.

    Raises:
        HddmError: for fewer than two, for evaluations and benchmarks together, and for benchmarks without a
            row in common.
    """
    benchmarks = [path for path in paths if _is_benchmark(path)]
    if not benchmarks:
        return {"": read_sides(paths)}
    if len(paths) < 2:
        raise HddmError(
            f"{paths[0]}: one benchmark has its own tables (tables.md, report.html); name two or more"
        )
    foreign = [path for path in paths if path not in benchmarks]
    if foreign:
        raise HddmError(f"{foreign[0]}: is no benchmark, unlike others here; compare like with like")
    sides = [_sides(path if path.is_dir() else path.parent) for path in paths]
    names = [name for name in sides[0] if all(name in other for other in sides)]
    if not names:
        raise HddmError(
            "these benchmarks have no row of their first tables in common",
            [f"{path}: {', '.join(found)}" for path, found in zip(paths, sides, strict=True)],
        )
    return {name: [found[name] for found in sides] for name in names}


def _is_benchmark(path: Path) -> bool:
    if path.is_dir():
        return (path / RESULTS_FILE).is_file()
    return path.name == RESULTS_FILE and "tables" in read_json(path, LARGEST)


def _sides(folder: Path) -> dict[str, Side]:
    results = read_results(folder)
    first = next(iter(results.tables))
    rows: dict[str, list[Result]] = {}
    for record in results.records:
        if record.table == first:
            rows.setdefault(record.row, []).append(Result(folder / RESULTS_FILE, _content(results, record)))
    return {name: Side(str(folder), tuple(found)) for name, found in rows.items()}


def _content(results: Results, record: SeedRow) -> dict[str, Any]:
    """A record in the form of an evaluation; the split that is scored on is its held-out side."""
    split = results.score_on.replace("-", "_")
    scores = {key.replace(split, "held_out"): value for key, value in record.scores.items()}
    few = record.scores[results.decides]["few_images"]
    hashes, images = results.hashes, results.images
    made = next(one for one in results.models if (one.model, one.seed) == (record.model, record.seed))
    return {
        **scores,
        "shards": list(record.scores["shards"]),
        "features": results.features,
        "data": {
            "images": {"images": record.images, "shape": None, "hash": " ".join(record.samples)},
            "reference": {"images": images["training"], "hash": hashes["training"]},
            "held_out": {"images": images["fresh"], "hash": hashes["reference"]},
            "shards": {"images": images["training"], "hash": hashes["shards"]},
        },
        "split": results.score_on,
        "sampling": {
            **record.point.model_dump(),
            **results.sampled_as,
            **record.sampled_as,
            "source": made.hash,
            "seed": record.seed,
        },
        "training_tflop": None if made.training_flop is None else made.training_flop / 1e12,
        "versions": results.machine["packages"],
        "comparable": not few,
        "reasons": [f"too few images: {results.features['dimensions']} features"] if few else [],
    }
