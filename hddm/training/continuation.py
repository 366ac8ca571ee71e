"""Continue the training of an existing expert on another shard, as a whole or by an adapter.

With flow matching any expert learns the velocity through the exact conversion, in the parametrisation of
`hddm.training.bounded_gain`, or x_0 where it predicts that; its prediction type and schedule stay. An expert
that was continued before keeps the calibration of that training, since its weights are valid only with it.
Adapters are those of `hddm.training.adapters`.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hddm.condition_names import LABELS, TEXT
from hddm.conversion import derivatives_at
from hddm.data.shards import Shard, open_shard
from hddm.experts.adapter_records import adapter_of
from hddm.experts.expert import Expert
from hddm.experts.expert_folders import field_of, save_expert
from hddm.experts.records import EXPERT_FILE
from hddm.experts.shard_images import check_fit, labels_of_shard
from hddm.networks.wrappers import OPTIONAL_CONDITIONS
from hddm.predictions import Level, PredictionType
from hddm.schedules import LinearSchedule, from_config
from hddm.training.adapters import add_adapter, save_adapted, targets_of
from hddm.training.bounded_gain import KAPPA, calibration_to_train_in
from hddm.training.calibrate import fitted_states
from hddm.training.expert import read_init, record_of_shard, saving
from hddm.training.loop import OnTrainingStep, Task, Training
from hddm.training.objectives import Objective, check_conditions, drawing, loss_of, objective_of
from hddm.training.resume import encoding_of, recipe_before
from hddm.training.settings import ExpertRecipe, ExpertSettings, RunOptions, Start, resolve
from hddm.training.watching import watching
from hddm.utils.errors import HddmError
from hddm.utils.streams import Use
from hddm.utils.tensors import append_dims
from hddm.velocity import VelocityField


def continue_expert(
    init: Path,
    shard_folder: Path,
    out: Path,
    settings: ExpertSettings,
    overwrite: bool = False,
    on_step: OnTrainingStep | None = None,
    run: RunOptions | None = None,
) -> list[float]:
    """Train the expert in ``init`` on one shard and write the result to ``out``; return all losses.

    Arguments are those of `hddm.training.expert.train_expert`. Network, prediction type and schedule are the
    init's, and the loss is that of its prediction, or of velocity for flow: the size, prediction, weighting
    and positions of ``settings`` are ignored. With a ``lora_rank`` an adapter is trained, and ``out`` holds
    that alone (`hddm.experts.lora`).

    Raises:
        HddmError: as `train_expert`; for a shard that does not fit the init, a condition without value or
            null value, DDPM for a flow expert or one that flow matching has gone on with; for an adapter of
            an adapter, or without peft.
    """
    before = recipe_before(out, EXPERT_FILE, run, overwrite)
    training = continued_training(init, shard_folder, out, settings, before, run)
    return training.run(out, overwrite, on_step, run)


def continued_training(
    init: Path,
    shard_folder: Path,
    out: Path,
    settings: ExpertSettings,
    before: Mapping[str, Any] | None = None,
    run: RunOptions | None = None,
) -> Training:
    """Return the training of `continue_expert`; ``before`` is the recipe of a run that it continues."""
    expert, origin = read_init(init)
    shard = open_shard(shard_folder)
    recipe, objective = resolve_continued(init, expert, shard, settings, before)
    expert = _completed_by(expert, shard, recipe)
    field = field_of(expert)
    conditions = _conditions(init, field, shard, recipe)
    field.calibration = None
    if objective.prediction.is_velocity:
        field.calibration = calibration_to_train_in(expert, field, shard, conditions.get(LABELS))
    save: Callable[[Path, Expert], None] = save_expert
    if recipe.lora_rank is None or recipe.lora_alpha is None:
        expert.network.requires_grad_(True)
    else:
        targets = targets_of(expert.network)
        adapter = adapter_of(init, out, recipe.lora_rank, recipe.lora_alpha, targets)
        add_adapter(expert.network, adapter, recipe.seed)
        save = functools.partial(save_adapted, adapter=adapter)
    nulls: dict[str, Tensor] = {}
    for name, null in field.null_conditions.items():
        if name in recipe.conditions:
            nulls[name] = null
    draw = drawing(shard, objective, recipe, conditions, nulls)
    loss = loss_of(objective, lambda module: _prediction_of(module, field, objective))
    key = Use.EXPERT_ORDER, Use.EXPERT_STEPS, shard.index
    task = Task(expert.network, len(shard), draw, loss, key, recipe.weak_step)
    if field.calibration is not None:
        origin["kappa"] = expert.record.training.get("kappa", KAPPA)
    own = record_of_shard(shard, expert.record.classes)
    changes: dict[str, object] = {
        "objective": recipe.objective,
        "weights": "ema",
        "shard": own,
    }
    changes["training_calibration"] = field.calibration is not None
    record = expert.record.model_copy(update=changes)
    expert = replace(expert, record=record, calibration=field.calibration)
    write = saving(expert, shard, recipe, conditions, origin, save)
    data = {"shard": shard.hash, **encoding_of([shard.folder]), **origin}
    watch = watching(field, shard, recipe.conditions, run)
    states = 0 if field.calibration is not None else fitted_states(recipe.noise_range)
    return Training(task, recipe, EXPERT_FILE, write, data, watch, states)


def resolve_continued(
    init: Path,
    expert: Expert,
    shard: Shard,
    settings: ExpertSettings,
    before: Mapping[str, Any] | None = None,
) -> tuple[ExpertRecipe, Objective]:
    """Return recipe and objective that continue the ``expert`` in ``init`` on ``shard``, or its outline.

    Raises `HddmError` as `continue_expert`.
    """
    record = expert.record
    record.refuse_student(
        f"`init` {init}", "continue the expert that it began with, and distill again"
    )
    schedule = from_config(record.schedule)
    kind = record.prediction_type
    # Noise on the straight path is learned by DDPM.
    is_straight = isinstance(schedule, LinearSchedule) and not kind.prediction.is_of_noise
    learned = kind
    if settings.objective == "flow":
        # x_0 is the same on every path, and its weights of velocity are bounded; all else learns velocity.
        is_kept = kind.prediction.has_velocity_loss and not record.training_calibration
        schedule = LinearSchedule()
        learned = kind if is_kept else PredictionType.FLOW_PREDICTION
    elif record.training_calibration or is_straight:
        raise HddmError(
            f"{init}: was trained with flow matching, so only `objective` flow can continue it"
        )
    start = Start.of(expert.network, kind, record.noise_range)
    recipe = resolve(ExpertRecipe, settings, start, before)
    # Flow matching learns on the common path, in the units of the shard.
    units = None if settings.objective == "flow" else record.units
    objective = objective_of(recipe, schedule, learned, units)
    check_fit(shard, record, expert.network)
    check_conditions(shard, recipe)
    if recipe.class_conditional:
        labels_of_shard(shard, record.classes, str(init), ", or drop `class_conditional=True`")
    return recipe, objective


def _completed_by(expert: Expert, shard: Shard, recipe: ExpertRecipe) -> Expert:
    """Add to the record of ``expert`` what it lacks and ``shard`` supplies: VAE, text encoder, null text."""
    record, nulls = expert.record, dict(expert.nulls)
    found: dict[str, object] = {"noise_range": recipe.noise_range}
    if shard.vae is not None and record.vae is None:
        found |= {"vae": shard.vae, "unread_vae": None, "latent_scale": shard.vae.scale}
    if record.takes_text and recipe.text_conditional and shard.texts is not None:
        if record.text_encoder is None:
            found |= {"text_encoder": shard.text_encoder, "unread_text_encoder": None}
        if recipe.condition_dropout:
            nulls.setdefault(TEXT, shard.texts.null)
    return replace(expert, record=record.model_copy(update=found), nulls=nulls)


def _conditions(
    init: Path, field: VelocityField, shard: Shard, recipe: ExpertRecipe
) -> dict[str, Tensor]:
    """Return the conditions of every image: its class where it is learned, else null values."""
    found: dict[str, Tensor] = {}
    for name, null in field.null_conditions.items():
        found[name] = null.expand(len(shard), *null.shape)
    if recipe.text_conditional:
        found.pop(TEXT, None)
    if recipe.class_conditional and shard.labels is not None:
        found[LABELS] = shard.labels
    supplied = found.keys() | set(recipe.conditions)
    missing = sorted(set(field.conditions or ()) - supplied - OPTIONAL_CONDITIONS)
    if missing:
        remedy = "; pass `class_conditional=True`" if missing == [LABELS] else ""
        raise HddmError(f"{init}: has no empty default for {', '.join(missing)}{remedy}")
    return found


def _prediction_of(
    network: nn.Module, field: VelocityField, objective: Objective
) -> Callable[..., Tensor]:
    """Return the prediction as a function of (x, timestep, **conditions).

    For flow, it is what the objective learns, x_0 or the velocity, through the exact conversion; for DDPM
    the network's own.
    """
    # A network that drops labels by itself would do so on top of --condition-dropout.
    network.eval()
    velocity: Callable[..., Tensor] = field.velocity

    def predict(x: Tensor, timestep: Tensor, **conditions: Tensor) -> Tensor:
        native = timestep.double() / objective.time_scale
        if objective.recipe.objective == "ddpm":
            return field.output_of(x, native, conditions)
        v = velocity(x, native, **conditions)
        if objective.prediction.is_velocity:
            return v

        def wide(values: Tensor) -> Tensor:
            return append_dims(values, x.ndim).to(x)

        t = wide(native)
        at = Level(1 - t, t, derivatives_at(objective.schedule, native, wide))
        return objective.prediction.output(x - t * v, x + (1 - t) * v, at)

    return predict
