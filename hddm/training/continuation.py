r"""Continue the training of an existing expert on another shard, as a whole or by an adapter.

With flow matching any expert learns the velocity through the exact conversion, in the parametrisation below,
or x_0 where it predicts that; its prediction type and schedule stay. An expert that was continued before
keeps the calibration of that training, since its weights are valid only with it.

**Bounded gain.** An epsilon expert that is trained on with flow matching learns badly through 1/(1 - t): near
t = 1 its error and its gradient grow without bound. It is trained on in

    v(x, t) = K(t) v_net(x, t) + (1 - K(t)) v_gauss(x, t),      K(t) = min(1, kappa/gain(t)),

where gain(t) is the factor of the network's output in the conversion (epsilon 1/(1 - t), sample 1/t).

- It starts as the expert: K = 1 and v = v_net up to t = 1 - 1/kappa.
- It is well-conditioned: the output counts min(gain, kappa) times, on the closed interval [0, 1].
- It can learn anything: that factor is kappa, not 0, up to t = 1. A fitted table, whose weight reaches 1,
  would cut the network off there: right for a network that stays as it is, wrong for one that learns.
- At t = 1 an epsilon expert starts near v = x - m, exact for unconditional data: what is left of the
  network is kappa (eps - x), its error. At t = 0 a sample expert starts near v = -x likewise.

K is piecewise linear in t, since 1/gain is. So the parametrisation is a `Calibration` with the weight 1 - K
for every direction, and every reader of experts knows it. With a schedule that ends at t_max < 1 the network
is evaluated at t_max (`hddm.velocity`). There K also falls to 0 from t_max on, whatever the network predicts,
so that v = x - m at t = 1 where the bare rule has v = x. A condition has no effect at t = 1 itself.

Against EDM (arXiv:2206.00364, section 5): its c_skip is (1 - K) v_gauss with an isotropic covariance, and in
velocity units its c_out goes from 1 at t = 0 to the deviation of the data at t = 1. Here the gain rises from
1 to kappa, since a trained network has to keep its scale where its function is kept. How kappa was chosen:
docs/notes/bounded-gain.md.

**Adapters** (LoRA, arXiv:2106.09685) are added, trained and written through peft. Adapted are the linear
layers of attention and MLPs, as in the training scripts of diffusers and peft. The packed query, key and
value matrix of our own attention is a parameter and no layer; peft's ``target_parameters`` adapts it as one
matrix (3 width, width) with one A and one B.
"""

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers import ModelMixin
from torch import Tensor, nn

from hddm.calibration import Calibration, Moments
from hddm.conditions import LABELS
from hddm.data.shards import Shard, open_shard
from hddm.experts.expert import Expert, field_of, save_expert
from hddm.experts.lora import (
    PREFIX,
    AdapterRecord,
    adapter_of,
    peft_config,
    tensor_names,
    write_adapter,
)
from hddm.experts.records import EXPERT_FILE, FORMAT, write_records
from hddm.experts.shard_images import check_fit, labels_of_shard
from hddm.networks.families import known_family
from hddm.networks.wrappers import OPTIONAL_CONDITIONS
from hddm.schedules import LinearSchedule, from_config
from hddm.settings import Report, keywords, silent
from hddm.training.calibrate import calibration_origin, calibration_rows
from hddm.training.expert import read_init, record_of_shard, saving, train_expert
from hddm.training.loop import OnTrainingStep, Task, run_task, summary_of
from hddm.training.objectives import Objective, check_conditions, drawing, loss_of, objective_of
from hddm.training.resume import encoding_of, recipe_before
from hddm.training.settings import (
    TEXT,
    ExpertRecipe,
    ExpertSettings,
    RunOptions,
    Start,
    refuse_fixed,
    resolve,
)
from hddm.training.watching import watching
from hddm.utils.errors import HddmError, optional
from hddm.utils.progress import TrainingProgress
from hddm.utils.streams import Use, seed_of
from hddm.utils.tensors import append_dims
from hddm.velocity import PredictionType, VelocityField


@keywords
def train(
    shard: Path,
    out: Path,
    settings: ExpertSettings,
    run: RunOptions,
    *,
    init: Path | None = None,
    schedule: Path | None = None,
    overwrite: bool = False,
    report: Report = silent,
) -> Path:
    """Train one expert on one shard, from scratch or from another expert.

    Checkpoints, logs and sample grids are saved in ``OUT.run``; ``resume=True`` continues from there, to the
    same weights.

    Args:
        shard: shard folder, as ``hddm partition`` or ``hddm encode`` writes it.
        out: the expert folder.
        settings: its fields are keywords: see `hddm.training.settings.ExpertSettings`.
        run: its fields are keywords too: see `hddm.training.settings.RunOptions`.
        init: expert to continue from, with its network, prediction and schedule.
        schedule: noise schedule (DDPM only), a scheduler file of diffusers; cosine by default.
        overwrite: replace an expert in ``out``.
        report: is called with a line about the losses.

    Returns:
        ``out``.

    Raises:
        HddmError: for settings that do not fit together, the shard or ``init``, a run or an expert that is in
            the way, and steps that are not finite.
    """
    if init is not None:
        refuse_fixed(settings, schedule)
    with TrainingProgress(settings.steps, settings.batch_size, "train") as progress:
        if init is not None:
            losses = continue_expert(init, shard, out, settings, overwrite, progress.reach, run)
        else:
            losses = train_expert(shard, out, settings, schedule, overwrite, progress.reach, run)
    if losses:
        report(f"{out}: {summary_of(losses)}")
    return out


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
    expert, origin = read_init(init)
    shard = open_shard(shard_folder)
    recipe, objective = resolve_continued(init, expert, shard, settings, before)
    expert = _completed_by(expert, shard, recipe)
    field = field_of(expert)
    conditions = _conditions(init, field, shard, recipe)
    field.calibration = None
    if objective.prediction_type is PredictionType.FLOW_PREDICTION:
        field.calibration = _calibration_to_train_in(expert, field, shard, conditions.get(LABELS))
    save: Callable[[Path, Expert], None] = save_expert
    if recipe.lora_rank is None or recipe.lora_alpha is None:
        expert.network.requires_grad_(True)
    else:
        adapter = adapter_of(
            init, out, recipe.lora_rank, recipe.lora_alpha, targets_of(expert.network)
        )
        add_adapter(expert.network, adapter, recipe.seed)
        save = functools.partial(save_adapted, adapter=adapter)
    nulls = {
        name: null for name, null in field.null_conditions.items() if name in recipe.conditions
    }
    draw = drawing(shard, objective, recipe, conditions, nulls)
    loss = loss_of(objective, lambda module: _prediction_of(module, field, objective))
    key = Use.EXPERT_ORDER, Use.EXPERT_STEPS, shard.index
    task = Task(expert.network, len(shard), draw, loss, key, recipe.weak_step)
    if field.calibration is not None:
        origin["kappa"] = expert.record.training.get("kappa", KAPPA)
    own = record_of_shard(shard, expert.record.classes)
    changes = {"format": FORMAT, "objective": recipe.objective, "weights": "ema", "shard": own}
    changes["training_calibration"] = field.calibration is not None
    record = expert.record.model_copy(update=changes)
    expert = replace(expert, record=record, calibration=field.calibration)
    write = saving(expert, shard, recipe, conditions, origin, save)
    data = {"shard": shard.hash, **encoding_of([shard.folder]), **origin}
    watch = watching(field, shard, recipe.conditions, run)
    return run_task(task, recipe, out, EXPERT_FILE, write, data, overwrite, on_step, run, watch)


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
    schedule, kind = from_config(record.schedule), record.prediction_type
    is_straight = isinstance(schedule, LinearSchedule) and kind is not PredictionType.EPSILON
    learned = kind
    if settings.objective == "flow":
        # x_0 is the same on every path, and its weights of velocity are bounded; all else learns velocity.
        of_sample = kind is PredictionType.SAMPLE and not record.training_calibration
        schedule, learned = LinearSchedule(), kind if of_sample else PredictionType.FLOW_PREDICTION
    elif record.training_calibration or is_straight:
        raise HddmError(
            f"{init}: was trained with flow matching, so only `objective` flow can continue it"
        )
    start = Start.of(expert.network, kind, record.noise_range)
    recipe = resolve(ExpertRecipe, settings, start, before)
    objective = objective_of(recipe, schedule, learned)
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
    if TEXT in record.conditions and recipe.text_conditional and shard.texts is not None:
        if record.text_encoder is None:
            found["text_encoder"] = shard.text_encoder
        if recipe.condition_dropout:
            nulls.setdefault(TEXT, shard.texts.null)
    return replace(expert, record=record.model_copy(update=found), nulls=nulls)


def _conditions(
    init: Path, field: VelocityField, shard: Shard, recipe: ExpertRecipe
) -> dict[str, Tensor]:
    """Return the conditions of every image: its class where it is learned, else null values."""
    found = {
        name: null.expand(len(shard), *null.shape) for name, null in field.null_conditions.items()
    }
    if recipe.text_conditional:
        found.pop(TEXT, None)
    if recipe.class_conditional and shard.labels is not None:
        found[LABELS] = shard.labels
    missing = sorted(
        set(field.conditions or ()) - {*found, *recipe.conditions} - OPTIONAL_CONDITIONS
    )
    if missing:
        remedy = "; pass `class_conditional=True`" if missing == [LABELS] else ""
        raise HddmError(f"{init}: has no empty default for {', '.join(missing)}{remedy}")
    return found


def _calibration_to_train_in(
    expert: Expert, field: VelocityField, shard: Shard, labels: Tensor | None
) -> Calibration | None:
    """Return the init's own calibration if its weights were trained in one, else a new one."""
    if expert.record.training_calibration:
        return expert.calibration
    if not gauss_shares(field.prediction_type, field.range[1], KAPPA):
        return None
    rows = calibration_rows(shard)
    moments = Moments.of(shard.take(rows), None if labels is None else labels[rows])
    blend = bounded_gain(field.prediction_type, field.range[1], moments, KAPPA)
    return blend and replace(blend, record=calibration_origin(shard))


def _prediction_of(
    network: nn.Module, field: VelocityField, objective: Objective
) -> Callable[..., Tensor]:
    """Return the prediction as a function of (x, timestep, **conditions).

    It is x_0 or the velocity through the exact conversion for flow, the network's own for DDPM.
    """
    # A network that drops labels by itself would do so on top of --condition-dropout.
    network.eval()
    velocity: Callable[..., Tensor] = field.velocity

    def predict(x: Tensor, timestep: Tensor, **conditions: Tensor) -> Tensor:
        native = timestep.double() / objective.time_scale
        if objective.recipe.objective == "ddpm":
            return field.output_of(x, native, conditions)
        v = velocity(x, native, **conditions)
        if objective.prediction_type is PredictionType.FLOW_PREDICTION:
            return v
        return x - append_dims(native, x.ndim).to(x) * v

    return predict


KAPPA = 1.5


def gauss_shares(prediction_type: str, t_max: float, kappa: float = KAPPA) -> dict[float, float]:
    """1 - K(t) of a bounded gain by t, linear between; empty where K = 1 everywhere."""
    low = 1 / kappa if prediction_type == "sample" else 0.0
    high = min(t_max, 1 - 1 / kappa) if prediction_type == "epsilon" else t_max
    if low == 0 and high == 1:
        return {}
    # A dictionary keeps a knot that two rules share once.
    return (
        ({0.0: 1.0} if low > 0 else {}) | {low: 0.0, high: 0.0} | ({1.0: 1.0} if high < 1 else {})
    )


def bounded_gain(
    prediction_type: str, t_max: float, moments: Moments, kappa: float = KAPPA
) -> Calibration | None:
    """The blend of K(t) as a calibration, None where K = 1 everywhere.

    Args:
        prediction_type: what the network predicts, as `hddm.velocity.PredictionType` spells it.
        t_max: end of its trained range on the common path, `VelocityField.range[1]`.
        moments: of the shard that it is trained on.
        kappa: bound of the gain, above 1.
    """
    shares = gauss_shares(prediction_type, t_max, kappa)
    if not shares:
        return None
    weights = torch.tensor(list(shares.values()))[:, None].expand(-1, len(moments.variances))
    return Calibration(moments, torch.tensor(list(shares)), weights.contiguous())


def targets_of(network: nn.Module) -> tuple[str, ...]:
    """Return the names of the weights that an adapter changes, of attention and MLPs."""
    family = known_family(network)
    adapted = set()
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear) and re.fullmatch(family.lora_layers, name):
            adapted.add(f"{name}.weight")
    names = [name for name, _ in network.named_parameters()]
    return tuple(
        name for name in names if name in adapted or re.fullmatch(family.lora_parameters, name)
    )


def add_adapter(network: ModelMixin, adapter: AdapterRecord, seed: int) -> None:
    """Put an adapter on ``network``: freeze its own parameters, and train the adapter's.

    B is zero, so nothing changes at first; A is uniform, as peft draws it, from ``seed`` alone.
    """
    peft = _peft()
    network.requires_grad_(False)
    config = peft.LoraConfig(**peft_config(adapter))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(seed, Use.ADAPTER_WEIGHTS))
        peft.inject_adapter_in_model(config, network)


def save_adapted(folder: Path, expert: Expert, adapter: AdapterRecord) -> None:
    """Write an adapted expert, without its base's weights, into an empty folder, in peft's format."""
    network: Any = expert.network
    network.save_config(folder)
    # By default peft looks the base up on the hub, to see whether an embedding has changed.
    state = _peft().get_peft_model_state_dict(network, save_embedding_layers=False)
    names = [name for pair in tensor_names(adapter.targets).values() for name in pair]
    tensors = {name: state[name.removeprefix(PREFIX)].detach().cpu().contiguous() for name in names}
    write_adapter(folder, adapter, tensors)
    if expert.calibration is not None:
        expert.calibration.save(folder)
    write_records(folder, expert.record.model_copy(update={"adapter": adapter}), expert.nulls)


def _peft() -> Any:
    return optional("peft", "`lora_rank`", "lora")
