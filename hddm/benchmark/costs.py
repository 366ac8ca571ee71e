"""Counted operations of trainings and of sampling, a multiply-add being two.

    training = steps × (batch × one image's step + the optimiser's update)
               + trajectories × one of the teacher's trajectories + calibration
    calibration = states that it looks at × one evaluation, of all experts of an ensemble
    sampling = images × one image

States are those of the data at each level of noise, and of own samples those at each of their steps. Only
students of few steps have trajectories. `hddm.benchmark.counting` counts; this tells what is counted once for
several steps, and where it is recorded.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hddm.benchmark.lines import placed
from hddm.benchmark.steps import Contents, Step
from hddm.data.shard_records import PARTITION_FILE, find_shards, holds_shard, read_manifest
from hddm.experts.ensemble_records import read_ensemble_record
from hddm.experts.expert import experts_in
from hddm.experts.records import ROUTER_FILE
from hddm.experts.shares import domains_of
from hddm.strategies import Strategy
from hddm.utils.files import read_json
from hddm.utils.records import ENSEMBLE_FILE, EXPERT_FILE
from hddm.utils.work import hash_of


def cost_key(step: Step) -> str:
    """Hash of what the counted operations of an image depend on.

    A training's depend on its values, but for the seed, and on the shapes of networks and images that it
    reads. How many experts run for a sample can depend on everything.
    """
    if not step.kind.is_training:
        return hash_of(["cost", step.identity])
    values = {name: value for name, value in step.values.items() if name not in ("seed", "config")}
    paths = {name: str(one.path) for name, one in step.inputs.items()}
    shapes = {name: _shape_of(value, paths, step.contents) for name, value in values.items()}
    return hash_of(["cost", step.verb, shapes])


def _shape_of(value: Any, paths: Mapping[str, str], contents: Contents) -> Any:
    """A value with the shapes of what its paths name."""
    if isinstance(value, Mapping):
        return sorted([str(key), _shape_of(one, paths, contents)] for key, one in value.items())
    if isinstance(value, list | tuple):
        return [_shape_of(one, paths, contents) for one in value]
    if not isinstance(value, Path):
        return value
    return _shape_at(Path(placed(str(value), paths)), contents)


def _shape_at(path: Path, contents: Contents) -> Any:
    """What decides the cost of a shard, a partition or an expert; of anything else its whole content."""
    if (path / PARTITION_FILE).is_file():
        return [_shape_at(shard, contents) for shard in find_shards(path)]
    if holds_shard(path):
        manifest = read_manifest(path)
        encoding = manifest.encoding
        shape = None if encoding is None else encoding.shape
        encoder = manifest.text_encoder
        text = None if encoder is None else encoder.model_dump(mode="json")
        return [manifest.channels, manifest.size, len(manifest.classes), shape, text]
    if (path / EXPERT_FILE).is_file():
        configs = [read_json(one) for one in sorted(path.rglob("config.json"))]
        # Students of few steps take as many as they were trained for.
        return [configs, read_json(path / EXPERT_FILE).get("sampling_steps")]
    return contents.of(path)


def cost_path(step: Step) -> Path:
    """Where the counted operations of a step are recorded."""
    return step.work.path("cost", cost_key(step))


def calibration_path(step: Step) -> Path:
    """Where the counted operations of a step's calibration are recorded."""
    return step.work.path("calibration-cost", step.identity)


def has_unknown_cost(step: Step) -> bool:
    """True for a finished step of unknown cost.

    The first images are counted for all. So a student's cost is not known where what its teacher does for an
    image depends on the image: with unlike experts, of which each image has another, and with strategies that
    run more experts for some images than for others.
    """
    if step.verb != "distill":
        return step.kind.is_of_unknown_cost
    folder = step.placed_path(step.values["ensemble"])
    if not (folder / ENSEMBLE_FILE).is_file():
        return not (folder / EXPERT_FILE).is_file()
    experts = experts_in(folder, read_ensemble_record(folder))
    configs = [read_json(one.place / "config.json") for one in experts]
    are_alike = all(one == configs[0] for one in configs)
    teacher = read_json(step.path / EXPERT_FILE)["training"]["teacher"]
    num_domains = len(set(domains_of(experts)))
    if teacher["kind"] == "shard" or num_domains == 1:
        return not are_alike
    strategy = Strategy.parse(teacher["strategy"])
    if not are_alike:
        # All of them run for every image, unless each has its own noise levels.
        return strategy.kind != "full" or num_domains < len(experts)
    return not strategy.has_fixed_number


def trained_size(step: Step) -> tuple[int, int]:
    """Steps and batch size of a finished training, as its record says; none of a calibration."""
    if not step.kind.is_training:
        return 0, 0
    record = step.path / (ROUTER_FILE if step.verb == "train router" else EXPERT_FILE)
    found = read_json(record)["training"]
    return found["steps"], found["batch_size"]
