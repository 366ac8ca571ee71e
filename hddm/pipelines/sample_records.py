"""Folders of samples: their files, and what ``sampling.json`` says of a run and of who made which image.

Two runs with records of one `identity_of` make the same images, so that one continues the other.
"""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor

from hddm.condition_names import LABELS
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.running import Plan
from hddm.settings import SampleSettings
from hddm.utils.errors import HddmError
from hddm.utils.files import read_json, sha256_of, sha256_once
from hddm.utils.records import SAMPLING_FILE, model_hash
from hddm.utils.tensors import available_device
from hddm.utils.work import differences

FORMAT = "1.7"
LATENTS_FILE = "latents.safetensors"
IMAGE = "{:05d}.png"
IN_LINE = 50
"""Images whose experts stand in one line of the record."""


def record_of(
    source: Path,
    settings: SampleSettings,
    pipeline: HDDMPipeline,
    how: Plan,
    given: Mapping[str, Tensor],
) -> dict[str, Any]:
    """What ``sampling.json`` says of a run before it begins; ``given`` are its conditions."""
    # One VAE for all experts, or a list if they differ.
    vaes = [one.vae and one.vae.model_dump(mode="json") for one in pipeline.experts.records]
    strategy = None
    if settings.expert is None:
        strategy = settings.strategy or pipeline.record.strategy
    record: dict[str, Any] = {
        "format": FORMAT,
        "hddm": version("hddm-diffusion"),
        "source": str(source),
        "source_sha256": model_hash(source, sha256_once),
    }
    record |= settings.model_dump(mode="json")
    for name in ("conditions", "init_image", "mask"):
        path = getattr(settings, name)
        if path is not None:
            record[f"{name}_sha256"] = sha256_of(path)
    return record | {
        "device": str(available_device(settings.device)),
        "strategy": strategy,
        "model_shift": pipeline.record.shift,
        "weights": sorted({one.weights for one in pipeline.experts.records}),
        "vae": vaes[0] if all(one == vaes[0] for one in vaes) else vaes,
        "class_labels": given[LABELS].tolist() if LABELS in given else None,
        "class_names": list(class_names(given, pipeline.ensemble.classes)) or None,
        "begins_at": _begins_at(how),
    }


def _begins_at(how: Plan) -> float | list[float] | None:
    """The time at which networks begin, after the first step (`hddm.times`); None where there is none.

    It is a list, of each expert in order, where every image has an expert of its own and these differ.
    """
    if how.native is not None:
        return None
    if how.expert is None and how.model.strategy == "draw":
        found = [how.beginning_of([k]).time for k in range(len(how.model.experts))]
    else:
        found = [how.beginning_of(None if how.expert is None else [how.expert]).time]
    if min(found) == float(how.times[0]):
        return None
    return found[0] if len(set(found)) == 1 else found


_FREE = {"format", "hddm", "offload", "max_memory", "expert_use", "batch_ran", "metadata"}
"""Keys of the record that change no pixel."""
_HASHED = {
    "source",
    "conditions",
    "init_image",
    "mask",
    "model_shift",
    "weights",
    "vae",
    "class_names",
}
"""Keys of the record that the hash of the source or of the conditions covers."""


def identity_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a record that decides on pixels, and which a resumed run must have too."""
    # Format 1.5 has the default of what only a mask uses.
    unused = set() if record.get("mask") else {"resampling_steps"}
    return {key: value for key, value in record.items() if key not in _FREE | _HASHED | unused}


def refuse_other_samples(out: Path, settings: SampleSettings, identity: Mapping[str, Any]) -> None:
    """Refuse to resume a finished run of other settings, or one that lacks an image."""
    differing = differences(identity_of(read_json(out / SAMPLING_FILE)), identity)
    if differing:
        text = "holds samples of other options; choose another `out`, or `overwrite=True`"
        raise HddmError(f"{out}: {text}", map(str, differing))
    names = [IMAGE.format(number) for number in settings.numbers]
    if settings.output_type == "latent":
        names = [LATENTS_FILE]
    for name in names:
        if not (out / name).is_file():
            raise HddmError(f"{out}: lacks {name}; `overwrite=True` makes all images anew")


def lines_of(makers: Mapping[int, int]) -> dict[str, str]:
    """Experts of images in order, `IN_LINE` to a line, each under the number of its first image."""
    numbers, found = sorted(makers), {}
    for start in range(0, len(numbers), IN_LINE):
        line = numbers[start : start + IN_LINE]
        experts = [str(makers[number]) for number in line]
        found[f"{line[0]:05d}"] = " ".join(experts)
    return found


def class_names(given: Mapping[str, Tensor], classes: Sequence[str]) -> tuple[str, ...]:
    """Names of the labels among ``given``, or numbers without a name; empty without labels."""
    labels = given[LABELS].tolist() if LABELS in given else []
    found = []
    for k in labels:
        found.append(classes[k] if 0 <= k < len(classes) else str(k))
    return tuple(found)
