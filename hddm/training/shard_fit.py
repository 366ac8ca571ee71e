"""An expert beside a shard: whether the two fit, and what the one takes and remembers of the other."""

from collections.abc import Mapping

from torch import Tensor

from hddm.data.shards import Shard
from hddm.errors import HddmError
from hddm.experts import ExpertFacts, ShardFacts
from hddm.velocity import VelocityField


def check_fit(shard: Shard, facts: ExpertFacts) -> None:
    """Refuse a shard whose samples are none of the expert that ``facts`` describe.

    Raises:
        HddmError: for samples of another space or shape, or latents of another VAE or scale.
    """
    if facts.space != shard.space:
        raise HddmError(f"{shard.folder}: holds {shard.space}, and the expert works in {facts.space}")
    if shard.shape != facts.sample_shape:
        raise HddmError(
            f"{shard.folder}: images are {shard.shape}, the expert's samples {facts.sample_shape}"
        )
    if shard.vae is None:
        return
    if facts.vae is not None and facts.vae != shard.vae:
        raise HddmError(f"{shard.folder}: its latents are of {shard.vae}, the expert's of {facts.vae}")
    if facts.latent_scale is not None and facts.latent_scale != shard.vae.scale:
        raise HddmError(
            f"{shard.folder}: its latents are scaled by {shard.vae.scale:g}, the expert's by "
            f"{facts.latent_scale:g}; encode with the VAE that the expert was trained with"
        )


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
    if shard.texts is not None and "encoder_hidden_states" in (field.conditions or ()):
        conditions["encoder_hidden_states"] = shard.texts.take(rows)
    return conditions


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
