"""Models as they are known before any step has run: their experts, their router and their strategy.

An expert that a step will write is outlined by an `Expert`, with what decides its domain alone. So one rule
(`hddm.experts.parts.domains_of`) tells what is one network, here and wherever an ensemble is opened.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from hddm.benchmark.lines import names_in
from hddm.benchmark.steps import Step
from hddm.experts.decisions import kept_of, left_of, with_settings
from hddm.experts.ensemble_records import Member, name_of, read_ensemble_record
from hddm.experts.expert import Expert, experts_in
from hddm.experts.records import ExpertRecord, ShardRecord, read_expert_record
from hddm.experts.routing import DRAWN, named_router
from hddm.experts.shares import domains_of
from hddm.objective.checks import check_weighing, refuse_shared_noise, why_unscored
from hddm.predictions import PredictionType
from hddm.sampling_choices import check_expert, refuse_kind, refuse_native_mix
from hddm.settings import CalibrationSettings, NativeName
from hddm.strategies import Strategy, refuse_unrouted
from hddm.utils.errors import HddmError
from hddm.utils.records import ENSEMBLE_FILE, EXPERT_FILE, WHOLE, NoiseRange

EXPERTS = "experts"
"""Folder of the experts in an ensemble's folder."""
_OF_SHARD = "expert_"
"""Folders of ``hddm train all`` begin with it."""
_ONE_NETWORK = frozenset({"train expert", "distill", "convert", "calibrate", "merge"})
"""Verbs that write an expert."""


class Model(NamedTuple):
    """A network, or several with a strategy."""

    experts: tuple[Expert, ...]
    has_router: bool | None = False
    """None where only the assembly will tell."""
    strategy: str = DRAWN.name

    @property
    def num_domains(self) -> int:
        """Number of experts between which something has to choose."""
        return len(set(domains_of(self.experts)))

    @property
    def is_alone(self) -> bool:
        """True for a network alone, and for networks that divide the noise levels of one shard."""
        return self.num_domains == 1

    def check(
        self, strategy: str | None, expert: int | None, native: NativeName | None = None
    ) -> None:
        """Raise an `HddmError` for a choice of `hddm.sampling.plan` that these experts do not have."""
        check_expert(expert, strategy, len(self.experts))
        if strategy is not None:
            self.check_strategy(strategy)
        if native is None:
            return
        if expert is None and not self.is_alone:
            refuse_native_mix(native, strategy or self.strategy)
        for k, one in enumerate(self.experts):
            if expert in (None, k):
                record = one.record
                is_flow = record.objective == "flow"
                refuse_kind(native, is_flow, record.sampling_steps, record.noise_range)

    def check_strategy(self, strategy: str) -> None:
        """Raise an `HddmError` for a strategy that needs more experts, or a router."""
        Strategy.parse(strategy).check(self.num_domains)
        if self.has_router is False:
            refuse_unrouted(strategy)


def why_not_scored(sampled: Mapping[str, Any], model: Model | None, has_likelihood: bool) -> str:
    """Why a model that is ``sampled`` with these values has no scores by its objective; empty if it has.

    Without ``has_likelihood`` errors alone are measured. What is not known of a model is no reason.
    """
    native, expert = sampled["native"], sampled["expert"]
    if native is not None:
        return f"by its experts' own sampler ({native}), which follows no common velocity"
    if sampled["height"] is not None or sampled["width"] is not None:
        return "sampled at another size than its model's own"
    strategy = sampled["strategy"]
    if model is None:
        return "" if strategy is None else why_unscored(strategy, has_likelihood)
    experts = model.experts if expert is None else [model.experts[expert]]
    if any(one.record.sampling_steps is not None for one in experts):
        return "a student of few steps, whose network predicts mean velocities"
    if expert is not None:
        is_part = experts[0].record.noise_range != WHOLE
        return "this expert covers a part of the noise" if is_part else ""
    return "" if model.is_alone else why_unscored(strategy or model.strategy, has_likelihood)


class Models:
    """The models of one seed's steps, in the order in which the steps are planned."""

    def __init__(self) -> None:
        # By the names of steps, each computed once: a chain of trainings may be long.
        self._written: dict[str, Model | None] = {}

    def add(self, step: Step) -> None:
        """Note what a step writes; raises `HddmError` for an ensemble that could not be assembled."""
        if step.verb == "assemble":
            self._written[step.name] = self._ensemble_of(step)
        elif step.writes_ensemble:
            self._written[step.name] = self._weighed_of(step)
        elif step.verb in _ONE_NETWORK:
            self._written[step.name] = Model((self._expert_of(step),))

    def of(self, model: Step) -> Model | None:
        """The model that a step writes, or a path names; None where it is not known.

        Raises `HddmError` for what is no model.
        """
        if model.verb:
            return self._written_by(model)
        return self.at(model, model.values["source"])

    def at(self, step: Step, path: Path) -> Model | None:
        """The model at a path that ``step`` reads, as it names it."""
        names = [name for name in names_in(str(path)) if name in step.inputs]
        if not names:
            return _finished(path)
        # What leads out of the folder is refused where the step is made.
        if path.parts[0] != f"${names[0]}" or ".." in path.parts:
            return None
        source = step.inputs[names[0]]
        return self._within(source, path.parts[1:]) if path.parts[1:] else self._written_by(source)

    def _written_by(self, step: Step) -> Model | None:
        if step.name not in self._written:
            text = f"hddm {step.verb} writes no model that can be sampled"
            raise HddmError(f"${step.name}: {text}; name a step that does")
        return self._written[step.name]

    def _within(self, step: Step, parts: Sequence[str]) -> Model | None:
        """The expert at a path within the folder that a step writes."""
        shown = "/".join([f"${step.name}", *parts])
        if step.writes_ensemble and len(parts) == 2 and parts[0] == EXPERTS:
            ensemble = self._written_by(step)
            if ensemble is None:
                return None
            if parts[1] not in map(str, range(len(ensemble.experts))):
                last = len(ensemble.experts) - 1
                raise HddmError(f"{shown}: no such expert; choose from {EXPERTS}/0 to {last}")
            return Model((ensemble.experts[int(parts[1])],))
        if step.verb == "train all" and len(parts) == 1 and parts[0].startswith(_OF_SHARD):
            shard = f"{step.values['shards']}/shard_{parts[0].removeprefix(_OF_SHARD)}"
            return Model((_outline(shown, shard, step.values["noise_range"] or WHOLE),))
        raise HddmError(f"{shown}: is no model; name a step that writes one, or one of its experts")

    def _expert_of(self, step: Step) -> Expert:
        """The expert that a step writes."""
        shown, values = f"${step.name}", step.values
        if step.verb == "train expert":
            part = values["noise_range"]
            if part is None and values["init"] is not None:
                part = self._expert_at(step, values["init"]).record.noise_range
            outline = _outline(shown, str(values["shard"]), part or WHOLE)
            kind = {"objective": values["objective"]}
            return replace(outline, record=outline.record.model_copy(update=kind))
        if step.verb == "distill":
            outline = _outline(shown)
            kind = {"sampling_steps": values["sampling_steps"]}
            return replace(outline, record=outline.record.model_copy(update=kind))
        read: list[Path] = []
        if step.verb == "calibrate":
            read = [values["expert"]]
        elif step.verb == "merge":
            read = values["experts"]
        if not read:
            return _outline(shown)
        experts = [self._expert_at(step, path) for path in read]
        record = experts[0].record
        if any(one.record.shard != record.shard for one in experts):
            record = record.model_copy(update={"shard": None})
        return replace(_outline(shown), record=record)

    def _expert_at(self, step: Step, path: Path) -> Expert:
        """The expert at a path that ``step`` reads, or an outline of one of which nothing is known."""
        found = self.at(step, path)
        if found is None or len(found.experts) > 1:
            return _outline(str(path))
        return found.experts[0]

    def _ensemble_of(self, step: Step) -> Model | None:
        """The ensemble that a step assembles or changes; None where it changes one that is not known."""
        values = step.values
        added = [self._member_at(step, path) for path in values["add"]]
        has_router: bool | None = values["router"] is not None
        strategy = named_router(values["router"]).default_strategy.name
        if len(values["experts"]) == 1 and self._may_be_ensemble(step, values["experts"][0]):
            before = self.at(step, values["experts"][0])
            if before is None:
                return None
            kept = kept_of(before.experts, values["remove"], bool(added))
            experts = [*left_of(before.experts, kept), *added]
            strategy = before.strategy
            if not has_router:
                # A learned router may not know an added expert, and is then left out.
                has_router = None if before.has_router and added else before.has_router
        else:
            experts = [self._member_at(step, path) for path in values["experts"]] + added
        experts = with_settings(experts, None, None, values["domain"])
        made = Model(_placed(step, experts), has_router, values["strategy"] or strategy)
        made.check_strategy(made.strategy)
        return made

    def _weighed_of(self, step: Step) -> Model | None:
        """The ensemble whose experts a step weighs, or None if it is unknown."""
        settings = {name: step.values[name] for name in CalibrationSettings.model_fields}
        check_weighing(step.values["data"], CalibrationSettings(**settings))
        before = self.at(step, step.values["expert"])
        if before is None:
            return None
        refuse_shared_noise(before.num_domains, len(before.experts))
        # Without another router the weights are one.
        return Model(_placed(step, before.experts), True, before.strategy)

    def _may_be_ensemble(self, step: Step, path: Path) -> bool:
        """True for an ensemble's folder, and for one of which nothing is known."""
        if not any(name in step.inputs for name in names_in(str(path))):
            return (path / ENSEMBLE_FILE).is_file()
        if path.parts[1:]:
            return False
        return step.inputs[names_in(str(path))[0]].writes_ensemble

    def _member_at(self, step: Step, path: Path) -> Expert:
        """The expert at a path, as a new one of an ensemble, which has its name of before."""
        expert = self._expert_at(step, path)
        name = expert.member.name or path.name.removeprefix("$")
        return replace(expert, folder=path, member=Member(folder="", name=name))


def _placed(step: Step, experts: Sequence[Expert]) -> tuple[Expert, ...]:
    """Experts where they lie in the ensemble that a step writes."""
    placed = []
    for k, one in enumerate(experts):
        folder = f"{EXPERTS}/{k}"
        member = one.member.model_copy(update={"folder": folder})
        placed.append(replace(one, folder=Path(f"${step.name}", folder), member=member))
    return tuple(placed)


def _finished(folder: Path) -> Model | None:
    """The model in a folder; None if hddm has no record there."""
    if (folder / ENSEMBLE_FILE).is_file():
        record = read_ensemble_record(folder)
        experts = tuple(experts_in(folder, record))
        return Model(experts, record.router is not None, record.strategy)
    if not (folder / EXPERT_FILE).is_file():
        return None
    member = Member(folder="", name=name_of(folder))
    return Model((Expert(None, read_expert_record(folder), folder=folder, member=member),))


def _outline(name: str, shard: str | None = None, noise_range: NoiseRange = WHOLE) -> Expert:
    """An expert of which this alone is known; all else in its record stands for what is not."""
    trained_on = None
    if shard is not None:
        trained_on = ShardRecord(index=0, num_shards=1, hash=shard, images=1)
    record = ExpertRecord(
        objective="flow",
        prediction_type=PredictionType.FLOW_PREDICTION,
        schedule={},
        schedule_source="",
        time_scale=1.0,
        sample_shape=(1, 1, 1),
        noise_range=noise_range,
        shard=trained_on,
    )
    return Expert(None, record, folder=Path(name))
