"""Which tensors the data files of an encoded shard hold, by what its record says."""

import torch

from hddm.components.identity import TextEncoderFacts, VaeFacts
from hddm.data.encoding_records import DEVIATION, MEAN, MIRRORED, PIXELS, TOKENS, EncodingFacts
from hddm.errors import HddmError

Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]


def layout_of(encoding: EncodingFacts, vae: VaeFacts | None, text_encoder: TextEncoderFacts | None) -> Layout:
    """Shape of a row and dtype of each tensor in a data file.

    Raises:
        HddmError: for facts that contradict each other.
    """
    is_latent = encoding.space == "latents"
    if is_latent == (vae is None) or is_latent == (encoding.dtype == "uint8"):
        raise HddmError(f"{encoding.space} in {encoding.dtype} {'without' if vae is None else 'with'} a VAE")
    if (text_encoder is None) != (encoding.text_dtype is None):
        raise HddmError(f"text_dtype is {encoding.text_dtype}, and text_encoder {text_encoder}")
    names = [PIXELS]
    if vae is not None:
        names = [MEAN, DEVIATION] if vae.kind == "AutoencoderKL" else [MEAN]
        names += [MIRRORED + name for name in names] if encoding.mirrored else []
    layout: Layout = {name: (encoding.shape, getattr(torch, encoding.dtype)) for name in names}
    if text_encoder is not None:
        size = (text_encoder.tokens, text_encoder.width)
        layout[TOKENS] = (size, getattr(torch, str(encoding.text_dtype)))
    return layout
