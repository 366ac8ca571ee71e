"""What settings ask of models that these cannot give: known before anything is trained, so refused then."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hddm.benchmark.conversions import EXACT, OWN_SAMPLER
from hddm.benchmark.finished import read_finished
from hddm.benchmark.naming import named
from hddm.benchmark.samples import canonical
from hddm.benchmark.schema import BenchmarkSettings, Point, table_points
from hddm.benchmark.schema_of_models import ModelSettings
from hddm.ensemble import Ensemble, Strategy
from hddm.evaluation.distances import are_few, too_few
from hddm.experts.loading import load
from hddm.utils.errors import HddmError
from hddm.velocity import PredictionType, missing_from


@dataclass(frozen=True)
class _Kind:
    """What of a model decides how it can be sampled."""

    experts: int
    """0 of a single model."""
    is_ddpm: bool
    """Its experts predict noise on one schedule, as they were trained."""
    has_classes: bool
    has_router: bool = True
    has_shards: bool = True
    """Whether the shards are known that its experts were trained on."""


def check_rows(settings: BenchmarkSettings) -> None:
    """Refuse what could not be sampled, from the settings and the finished models that they name.

    Raises:
        HddmError: for a row that asks a model for what it cannot give, and for a finished model that cannot
            be opened or compared.
    """
    kinds = {model.name: _kind(settings, model) for model in settings.models}
    for table in settings.tables:
        for name, point in itertools.product(table.models or kinds, table_points(settings, table)):
            kind = kinds[name]
            wrong = next(_misfits(f"model {name!r}", kind, canonical(point, not kind.experts)), None)
            if wrong is not None:
                raise HddmError(f"table {table.name!r}: {wrong}")


def check_shapes(settings: BenchmarkSettings, shape: Sequence[int]) -> None:
    """Refuse finished models that make other images than the data's, of ``shape`` (C, H, W).

    Raises:
        HddmError: as `read_finished`, and for another shape.
    """
    for model in settings.models:
        if model.path is None:
            continue
        made = {record.sample_shape for record in read_finished(model.path)}
        if made != {tuple(shape)}:
            told = " and ".join(map(str, sorted(made)))
            raise HddmError(
                f"model {model.name!r}: {model.path} makes images (C, H, W) of {told}, and the data's are "
                f"{tuple(shape)}; take data of that shape"
            )


def check_counts(settings: BenchmarkSettings, counts: Mapping[str, int], dimensions: int) -> None:
    """Refuse sides of no more images than features, unless the settings allow few.

    Args:
        settings: of the benchmark.
        counts: images of every side that a distance is measured on, by what the side is called.
        dimensions: features of an image.

    Raises:
        HddmError: for the smallest side, where it has too few.
    """
    side = min(counts, key=counts.__getitem__)
    if are_few(dimensions, [counts[side]]) and not settings.allow_few:
        with named(f"{side} {counts[side]}"):
            raise too_few(dimensions, [counts[side]], "allow_few: true in the settings")


def _misfits(model: str, kind: _Kind, point: Point) -> Iterator[str]:
    """Why ``model`` cannot be sampled at ``point``, and what to do."""
    strategy = Strategy.parse(point.strategy)
    if strategy.kind == "top" and strategy.value > kind.experts > 0:
        yield (
            f"strategy {point.strategy!r} asks for more experts than the {kind.experts} of {model}; take "
            f"top-{kind.experts} at most"
        )
    if strategy.kind != "draw" and kind.experts > 1 and not kind.has_router:
        yield f"strategy {point.strategy!r} needs a router, and {model} has none; take draw"
    if point.guidance_scale != 1 and not kind.has_classes:
        yield f"guidance_scale {point.guidance_scale:g} needs classes, and {model} has none; take 1"
    if point.conversion == OWN_SAMPLER and (kind.has_classes or not kind.experts or not kind.is_ddpm):
        yield (
            f"conversion {OWN_SAMPLER!r} is for ensembles without classes whose experts all predict noise as "
            f"they were trained to, and {model} is none; name such models in the table"
        )
    if point.conversion not in (EXACT, OWN_SAMPLER) and not kind.has_shards:
        yield (
            f"conversion {point.conversion!r} needs the shards that experts were trained on, which are not "
            f"known of {model}, a finished one; name others in the table"
        )


def _kind(settings: BenchmarkSettings, model: ModelSettings) -> _Kind:
    if model.path is not None:
        with named(f"model {model.name!r}"):
            return _kind_of_finished(model.path)
    if model.kind == "single":
        trained = settings.single(model.objectives, 0, 1, **model.training)
        return _Kind(0, False, trained.class_conditional)
    objectives = model.named_objectives(settings.partition.shards)
    labelled = (settings.expert(name, 0, **model.training).class_conditional for name in set(objectives))
    return _Kind(len(objectives), set(objectives) == {"ddpm"}, any(labelled))


def _kind_of_finished(path: Path) -> _Kind:
    records = read_finished(path)
    opened = load(path)
    fields = opened.experts if isinstance(opened, Ensemble) else [opened]
    for field in fields:
        given = {*field.null_conditions, *(["class_labels"] if opened.classes else [])}
        missing = missing_from(given, field.conditions or ())
        if missing:
            raise HddmError(
                f"{path}: needs {' and '.join(missing)}, which a benchmark does not give; sample it with "
                "hddm sample, and compare the images with hddm evaluate"
            )
    is_ddpm = all(
        record.prediction_type is PredictionType.EPSILON
        and not record.training_calibration
        and record.schedule == records[0].schedule
        for record in records
    )
    experts = len(fields) if isinstance(opened, Ensemble) else 0
    has_router = isinstance(opened, Ensemble) and opened.router is not None
    return _Kind(experts, is_ddpm, bool(opened.classes), has_router, has_shards=False)
