"""Training an expert on: from the weights and conventions of one that exists, on another shard.

With flow matching any expert learns the velocity through the exact conversion, in the parametrisation of
`hddm.parametrisation`; what it predicts, and on which schedule, stays. An init that was trained on before
keeps the calibration of that training, since its weights mean something in that one only.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from hddm.calibration import FILE_NAME as CALIBRATION
from hddm.calibration import Calibration
from hddm.data.open_shard import open_shard
from hddm.data.shards import Shard
from hddm.errors import HddmError
from hddm.experts import EXPERT_FILE, FORMAT, Expert, ExpertFacts, read_expert, save_expert
from hddm.files import check_absent, new_folder
from hddm.load import field_of
from hddm.model_folders import WEIGHTS
from hddm.moments import Moments
from hddm.networks import OPTIONAL_CONDITIONS
from hddm.objectives import Objective, drop_labels
from hddm.parametrisation import KAPPA, bounded_gain
from hddm.predictions import PredictionType
from hddm.schedules import from_config
from hddm.tensors import generator
from hddm.training.expert import ExpertSettings, calibrated_on, shard_facts, shard_record
from hddm.training.loop import TRAINING_STREAM, OnStep, fit
from hddm.training.recalibrate import check_images
from hddm.velocity import VelocityField
from hddm.weight_files import sha256_of


def continue_expert(
    init: Path,
    shard_folder: Path,
    out: Path,
    settings: ExpertSettings,
    overwrite: bool = False,
    on_step: OnStep | None = None,
    kappa: float = KAPPA,
) -> list[float]:
    """Train the expert in ``init`` on one shard, and write the result to ``out``.

    Args:
        init: an expert folder; it fixes network, prediction type and schedule.
        shard_folder: as `hddm.data.shards.partition` writes it.
        out: the expert folder to write.
        settings: as for a new expert; ``size`` has no say.
        overwrite: whether an existing ``out`` is replaced.
        on_step: called after each step with its number and loss.
        kappa: bound of the gain of flow matching; an init that was trained on before keeps its own.

    Returns:
        The loss of every step.

    Raises:
        HddmError: as `train_expert`, and for a shard whose images or classes the init does not fit, a
            condition that neither the shard nor a null value gives, or DDPM for an init that predicts
            anything but noise on its whole range.
    """
    check_absent(out, EXPERT_FILE, overwrite)
    if not init.is_dir():
        raise HddmError(f"{init}: no such folder")
    if not (init / EXPERT_FILE).is_file():
        raise HddmError(
            f"{init}: no expert folder; a checkpoint becomes one by hddm convert, and an ensemble's experts "
            "are trained on one by one"
        )
    expert = read_expert(init)
    field = field_of(expert)
    objective = _objective(init, expert.facts, settings)
    shard = open_shard(shard_folder)
    check_images(shard, expert.facts)
    given = _conditions(init, field, shard, settings)
    field.calibration = None
    if objective.name == "flow":
        field.calibration = _parametrisation(init, expert, field, shard, kappa)
    expert.network.requires_grad_(True)
    loss = _batch_loss(expert.network, field, shard, given, objective, settings)
    fitted = fit(expert.network, loss, settings, on_step)
    expert.network.requires_grad_(False)
    record = fitted.record(settings) | {"init": init.resolve().name, "init_sha256": sha256_of(init / WEIGHTS)}
    # Its network is the init's, whatever the settings say.
    del record["size"]
    if field.calibration is not None:
        record["kappa"] = expert.facts.training.get("kappa", kappa)
    facts = expert.facts.model_copy(
        update={
            "format": FORMAT,
            "objective": objective.name,
            "weights": "ema",
            "shard": shard_facts(shard, expert.facts.classes),
            "training": record,
            "training_calibration": field.calibration is not None,
        }
    )
    calibration = field.calibration or calibrated_on(shard, field, given, settings.seed)
    with new_folder(out, EXPERT_FILE, overwrite) as draft:
        save_expert(draft, replace(expert, facts=facts, calibration=calibration))
    return fitted.losses


def _objective(init: Path, facts: ExpertFacts, settings: ExpertSettings) -> Objective:
    if settings.objective == "flow":
        return Objective.named("flow", time_sampling=settings.time_sampling)
    if facts.prediction_type is not PredictionType.EPSILON:
        raise HddmError(
            f"{init}: predicts {facts.prediction_type.value}, and --objective ddpm learns epsilon; take flow"
        )
    if facts.training_calibration:
        raise HddmError(
            f"{init}: was trained on with flow matching, so it predicts noise on a part of its range only; "
            "take --objective flow"
        )
    return Objective.named("ddpm", from_config(facts.schedule), settings.time_sampling)


def _parametrisation(
    init: Path, expert: Expert, field: VelocityField, shard: Shard, kappa: float
) -> Calibration | None:
    """What the velocity is trained in: the init's own where its weights were trained in one."""
    if not expert.facts.training_calibration:
        blend = bounded_gain(field.prediction_type, field.range[1], Moments.of(shard.images), kappa)
        return blend and replace(blend, record=shard_record(shard))
    if expert.calibration is None:
        raise HddmError(f"{init / CALIBRATION}: no such file, and the expert was trained in it; take it anew")
    return expert.calibration


def _conditions(
    init: Path, field: VelocityField, shard: Shard, settings: ExpertSettings
) -> dict[str, Tensor]:
    """What the network is told about every image: its class where asked for, else null values."""
    given = {name: null.expand(len(shard), *null.shape) for name, null in field.null_conditions.items()}
    if settings.class_conditional:
        if shard.labels is None:
            raise HddmError(f"{shard.folder}: its images carry no labels; drop --class-conditional")
        if shard.classes != field.classes:
            raise HddmError(
                f"{shard.folder}: its classes are {list(shard.classes)}, those of {init} "
                f"{list(field.classes)}; take images of the same classes, or drop --class-conditional"
            )
        given["class_labels"] = shard.labels
    missing = sorted(set(field.conditions or ()) - set(given) - OPTIONAL_CONDITIONS)
    if missing:
        remedy = "; pass --class-conditional" if missing == ["class_labels"] else ""
        raise HddmError(f"{init}: has no value that stands for no {', '.join(missing)}{remedy}")
    return given


def _batch_loss(
    network: nn.Module,
    field: VelocityField,
    shard: Shard,
    given: Mapping[str, Tensor],
    objective: Objective,
    settings: ExpertSettings,
) -> Callable[[], Tensor]:
    images, draws = shard.images, generator(settings.seed, shard.index, TRAINING_STREAM)
    null_class = field.null_conditions.get("class_labels")
    velocity: Callable[..., Tensor] = field.velocity

    def predict(x: Tensor, timestep: Tensor, **conditions: Tensor) -> Tensor:
        native = timestep.double() / objective.time_scale
        if objective.name == "flow":
            return velocity(x, native, **conditions)
        return field.ask(x, native, conditions)

    def loss() -> Tensor:
        # A network that drops labels by itself would do so on top of --condition-dropout.
        network.eval()
        rows = torch.randint(len(images), (settings.batch_size,), generator=draws)
        conditions = {name: value[rows] for name, value in given.items()}
        if settings.class_conditional and null_class is not None:
            conditions["class_labels"] = drop_labels(
                conditions["class_labels"], int(null_class), settings.condition_dropout, draws
            )
        return objective.loss(predict, images[rows], draws, conditions)[0].mean()

    return loss
