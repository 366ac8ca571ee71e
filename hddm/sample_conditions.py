"""What images are made of: class labels, prompts and tensors in a file, cycled over the images."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hddm.conditions import missing_from
from hddm.errors import HddmError, UsageError
from hddm.pipeline import HDDMPipeline
from hddm.pipeline_inputs import class_indices
from hddm.sample_settings import SampleSettings
from hddm.weight_files import read_safetensors

NEGATIVE = "negative_"
Cycles = Mapping[str, Tensor]


def read_cycles(pipeline: HDDMPipeline, settings: SampleSettings) -> tuple[Cycles, Cycles]:
    """Conditions and negative ones, each of as many rows as there are different ones.

    Raises:
        HddmError: for an unknown class, prompts without a text encoder, a file that cannot be read, and two
            sources of one condition.
    """
    guided = settings.guidance.scale != 1.0
    if settings.negative_prompt is not None and not guided:
        raise UsageError("--negative-prompt: needs a --guidance-scale other than 1")
    if settings.prompts and (pipeline.text_encoder is None or pipeline.tokenizer is None):
        raise UsageError(
            "--prompt: this model has no text encoder and tokenizer; give it both (hddm assemble MODEL "
            "--text-encoder FOLDER --tokenizer FOLDER; in Paris as text_encoder/ and tokenizer/), "
            "or pass the encoded text by --conditions"
        )
    given, against = pipeline.encode(
        settings.prompts or None, None, settings.negative_prompt, guided and bool(settings.prompts)
    )
    if settings.class_labels is not None:
        given["class_labels"] = _labels(settings.class_labels, pipeline.ensemble.classes)
    if settings.conditions is not None:
        for name, value in _file(settings.conditions).items():
            side, key = (against, name.removeprefix(NEGATIVE)) if name.startswith(NEGATIVE) else (given, name)
            if key in side:
                raise UsageError(f"{settings.conditions}: {name} is given by another option too; drop one")
            if side is given or guided:
                side[key] = value
    _refuse_missing(pipeline, given, settings.expert)
    takes_text = any("encoder_hidden_states" in facts.conditions for facts in pipeline.experts.facts)
    if takes_text and "encoder_hidden_states" not in given:
        warnings.warn("no --prompt: the experts make what no text stands for", stacklevel=2)
    return given, against


def cycled(cycles: Cycles, start: int, stop: int) -> dict[str, Tensor]:
    """The rows of images ``start`` … ``stop`` - 1."""
    return {name: value[torch.arange(start, stop) % len(value)] for name, value in cycles.items()}


def class_names(cycles: Cycles, classes: Sequence[str]) -> tuple[str, ...]:
    """What the labels among ``cycles`` are called, numbers where no name is known; empty without labels."""
    labels = cycles["class_labels"].tolist() if "class_labels" in cycles else []
    return tuple(classes[k] if 0 <= k < len(classes) else str(k) for k in labels)


def _refuse_missing(pipeline: HDDMPipeline, given: Cycles, only: int | None) -> None:
    options = {"encoder_hidden_states": "--prompt", "class_labels": "--class-labels"}
    for index, field in enumerate(pipeline.ensemble.experts):
        if only not in (None, index):
            continue
        for name in missing_from({*given, *field.null_conditions}, field.conditions or ()):
            option = f"{options[name]} or --conditions" if name in options else "--conditions"
            raise UsageError(
                f"{option}: the experts need {name}, and know no value that stands for none; pass it"
            )


def _labels(text: str, classes: tuple[str, ...]) -> Tensor:
    if not classes:
        raise UsageError(f"--class-labels {text}: the model is unconditional; drop the option")
    try:
        return class_indices([part.strip() for part in text.split(",")], classes)
    except HddmError as error:
        raise UsageError(f"--class-labels: {error}") from error


def _file(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise UsageError(f"--conditions {path}: no such file")
    tensors = read_safetensors(path)
    empty = [name for name, value in tensors.items() if value.ndim == 0 or not len(value)]
    if empty or not tensors:
        raise HddmError(f"--conditions {path}: holds no rows of {empty or 'anything'}")
    return tensors
