"""Features of Inception and of CLIP, prepared and computed as clean-fid does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from hddm.data.images import to_bytes
from hddm.data.resize import fit_image
from hddm.errors import HddmError
from hddm.weight_files import read_safetensors

INCEPTION_FEATURES = 2048
INCEPTION_RESIZE = "each channel by Pillow's bicubic filter to 299×299 in float32, not rounded"
CLIP_RESIZE = "the shorter side by Pillow's bicubic filter to 224 in bytes, the middle 224×224"
_BATCH = 32
# Of the images that CLIP was trained on, in its own code.
_MEAN, _DEVIATION = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def inception_features(weights: Path) -> Callable[[Tensor], Tensor]:
    """clean-fid's network and its resizing ``clean``, one image at a time as it does.

    Images (n, C, H, W) in [-1, 1] with C = 1 or 3 → (n, 2048) before the last layer, on the CPU.

    Source: arXiv:2104.11222.
    """
    from cleanfid.inception_torchscript import InceptionV3W
    from cleanfid.resize import build_resizer

    network = InceptionV3W(str(weights.parent), download=False, resize_inside=False).eval().to(device())
    return _by_image(build_resizer("clean"), network)


def clip_features(weights: Path, config: Any = None) -> Callable[[Tensor], Tensor]:
    """Projected image embeddings of CLIP, not normalised, prepared as clean-fid's CLIP-FID prepares them.

    Images (n, C, H, W) in [-1, 1] with C = 1 or 3 → (n, 512) on the CPU.

    Args:
        weights: safetensors file of a CLIP model or its vision part, as transformers writes it.
        config: transformers' ``CLIPVisionConfig``; its defaults are ViT-B/32.

    Raises:
        HddmError: for a file that lacks tensors of the network.

    Source: arXiv:2203.06026 (CLIP features for Fréchet distances), clean-fid's ``clip_vit_b_32``.
    """
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    network: Any = CLIPVisionModelWithProjection(config or CLIPVisionConfig())
    tensors = read_safetensors(weights)
    # The text part lies in the same file.
    missing = network.load_state_dict(tensors, strict=False).missing_keys
    if missing:
        raise HddmError(f"{weights}: lacks {len(missing)} tensors of CLIP, as {missing[0]}; fetch it again")
    network.eval().to(device())
    mean, deviation = (torch.tensor(v).view(3, 1, 1).to(device()) for v in (_MEAN, _DEVIATION))

    def embed(pixels: Tensor) -> Tensor:
        embedded: Tensor = network(pixel_values=(pixels / 255 - mean) / deviation).image_embeds
        return embedded

    return _by_image(_middle, embed)


def device() -> str:
    """Where these networks run."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _middle(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.asarray(fit_image(Image.fromarray(image), 224, "center", "bicubic"))


def _by_image(
    prepare: Callable[[NDArray[np.uint8]], NDArray[Any]], network: Callable[[Tensor], Tensor] | nn.Module
) -> Callable[[Tensor], Tensor]:
    @torch.no_grad()
    def features(images: Tensor) -> Tensor:
        colour = to_bytes(images).expand(-1, 3, -1, -1).permute(0, 2, 3, 1).numpy()
        batches = []
        for start in range(0, len(colour), _BATCH):
            ready = np.stack([prepare(np.ascontiguousarray(i)) for i in colour[start : start + _BATCH]])
            pixels = torch.from_numpy(ready).permute(0, 3, 1, 2).float().to(device())
            batches.append(network(pixels).float().cpu())
        return torch.cat(batches)

    return features
