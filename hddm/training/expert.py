"""Train one expert alone, on its shard.

`train_expert` is the entry; `new_network` makes the fresh network of a named size that it begins with.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from diffusers import ModelMixin

from hddm.data.shards import Shard, open_shard
from hddm.experts.loading import field_of
from hddm.experts.lora import ADAPTER_WEIGHTS
from hddm.experts.records import EXPERT_FILE, Expert, ExpertRecord, null_conditions, save_expert
from hddm.networks.folders import WEIGHTS
from hddm.networks.identity import size_config
from hddm.networks.transformers import ExpertTransformer
from hddm.schedules import Schedule, declared_prediction_type, from_diffusers
from hddm.training.loop import Fitted, OnStep, Task, train
from hddm.training.objectives import Objective, check_conditions, drawing, losing
from hddm.training.resume import expert_data, is_complete
from hddm.training.settings import ExpertSettings as ExpertSettings
from hddm.training.settings import RunOptions
from hddm.training.shard_fit import calibrated, shard_facts
from hddm.training.watching import watching
from hddm.utils.errors import HddmError, UsageError
from hddm.utils.files import sha256_of

Network = TypeVar("Network", bound=ModelMixin)


def begun_with(init: Path) -> dict[str, str]:
    """Return what a record says of the expert folder that a training began with."""
    weights = WEIGHTS if (init / WEIGHTS).is_file() else ADAPTER_WEIGHTS
    return {"init": init.resolve().name, "init_sha256": sha256_of(init / weights)}


def new_network(kind: type[Network], size: str, shape: Sequence[int], seed: int, **arguments: Any) -> Network:
    """A ``kind`` of network of named ``size`` for images of ``shape`` (C, H, W).

    Its weights depend on ``seed`` alone; torch's global generator is left as it was.

    Raises:
        HddmError: for an unknown size, or images that are not squares of whole patches.
    """
    channels, height, width = shape
    config = size_config(size)
    if height != width or height % config["patch_size"]:
        raise HddmError(
            f"images are {width}×{height}; --size {size} takes squares with a side divisible by "
            f"{config['patch_size']}"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network: Network = kind(sample_size=height, in_channels=channels, **config, **arguments)
    return network


def train_expert(
    shard_folder: Path,
    out: Path,
    settings: ExpertSettings,
    schedule: Schedule | None = None,
    schedule_source: str = "default of the objective",
    overwrite: bool = False,
    on_step: OnStep | None = None,
    run: RunOptions | None = None,
) -> list[float]:
    """Train an expert on one shard, calibrate it there, and write its folder.

    Nothing but the shard is read: no other expert's weights, gradients or data.

    Args:
        shard_folder: as `hddm.data.partition.partition` or `hddm.data.encoding` writes it.
        out: the expert folder to write.
        settings: see `ExpertSettings`.
        schedule: of DDPM; cosine by default.
        schedule_source: where ``schedule`` came from, for the record.
        overwrite: whether an existing ``out`` is replaced.
        on_step: called after each step with its number, loss and seconds.
        run: how the training is kept beside ``out``, to be resumed and looked at; it is not without.

    Returns:
        The loss of every step.

    Raises:
        HddmError: for a shard that cannot be read or is too small, images that do not fit the network,
            a run that differs from the one to be resumed, or losses that are not finite.
        Stopped: after a signal, with the run saved.
    """
    if settings.lora_rank is not None:
        raise UsageError("--lora-rank adapts an expert that exists; name it by --init")
    objective = Objective.named(settings.objective, schedule, settings.time_sampling, settings.snr_gamma)
    data = expert_data(shard_folder, objective.schedule.config)
    if is_complete(out, EXPERT_FILE, run, overwrite, settings, data):
        return []
    shard = open_shard(shard_folder)
    check_conditions(shard, settings)
    facts = expert_facts(shard, settings, objective, schedule_source)
    network = new_network(
        ExpertTransformer,
        settings.size,
        shard.shape,
        settings.seed,
        num_classes=len(shard.classes) if settings.class_conditional else None,
        text_dim=shard.texts.null.shape[-1] if settings.text_conditional and shard.texts else None,
    )
    texts = {"encoder_hidden_states": shard.texts.null} if settings.text_conditional and shard.texts else {}
    nulls = null_conditions(facts.null_class) | texts
    given = {"class_labels": shard.labels} if settings.class_conditional and shard.labels is not None else {}
    task = Task(
        network,
        len(shard),
        drawing(shard, objective, settings, given, nulls),
        losing(objective, lambda module: module),
        (shard.index,),
    )

    def write(draft: Path, fitted: Fitted, used: ExpertSettings) -> None:
        network.requires_grad_(False)
        bare = Expert(network, facts.model_copy(update={"training": fitted.record(used)}), None, texts)
        save_expert(draft, calibrated(bare, shard, given, settings.seed, fitted.device))

    watch = watching(field_of(Expert(network, facts, None, texts)), shard, settings)
    return train(task, settings, out, EXPERT_FILE, write, data, overwrite, on_step, run, watch)


def ddpm_schedule(config: Path | None) -> tuple[Schedule | None, str]:
    """The schedule of DDPM in a scheduler config of diffusers, and where it came from; None is the default.

    Raises:
        HddmError: for a config that cannot be read, or of another prediction than noise.
    """
    if config is None:
        return None, "default of the objective"
    declared = declared_prediction_type(config)
    if declared not in (None, "epsilon"):
        raise HddmError(f"{config}: prediction_type is {declared!r}, and DDPM training here learns epsilon")
    return from_diffusers(config), str(config)


def expert_facts(
    shard: Shard, settings: ExpertSettings, objective: Objective, schedule_source: str
) -> ExpertRecord:
    """The record of an expert of ``shard``, before it is trained."""
    classes = shard.classes if settings.class_conditional else ()
    conditions = {
        "class_labels": settings.class_conditional,
        "encoder_hidden_states": settings.text_conditional,
    }
    return ExpertRecord(
        objective=settings.objective,
        prediction_type=objective.prediction_type,
        schedule=objective.schedule.config,
        schedule_source=schedule_source,
        time_scale=objective.time_scale,
        sample_shape=shard.shape,
        space=shard.space,
        latent_scale=shard.vae.scale if shard.vae is not None else 1.0,
        vae=shard.vae,
        text_encoder=shard.text_encoder if settings.text_conditional else None,
        conditions=tuple(name for name, wanted in conditions.items() if wanted),
        classes=classes,
        null_class=len(shard.classes) if settings.class_conditional else None,
        shard=shard_facts(shard, classes),
    )
