"""Which strategy suits an ensemble best, measured on samples of each against held-out images."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hddm.evaluation.compare import figure_at
from hddm.evaluation.evaluate import evaluate
from hddm.evaluation.features import INCEPTION
from hddm.evaluation.results import Evaluation, ResultGroup, read_groups
from hddm.pipelines.samples import sample_to_folder
from hddm.routers import Strategy
from hddm.utils.errors import HddmError
from hddm.utils.files import read_json, write_json, write_whole
from hddm.utils.settings import SampleSettings
from hddm.utils.work import differences

STRATEGIES = ("draw", "commit-0.92", "commit-0.68", "top-1", "top-2", "full")
"""Strategies that are compared by default."""
MEASURED = "measured.json"
"""What the strategies in a folder are measured with."""


@dataclass(frozen=True)
class Measure:
    """What the samples of every strategy are compared with; see `hddm.evaluation.evaluate`."""

    reference: Path
    held_out: Path | None = None
    features: str = "auto"
    allow_few: bool = False

    @property
    def identity(self) -> dict[str, Any]:
        """Values that all results on the same images and features share."""
        held_out = self.held_out and str(self.held_out.resolve())
        return asdict(self) | {"reference": str(self.reference.resolve()), "held_out": held_out}

    def evaluate(self, images: Path, classifier: Path) -> Evaluation:
        """The result of a folder of images; a ``classifier`` is trained once, and used by all later ones."""
        features, saved = self.features, None
        if features == "auto" and INCEPTION.find() is None:
            features = "classifier"
        if features == "classifier":
            features, saved = (str(classifier), None) if classifier.exists() else (features, classifier)
        return evaluate(
            images,
            self.reference,
            held_out=self.held_out,
            features=features,
            save_classifier=saved,
            allow_few=self.allow_few,
        )


def measure_strategies(
    ensemble: Path, out: Path, strategies: Sequence[str], settings: SampleSettings, measure: Measure
) -> list[ResultGroup]:
    """Sample ``ensemble`` by each strategy with the same noise, and evaluate all on the same features.

    Images are in ``out/<strategy>``, results in ``out/<strategy>.json``. What a killed run finished is kept.

    Raises:
        HddmError: before any sampling, for an unknown strategy, and for an ``out`` with results of other
            images or features; for a strategy that the ensemble cannot follow, and as sampling and
            evaluation.
    """
    for name in strategies:
        Strategy.parse(name)
    measured = out / MEASURED
    if measured.exists() and (differing := differences(read_json(measured), measure.identity)):
        raise HddmError(f"{out}: holds results of other settings; choose another folder", map(str, differing))
    out.mkdir(parents=True, exist_ok=True)
    write_json(measured, measure.identity)
    for name in strategies:
        sample_to_folder(ensemble, out / name, settings.model_copy(update={"strategy": name}), resume=True)
    paths = {name: out / f"{name}.json" for name in strategies}
    for name, path in paths.items():
        if not path.exists():
            result = measure.evaluate(out / name, out / "classifier.safetensors")
            write_whole(path, partial(Path.write_text, data=f"{result.model_dump_json(indent=2)}\n"))
    return read_groups(list(paths.values()))


def best_of(groups: Sequence[ResultGroup]) -> str:
    """Name of the strategy with the least distance to held-out images, else to training images."""
    distances = {}
    for group in groups:
        figure = figure_at(group, "splits.held_out.distance") or figure_at(group, "splits.training.distance")
        assert figure is not None
        distances[Path(group.name).stem] = figure.mean
    return min(distances, key=distances.__getitem__)
