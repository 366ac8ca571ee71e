"""Principal components of small copies of images, for small plain images.

For photographs, features of a pretrained network separate content far better.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from sklearn.decomposition import PCA

from hddm.data.atomic_tensors import read_tensors, write_tensors
from hddm.data.decoding import decode
from hddm.data.features import in_colour
from hddm.data.sources import ImageSource
from hddm.errors import HddmError

SIDE = 32
"""Pixels of the longest side of the small copies."""
DIMENSIONS = 32
SAMPLE = 8192
"""Images, drawn at random, on which the components are fitted: 100 MB of small copies."""
_BASIS = "pixel_pca.safetensors"


class PixelPca:
    """Principal components (n, ≤ `DIMENSIONS`) of RGB pixels in [0, 1].

    All images are first shrunk to one size, whatever their shape: the median height and width of a sample of
    them, `SIDE` at most. The components are those of the same sample, with the mean taken off.
    """

    name = "pixel_pca"
    batch = 256

    def __init__(self, dimensions: int = DIMENSIONS, sample: int = SAMPLE, seed: int = 0) -> None:
        self._dimensions, self._sample, self._seed = dimensions, sample, seed
        self._size = (0, 0)
        self._mean: NDArray[np.float32] = np.zeros(0, dtype=np.float32)
        self._components: NDArray[np.float32] = self._mean

    @property
    def identity(self) -> str:
        settings = f"{self.name} {SIDE} {self._dimensions} {self._sample} {self._seed}"
        return hashlib.sha256(settings.encode()).hexdigest()

    def prepare(self, source: ImageSource, folder: Path) -> None:
        path = folder / _BASIS
        if not path.exists():
            write_tensors(path, self._fitted(source))
        basis, _ = read_tensors(path)
        height, width = basis["size"].tolist()
        self._size = (height, width)
        self._mean, self._components = (
            basis["mean"].astype(np.float32),
            basis["components"].astype(np.float32),
        )

    def __call__(self, images: Sequence[NDArray[np.uint8]]) -> NDArray[np.float32]:
        centred = self._flat(images) - self._mean
        reduced: NDArray[np.float32] = np.matmul(centred, self._components.T, dtype=np.float32)
        return reduced

    def _fitted(self, source: ImageSource) -> dict[str, np.ndarray]:
        count = min(self._sample, len(source))
        rows = np.sort(np.random.default_rng(self._seed).choice(len(source), count, replace=False))
        # Each is shrunk when it is read: a sample of photographs in full would take gigabytes.
        small, sizes = [], []
        for row in rows.tolist():
            try:
                image = in_colour(decode(source.read(row), source.root / source.files[row]))
            except HddmError:
                # Extraction comes to every image and counts this one.
                continue
            sizes.append(image.shape[:2])
            small.append(_shrunk(image, tuple(min(SIDE, side) for side in image.shape[:2])))
        if not small:
            raise HddmError(f"{source.root}: none of {count} images can be read; hddm data check tells more")
        height, width = (min(SIDE, side) for side in np.median(sizes, axis=0).astype(int).tolist())
        self._size = (height, width)
        flat = self._flat(small)
        pca = PCA(min(self._dimensions, *flat.shape), random_state=self._seed).fit(flat)
        return {
            "size": np.array(self._size),
            "mean": pca.mean_.astype(np.float32),
            "components": np.ascontiguousarray(pca.components_, dtype=np.float32),
        }

    def _flat(self, images: Sequence[NDArray[np.uint8]]) -> NDArray[np.float32]:
        small = np.stack([_shrunk(image, self._size) for image in images])
        flat: NDArray[np.float32] = small.reshape(len(small), -1).astype(np.float32) / np.float32(255)
        return flat


def _shrunk(image: NDArray[np.uint8], size: tuple[int, ...]) -> NDArray[np.uint8]:
    """Pixels (*size, 3), each the mean of what it covers."""
    if image.shape[:2] == size:
        return image
    height, width = size
    return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BOX))
