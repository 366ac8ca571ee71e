"""How varied samples are, and whether they repeat the training images."""

import torch
from torch import Tensor

from hddm.errors import HddmError


def diversity(features: Tensor, reference: Tensor) -> float:
    """Mean distance between pairs of ``features`` (n, d), over that of ``reference`` (m, d).

    1 is as varied as the reference, 0 all the same. It does not say that the *right* things vary.

    Raises:
        HddmError: for fewer than 2 rows on a side, or a reference without any variation.
    """
    spread = _mean_pair_distance(reference)
    if spread == 0:
        raise HddmError("all reference images have the same features: diversity has no scale")
    return _mean_pair_distance(features) / spread


def nearest_ratio(samples: Tensor, training: Tensor, held_out: Tensor) -> float:
    """Mean distance of ``samples`` to the nearest training image, over that of ``held_out`` images.

    All are images (n, …) in one scale; the distance is Euclidean over pixels. About 1: samples lie as
    far from the training images as fresh images do. Well below 1: the model repeats its training
    images. Above 1: the samples lie off the data.

    Raises:
        HddmError: where held-out images repeat training images exactly.
    """
    fresh = _mean_nearest(held_out, training)
    if fresh == 0:
        raise HddmError("every held-out image is also a training image: hold others out")
    return _mean_nearest(samples, training) / fresh


def _mean_pair_distance(rows: Tensor) -> float:
    if len(rows) < 2:
        raise HddmError(f"diversity needs at least 2 images, not {len(rows)}")
    return torch.pdist(rows.float()).mean().item()


def _mean_nearest(rows: Tensor, others: Tensor) -> float:
    flat = others.flatten(1).float()
    chunks = rows.flatten(1).float().split(1024)
    # cdist's distances of equal rows are not 0 (it multiplies matrices); it only finds the nearest here.
    distances = [(chunk - flat[torch.cdist(chunk, flat).argmin(1)]).norm(dim=1) for chunk in chunks]
    return torch.cat(distances).mean().item()
