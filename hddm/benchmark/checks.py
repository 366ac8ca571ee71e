"""Rows of tables that their model cannot be sampled for: known from the settings, so refused at once."""

import itertools
from dataclasses import dataclass

from hddm.benchmark.conversions import OWN_SAMPLER
from hddm.benchmark.finished import read_finished
from hddm.benchmark.naming import named
from hddm.benchmark.samples import canonical
from hddm.benchmark.schema import BenchmarkSettings, ModelSettings, Point, table_points
from hddm.errors import HddmError
from hddm.experts import EXPERT_FILE
from hddm.predictions import PredictionType


@dataclass(frozen=True)
class _Kind:
    """What of a model decides how it can be sampled."""

    is_single: bool
    is_ddpm: bool
    """Its experts predict noise on one schedule, as they were trained."""
    has_classes: bool


def check_rows(settings: BenchmarkSettings) -> None:
    """Refuse what could not be sampled, before anything is trained.

    Raises:
        HddmError: for a row that asks a model for what it cannot give, and for a finished model that cannot
            be compared.
    """
    kinds = {model.name: _kind(settings, model) for model in settings.models}
    for table in settings.tables:
        for name, point in itertools.product(table.models or kinds, table_points(settings, table)):
            wrong = _misfit(name, kinds[name], canonical(point, kinds[name].is_single))
            if wrong is not None:
                raise HddmError(f"table {table.name!r}: {wrong}")


def _misfit(name: str, kind: _Kind, point: Point) -> str | None:
    """Why the model ``name`` cannot be sampled at ``point``, and what to do; None where it can."""
    if point.conversion == OWN_SAMPLER and (kind.is_single or kind.has_classes or not kind.is_ddpm):
        return (
            f"conversion {OWN_SAMPLER!r} is for ensembles without classes whose experts all predict noise as "
            f"they were trained to, and model {name!r} is none; name such models in the table"
        )
    return None


def _kind(settings: BenchmarkSettings, model: ModelSettings) -> _Kind:
    if model.path is not None:
        with named(f"model {model.name!r}"):
            records = read_finished(model.path)
        schedules = [record.schedule for record in records]
        return _Kind(
            (model.path / EXPERT_FILE).is_file(),
            all(
                record.prediction_type is PredictionType.EPSILON and not record.training_calibration
                for record in records
            )
            and all(schedule == schedules[0] for schedule in schedules),
            any(record.classes for record in records),
        )
    if model.kind == "single":
        trained = settings.single(model.objectives, 0, 1, **model.training)
        return _Kind(True, False, trained.class_conditional)
    objectives = set(model.named_objectives(settings.partition.shards))
    labelled = (settings.expert(name, 0, **model.training).class_conditional for name in objectives)
    return _Kind(False, objectives == {"ddpm"}, any(labelled))
