"""Training one expert alone, on its shard."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from hddm.calibration import Calibration, calibrate
from hddm.data.open_shard import open_shard
from hddm.data.shards import Shard
from hddm.errors import HddmError
from hddm.experts import EXPERT_FILE, Expert, ExpertFacts, ShardFacts, null_conditions, save_expert
from hddm.files import check_absent, new_folder
from hddm.models.transformer import ExpertTransformer
from hddm.objectives import Objective, drop_labels
from hddm.schedules import Schedule
from hddm.tensors import generator
from hddm.training.loop import TRAINING_STREAM, Fitted, LoopSettings, OnStep, fit
from hddm.training.networks import new_network
from hddm.velocity import VelocityField


class ExpertSettings(LoopSettings):
    """What an expert learns, how large it is, and how it is optimised."""

    objective: Literal["ddpm", "flow"]
    time_sampling: Literal["uniform", "logit-normal"] = "uniform"
    size: str = "small"
    class_conditional: bool = False
    condition_dropout: Annotated[float, Field(ge=0, le=1)] = 0.1


def train_expert(
    shard_folder: Path,
    out: Path,
    settings: ExpertSettings,
    schedule: Schedule | None = None,
    schedule_source: str = "default of the objective",
    overwrite: bool = False,
    on_step: OnStep | None = None,
) -> list[float]:
    """Train an expert on one shard, calibrate it there, and write its folder.

    Nothing but the shard is read: no other expert's weights, gradients or data.

    Args:
        shard_folder: as `hddm.data.shards.partition` writes it.
        out: the expert folder to write.
        settings: see `ExpertSettings`.
        schedule: of DDPM; cosine by default.
        schedule_source: where ``schedule`` came from, for the record.
        overwrite: whether an existing ``out`` is replaced.
        on_step: called after each step with its number and loss.

    Returns:
        The loss of every step.

    Raises:
        HddmError: for a shard that cannot be read or is too small, images that do not fit the network,
            or a loss that is not finite.
    """
    check_absent(out, EXPERT_FILE, overwrite)
    objective = Objective.named(settings.objective, schedule, settings.time_sampling)
    shard = open_shard(shard_folder)
    if settings.class_conditional and shard.labels is None:
        raise HddmError(f"{shard_folder}: its images carry no labels; drop --class-conditional")
    network = new_network(
        ExpertTransformer,
        settings.size,
        shard.shape,
        settings.seed,
        num_classes=len(shard.classes) if settings.class_conditional else None,
    )
    fitted = fit(network, _batch_loss(network, shard, objective, settings), settings, on_step)
    network.requires_grad_(False)
    facts = _facts(shard, settings, objective, schedule_source, fitted)
    field = VelocityField(
        network,
        objective.schedule,
        objective.prediction_type,
        objective.time_scale,
        null_conditions=null_conditions(facts.null_class),
        classes=facts.classes,
    )
    calibration = calibrated_on(shard, field, conditions_of(shard, field), settings.seed)
    with new_folder(out, EXPERT_FILE, overwrite) as draft:
        save_expert(draft, Expert(network, facts, calibration))
    return fitted.losses


def conditions_of(shard: Shard, field: VelocityField) -> dict[str, Tensor]:
    """What ``field`` takes as conditions for the images of ``shard``: their labels, or nothing.

    Raises:
        HddmError: where the classes of the two differ.
    """
    if not field.classes:
        return {}
    if shard.labels is None or shard.classes != field.classes:
        raise HddmError(
            f"{shard.folder}: its classes are {list(shard.classes)}, the expert's {list(field.classes)}"
        )
    return {"class_labels": shard.labels}


def calibrated_on(
    shard: Shard, field: VelocityField, conditions: Mapping[str, Tensor], seed: int
) -> Calibration:
    """A calibration of ``field``, which has none yet, that says which shard it was fitted to."""
    calibration = calibrate(field.velocity, shard.images, conditions, seed)
    return replace(calibration, record=shard_record(shard) | {"seed": str(seed)})


def shard_record(shard: Shard) -> dict[str, str]:
    """What a calibration remembers of its shard."""
    return {"data": f"shard {shard.hash}", "images": str(len(shard))}


def shard_facts(shard: Shard, classes: tuple[str, ...]) -> ShardFacts:
    """What an expert remembers of its shard: images are counted by its own ``classes``, or not at all."""
    counts: list[int] = []
    if shard.labels is not None and shard.classes == classes:
        counts = shard.labels.bincount(minlength=len(classes)).tolist()
    return ShardFacts(
        index=shard.index,
        num_shards=shard.num_shards,
        hash=shard.hash,
        images=len(shard),
        class_images=tuple(counts),
        partition=shard.partition,
    )


def _batch_loss(
    network: ExpertTransformer, shard: Shard, objective: Objective, settings: ExpertSettings
) -> Callable[[], Tensor]:
    images, draws = shard.images, generator(settings.seed, shard.index, TRAINING_STREAM)

    def loss() -> Tensor:
        rows = torch.randint(len(images), (settings.batch_size,), generator=draws)
        conditions = {}
        if settings.class_conditional and shard.labels is not None:
            conditions["class_labels"] = drop_labels(
                shard.labels[rows], len(shard.classes), settings.condition_dropout, draws
            )
        return objective.loss(network, images[rows], draws, conditions)[0].mean()

    return loss


def _facts(
    shard: Shard,
    settings: ExpertSettings,
    objective: Objective,
    schedule_source: str,
    fitted: Fitted,
) -> ExpertFacts:
    channels, height, width = shard.shape
    classes = shard.classes if settings.class_conditional else ()
    return ExpertFacts(
        objective=settings.objective,
        prediction_type=objective.prediction_type,
        schedule=objective.schedule.config,
        schedule_source=schedule_source,
        time_scale=objective.time_scale,
        sample_shape=(channels, height, width),
        conditions=("class_labels",) if settings.class_conditional else (),
        classes=classes,
        null_class=len(shard.classes) if settings.class_conditional else None,
        shard=shard_facts(shard, classes),
        training=fitted.record(settings),
    )
