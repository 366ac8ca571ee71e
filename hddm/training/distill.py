"""Distil an ensemble into one dense student, whatever its experts were trained to predict.

    minimise  E w(t) || v_student(x_t, t) - v_teacher ||²,   x_t = (1 - t) x_0 + t eps

A student predicts x_0 unless it begins with a network that predicts something else; w is 1, but falls to 0
where a velocity of x_0 or eps is singular (`hddm.predictions.BOUND`).
With the ``shard`` teacher (arXiv:2501.05450) v_teacher = v_k(x_t, t), where k is the shard of x_0. The
minimum is sum_k p(k | x_t) v_k(x_t, t): the full mixture with an exact router. The ``routed`` teacher is the
mixture itself, by the ensemble's strategy and with its router's errors. docs/notes/distillation.md compares
the noise of the two. Velocities are converted and calibrated as in sampling.
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from diffusers import ModelMixin
from torch import Tensor, nn

from hddm.condition_names import LABELS, TEXT
from hddm.data.shard_records import find_shards
from hddm.data.shards import NO_CAPTION, Shard, joined, open_shard
from hddm.ensemble import Ensemble
from hddm.experts.expert import Expert
from hddm.experts.expert_folders import field_of, null_conditions
from hddm.experts.loading import OpenedEnsemble, open_ensemble
from hddm.experts.records import EXPERT_FILE, ExpertRecord, joint_licence
from hddm.experts.shard_images import check_fit, labels_of_shard
from hddm.experts.shares import domains_of
from hddm.networks.families import family_of
from hddm.networks.families.expert import EXPERT
from hddm.strategies import Strategy, refuse_void
from hddm.training.calibrate import fitted_states
from hddm.training.expert import data_of, new_record, read_init, saving, transformer_of
from hddm.training.loader import StepInputs
from hddm.training.loop import OnTrainingStep, Task, Training
from hddm.training.mean_flow import CAPTION, MeanFlow, trajectories_size
from hddm.training.needs import needs_of_training
from hddm.training.objectives import Objective, conditions_in, drawing, objective_of
from hddm.training.resume import recipe_before, recipe_of_resumed
from hddm.training.settings import (
    DenoiserFields,
    DistillRecipe,
    DistillSettings,
    ExpertRecipe,
    RunOptions,
    Start,
    refuse_without_init,
    resolve,
)
from hddm.training.watching import watching
from hddm.utils.errors import HddmError, UsageError, an, errors_as
from hddm.utils.files import sha256_once
from hddm.utils.needs import Needs
from hddm.utils.records import MANIFEST, WHOLE
from hddm.utils.streams import Use, generator, seed_of
from hddm.utils.tensors import append_dims

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Teacher:
    """An ensemble that was checked against the data; its experts are read at their first use.

    ``expert_of_shard`` (shards,) holds the index of each shard's expert, None for the mixture. Two teachers
    with the same ``record``, of plain values, have the same velocity.
    """

    opened: OpenedEnsemble
    expert_of_shard: Tensor | None
    record: dict[str, Any]

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes that its experts take labels of; empty where none does."""
        for one in self.opened.experts:
            if one.record.classes:
                return one.record.classes
        return ()

    @property
    def takes_text(self) -> bool:
        """Whether an expert takes the tokens of a caption."""
        return any(one.record.takes_text for one in self.opened.experts)


def open_teacher(
    folder: Path,
    union: Shard,
    shards: Sequence[Shard],
    settings: DistillSettings,
    recorded: str | None,
) -> Teacher:
    """Open the teacher in ``folder``, an ensemble or one expert, for a student of ``shards`` and their union.

    The ``shard`` teacher is each sample's own expert, found by the hash of its shard; the ``routed`` one is
    the mixture, by the strategy of the settings, else by ``recorded``, that of the run that is continued, or
    else by the ensemble's own. ``draw`` and ``commit-x`` are no mixtures, and ``full`` takes their place:
    with an exact router all three have the same samples.

    Raises:
        HddmError: for an unreadable folder, a shard without expert, a mixture without a router or of more
            experts than there are, a strategy without effect (`refuse_void`), conditions other than classes
            and captions, classes or captions that the data lacks, or samples of another shape or space.
    """
    opened = open_ensemble(folder, torch.float32)
    if settings.teacher == "routed":
        opened = _with_mixing_strategy(folder, opened, settings.strategy, recorded)
    names = [member.folder for member in opened.record.experts]
    for name, expert in zip(names, opened.experts, strict=True):
        _check_conditions(f"{folder / name}", expert.record, union, settings.condition_dropout)
    check_fit(union, opened.experts[0].record, opened.experts[0].network)
    hashes: list[str | None] = []
    experts: dict[str, dict[str, Any]] = {}
    for name, expert in zip(names, opened.experts, strict=True):
        own = None if expert.record.shard is None else expert.record.shard.hash
        files = {} if expert.folder is None else _file_hashes(expert.folder)
        hashes.append(own)
        experts[name] = {"files": files, "shard": own}
    record: dict[str, Any] = {
        "ensemble": folder.resolve().name,
        "kind": settings.teacher,
        "experts": experts,
    }
    if settings.teacher == "routed":
        record["strategy"] = opened.record.strategy
        if opened.record.learned is not None:
            record["router"] = _file_hashes(folder / opened.record.learned)
        return Teacher(opened, None, record)
    missing: list[str] = []
    for one in shards:
        if one.hash not in hashes:
            missing.append(f"{one.folder}: no expert was trained on it")
    if missing:
        for name, own in zip(names, hashes, strict=True):
            if own is None:
                missing.append(f"{folder / name}: records no shard")
        text = "`teacher` shard needs the expert of every shard; pass their partition, or `teacher` routed"
        raise HddmError(f"{folder}: {text}", missing)
    # The last of several experts of one shard.
    places = {own: k for k, own in enumerate(hashes)}
    return Teacher(opened, torch.tensor([places[one.hash] for one in shards]), record)


def _with_mixing_strategy(
    folder: Path, opened: OpenedEnsemble, requested: str | None, recorded: str | None
) -> OpenedEnsemble:
    """An ensemble with the strategy by which it mixes as a teacher; see `open_teacher`."""
    record, is_alone = opened.record, len(opened.experts) == 1
    if record.router is None and not is_alone:
        raise HddmError(
            f"{folder}: `teacher` routed needs its router, and it has none; use `teacher` shard"
        )
    keeps_one = Strategy.parse(record.strategy).keeps_one
    strategy = requested or recorded
    if strategy is None and keeps_one and not is_alone:
        log.info("%s: keeps one expert per sample; the student learns their full mixture", folder)
    chosen = strategy or ("full" if keeps_one else record.strategy)
    num_domains = len(set(domains_of(opened.experts)))
    with errors_as(UsageError):
        Strategy.parse(chosen).check(num_domains)
    if requested is not None and requested != record.strategy:
        refuse_void(requested, len(opened.experts), num_domains)
    return replace(opened, record=record.model_copy(update={"strategy": chosen}))


def _check_conditions(name: str, record: ExpertRecord, shard: Shard, dropout: float) -> None:
    """Refuse an expert, named ``name`` in errors, whose conditions a student of ``shard`` cannot learn."""
    record.refuse_student(name, "name the ensemble that it learned from as the teacher")
    others = [condition for condition in record.conditions if condition not in (LABELS, TEXT)]
    if others:
        raise HddmError(
            f"{name}: takes {', '.join(others)}; a student can learn classes and captions alone"
        )
    if record.takes_text and shard.texts is None:
        raise HddmError(
            f"{name}: takes text, and {shard.folder} holds no tokens of captions; encode it"
        )
    if not record.takes_classes:
        return
    labels_of_shard(shard, record.classes, name)
    if dropout and record.null_class != len(record.classes):
        raise HddmError(
            f"{name}: null class {record.null_class} is not the last; pass `condition_dropout` 0"
        )


def _file_hashes(folder: Path) -> dict[str, str]:
    """Hash the files that determine a model's velocity: SHA-256 of weights, calibration, records by name."""
    hashes: dict[str, str] = {}
    for path in sorted(folder.glob("[!.]*")):
        if path.suffix in (".safetensors", ".json") and path.name != MANIFEST:
            hashes[path.name] = sha256_once(path)
    return hashes


def distill(
    ensemble_folder: Path,
    shards_folder: Path,
    out: Path,
    settings: DistillSettings,
    overwrite: bool = False,
    on_step: OnTrainingStep | None = None,
    run: RunOptions | None = None,
    init: Path | None = None,
) -> list[float]:
    """Train one flow expert to match the velocity of an ensemble, and write its folder; return all losses.

    Arguments are those of `hddm.training.expert.train_expert`, with a teacher, which is an ensemble or one
    expert, and a partition, encoded or not. The student starts with the network of the flow expert in
    ``init``, whatever ``settings.size``, else with random weights. It is on the linear path and calibrated on
    the whole data. With ``settings.sampling_steps`` it is a student of few steps
    (`hddm.training.mean_flow`), which has no calibration and begins with the network of ``init``.

    Its record names the teacher with the hashes of all its files, and as its shard the whole partition
    (`hddm.data.shards.joined`). Licences that the teacher's experts state hold for it too.

    Raises:
        HddmError: as `open_teacher` and `train_expert`, for shards that do not fit each other or the teacher,
            and for an ``init`` that is no flow expert of such samples and classes.
        Stopped: after a signal, with the run saved.
    """
    if run is not None and run.held_out is not None:
        raise UsageError("`held_out`: is for trainings of experts; leave it out")
    before = recipe_before(out, EXPERT_FILE, run, overwrite)
    training = student_training(ensemble_folder, shards_folder, settings, before, init)
    return training.run(out, overwrite, on_step, run)


def student_training(
    ensemble_folder: Path,
    shards_folder: Path,
    settings: DistillSettings,
    before: Mapping[str, Any],
    init: Path | None = None,
) -> Training:
    """Return the training of `distill`; ``before`` is the recipe of a run that it continues, or {}."""
    shards = [open_shard(folder) for folder in find_shards(shards_folder)]
    union = joined(shards, shards_folder)
    teacher = open_teacher(ensemble_folder, union, shards, settings, before.get("strategy"))
    initial, origin = (None, {}) if init is None else read_init(init)
    if initial is None:
        refuse_without_init(settings)
    start = Start()
    if initial is not None:
        start = Start.of(initial.network, initial.record.prediction_type)
    start = replace(start, strategy=teacher.record.get("strategy"))
    recipe = resolve(DistillRecipe, settings, start, before)
    learned = _as_expert(recipe, bool(teacher.classes), teacher.takes_text)
    objective = objective_of(learned)
    record = new_record(union, learned, objective)
    labels = {LABELS: union.labels} if teacher.classes and union.labels is not None else {}
    texts = union.texts if teacher.takes_text else None
    null_text = {} if texts is None else {TEXT: texts.null}
    if initial is None:
        network = transformer_of(recipe, record, None if texts is None else texts.null.shape[-1])
    else:
        _check_start(f"`init` {init}", initial.record, record)
        network = initial.network.requires_grad_(True)
    licences = [one.record.licence for one in teacher.opened.experts]
    if initial is not None:
        licences.append(initial.record.licence)
    added = {"shift": teacher.opened.record.shift, "sampling_steps": recipe.sampling_steps}
    record = record.model_copy(update=added | {"licence": joint_licence(licences)})
    conditions: dict[str, Tensor] = dict(labels)
    if teacher.expert_of_shard is not None:
        counts = torch.tensor([len(shard) for shard in shards])
        conditions["expert"] = teacher.expert_of_shard.repeat_interleave(counts)
    on = functools.partial(teacher.opened.on, dtype=torch.float32)
    key = Use.STUDENT_ORDER, Use.STUDENT_STEPS, 0
    if recipe.sampling_steps is None:
        nulls = null_conditions(record.null_class) | null_text
        draw = drawing(union, objective, learned, conditions, nulls)
        task = Task(network, len(union), draw, matching(on, objective), key)
    else:
        network = with_interval(network, f"`init` {init}")
        if texts is not None:
            conditions[CAPTION] = torch.arange(len(union))
        drawn = _conditions_of_trajectories(recipe, record, union, conditions)
        flow = MeanFlow(
            on, record.prediction_type.prediction, recipe, record.sample_shape, drawn, texts
        )
        task = Task(network, recipe.trajectories, flow.draw, flow.loss, key, prepare=flow.prepare)
    student = Expert(network, record, None, null_text)
    write = saving(student, union, recipe, labels, {**origin, "teacher": teacher.record})
    data = {**data_of(shards), "teacher": teacher.record, **origin}
    watch = watching(field_of(student), union, learned.conditions)
    states = 0 if recipe.sampling_steps is not None else fitted_states(WHOLE)
    others = {"teacher": teacher.opened.expert_set("cpu", torch.float32).shelf.total}
    if recipe.sampling_steps is not None:
        others["trajectories"] = trajectories_size(settings.trajectories, record.sample_shape)
    return Training(task, recipe, EXPERT_FILE, write, data, watch, states, others)


FEW = 16
"""Trajectories that are solved to measure what many need."""


def needs_of_student(
    ensemble_folder: Path,
    shards_folder: Path,
    out: Path,
    settings: DistillSettings,
    run: RunOptions,
    init: Path | None = None,
) -> Needs:
    """Measure what `distill` needs with these arguments, and write nothing."""
    before = recipe_of_resumed(out, run)
    folders = ensemble_folder, shards_folder
    if settings.sampling_steps is None:
        return needs_of_training(student_training(*folders, settings, before, init))
    few = settings.model_copy(update={"trajectories": min(FEW, settings.trajectories)})
    training = student_training(*folders, few, before, init)
    factor = settings.trajectories / few.trajectories
    others = dict(training.others)
    others["trajectories"] = round(others["trajectories"] * factor)
    return needs_of_training(replace(training, others=others), settings.trajectories)


def _as_expert(
    recipe: DistillRecipe, class_conditional: bool, text_conditional: bool
) -> ExpertRecipe:
    """Return the recipe of the flow expert that a student is, learned by the error of its velocity."""
    same = recipe.model_dump(include=set(DenoiserFields.model_fields))
    own = {"objective": "flow", "weighting": "velocity", "noise_range": WHOLE, "weak_at": 0.0}
    takes = {"class_conditional": class_conditional, "text_conditional": text_conditional}
    return ExpertRecipe.model_validate(same | own | takes)


def _conditions_of_trajectories(
    recipe: DistillRecipe, record: ExpertRecord, union: Shard, conditions: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Draw conditions of trajectories from those (N,) of all samples; some are dropped as in training."""
    _require_expert_by_class(conditions)
    if recipe.guidance_scale != 1 and not conditions.keys() & {LABELS, CAPTION}:
        raise UsageError(
            "`guidance_scale`: the teacher takes no conditions to guide by; drop the option"
        )
    draws = generator(recipe.seed, Use.TRAJECTORY_IMAGES)
    rows = torch.randint(len(union), (recipe.trajectories,), generator=draws)
    chosen = {name: value[rows] for name, value in conditions.items()}
    is_dropped = torch.rand(len(rows), generator=draws) < recipe.condition_dropout
    for name, null in ((LABELS, record.null_class), (CAPTION, NO_CAPTION)):
        if name in chosen and null is not None:
            chosen[name] = torch.where(is_dropped, null, chosen[name])
    return chosen


def _require_expert_by_class(given: Mapping[str, Tensor]) -> None:
    """Refuse an ``expert`` of each sample (N,) that its label (N,) does not tell."""
    expert = given.get("expert")
    if expert is None or len(expert.unique()) == 1:
        return
    labels = given.get(LABELS, torch.zeros_like(expert))
    if len(torch.stack([labels, expert]).unique(dim=1).T) > len(labels.unique()):
        text = "noise and class do not tell the shard here, so experts would be averaged"
        raise UsageError(f"`teacher` shard: {text}; use `teacher` routed")


def with_interval(network: Any, name: str) -> ModelMixin:
    """A network that takes intervals too, with the weights of ``network``; refuses another class."""
    if family_of(network) is not EXPERT:
        text = (
            f"`sampling_steps` needs hddm's own transformer, and it is {an(type(network).__name__)}"
        )
        raise HddmError(f"{name}: {text}; begin with an expert that was trained here")
    arguments = {key: value for key, value in network.config.items() if not key.startswith("_")}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(0, Use.STUDENT_WEIGHTS))
        wider = EXPERT.network(**arguments | {"interval": True})
    wider.load_state_dict(wider.state_dict() | network.state_dict())
    return wider


def _check_start(name: str, start: ExpertRecord, record: ExpertRecord) -> None:
    """Refuse a ``start``, named ``name`` in errors, that does not agree with the student's ``record``."""
    start.refuse_student(name, "begin with the expert that it began with")
    qualities = (
        *("schedule", "time_scale", "data_scale", "data_shift", "negated"),
        *("space", "sample_shape", "conditions", "classes"),
    )
    lines: list[str] = []
    for one in qualities:
        own = getattr(start, one)
        its = getattr(record, one)
        if own != its:
            lines.append(f"{one}: {own}, and the student's is {its}")
    if start.training_calibration:
        lines.append("trained together with its calibration, which a student does not have")
    if lines:
        raise HddmError(
            f"{name}: a student cannot begin with it; name a flow expert of this data", lines
        )


def matching(
    teacher_on: Callable[[torch.device], Ensemble], objective: Objective
) -> Callable[[nn.Module, StepInputs], Tensor]:
    """Return the student's loss: that of ``objective``, the teacher on a device standing for the truth.

    At x_t the teacher's velocity v means x_0 = x_t - t v and eps = x_t + (1 - t) v. The loss takes the
    student, of (x_t, 1000 t, **conditions), and ``x_0`` and ``eps`` (n, C, H, W), ``t`` (n,),
    ``class_labels`` (n,) and ``encoder_hidden_states`` (n, tokens, width) where experts take them, and unless
    the teacher is the mixture the index of the ``expert`` to learn from (n,). It returns weighted means over
    each sample's elements (n,). The teacher runs in float32, whatever the student's precision, and gets no
    gradients.
    """
    opened = functools.cache(teacher_on)

    def loss(network: nn.Module, inputs: StepInputs) -> Tensor:
        x_0, t = inputs["x_0"], inputs["t"]
        wide = append_dims(t, x_0.ndim).to(x_0)
        x_t = (1 - wide) * x_0 + wide * inputs["eps"]
        conditions: dict[str, Any] = conditions_in(inputs)
        with torch.no_grad(), torch.autocast(x_t.device.type, enabled=False):
            v = opened(x_t.device).velocity(x_t, t, expert=inputs.get("expert"), **conditions)
        return objective.errors(network, x_t - wide * v, x_t + (1 - wide) * v, t, conditions)

    return loss
