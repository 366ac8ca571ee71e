"""Continue the training of an existing expert on another shard.

With flow matching any expert learns the velocity through the exact conversion, in the parametrisation of
`hddm.calibration`, or x_0 where it predicts that; its prediction type and schedule stay. An expert that was
continued before keeps the calibration of that training, since its weights are valid only with it.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from hddm.calibration import Calibration, Moments
from hddm.conditions import LABELS
from hddm.data.shards import Shard, open_shard
from hddm.experts.records import (
    EXPERT_FILE,
    FORMAT,
    Expert,
    ExpertRecord,
    field_of,
    read_expert,
    save_expert,
)
from hddm.networks.wrappers import OPTIONAL_CONDITIONS
from hddm.schedules import LinearSchedule, from_config
from hddm.training.bounded_gain import KAPPA, bounded_gain, gauss_shares
from hddm.training.expert import (
    begun_with,
    calibrated,
    calibration_origin,
    calibration_rows,
    check_fit,
    record_of_shard,
    weak_of,
)
from hddm.training.loop import Fitted, OnStep, Task, completed, train
from hddm.training.lora import add_adapter, new_adapter, save_adapted
from hddm.training.objectives import Objective, check_conditions, drawing, loss_of
from hddm.training.resume import expert_data, is_complete
from hddm.training.settings import TEXT, ExpertSettings, RunOptions
from hddm.training.watching import watching
from hddm.utils.errors import HddmError, UsageError
from hddm.utils.tensors import append_dims
from hddm.velocity import PredictionType, VelocityField


def continue_expert(
    init: Path,
    shard_folder: Path,
    out: Path,
    settings: ExpertSettings,
    overwrite: bool = False,
    on_step: OnStep | None = None,
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
            an adapter, of a network without attention, or without peft.
    """
    if not init.is_dir():
        raise HddmError(f"{init}: no such folder")
    if not (init / EXPERT_FILE).is_file():
        raise UsageError(
            f"{init}: not an expert folder; convert a checkpoint, or name one expert of an ensemble"
        )
    data = expert_data(shard_folder)
    if is_complete(out, EXPERT_FILE, run, overwrite):
        return []
    settings = completed(settings.model_copy(update=DECIDED_BY_INIT), out, run, is_new=False)
    expert = read_expert(init)
    shard = open_shard(shard_folder)
    objective = check_continued(init, expert.facts, expert.network, shard, settings)
    expert = _completed(expert, shard, settings, objective)
    field = field_of(expert)
    given = _conditions(init, field, shard, settings)
    field.calibration = None
    if objective.prediction_type is PredictionType.FLOW_PREDICTION:
        field.calibration = _parametrisation(init, expert, field, shard, given.get(LABELS))
    adapter = None
    if settings.lora_rank is None:
        expert.network.requires_grad_(True)
    else:
        adapter = new_adapter(expert.network, settings.lora_rank, settings.lora_alpha, init, out)
        add_adapter(expert.network, adapter, settings.seed)
    nulls = {name: null for name, null in field.null_conditions.items() if name in settings.conditions}
    draw = drawing(shard, objective, settings, given, nulls)
    loss = loss_of(objective, lambda module: _predicting(module, field, objective))
    task = Task(expert.network, len(shard), draw, loss, (shard.index,), settings.weak_step, is_new=False)
    begun = begun_with(init)
    if field.calibration is not None:
        begun["kappa"] = expert.facts.training.get("kappa", KAPPA)

    def write(draft: Path, fitted: Fitted, used: ExpertSettings) -> None:
        expert.network.requires_grad_(False)
        record = expert.facts.model_copy(
            update={
                "format": FORMAT,
                "objective": objective.name,
                "weights": "ema",
                "shard": record_of_shard(shard, expert.facts.classes),
                "training": fitted.record(used, begun),
                "training_calibration": field.calibration is not None,
            }
        )
        weak = weak_of(expert.network, fitted)
        trained = replace(expert, facts=record, calibration=field.calibration, weak=weak)
        if field.calibration is None:
            trained = calibrated(trained, shard, given, settings.seed, fitted.device)
        if adapter is None:
            save_expert(draft, trained)
        else:
            save_adapted(draft, trained, adapter)

    watch = watching(field, shard, settings)
    return train(task, settings, out, EXPERT_FILE, write, data | begun, overwrite, on_step, run, watch)


DECIDED_BY_INIT = {"prediction": None, "weighting": None, "rotary": None}
"""Settings that the init decides, left open."""


def check_continued(
    init: Path, record: ExpertRecord, network: object, shard: Shard, settings: ExpertSettings
) -> Objective:
    """The objective that goes on with an expert on ``shard``, or its outline, with ``settings`` filled in.

    Raises `HddmError` as `continue_expert`.
    """
    record.refuse_student(f"--init {init}", "continue the expert that it began with, and distill again")
    objective = _objective(init, record, settings)
    check_fit(shard, record, network)
    check_conditions(shard, settings)
    if settings.class_conditional and shard.classes != record.classes:
        raise HddmError(
            f"{shard.folder}: its classes are {list(shard.classes)}, those of {init} "
            f"{list(record.classes)}; use images of the same classes, or drop --class-conditional"
        )
    return objective


def _objective(init: Path, record: ExpertRecord, settings: ExpertSettings) -> Objective:
    """The objective that keeps what an expert predicts, or that its calibration turns into velocity."""
    assert settings.time_sampling is not None
    schedule, drawn = from_config(record.schedule), (settings.time_sampling, settings.snr_gamma)
    part = settings.noise_range or record.noise_range
    kind = record.prediction_type
    if settings.objective == "flow":
        # x_0 is the same on every path, and its weights of velocity are bounded; all else learns velocity.
        of_sample = kind is PredictionType.SAMPLE and not record.training_calibration
        prediction = "sample" if of_sample else "flow_prediction"
        return Objective.named("flow", None, *drawn, prediction, noise_range=part)
    is_linear = isinstance(schedule, LinearSchedule)
    if kind is PredictionType.FLOW_PREDICTION or (is_linear and kind is not PredictionType.EPSILON):
        raise HddmError(f"{init}: is a flow expert, which predicts {kind.value}; use --objective flow")
    if record.training_calibration:
        raise HddmError(f"{init}: was continued with flow matching, so only --objective flow can continue it")
    return Objective.named("ddpm", schedule, *drawn, record.prediction_type, noise_range=part)


def _completed(expert: Expert, shard: Shard, settings: ExpertSettings, objective: Objective) -> Expert:
    """Add to the record of ``expert`` what it lacks and ``shard`` supplies: VAE, text encoder, null text."""
    record, nulls = expert.facts, dict(expert.nulls)
    found: dict[str, object] = {"noise_range": objective.noise_range}
    if shard.vae is not None and record.vae is None:
        found |= {"vae": shard.vae, "latent_scale": shard.vae.scale}
    if TEXT in record.conditions and settings.text_conditional and shard.texts is not None:
        if record.text_encoder is None:
            found["text_encoder"] = shard.text_encoder
        if settings.condition_dropout:
            nulls.setdefault(TEXT, shard.texts.null)
    return replace(expert, facts=record.model_copy(update=found), nulls=nulls)


def _conditions(
    init: Path, field: VelocityField, shard: Shard, settings: ExpertSettings
) -> dict[str, Tensor]:
    """Return the conditions of every image: its class where asked for, else null values."""
    given = {name: null.expand(len(shard), *null.shape) for name, null in field.null_conditions.items()}
    if settings.text_conditional:
        given.pop(TEXT, None)
    if settings.class_conditional and shard.labels is not None:
        given[LABELS] = shard.labels
    missing = sorted(set(field.conditions or ()) - {*given, *settings.conditions} - OPTIONAL_CONDITIONS)
    if missing:
        remedy = "; pass --class-conditional" if missing == [LABELS] else ""
        raise HddmError(f"{init}: has no empty default for {', '.join(missing)}{remedy}")
    return given


def _parametrisation(
    init: Path, expert: Expert, field: VelocityField, shard: Shard, labels: Tensor | None
) -> Calibration | None:
    """Return the init's own calibration where its weights were trained in one, else a new one."""
    if not expert.facts.training_calibration:
        if not gauss_shares(field.prediction_type, field.range[1], KAPPA):
            return None
        rows = calibration_rows(shard)
        moments = Moments.of(shard.take(rows), None if labels is None else labels[rows])
        blend = bounded_gain(field.prediction_type, field.range[1], moments, KAPPA)
        return blend and replace(blend, record=calibration_origin(shard))
    return expert.calibration


def _predicting(network: nn.Module, field: VelocityField, objective: Objective) -> Callable[..., Tensor]:
    """Return the prediction as a function of (x, timestep, **conditions).

    It is x_0 or the velocity through the exact conversion for flow, the network's own for DDPM.
    """
    # A network that drops labels by itself would do so on top of --condition-dropout.
    network.eval()
    velocity: Callable[..., Tensor] = field.velocity

    def predict(x: Tensor, timestep: Tensor, **conditions: Tensor) -> Tensor:
        native = timestep.double() / objective.time_scale
        if objective.name == "ddpm":
            return field.ask(x, native, conditions)
        v = velocity(x, native, **conditions)
        if objective.prediction_type is PredictionType.FLOW_PREDICTION:
            return v
        return x - append_dims(native, x.ndim).to(x) * v

    return predict
