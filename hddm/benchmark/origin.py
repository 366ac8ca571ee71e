"""Where a model comes from: the steps that made it, and what they cost.

A model of several experts comes from the trainings of all of them, without those that were removed, and one
of these experts, taken out of its folder, from its own training alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hddm.benchmark.costs import calibration_path, cost_path, has_unknown_cost, trained_size
from hddm.benchmark.results import ModelResult
from hddm.benchmark.steps import Step
from hddm.experts.ensemble_records import read_ensemble_record
from hddm.utils.files import sha256_once
from hddm.utils.records import ENSEMBLE_FILE, EXPERT_FILE, ROUTER_FILE


@dataclass(frozen=True)
class Origin:
    """The steps that a model comes from, each once, in the order in which they ran.

    ``is_whole`` is False where the model was taken out of a folder and nobody knows which step made it.
    """

    steps: tuple[Step, ...]
    is_whole: bool

    @classmethod
    def of(cls, model: Step) -> "Origin":
        """The origin of what a step writes, or of a path within it, which `is_decided`."""
        needed = {model.identity}
        is_whole = True
        # From the last on, since a step comes after all that it reads.
        for step in reversed(model.upstream):
            if step.identity not in needed:
                continue
            for read, part in _read_by(step):
                maker = _maker(read, part)
                is_whole = is_whole and maker is not None
                needed.add((maker or read).identity)
        # Steps of several names ran once.
        steps: dict[str, Step] = {}
        for step in model.upstream:
            if step.identity in needed:
                steps.setdefault(step.identity, step)
        return cls(tuple(steps.values()), is_whole)


def is_decided(model: Step) -> bool:
    """True if all ensembles are there of which a model takes a part."""
    for step in model.upstream:
        for name, read in step.inputs.items():
            if not read.writes_ensemble:
                continue
            takes_part = step.verb == "assemble" or step.paths_within(name) != [read.path]
            if takes_part and not (read.is_done and (step.is_done or step.verb != "assemble")):
                return False
    return True


def _read_by(step: Step) -> Iterator[tuple[Step, Path]]:
    """The paths that a step depends on, each with the step in whose folder it is."""
    for name, read in step.inputs.items():
        for path in step.paths_within(name):
            if step.verb == "assemble" and (path / ENSEMBLE_FILE).is_file():
                # Experts and the router may have been left out.
                for part in _parts_left(path, step.path):
                    yield read, part
            else:
                yield read, path


def _parts_left(ensemble: Path, changed: Path) -> Iterator[Path]:
    """Experts and router of an ensemble that are also in the one that it was changed into."""
    left = [_weights(part) for part in _networks(changed)]
    for part in _networks(ensemble):
        if _weights(part) in left:
            yield part


def _networks(ensemble: Path) -> Iterator[Path]:
    """Folders of an ensemble's experts, and of its learned router."""
    record = read_ensemble_record(ensemble)
    for member in record.experts:
        yield ensemble / member.folder
    if record.learned is not None:
        yield ensemble / record.learned


def _maker(step: Step, path: Path) -> Step | None:
    """The step that made what lies at ``path`` in the folder of ``step``; None for a network of others."""
    if not _is_network(path) or not (step.path / ENSEMBLE_FILE).is_file():
        return step
    weights = _weights(path)
    found = None
    for one in step.upstream:
        if one is not step and _is_network(one.path) and _weights(one.path) == weights:
            found = one
    return found


def _is_network(folder: Path) -> bool:
    """True for the folder of an expert or of a router."""
    return (folder / EXPERT_FILE).is_file() or (folder / ROUTER_FILE).is_file()


def _weights(network: Path) -> dict[str, str]:
    """SHA-256 of the weights of an expert, with its calibration, or of a router, by file."""
    return {path.name: sha256_once(path) for path in sorted(network.glob("*.safetensors"))}


class _Cost(NamedTuple):
    """Counted operations of a step."""

    whole: int
    calibration: int
    """The part of them that calibration took."""


def _cost_of(step: Step) -> _Cost:
    """What a finished step took, by the equation of `hddm.benchmark.costs`."""
    if step.verb == "sample":
        return _Cost(step.values["num_images"] * step.work.record(cost_path(step))["image"], 0)
    fitting: int = step.work.record(calibration_path(step))["flop"]
    if not step.kind.is_training:
        return _Cost(fitting, fitting)
    cost = step.work.record(cost_path(step))
    num_steps, batch_size = trained_size(step)
    flop = num_steps * (batch_size * cost["image"] + cost["update"])
    if cost["trajectory"]:
        flop += step.values["trajectories"] * cost["trajectory"]
    return _Cost(flop + fitting, fitting)


def counted_parts(model: Step, not_counted: Sequence[Step]) -> list[Step]:
    """The steps whose operations count for a model: none of ``not_counted``, and none before them.

    One of these costs all that it took itself. Samples count where a training learns from them.
    """
    own = _own_steps(Origin.of(model), model, not_counted)
    return [one for one in own if _has_cost(one)]


def _own_steps(origin: Origin, model: Step, not_counted: Sequence[Step]) -> list[Step]:
    before: set[str] = set()
    for earlier in not_counted:
        before |= {one.identity for one in earlier.upstream}
    if model.identity in before:
        before.clear()
    return [one for one in origin.steps if one.identity not in before]


def model_cost(
    model: Step, seed: int, not_counted: Sequence[Step], records: Mapping[str, Mapping[str, Any]]
) -> ModelResult:
    """What a model took, by its `counted_parts`."""
    origin = Origin.of(model)
    own = _own_steps(origin, model, not_counted)
    parts = [one for one in own if _has_cost(one)]
    costs = [_cost_of(one) for one in parts]
    router = 0
    for one, cost in zip(parts, costs, strict=True):
        if one.verb == "train router":
            router += cost.whole
    is_unknown = any(has_unknown_cost(one) or one.reads_a_finished_model for one in own)
    is_known = any(map(_has_cost, origin.steps)) and origin.is_whole and not is_unknown
    sizes = [trained_size(one) for one in parts]
    return ModelResult(
        model=model.name,
        seed=seed,
        hash=model.identity,
        folder=model.label,
        parts=tuple(one.name for one in parts),
        steps=tuple(num_steps for num_steps, _ in sizes),
        batch_sizes=tuple(batch_size for _, batch_size in sizes),
        calibration_flop=sum(cost.calibration for cost in costs) if is_known else None,
        router_flop=router if is_known else None,
        training_flop=sum(cost.whole for cost in costs) if is_known else None,
        seconds=round(sum(records[one.identity]["seconds"] for one in parts), 1),
    )


def _has_cost(step: Step) -> bool:
    """True for steps of which operations count: trainings, calibrations, and samples to learn from."""
    return step.is_counted or step.may_calibrate
