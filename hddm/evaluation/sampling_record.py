"""What is recorded beside images of how they were sampled, and under which condition each was."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hddm.data.images import ImageSet
from hddm.files import read_json
from hddm.record_names import SAMPLING_FILE


def read_sampling(images: Path) -> dict[str, Any] | None:
    """The record that ``hddm sample`` leaves in a folder of images, without how experts were used.

    None where there is none.

    Raises:
        HddmError: for one that cannot be read.
    """
    path = images / SAMPLING_FILE
    if not path.is_file():
        return None
    return {key: value for key, value in read_json(path).items() if key != "expert_use"}


def conditions(
    samples: ImageSet, sampling: dict[str, Any] | None, classes: tuple[str, ...]
) -> tuple[Tensor | None, bool]:
    """The condition (n,) of each of ``samples``, and whether it is a number among ``classes``.

    Folders of ``samples`` that are named like ``classes`` say it; else the labels, or the prompts, that were
    cycled over the images. Labels are known by their names; by their numbers only where none are recorded.
    None where nothing says it.
    """
    if samples.labels is not None and set(samples.classes) <= set(classes):
        return _numbers(samples.classes, classes)[samples.labels], True
    if samples.labels is not None:
        return samples.labels, False
    # Of a folder that is not whole, nobody knows which image is which.
    if sampling is None or sampling.get("num_images") != len(samples):
        return None, False
    numbers = int(sampling.get("start", 0)) + torch.arange(len(samples))
    labels = sampling.get("class_labels")
    if labels:
        names = sampling.get("class_names")
        if not names:
            return torch.tensor(labels)[numbers % len(labels)], max(labels) < len(classes)
        known = set(names) <= set(classes)
        found = _numbers(names, classes) if known else torch.tensor(labels)
        return found[numbers % len(found)], known
    prompts = sampling.get("prompts") or ()
    distinct = [prompts.index(prompt) for prompt in prompts]
    return (torch.tensor(distinct)[numbers % len(prompts)] if prompts else None), False


def _numbers(names: Sequence[str], classes: tuple[str, ...]) -> Tensor:
    return torch.tensor([classes.index(name) for name in names])
