"""Where a model comes from: the steps that made it, and what they cost.

A model of several experts comes from the trainings of all of them, without those that were removed, and one
of these experts, taken out of its folder, from its own training alone.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hddm.benchmark.costs import calibration_flop, cost_path, has_unknown_cost, trained_size
from hddm.benchmark.results import ModelResult
from hddm.benchmark.steps import Step
from hddm.experts.ensemble_folders import read_ensemble_record
from hddm.utils.files import sha256_of
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
        """The origin of what a finished step wrote, or of a path within it."""
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


def _read_by(step: Step) -> Iterator[tuple[Step, Path]]:
    """The paths that a finished step depends on, each with the step in whose folder it is."""
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
    return {path.name: sha256_of(path) for path in sorted(network.glob("*.safetensors"))}


def trained(
    model: Step, seed: int, not_counted: list[Step], records: Mapping[str, Mapping[str, Any]]
) -> ModelResult:
    """What the training of a model took, without the steps ``not_counted`` and all before them."""
    before: set[str] = set()
    for earlier in not_counted:
        if earlier.identity != model.identity:
            before |= {one.identity for one in earlier.upstream}
    origin = Origin.of(model)
    own = [one for one in origin.steps if one.identity not in before]
    parts = [one for one in own if one.kind.is_training or one.verb == "calibrate"]
    steps = []
    batch_sizes = []
    calibration = router = training = 0
    for one in parts:
        num_steps, batch_size = trained_size(one)
        steps.append(num_steps)
        batch_sizes.append(batch_size)
        fitting = calibration_flop(one)
        flop = fitting
        if num_steps:
            cost = one.work.record(cost_path(one))
            flop += num_steps * (batch_size * cost["image"] + cost["update"])
            if cost["trajectory"]:
                flop += one.values["trajectories"] * cost["trajectory"]
        calibration += fitting
        training += flop
        if one.verb == "train router":
            router += flop
    is_unknown = any(has_unknown_cost(one) or one.reads_a_finished_model for one in own)
    is_known = bool(parts) and origin.is_whole and not is_unknown
    return ModelResult(
        model=model.name,
        seed=seed,
        hash=model.identity,
        folder=model.label,
        parts=tuple(one.name for one in parts),
        steps=tuple(steps),
        batch_sizes=tuple(batch_sizes),
        calibration_flop=calibration if is_known else None,
        router_flop=router if is_known else None,
        training_flop=training if is_known else None,
        seconds=round(sum(records[one.identity]["seconds"] for one in parts), 1),
    )
