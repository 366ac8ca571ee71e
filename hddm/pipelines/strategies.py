"""Which strategy suits an ensemble best, by samples of each and images that it was not trained on."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hddm.ensemble import Strategy
from hddm.evaluation.compare import figure_at
from hddm.evaluation.evaluate import evaluate_folder
from hddm.evaluation.features import INCEPTION
from hddm.evaluation.results import ResultGroup, read_groups
from hddm.pipelines.samples import SampleSettings, sample_to_folder
from hddm.utils.drafts import differences
from hddm.utils.errors import HddmError
from hddm.utils.files import read_json, write_json, write_whole

STRATEGIES = ("draw", "commit-0.92", "commit-0.68", "top-1", "top-2", "full")
"""Strategies that are compared by default."""
MEASURED = "measured.json"
"""What the strategies in a folder are measured by."""


def measure_strategies(
    ensemble: Path,
    out: Path,
    reference: Path,
    held_out: Path | None = None,
    strategies: Sequence[str] = STRATEGIES,
    settings: SampleSettings | None = None,
    features: str = "auto",
    allow_few: bool = False,
) -> list[ResultGroup]:
    """Sample ``ensemble`` by each strategy with the same noise, and evaluate all on the same features.

    Images lie in ``out/<strategy>``, results in ``out/<strategy>.json``. What a killed run finished is not
    made again. Other arguments are as in `hddm.evaluation.evaluate.evaluate_folder`.

    Raises:
        HddmError: before any sampling, for an unknown strategy and an ``out`` with results of other images or
            features; for one that the ensemble cannot follow, and as sampling and evaluating do.
    """
    for name in strategies:
        Strategy.parse(name)
    sides = {"reference": str(reference.resolve()), "held_out": held_out and str(held_out.resolve())}
    asked, measured = {**sides, "features": features, "allow_few": allow_few}, out / MEASURED
    if measured.exists() and (differing := differences(read_json(measured), asked)):
        raise HddmError(f"{out}: holds results measured otherwise; choose another folder", differing)
    out.mkdir(parents=True, exist_ok=True)
    write_json(measured, asked)
    chosen, classifier = settings or SampleSettings(num_images=1000), out / "classifier.safetensors"
    if features == "auto" and INCEPTION.find() is None:
        features = "classifier"
    paths = [out / f"{name}.json" for name in strategies]
    for name in strategies:
        sample_to_folder(ensemble, out / name, chosen.model_copy(update={"strategy": name}), resume=True)
    for name, path in zip(strategies, paths, strict=True):
        if path.exists():
            continue
        # One classifier serves all, since distances compare on the same features alone.
        is_trained, save = classifier.exists(), features == "classifier"
        result = evaluate_folder(
            out / name,
            reference,
            held_out,
            allow_few,
            features=str(classifier) if save and is_trained else features,
            classifier=classifier if save and not is_trained else None,
        )
        write_whole(path, partial(write_json, content=result))
    return read_groups(paths)


def best_of(groups: Sequence[ResultGroup]) -> str:
    """Name of the strategy with the least distance to held-out images, or to training images without any."""
    distances = {}
    for group in groups:
        figure = figure_at(group, "to_held_out") or figure_at(group, "to_training")
        assert figure is not None
        distances[Path(group.name).stem] = figure.mean
    return min(distances, key=distances.__getitem__)
