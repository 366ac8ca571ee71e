"""Identities of VAE and text encoder by their content."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from hddm.networks.encoders import replaced_by
from hddm.utils.errors import an
from hddm.utils.records import AboveZero, Record, SparseRecord

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST = 65536
"""Number of elements of the largest tensor in a fingerprint; a network's norms and biases are smaller."""


@dataclass(frozen=True)
class Scaling:
    """How samples are scaled from z, what a VAE encodes.

    They are (z - ``shift``) × ``scale``; where a VAE states its latents' ``mean`` and ``deviation`` for each
    channel, (z - ``mean``) × ``scale`` / ``deviation``.
    """

    scale: float
    shift: float = 0.0
    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()

    def samples(self, z: "Tensor") -> "Tensor":
        """Samples (N, C, h, w) of ``z``."""
        if not self.mean:
            return (z - self.shift) * self.scale
        mean, deviation = self._statistics(z)
        return (z - mean) * (self.scale / deviation)

    def z(self, samples: "Tensor") -> "Tensor":
        """What the decoder takes for ``samples`` (N, C, h, w)."""
        if not self.mean:
            return samples / self.scale + self.shift
        mean, deviation = self._statistics(samples)
        return samples * (deviation / self.scale) + mean

    def _statistics(self, like: "Tensor") -> "list[Tensor]":
        return [like.new_tensor(one).view(1, -1, 1, 1) for one in (self.mean, self.deviation)]


class VaeRecord(SparseRecord):
    """The latent space of an expert.

    ``kind`` is the VAE's class; how its latents are scaled says `Scaling`. ``fingerprint`` covers only the
    encoder's weights, since VAEs that differ in the decoder alone share a latent space.
    """

    sparse = ("mean", "deviation")

    kind: str
    fingerprint: str
    scale: AboveZero
    shift: float = Field(default=0.0, allow_inf_nan=False)
    mean: tuple[Annotated[float, Field(allow_inf_nan=False)], ...] = ()
    deviation: tuple[AboveZero, ...] = ()

    @property
    def scaling(self) -> Scaling:
        """How samples are scaled from what the VAE encodes."""
        return Scaling(self.scale, self.shift, self.mean, self.deviation)


class UnreadVae(Record):
    """The VAE of an expert of latents that hddm could not read, and why.

    ``fingerprint`` is that of a `VaeRecord`, or of all weights where none are called an encoder's; None where
    the weights could not be read. ``scale`` and ``shift`` are None unless one number is for all channels.
    """

    kind: str
    reason: str
    fingerprint: str | None = None
    scale: AboveZero | None = None
    shift: Annotated[float, Field(allow_inf_nan=False)] | None = None

    def misfit(self, vae: VaeRecord) -> str | None:
        """How ``vae`` differs from this one, in words; None where it is this one, or could be.

        Where the weights could not be read, another one of the same class and scale could be. So could a
        distilled one, which has a scale of its own, if this one has one scale for all channels.
        """
        if self.scale is None or self.shift is None:
            return "its latents are not scaled by one number"
        if self.kind in replaced_by(vae.kind):
            return None
        if vae.mean:
            return "its latents are scaled for each channel"
        if self.fingerprint is not None and self.fingerprint != vae.fingerprint:
            return f"fingerprint {vae.fingerprint}, not {self.fingerprint}"
        if self.fingerprint is None and self.kind != vae.kind:
            return f"is {an(vae.kind)}"
        if (vae.scale, vae.shift) != (self.scale, self.shift):
            return f"scale {vae.scale:g} and shift {vae.shift:g}, not {self.scale:g} and {self.shift:g}"
        return None

    def __str__(self) -> str:
        return f"unreadable {self.kind} ({self.reason})"


class TextEncoderRecord(SparseRecord):
    """The text encoder of an expert, and the number of tokens in a padded prompt.

    ``padding`` is the word that its tokenizer pads with, empty where it is the one that such encoders were
    trained with.
    """

    sparse = ("padding",)

    kind: str
    fingerprint: str
    tokens: int
    width: int
    padding: str = ""


class UnreadTextEncoder(Record):
    """The text encoder of an expert that hddm could not read, and why.

    ``fingerprint`` is that of a `TextEncoderRecord`; None where the weights could not be read.
    """

    kind: str
    reason: str
    fingerprint: str | None = None

    def misfit(self, encoder: TextEncoderRecord) -> str | None:
        """How ``encoder`` differs from this one, in words; None where it is this one, or could be."""
        if self.fingerprint is not None and self.fingerprint != encoder.fingerprint:
            return f"fingerprint {encoder.fingerprint}, not {self.fingerprint}"
        return None

    def __str__(self) -> str:
        return f"unreadable {self.kind} ({self.reason})"


def fingerprint(weights: "Mapping[str, Tensor]") -> str:
    """Hash the small tensors in ``weights``, cast to float16, to 16 hexadecimal digits.

    Names count but dtypes do not: a float16 copy has the fingerprint of its float32 original.
    """
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name]
        if tensor.is_floating_point() and tensor.numel() <= _LARGEST:
            digest.update(f"{name} {tuple(tensor.shape)}".encode())
            digest.update(tensor.half().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
