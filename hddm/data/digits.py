"""scikit-learn's digits as a folder of images."""

from pathlib import Path

import numpy as np
from PIL import Image

from hddm.utils.errors import optional

TRAINING, HELD_OUT = "train", "held_out"
_HELD_OUT_SHARE = 5


def write_digits(folder: Path, seed: int = 0) -> tuple[Path, Path]:
    """Write ``train/<digit>/<n>.png`` and ``held_out/<digit>/<n>.png``; return both folders.

    1,797 images of 8×8 pixels from the test part of the UCI Optical Recognition of Handwritten Digits
    set. A fifth of them, chosen at random, is held out before anything looks at the rest.
    """
    bunch = optional("sklearn.datasets", "the digits", "train").load_digits()
    # Levels are 0 … 16.
    pixels = np.round(bunch.images / 16 * 255).astype(np.uint8)
    # Not from the table of streams: this split belongs to the data, and published results share it.
    order = np.random.default_rng(seed).permutation(len(pixels))
    held_out = set(order[: len(pixels) // _HELD_OUT_SHARE].tolist())
    for index, (image, digit) in enumerate(zip(pixels, bunch.target.tolist(), strict=True)):
        side = HELD_OUT if index in held_out else TRAINING
        path = folder / side / str(digit) / f"{index:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    return folder / TRAINING, folder / HELD_OUT
