"""The images of the quickstart: scikit-learn's digits, as folders of PNG files."""

from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits

from hddm.data.images import save_png

HELD_OUT_SHARE = 5


def write_digits(folder: Path, seed: int = 0) -> tuple[Path, Path]:
    """Write ``train/<digit>/<n>.png`` and ``held_out/<digit>/<n>.png``; return both folders.

    1,797 images of 8×8 pixels from the test part of the UCI Optical Recognition of Handwritten Digits
    set. A fifth of them, chosen at random, is held out before anything looks at the rest.
    """
    bunch = load_digits()
    # Levels are 0 … 16.
    pixels = torch.from_numpy(np.round(bunch.images / 16 * 255).astype(np.uint8))[:, None]
    order = np.random.default_rng(seed).permutation(len(pixels))
    held_out = set(order[: len(pixels) // HELD_OUT_SHARE].tolist())
    for index, (image, digit) in enumerate(zip(pixels, bunch.target.tolist(), strict=True)):
        side = "held_out" if index in held_out else "train"
        path = folder / side / str(digit) / f"{index:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_png(image, path)
    return folder / "train", folder / "held_out"
