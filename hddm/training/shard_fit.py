"""An expert and a shard: do they fit, and what does the expert take and remember of the shard?

`check_fit` and `check_own` refuse, `calibrated_on` calibrates the expert on the shard.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from hddm.calibration import Calibration, calibrate
from hddm.data.shard_records import MIN_IMAGES
from hddm.data.shards import Shard
from hddm.experts.records import Expert, ExpertRecord, ShardRecord, field_of
from hddm.networks.identity import TextEncoderRecord, VaeRecord
from hddm.networks.wrappers import text_width
from hddm.utils.errors import HddmError, counted
from hddm.velocity import VelocityField

TEXT = "encoder_hidden_states"


def check_fit(shard: Shard, facts: ExpertRecord, network: object) -> None:
    """Refuse a shard whose samples are none of the expert that ``facts`` describe.

    Args:
        shard: the shard.
        facts: the expert's record. What that leaves open is no difference.
        network: the expert's, whose config tells how wide the tokens are that it takes.

    Raises:
        HddmError: for samples of another space or shape, latents of another VAE or scale, or tokens of
            another text encoder.
    """
    if facts.space != shard.space:
        raise HddmError(f"{shard.folder}: holds {shard.space}, and the expert works in {facts.space}")
    if shard.shape != facts.sample_shape:
        raise HddmError(
            f"{shard.folder}: images are {shard.shape}, the expert's samples {facts.sample_shape}"
        )
    if shard.vae is not None:
        _check_latents(shard, shard.vae, facts)
    if shard.text_encoder is not None and TEXT in facts.conditions:
        _check_tokens(shard, shard.text_encoder, facts, getattr(network, "config", {}))


def check_own(shard: Shard, facts: ExpertRecord) -> None:
    """Refuse images that are neither of the expert's own shard nor kept from it.

    A student's shard is a whole partition, and all shards of that are its own. An expert may not say.

    Raises:
        HddmError: for another shard.
    """
    of = shard.held_out_of or shard.hash
    if facts.shard is not None and facts.shard.hash not in (of, shard.partition):
        raise HddmError(
            f"{shard.folder}: is of shard {of[:16]}…, the expert of shard {facts.shard.index}, "
            f"{facts.shard.hash[:16]}…; take images of its own"
        )


def _check_latents(shard: Shard, vae: VaeRecord, facts: ExpertRecord) -> None:
    if facts.vae is not None and facts.vae != vae:
        raise HddmError(f"{shard.folder}: its latents are of {vae}, the expert's of {facts.vae}")
    if facts.latent_scale is not None and facts.latent_scale != vae.scale:
        raise HddmError(
            f"{shard.folder}: its latents are scaled by {vae.scale:g}, the expert's by "
            f"{facts.latent_scale:g}; encode with the VAE that the expert was trained with"
        )


def _check_tokens(
    shard: Shard, encoder: TextEncoderRecord, facts: ExpertRecord, config: Mapping[str, object]
) -> None:
    mine, width = facts.text_encoder, text_width(config)
    if mine is not None:
        for key in ("fingerprint", "width", "tokens"):
            found, known = getattr(encoder, key), getattr(mine, key)
            if found != known:
                raise HddmError(
                    f"{shard.folder}: its captions are of a text encoder with {key} {found}, the expert's "
                    f"has {known}; encode with the text encoder that the expert was trained with"
                )
    elif width not in (None, encoder.width):
        raise HddmError(
            f"{shard.folder}: its tokens are {encoder.width} wide, and the expert takes {width}; encode with "
            "the text encoder that the expert was trained with"
        )


def conditions_of(shard: Shard, field: VelocityField) -> dict[str, Tensor]:
    """Return the conditions that ``field`` takes for the images of ``shard``: their labels, or nothing.

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


def conditions_at(
    rows: Tensor, given: Mapping[str, Tensor], shard: Shard, field: VelocityField
) -> dict[str, Tensor]:
    """Conditions (n, …) of some samples.

    Args:
        rows: (n,) their indices.
        given: conditions (N, …) of all samples.
        shard: whose tokens come with them where the expert takes them.
        field: the expert.
    """
    conditions = {name: value[rows] for name, value in given.items()}
    if shard.texts is not None and TEXT in (field.conditions or ()):
        conditions[TEXT] = shard.texts.take(rows)
    return conditions


def shard_facts(shard: Shard, classes: tuple[str, ...]) -> ShardRecord:
    """Return an expert's record of its shard; images are counted by its own ``classes``, or not at all."""
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
    )


CALIBRATION_IMAGES = 4096
"""A calibration looks at so many images of a shard at most, spread evenly over it."""
CALIBRATION_BYTES = 2**30
"""And at so many bytes of them: samples in float64, as moments are taken, and tokens in float32."""

log = logging.getLogger(__name__)


def calibrated_on(shard: Shard, field: VelocityField, given: Mapping[str, Tensor], seed: int) -> Calibration:
    """A calibration of ``field``, which has none yet, that says which shard it was fitted to.

    Args:
        shard: of which `calibration_rows` are looked at.
        field: the expert; it is asked where it is.
        given: conditions (N, …) of all samples; tokens come from the shard where the expert takes them.
        seed: of the noise.
    """
    rows = calibration_rows(shard)
    log.info("calibrating on %s …", counted(len(rows), "image"))
    conditions = {
        name: value.to(field.device) for name, value in conditions_at(rows, given, shard, field).items()
    }
    calibration = calibrate(field.velocity, shard.take(rows).to(field.device), conditions, seed)
    return replace(calibration, record=shard_record(shard) | {"seed": str(seed)})


def calibrated(
    expert: Expert, shard: Shard, given: Mapping[str, Tensor], seed: int, device: torch.device
) -> Expert:
    """Return ``expert``, which has no calibration, with one of `calibrated_on`, computed on ``device``."""
    with placed(expert.network, device):
        return replace(expert, calibration=calibrated_on(shard, field_of(expert, device), given, seed))


@contextlib.contextmanager
def placed(network: nn.Module, device: torch.device) -> Iterator[None]:
    """Within the block ``network`` is on ``device``, and afterwards on the CPU."""
    network.to(device)
    try:
        yield
    finally:
        network.to("cpu")


def calibration_rows(shard: Shard) -> Tensor:
    """The samples that moments are taken of: all, or as many as may be, spread evenly over the shard."""
    size = 8 * torch.Size(shard.shape).numel()
    if shard.texts is not None:
        size += 4 * shard.texts.null.numel()
    number = min(len(shard), CALIBRATION_IMAGES, max(CALIBRATION_BYTES // size, MIN_IMAGES))
    return torch.linspace(0, len(shard) - 1, number).round().long()


def shard_record(shard: Shard) -> dict[str, str]:
    """Return a calibration's record of its shard."""
    return {"data": f"shard {shard.hash}", "images": str(len(calibration_rows(shard)))}
