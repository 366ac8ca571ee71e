"""Train one expert alone on its shard; what it has in common with students and experts that go on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from diffusers import ModelMixin
from torch import Tensor

from hddm.condition_names import LABELS, TEXT
from hddm.data.shards import Shard, open_shard
from hddm.experts.expert import Expert
from hddm.experts.expert_folders import (
    field_of,
    null_conditions,
    open_expert,
    save_expert,
    unread_as,
)
from hddm.experts.records import EXPERT_FILE, ExpertRecord, ShardRecord, weights_in
from hddm.networks.families.expert import EXPERT
from hddm.networks.sizes import size_config
from hddm.predictions import PredictionType
from hddm.schedules import (
    Schedule,
    declared_prediction_type,
    from_diffusers,
    read_prediction,
)
from hddm.training.calibrate import fit_on_shard, fitted_states
from hddm.training.loop import Complete, Fitted, OnTrainingStep, Task, Training
from hddm.training.objectives import Objective, check_conditions, drawing, loss_of, objective_of
from hddm.training.resume import encoding_of, recipe_before
from hddm.training.settings import (
    DistillRecipe,
    ExpertRecipe,
    ExpertSettings,
    Recipe,
    RunOptions,
    Start,
    refuse_without_init,
    resolve,
)
from hddm.training.watching import watching
from hddm.utils.errors import HddmError, errors_as
from hddm.utils.files import sha256_of
from hddm.utils.streams import Use, seed_of

DEFAULT_SCHEDULE = "default of the objective"
Network = TypeVar("Network", bound=ModelMixin)


def train_expert(
    shard_folder: Path,
    out: Path,
    settings: ExpertSettings,
    schedule: Schedule | Path | None = None,
    overwrite: bool = False,
    on_step: OnTrainingStep | None = None,
    run: RunOptions | None = None,
) -> list[float]:
    """Train an expert on one shard, calibrate it there, and write its folder; return the loss of every step.

    Only the shard is read: no other expert's weights, gradients or data. `hddm.data.partition.partition` or
    `hddm.data.encoding` writes it. ``schedule`` is DDPM's, cosine by default, or a file with a scheduler
    config of diffusers. ``on_step`` is called after each step. ``run`` says how the training is kept beside
    ``out``, to be resumed and watched; without it nothing is kept.

    Raises:
        HddmError: for a shard that is unreadable or too small, images that do not fit the network, a run that
            differs from the one to be resumed, or losses that are not finite.
        Stopped: after a signal, with the run saved.
    """
    before = recipe_before(out, EXPERT_FILE, run, overwrite)
    training = new_training(shard_folder, settings, schedule, before, run)
    return training.run(out, overwrite, on_step, run)


def new_training(
    shard_folder: Path,
    settings: ExpertSettings,
    schedule: Schedule | Path | None = None,
    before: Mapping[str, Any] | None = None,
    run: RunOptions | None = None,
) -> Training:
    """Return the training of `train_expert`; ``before`` is the recipe of a run that it continues."""
    shard = open_shard(shard_folder)
    recipe, objective = resolve_new(shard, settings, schedule, before)
    origin = str(schedule) if isinstance(schedule, Path) else DEFAULT_SCHEDULE
    record = new_record(shard, recipe, objective, origin)
    null_text = {TEXT: shard.texts.null} if recipe.text_conditional and shard.texts else {}
    text_dim = null_text[TEXT].shape[-1] if null_text else None
    expert = Expert(transformer_of(recipe, record, text_dim), record, None, null_text)
    labels = {LABELS: shard.labels} if recipe.class_conditional and shard.labels is not None else {}
    draw = drawing(shard, objective, recipe, labels, null_conditions(record.null_class) | null_text)
    loss = loss_of(objective, lambda module: module)
    key = Use.EXPERT_ORDER, Use.EXPERT_STEPS, shard.index
    task = Task(expert.network, len(shard), draw, loss, key, recipe.weak_step)
    write = saving(expert, shard, recipe, labels)
    data = {
        "shard": shard.hash,
        **encoding_of([shard.folder]),
        "schedule": objective.schedule.config,
    }
    watch = watching(field_of(expert), shard, recipe.conditions, run)
    states = fitted_states(recipe.noise_range)
    return Training(task, recipe, EXPERT_FILE, write, data, watch, states)


def saving(
    expert: Expert,
    shard: Shard,
    recipe: Recipe,
    conditions: Mapping[str, Tensor],
    origin: Mapping[str, Any] | None = None,
    save: Callable[[Path, Expert], None] = save_expert,
) -> Complete:
    """Return what completes an ``expert`` after its training; see `hddm.training.loop.run_task`.

    Its record gets the ``recipe`` and the ``origin`` of the weights. Unless it was trained in a calibration,
    or is a student of few steps, one is fitted to ``shard`` and the ``conditions`` (N, …) of its samples.
    """
    field = field_of(expert)

    def complete(fitted: Fitted) -> Callable[[Path], None]:
        expert.network.requires_grad_(False)
        calibration = expert.calibration
        if calibration is None and expert.record.sampling_steps is None:
            with fitted.on_device():
                calibration = fit_on_shard(shard, field, conditions, recipe.seed)
        network: Any
        network, weak = fitted.whole()
        training = fitted.record(recipe, origin)
        trained = replace(
            expert,
            opened=network,
            record=expert.record.model_copy(update={"training": training}),
            weak=unread_as(network, weak) if weak else None,
            calibration=calibration,
        )
        return lambda draft: save(draft, trained)

    return complete


def resolve_new(
    shard: Shard,
    settings: ExpertSettings,
    schedule: Schedule | Path | None = None,
    before: Mapping[str, Any] | None = None,
) -> tuple[ExpertRecipe, Objective]:
    """Return recipe and objective of a new expert on ``shard``, or its outline.

    A prediction that a file of a schedule states is the default. Raises `HddmError` for settings that the
    shard does not allow.
    """
    refuse_without_init(settings)
    stated = None
    if isinstance(schedule, Path):
        file = schedule
        stated = declared_prediction_type(file)
        if stated == PredictionType.FLOW_PREDICTION:
            raise HddmError(
                f"{file}: is for flow matching; use `objective` flow without `schedule`"
            )
        schedule = from_diffusers(file)
        if stated is not None:
            with errors_as(HddmError, str(file)):
                stated, _ = read_prediction(schedule, stated)
    recipe = resolve(ExpertRecipe, settings, Start(prediction=stated), before)
    objective = objective_of(recipe, schedule)
    check_conditions(shard, recipe)
    _check_size(shard.shape, recipe.size)
    return recipe, objective


def _check_size(shape: Sequence[int], size: str) -> None:
    _, height, width = shape
    patch = size_config(size)["patch_size"]
    if height != width or height % patch:
        raise HddmError(
            f"images are {width}×{height}; `size` {size} takes squares divisible by {patch}"
        )


def new_network(
    kind: type[Network], size: str, shape: Sequence[int], seed: int, **arguments: Any
) -> Network:
    """Make a ``kind`` of network of named ``size`` for square images of ``shape`` (C, H, W) in whole patches.

    Its weights depend on ``seed`` alone; torch's global generator is left as it was.
    """
    _check_size(shape, size)
    channels, height, _ = shape
    config = size_config(size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(seed, Use.WEIGHTS))
        network: Network = kind(sample_size=height, in_channels=channels, **config, **arguments)
    return network


def transformer_of(
    recipe: ExpertRecipe | DistillRecipe, record: ExpertRecord, text_dim: int | None = None
) -> ModelMixin:
    """Make the network of a new expert, with weights that depend on the seed alone."""
    shape, classes = record.sample_shape, len(record.classes) or None
    arguments: Any = {"rotary": recipe.rotary, "num_classes": classes, "text_dim": text_dim}
    return new_network(EXPERT.network, recipe.size, shape, recipe.seed, **arguments)


def data_of(shards: Sequence[Shard]) -> dict[str, Any]:
    """Describe the data of a training on several shards for its run's record."""
    return {"shards": [one.hash for one in shards], **encoding_of([one.folder for one in shards])}


def new_record(
    shard: Shard,
    recipe: ExpertRecipe,
    objective: Objective,
    schedule_source: str = DEFAULT_SCHEDULE,
) -> ExpertRecord:
    """Make the record of an expert of ``shard`` before its training."""
    classes = shard.classes if recipe.class_conditional else ()
    return ExpertRecord(
        objective=recipe.objective,
        prediction_type=objective.prediction_type,
        schedule=objective.schedule.config,
        schedule_source=schedule_source,
        time_scale=objective.time_scale,
        noise_range=recipe.noise_range,
        sample_shape=shard.shape,
        space=shard.space,
        latent_scale=shard.vae.scale if shard.vae is not None else 1.0,
        vae=shard.vae,
        text_encoder=shard.text_encoder if recipe.text_conditional else None,
        conditions=recipe.conditions,
        classes=classes,
        null_class=len(classes) if recipe.class_conditional else None,
        shard=record_of_shard(shard, classes),
    )


def record_of_shard(shard: Shard, classes: tuple[str, ...]) -> ShardRecord:
    """Make an expert's record of its shard, with image counts by class where its classes are the shard's."""
    counts: list[int] = []
    if shard.labels is not None and shard.classes == classes:
        counts = shard.labels.bincount(minlength=len(classes)).tolist()
    return ShardRecord(
        index=shard.index,
        num_shards=shard.num_shards,
        hash=shard.hash,
        partition=shard.partition,
        sketch=shard.sketch,
        images=len(shard),
        class_images=tuple(counts),
    )


def read_init(init: Path) -> tuple[Expert, dict[str, Any]]:
    """Read the expert that a training begins with, and its name and weight hash for records."""
    expert = open_expert(init).read()
    weights = weights_in(init)
    return expert, {"init": init.resolve().name, "init_sha256": weights and sha256_of(weights)}
