r"""Distillation: one dense student from an ensemble of experts, whatever each of them was trained to predict.

    E || student(x_t, t) - v_teacher ||²,   x_t = (1 - t) x_0 + t eps

With the ``shard`` teacher (DDM's recipe, arXiv:2501.05450) v_teacher = v_k(x_t, t), k being the shard of
x_0. A squared error is least at the conditional mean, and k given x_t has the posterior p(k | x_t), so

    student(x_t, t) = E[v_k(x_t, t) | x_t] = sum_k p(k | x_t) v_k(x_t, t),

the ensemble's full mixture with an exact router: no router is asked, and none is needed. The ``routed``
teacher's target is the mixture itself, by the ensemble's strategy and with its router's errors.

Training on data has the same minimum, for exact experts, with the target u = eps - x_0, which is far noisier.
By the law of total variance

    Var[u | x_t] = E[Var[u | x_t, k] | x_t] + Var[v_k(x_t, t) | x_t].

The ``shard`` teacher leaves the second term alone, which is 0 wherever x_t tells the shard; the ``routed``
one leaves neither. What the target does not vary, batches need not average out.

A teacher's velocity is converted and calibrated as in sampling, which makes DDPM and flow experts alike. The
student is a flow expert on the linear path, and is calibrated on the whole data as an expert is on its shard.
It may begin with the network of one: on one shard in K that is the expert's own target already.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hddm.data.open_shard import open_shard
from hddm.data.shard_records import find_shards
from hddm.data.whole import joined
from hddm.ensemble import Ensemble
from hddm.errors import HddmError, UsageError
from hddm.experts import EXPERT_FILE, Expert, ExpertFacts, null_conditions, read_expert, save_expert
from hddm.loading import field_of
from hddm.models.transformer import ExpertTransformer
from hddm.objectives import TIME_SCALE, Objective
from hddm.tensors import append_dims
from hddm.training.batches import drawing
from hddm.training.data_identity import data_of
from hddm.training.expert import expert_facts
from hddm.training.loop import Fitted, Inputs, OnStep, Task
from hddm.training.networks import begun_with, new_network
from hddm.training.runs import finished, train
from hddm.training.settings import DistillSettings as DistillSettings
from hddm.training.settings import RunOptions
from hddm.training.shard_calibration import calibrated_on, placed
from hddm.training.teachers import LABELS, open_teacher
from hddm.training.watching import watching


def distill(
    ensemble_folder: Path,
    shards_folder: Path,
    out: Path,
    settings: DistillSettings,
    overwrite: bool = False,
    on_step: OnStep | None = None,
    run: RunOptions | None = None,
    init: Path | None = None,
) -> list[float]:
    """Train one flow expert to have the velocity of an ensemble, and write its folder.

    Its record names the teacher with the hashes of all its files, and as its shard the whole partition
    (`hddm.data.whole.joined`). Licences that the teacher's experts state hold for it too.

    Args:
        ensemble_folder: the teacher; one expert's folder is an ensemble of one.
        shards_folder: a partition, as it is or encoded.
        out: the expert folder to write.
        settings: see `DistillSettings`.
        overwrite: whether an existing ``out`` is replaced.
        on_step: called after each step with its number, loss and seconds.
        run: as of `hddm.training.expert.train_expert`.
        init: a flow expert whose network the student begins with, one of the ensemble's say; ``size`` then
            has no say. Without one the student begins with random weights.

    Returns:
        The loss of every step.

    Raises:
        HddmError: as `hddm.training.teachers.open_teacher` and `hddm.training.expert.train_expert`, for
            shards that do not belong together or do not fit the teacher, and for an ``init`` that is no flow
            expert of such samples and classes.
        Stopped: after a signal, with the run saved.
    """
    folders = find_shards(shards_folder)
    data = data_of(folders)
    if finished(out, EXPERT_FILE, overwrite, run):
        return []
    shards = [open_shard(folder) for folder in folders]
    whole = joined(shards, shards_folder)
    teacher = open_teacher(ensemble_folder, whole, shards, settings.teacher, settings.condition_dropout)
    as_expert = settings.as_expert(bool(teacher.classes))
    objective = Objective.named("flow", time_sampling=settings.time_sampling)
    facts = expert_facts(whole, as_expert, objective, "default of the objective")
    facts = facts.model_copy(update={"shift": teacher.parts.facts.shift, "licence": teacher.licence})
    given = {LABELS: whole.labels} if teacher.classes and whole.labels is not None else {}
    nulls = null_conditions(facts.null_class)
    begun: dict[str, str] = {}
    if init is None:
        network: nn.Module = new_network(
            ExpertTransformer,
            settings.size,
            whole.shape,
            settings.seed,
            num_classes=len(teacher.classes) or None,
        )
    else:
        started, begun = _flow_expert(init, facts), begun_with(init)
        network = started.network.requires_grad_(True)
        stated = {licence for licence in (teacher.licence, started.facts.licence) if licence}
        facts = facts.model_copy(update={"licence": " AND ".join(sorted(stated)) or None})
    draw = drawing(whole, objective, as_expert, given, nulls)
    own = None
    if teacher.experts is not None:
        own = teacher.experts.repeat_interleave(torch.tensor([len(shard) for shard in shards]))

    def drawn(rows: Tensor, noise: torch.Generator) -> Inputs:
        return draw(rows, noise) | ({} if own is None else {"expert": own[rows]})

    def write(draft: Path, fitted: Fitted, used: DistillSettings) -> None:
        network.requires_grad_(False)
        record: dict[str, Any] = fitted.record(used) | {"teacher": teacher.record} | begun
        if begun:
            # Its network is the init's, whatever the settings say.
            del record["size"]
        bare = Expert(network, facts.model_copy(update={"training": record}), None)
        with placed(network, fitted.device):
            calibration = calibrated_on(whole, field_of(bare, fitted.device), given, settings.seed)
        save_expert(draft, replace(bare, calibration=calibration))

    return train(
        Task(network, len(whole), drawn, Matching(teacher.on), (len(shards), 1)),
        settings,
        out,
        EXPERT_FILE,
        write,
        {**data, "teacher": teacher.record, **begun},
        overwrite,
        on_step,
        run,
        watching(field_of(Expert(network, facts, None)), whole, as_expert),
    )


def _flow_expert(init: Path, facts: ExpertFacts) -> Expert:
    """The expert in ``init``, which must be what ``facts`` say of the student."""
    if not (init / EXPERT_FILE).is_file():
        raise UsageError(f"--init {init}: no expert folder; name one expert, of the ensemble say")
    expert = read_expert(init)
    qualities: dict[str, Callable[[ExpertFacts], Any]] = {
        "prediction type": lambda one: one.prediction_type.value,
        "schedule": lambda one: one.schedule,
        "time scale": lambda one: one.time_scale,
        "samples": lambda one: (one.space, *one.sample_shape),
        "conditions": lambda one: one.conditions,
        "classes": lambda one: one.classes,
    }
    lines = [
        f"{name}: {of(expert.facts)}, and the student's is {of(facts)}"
        for name, of in qualities.items()
        if of(expert.facts) != of(facts)
    ]
    if expert.facts.training_calibration:
        lines.append("trained on in its calibration, which a student has not")
    if lines:
        raise HddmError(
            f"--init {init}: a student cannot begin with it; name a flow expert of this data", lines
        )
    return expert


class Matching:
    """The loss of a student: the squared distance of its velocity to that of its teacher.

    The teacher runs in float32, whatever precision the student is trained in, and gets no gradients.

    Args:
        teacher_on: the teacher on a device; called once for each.
    """

    def __init__(self, teacher_on: Callable[[torch.device], Ensemble]) -> None:
        self._teacher_on = teacher_on
        self._on: dict[torch.device, Ensemble] = {}

    def __call__(self, network: nn.Module, inputs: Inputs) -> Tensor:
        """Means over the elements of each sample, (n,).

        Args:
            network: the student, of (x_t, 1000 t, **conditions).
            inputs: ``x_0`` and ``eps`` (n, C, H, W), ``t`` (n,), the index of the ``expert`` to learn from
                (n,) where that is not the mixture, and ``class_labels`` (n,) where there are classes.
        """
        x_0, t = inputs["x_0"], inputs["t"]
        wide = append_dims(t, x_0.ndim).to(x_0)
        x_t = (1 - wide) * x_0 + wide * inputs["eps"]
        conditions: dict[str, Any] = {name: inputs[name] for name in (LABELS,) if name in inputs}
        device = x_t.device
        if device not in self._on:
            self._on[device] = self._teacher_on(device)
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            target = self._on[device].velocity(x_t, t, expert=inputs.get("expert"), **conditions)
        output: Tensor = network(x_t, (t * TIME_SCALE).to(x_t), **conditions)
        return (output.float() - target).square().flatten(1).mean(1)
