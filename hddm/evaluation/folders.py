"""Scores of a folder of images."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from hddm.data.images import load_images
from hddm.errors import HddmError
from hddm.evaluation.extractors import choose_extractor
from hddm.evaluation.scores import Scorer


def evaluate_folder(
    images: Path, reference: Path, held_out: Path | None = None, allow_few: bool = False
) -> dict[str, Any]:
    """Scores of ``images`` against ``reference``, the training images, and held-out ones, as plain values.

    Raises:
        HddmError: for unreadable folders, images of different shapes, JPEG samples (their compression
            moves the distance), or too few images, unless ``allow_few``.
    """
    folders = {"images": images, "reference": reference, "held-out": held_out}
    sides = {name: load_images(folder) for name, folder in folders.items() if folder is not None}
    jpeg = [f for f in sides["images"].files if f.lower().endswith((".jpg", ".jpeg"))]
    if jpeg:
        raise HddmError(f"{images / jpeg[0]}: JPEG compression moves a Fréchet distance; save samples as PNG")
    shapes = {name: tuple(side.pixels.shape[1:]) for name, side in sides.items()}
    if len(set(shapes.values())) > 1:
        raise HddmError(f"images of different shapes (C, H, W) do not compare: {shapes}")
    extractor = choose_extractor(sides["reference"], min(map(len, sides.values())))
    fresh = sides["held-out"].pixels if held_out is not None else None
    scorer = Scorer(extractor, sides["reference"].pixels, fresh, allow_few=allow_few)
    return asdict(scorer.score(sides["images"].pixels))
