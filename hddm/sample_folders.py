"""Samples of a saved model, written as a folder of PNG files."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hddm.data.images import save_png, to_bytes
from hddm.errors import HddmError
from hddm.files import check_absent, new_folder, write_json
from hddm.load import load
from hddm.sampling import sample

FORMAT = "1.0"
SAMPLING_FILE = "sampling.json"


def sample_to_folder(
    source: Path,
    out: Path,
    num: int,
    *,
    seed: int = 0,
    steps: int = 50,
    strategy: str | None = None,
    solver: str = "euler",
    shift: float = 1.0,
    guidance_scale: float = 1.0,
    class_labels: str | None = None,
    batch_size: int = 64,
    overwrite: bool = False,
    on_batch: Callable[[int], None] | None = None,
) -> None:
    """Sample ``source`` and write ``00000.png`` … and ``sampling.json``, the settings, into ``out``.

    ``class_labels`` are class names, or numbers where no name fits, comma-separated and cycled over the
    images; the others are arguments of
    `hddm.sample`.

    Raises:
        HddmError: for an existing ``out``, a model that cannot be loaded, or wrong settings.
    """
    check_absent(out, SAMPLING_FILE, overwrite)
    model = load(source)
    shape = model.sample_shape
    if shape is None or shape[0] not in (1, 3):
        raise HddmError(
            f"{source}: its samples have shape {shape}: latents, which need a VAE to become images; in "
            "Python hddm.sample returns them"
        )
    conditions: dict[str, Any] = {}
    if class_labels is not None:
        conditions["class_labels"] = _labels(class_labels, model.classes, num)
    images = sample(
        model,
        num,
        seed,
        steps,
        strategy,
        solver,
        guidance_scale,
        shift=shift,
        batch_size=batch_size,
        on_batch=on_batch,
        **conditions,
    )
    with new_folder(out, SAMPLING_FILE, overwrite) as draft:
        for index, image in enumerate(to_bytes(images)):
            save_png(image, draft / f"{index:05d}.png")
        settings = {
            "format": FORMAT,
            "source": str(source),
            "num_images": num,
            "seed": seed,
            "steps": steps,
            "strategy": strategy or getattr(model, "strategy", None),
            "solver": solver,
            "shift": shift,
            "guidance_scale": guidance_scale,
            "class_labels": conditions["class_labels"].tolist() if conditions else None,
        }
        write_json(draft / SAMPLING_FILE, settings)


def _labels(text: str, classes: Sequence[str], num: int) -> Tensor:
    """Class indices (num,) from a comma-separated list of names or numbers, cycled."""
    indices = []
    for part in (part.strip() for part in text.split(",")):
        if part in classes:
            indices.append(list(classes).index(part))
        elif part.isdecimal() and int(part) < len(classes):
            indices.append(int(part))
        else:
            raise HddmError(
                f"--class-labels: no class {part!r}; the model's classes are {', '.join(classes)}"
                if classes
                else f"--class-labels {text}: the model is unconditional; drop the option"
            )
    return torch.tensor([indices[i % len(indices)] for i in range(num)])
