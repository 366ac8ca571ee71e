"""Where a model comes from: the steps that made it, and what they cost.

A model of several experts comes from the trainings of all of them, and one of these experts, taken out of its
folder, from its own training alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hddm.benchmark.costs import calibration_flop, cost_path, has_unknown_cost, trained_size
from hddm.benchmark.results import ModelResult
from hddm.benchmark.steps import Step
from hddm.utils.files import sha256_of
from hddm.utils.records import ENSEMBLE_FILE, EXPERT_FILE


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
            for name, read in step.inputs.items():
                for path in step.paths_within(name):
                    maker = _maker(read, path)
                    is_whole = is_whole and maker is not None
                    needed.add((maker or read).identity)
        # Steps of several names ran once.
        steps: dict[str, Step] = {}
        for step in model.upstream:
            if step.identity in needed:
                steps.setdefault(step.identity, step)
        return cls(tuple(steps.values()), is_whole)


def _maker(step: Step, path: Path) -> Step | None:
    """The step that made what lies at ``path`` in the folder of ``step``; None for an expert of others."""
    is_part = path != step.path and (step.path / ENSEMBLE_FILE).is_file()
    if not is_part or not (path / EXPERT_FILE).is_file():
        return step
    weights = _weights(path)
    found = None
    for one in step.upstream:
        if one is not step and (one.path / EXPERT_FILE).is_file() and _weights(one.path) == weights:
            found = one
    return found


def _weights(expert: Path) -> dict[str, str]:
    """SHA-256 of an expert's weights and of its calibration, by file."""
    return {path.name: sha256_of(path) for path in sorted(expert.glob("*.safetensors"))}


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
