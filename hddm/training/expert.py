"""Train one expert alone on its shard; check, condition and calibrate any expert on a shard."""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from diffusers import ModelMixin
from torch import Tensor, nn

from hddm.calibration import LEVELS, STATES, Calibration
from hddm.classes import LABELS
from hddm.data.shard_records import MIN_IMAGES
from hddm.data.shards import Shard, open_shard
from hddm.experts.lora import ADAPTER_WEIGHTS
from hddm.experts.records import (
    EXPERT_FILE,
    Expert,
    ExpertRecord,
    ShardRecord,
    field_of,
    null_conditions,
    save_expert,
    unread_as,
)
from hddm.networks.folders import WEIGHTS, Unread
from hddm.networks.transformers import ExpertTransformer
from hddm.networks.wrappers import text_width
from hddm.schedules import Schedule, declared_prediction_type, from_diffusers
from hddm.training.fitting import calibrate
from hddm.training.loop import Fitted, OnStep, Task, train
from hddm.training.objectives import Objective, check_conditions, drawing, loss_of, objective_of
from hddm.training.recipe import Start, resolve
from hddm.training.resume import encoding_of, recipe_before
from hddm.training.settings import TEXT, ExpertRecipe, ExpertSettings, RunOptions, size_config
from hddm.training.watching import watching
from hddm.utils.errors import HddmError, UsageError, counted
from hddm.utils.files import sha256_of
from hddm.utils.progress import Progress
from hddm.velocity import VelocityField

DEFAULT_SCHEDULE = "default of the objective"
Network = TypeVar("Network", bound=ModelMixin)

log = logging.getLogger(__name__)


def train_expert(
    shard_folder: Path,
    out: Path,
    settings: ExpertSettings,
    schedule: Schedule | Path | None = None,
    schedule_source: str | None = None,
    overwrite: bool = False,
    on_step: OnStep | None = None,
    run: RunOptions | None = None,
) -> list[float]:
    """Train an expert on one shard, calibrate it there, and write its folder; return the loss of every step.

    Only the shard is read: no other expert's weights, gradients or data. `hddm.data.partition.partition` or
    `hddm.data.encoding` writes it. ``schedule`` is DDPM's, cosine by default, or a file with a scheduler
    config of diffusers; ``schedule_source`` is its origin for the record, by default that file. ``on_step``
    is called after each step. ``run`` says how the training is kept beside ``out``, to be resumed and
    watched; without it nothing is kept.

    Raises:
        HddmError: for a shard that is unreadable or too small, images that do not fit the network, a run that
            differs from the one to be resumed, or losses that are not finite.
        Stopped: after a signal, with the run saved.
    """
    before = recipe_before(out, EXPERT_FILE, run, overwrite)
    shard = open_shard(shard_folder)
    recipe, objective = resolve_new(shard, settings, schedule, before)
    origin = str(schedule) if isinstance(schedule, Path) else DEFAULT_SCHEDULE
    record = new_record(shard, recipe, objective, schedule_source or origin)
    null_text = {TEXT: shard.texts.null} if recipe.text_conditional and shard.texts else {}
    network = new_network(
        ExpertTransformer,
        recipe.size,
        shard.shape,
        recipe.seed,
        num_classes=len(record.classes) or None,
        text_dim=null_text[TEXT].shape[-1] if null_text else None,
        rotary=recipe.rotary,
    )
    labels = {LABELS: shard.labels} if recipe.class_conditional and shard.labels is not None else {}
    draw = drawing(shard, objective, recipe, labels, null_conditions(record.null_class) | null_text)
    loss = loss_of(objective, lambda module: module)
    task = Task(network, len(shard), draw, loss, (shard.index,), recipe.weak_step)

    def write(draft: Path, fitted: Fitted) -> None:
        network.requires_grad_(False)
        trained = record.model_copy(update={"training": fitted.record(recipe)})
        expert = Expert(network, trained, None, null_text, weak_of(network, fitted))
        save_expert(draft, calibrated(expert, shard, labels, recipe.seed, fitted.device))

    data = {"shard": shard.hash, **encoding_of([shard.folder]), "schedule": objective.schedule.config}
    watch = watching(field_of(Expert(network, record, None, null_text)), shard, recipe.conditions)
    return train(task, recipe, out, EXPERT_FILE, write, data, overwrite, on_step, run, watch)


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
    if settings.lora_rank is not None:
        raise UsageError("--lora-rank adapts an existing expert; pass --init")
    stated = None
    if isinstance(schedule, Path):
        stated, path = declared_prediction_type(schedule), schedule
        if stated == "flow_prediction":
            raise HddmError(f"{path}: is for flow matching; use --objective flow without --schedule")
        schedule = from_diffusers(path)
    recipe = resolve(ExpertRecipe, settings, Start(prediction=stated), before)
    objective = objective_of(recipe, schedule)
    check_conditions(shard, recipe)
    _check_size(shard.shape, recipe.size)
    return recipe, objective


def _check_size(shape: Sequence[int], size: str) -> None:
    _, height, width = shape
    patch = size_config(size)["patch_size"]
    if height != width or height % patch:
        raise HddmError(f"images are {width}×{height}; --size {size} takes squares divisible by {patch}")


def new_network(kind: type[Network], size: str, shape: Sequence[int], seed: int, **arguments: Any) -> Network:
    """Make a ``kind`` of network of named ``size`` for square images of ``shape`` (C, H, W) in whole patches.

    Its weights depend on ``seed`` alone; torch's global generator is left as it was.
    """
    _check_size(shape, size)
    channels, height, _ = shape
    config = size_config(size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network: Network = kind(sample_size=height, in_channels=channels, **config, **arguments)
    return network


def new_record(
    shard: Shard, recipe: ExpertRecipe, objective: Objective, schedule_source: str = DEFAULT_SCHEDULE
) -> ExpertRecord:
    """Make the record of an expert of ``shard`` before its training."""
    classes = shard.classes if recipe.class_conditional else ()
    return ExpertRecord(
        objective=recipe.objective,
        prediction_type=objective.prediction_type,
        schedule=objective.schedule.config,
        schedule_source=schedule_source,
        time_scale=objective.time_scale,
        noise_range=objective.noise_range,
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
        images=len(shard),
        class_images=tuple(counts),
        partition=shard.partition,
        sketch=shard.sketch,
    )


def begun_with(init: Path) -> dict[str, Any]:
    """Return name and weight hash of the expert folder that a training began with, for its record."""
    weights = WEIGHTS if (init / WEIGHTS).is_file() else ADAPTER_WEIGHTS
    return {"init": init.resolve().name, "init_sha256": sha256_of(init / weights)}


def check_fit(shard: Shard, record: ExpertRecord, network: object) -> None:
    """Refuse a shard of samples in another space or shape, of another VAE or scale, or another text encoder.

    Values that ``record`` leaves open are no difference. The config of ``network`` gives the width of its
    tokens.
    """
    folder, vae, encoder = shard.folder, shard.vae, shard.text_encoder
    if record.space != shard.space:
        raise HddmError(f"{folder}: holds {shard.space}, but the expert works in {record.space}")
    if shard.shape != record.sample_shape:
        wanted = record.sample_shape
        remedy = f"; hddm encode SHARDS --out FOLDER --resolution {wanted[1]} brings them to its size"
        remedy = remedy if record.space == "pixels" and shard.shape[0] == wanted[0] else ""
        raise HddmError(f"{folder}: images are {shard.shape}, the expert's samples {wanted}{remedy}")
    if vae is not None and record.vae not in (None, vae):
        raise HddmError(f"{folder}: its latents are from {vae}, the expert's from {record.vae}")
    if vae is not None and record.latent_scale not in (None, vae.scale):
        raise HddmError(
            f"{folder}: its latents are scaled by {vae.scale:g}, the expert's by {record.latent_scale:g}; "
            "encode with the VAE that the expert was trained with"
        )
    if encoder is None or TEXT not in record.conditions:
        return
    remedy = "encode with the text encoder that the expert was trained with"
    if record.text_encoder is not None:
        for key in ("fingerprint", "width", "tokens"):
            found, known = getattr(encoder, key), getattr(record.text_encoder, key)
            if found != known:
                text = f"its captions are of a text encoder with {key} {found}, the expert's has {known}"
                raise HddmError(f"{folder}: {text}; {remedy}")
    elif (width := text_width(getattr(network, "config", {}))) not in (None, encoder.width):
        raise HddmError(
            f"{folder}: its tokens are {encoder.width} wide, and the expert takes {width}; {remedy}"
        )


def check_own(shard: Shard, record: ExpertRecord) -> None:
    """Refuse images that are not of the expert's own shard, held out or not, where it names that shard."""
    origin, own = shard.held_out_of or shard.hash, record.shard
    # A student's shard is a whole partition, all shards of which are its own.
    if own is not None and own.hash not in (origin, shard.partition):
        raise HddmError(
            f"{shard.folder}: is of shard {origin[:16]}…, the expert of shard {own.index}, "
            f"{own.hash[:16]}…; use its own images"
        )


def conditions_of(shard: Shard, field: VelocityField) -> dict[str, Tensor]:
    """Return the conditions that ``field`` takes for the images of ``shard``: their labels, or none."""
    if not field.classes:
        return {}
    if shard.labels is None or shard.classes != field.classes:
        raise HddmError(
            f"{shard.folder}: its classes are {list(shard.classes)}, the expert's {list(field.classes)}"
        )
    return {"class_labels": shard.labels}


def conditions_at(
    rows: Tensor, given: Mapping[str, Tensor], shard: Shard, field: VelocityField
) -> dict[str, Tensor]:
    """Select conditions (n, …) of samples ``rows`` (n,): ``given``, and tokens where ``field`` takes any."""
    conditions = {name: value[rows] for name, value in given.items()}
    if shard.texts is not None and TEXT in (field.conditions or ()):
        conditions[TEXT] = shard.texts.take(rows)
    return conditions


CALIBRATION_COST = LEVELS * STATES // 4
"""Images whose training takes about as long as a calibration: a state is one call of the network."""
CALIBRATION_IMAGES, CALIBRATION_BYTES = 4096, 2**30
"""Most images, and most bytes of them, in a calibration: samples in float64, tokens in float32."""


def calibrated(
    expert: Expert, shard: Shard, given: Mapping[str, Tensor], seed: int, device: torch.device
) -> Expert:
    """Return ``expert``, which has no calibration, with one of `calibrated_on`, computed on ``device``."""
    with placed(expert.network, device):
        return replace(expert, calibration=calibrated_on(shard, field_of(expert, device), given, seed))


def calibrated_on(shard: Shard, field: VelocityField, given: Mapping[str, Tensor], seed: int) -> Calibration:
    """Fit a calibration of ``field``, which has none yet, to `calibration_rows` of ``shard``.

    ``given`` are conditions (N, …) of all samples, without the tokens of the shard; ``seed`` is the noise's.
    """
    rows = calibration_rows(shard)
    log.info("calibrating on %s …", counted(len(rows), "image"))
    found = conditions_at(rows, given, shard, field)
    conditions = {name: value.to(field.device) for name, value in found.items()}
    images = shard.take(rows).to(field.device)
    with Progress(LEVELS * STATES, "calibrate", " states") as progress:
        part = field.noise_range
        calibration = calibrate(field.velocity, images, conditions, seed, on_batch=progress, noise_range=part)
    return replace(calibration, record=calibration_origin(shard) | {"seed": str(seed)})


def weak_of(network: ModelMixin, fitted: Fitted) -> Unread[ModelMixin] | None:
    """The weak model that a training of ``network`` kept, if any."""
    return unread_as(network, fitted.weak) if fitted.weak else None


@contextlib.contextmanager
def placed(network: nn.Module, device: torch.device) -> Iterator[None]:
    """Move ``network`` to ``device`` for a block, and to the CPU afterwards."""
    network.to(device)
    try:
        yield
    finally:
        network.to("cpu")


def calibration_rows(shard: Shard) -> Tensor:
    """Select the samples that moments are taken of: all or a limited number, spread evenly over the shard."""
    size = 8 * torch.Size(shard.shape).numel()
    if shard.texts is not None:
        size += 4 * shard.texts.null.numel()
    number = min(len(shard), CALIBRATION_IMAGES, max(CALIBRATION_BYTES // size, MIN_IMAGES))
    return torch.linspace(0, len(shard) - 1, number).round().long()


def calibration_origin(shard: Shard) -> dict[str, str]:
    """Return a calibration's record of its shard."""
    return {"data": f"shard {shard.hash}", "images": str(len(calibration_rows(shard)))}
