"""Images of a shard as an expert takes them: whether they are its own, and the conditions for them."""

from collections.abc import Mapping, Sized

import torch
from torch import Tensor

from hddm.condition_names import LABELS, TEXT
from hddm.data.shards import Shard
from hddm.experts.records import ExpertRecord
from hddm.networks.wrappers import text_width
from hddm.utils.errors import HddmError
from hddm.velocity import VelocityField


def check_fit(shard: Shard, record: ExpertRecord, network: object) -> None:
    """Refuse a shard of samples in another space or shape, of another VAE or scale, or another text encoder.

    Values that ``record`` leaves open are no difference. The config of ``network`` states the width of its
    tokens.
    """
    size = f"hddm encode SHARDS --out FOLDER --resolution {record.sample_shape[1]} brings them to its size"
    parts: list[tuple[str, object, object, str]] = [
        ("space", shard.space, record.space, ""),
        ("shape", shard.shape, record.sample_shape, size if record.space == "pixels" else ""),
    ]
    if (vae := shard.vae) is not None:
        unread = record.unread_vae
        misfit = None if unread is None else unread.misfit(vae)
        if misfit is not None:
            raise HddmError(f"{shard.folder}: its VAE is not the expert's, an {unread}: {misfit}")
        remedy = "encode with the VAE that the expert was trained with"
        parts += [
            ("VAE", vae, record.vae, remedy),
            ("scale", vae.scale, record.latent_scale, remedy),
        ]
    encoder = shard.text_encoder
    if encoder is not None and record.takes_text:
        remedy = "encode with the text encoder that the expert was trained with"
        width = {"width": text_width(network)}
        known = width if record.text_encoder is None else vars(record.text_encoder)
        for key in ("fingerprint", "width", "tokens"):
            parts.append((f"text encoder's {key}", getattr(encoder, key), known.get(key), remedy))
    for what, found, expected, remedy in parts:
        if expected not in (None, found):
            text = f"its {what} is {found}, the expert's {expected}"
            raise HddmError(f"{shard.folder}: {text}{remedy and '; '}{remedy}")


def check_own(shard: Shard, record: ExpertRecord) -> None:
    """Refuse images that are not of the expert's own shard, held out or not, where it names that shard."""
    origin, own = shard.held_out_of or shard.hash, record.shard
    # A student's shard is a whole partition, all shards of which are its own.
    if own is not None and own.hash not in (origin, shard.partition):
        text = f"is of shard {origin[:16]}…, the expert of shard {own.index}, {own.hash[:16]}…"
        raise HddmError(f"{shard.folder}: {text}; use its own images")


def conditions_of(shard: Shard, field: VelocityField) -> dict[str, Tensor]:
    """Return the conditions that ``field`` takes for the images of ``shard``: their labels, or none."""
    if not field.classes:
        return {}
    return {LABELS: labels_of_shard(shard, field.classes, "the expert")}


def labels_of_shard(shard: Shard, classes: tuple[str, ...], name: str, remedy: str = "") -> Tensor:
    """Return the labels of a shard, which must be of these ``classes``, those of ``name``.

    The `HddmError` asks for images of the same classes ``remedy``, which is another way out.
    """
    if shard.labels is None or shard.classes != classes:
        text = f"its classes are {list(shard.classes)}, those of {name} {list(classes)}"
        raise HddmError(f"{shard.folder}: {text}; use images of the same classes{remedy}")
    return shard.labels


def conditions_of_rows(
    rows: Tensor, given: Mapping[str, Tensor], shard: Shard, field: VelocityField
) -> dict[str, Tensor]:
    """Select conditions (n, …) of samples ``rows`` (n,): ``given``, and tokens where ``field`` takes any."""
    conditions = {name: value[rows] for name, value in given.items()}
    if shard.texts is not None and TEXT in (field.conditions or ()):
        conditions[TEXT] = shard.texts.take(rows)
    return conditions


def evenly_spaced(samples: Sized, most: int) -> Tensor:
    """Select all samples, or ``most`` of them, spread evenly."""
    return torch.linspace(0, len(samples) - 1, min(len(samples), most)).round().long()
