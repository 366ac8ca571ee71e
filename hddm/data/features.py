"""Features of images for clustering."""

import numpy as np
from numpy.typing import NDArray
from sklearn.decomposition import PCA
from torch import Tensor


def pixel_pca(pixels: Tensor, dimensions: int = 32, seed: int = 0) -> NDArray[np.float64]:
    """Principal components (N, ≤ ``dimensions``) of images (N, C, H, W), for small plain images.

    For photographs, features of a pretrained network separate content far better.
    """
    flat = pixels.flatten(1).double().numpy() / 255
    components = min(dimensions, *flat.shape)
    reduced: NDArray[np.float64] = PCA(components, random_state=seed).fit_transform(flat)
    return reduced
