"""Identities of VAE and text encoder by their content."""

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import Field

from hddm.utils.records import AboveZero, Record

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST = 65536
"""Number of elements of the largest tensor in a fingerprint; a network's norms and biases are smaller."""


class VaeRecord(Record):
    """The latent space of an expert.

    Samples are (z - ``shift``) × ``scale``, with z from the encoder of ``kind``. ``fingerprint`` covers only
    the encoder's weights, since VAEs that differ in the decoder alone share a latent space.
    """

    kind: str
    fingerprint: str
    scale: AboveZero
    shift: float = Field(default=0.0, allow_inf_nan=False)


class TextEncoderRecord(Record):
    """The text encoder of an expert, and the number of tokens in a padded prompt."""

    kind: str
    fingerprint: str
    tokens: int
    width: int


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
