"""Identities of VAE and text encoder by their content, and named sizes of the transformers.

``tiny`` and ``small`` are for tests and for images of a few hundred pixels. The other sizes are those of
Peebles & Xie 2022 (arXiv:2212.09748, table 1); the number after the slash is the patch size.
"""

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hddm.utils.errors import HddmError
from hddm.utils.records import Record

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST = 65536
"""Numbers of the largest tensor that a fingerprint looks at; norms and biases of a network are smaller."""


class VaeRecord(Record):
    """The latent space of an expert.

    Samples are (z - ``shift``) × ``scale``, z what ``kind``'s encoder gives. ``fingerprint`` is that of the
    encoder's weights: two VAEs that differ in the decoder alone share a latent space.
    """

    kind: str
    fingerprint: str
    scale: float
    shift: float = 0.0


class TextEncoderRecord(Record):
    """The text encoder of an expert, and how many tokens a prompt is padded to."""

    kind: str
    fingerprint: str
    tokens: int
    width: int


def fingerprint(weights: "Mapping[str, Tensor]") -> str:
    """16 hexadecimal digits of the small tensors in ``weights``, cast to float16.

    Names count, dtypes do not: a float16 copy has the fingerprint of its float32 original.
    """
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name]
        if tensor.is_floating_point() and tensor.numel() <= _LARGEST:
            digest.update(f"{name} {tuple(tensor.shape)}".encode())
            digest.update(tensor.half().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


_WIDTHS = {"S": (12, 384, 6), "B": (12, 768, 12), "L": (24, 1024, 16), "XL": (28, 1152, 16)}

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 2},
    "small": {"depth": 4, "hidden_size": 128, "num_heads": 4, "patch_size": 4},
} | {
    f"{name}/{patch}": {"depth": depth, "hidden_size": width, "num_heads": heads, "patch_size": patch}
    for name, (depth, width, heads) in _WIDTHS.items()
    for patch in (2, 4, 8)
}


def size_config(name: str) -> dict[str, int]:
    """The constructor arguments of a named size.

    Raises:
        HddmError: for an unknown name; the message lists the known ones.
    """
    if name not in SIZES:
        raise HddmError(f"unknown model size {name!r}: choose one of {', '.join(SIZES)}")
    return dict(SIZES[name])
