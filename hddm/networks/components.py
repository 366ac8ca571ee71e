"""Components of a pipeline on disk: ``model_index.json``, configs, and weights files with their variants.

    FOLDER/model_index.json                               class of the pipeline, and of each component
    FOLDER/vae/config.json                                class and arguments
    FOLDER/vae/diffusion_pytorch_model.safetensors        weights; of variant fp16: STEM.fp16.safetensors
    FOLDER/unet/diffusion_pytorch_model.safetensors.index.json    weights in several files

Nothing here knows what kind of network a component is.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hddm.networks.encoders import HELD_CODE
from hddm.utils.errors import HddmError, an, shown
from hddm.utils.files import file_kind, inside, read_json, write_json
from hddm.utils.pickles import read_pickle
from hddm.utils.records import MODEL_INDEX, WEIGHTS
from hddm.utils.tensors import Planned, read_safetensors, write_safetensors

STEM = WEIGHTS.removesuffix(".safetensors")
"""Name of weights files of diffusers, without variant and ending."""
_TASKS = re.compile("(ControlNet|Union|XS|PAG|Adapter|Img2Img|Inpaint|Inpainting)+(?=Pipeline$)")
_CODE = ("auto_map", "custom_pipeline", "trust_remote_code")


@dataclass(frozen=True)
class Held:
    """A component that is part of a larger file, as its folder would hold it: config and tensors.

    ``stem`` is the name of its weights file there. Tensors are mapped from ``path``.
    """

    config: Mapping[str, Any]
    weights: dict[str, Tensor]
    path: Path
    stem: str = STEM

    def write(self, folder: Path) -> None:
        """Write it into the new ``folder``."""
        folder.mkdir(parents=True)
        write_json(folder / "config.json", self.config)
        planned = []
        for name, one in self.weights.items():
            planned.append(
                Planned(name, tuple(one.shape), one.dtype, one.contiguous, str(self.path))
            )
        write_safetensors(folder / f"{self.stem}.safetensors", planned, {"format": "pt"}, True)


def read_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """Read a component's JSON file ``name``.

    It is read without the key that names its authors' code (`HELD_CODE`). Raises `HddmError` for a file
    that is missing, leaves the folder or names foreign code.
    """
    path = folder / name
    config = read_json(inside(folder, name) if _is_there(path) else path)
    if _is_held(config.get(_CODE[0])):
        del config[_CODE[0]]
    for key in _CODE:
        if key in config:
            text = "which names code of its own; hddm does not run it"
            raise HddmError(f"{path}: has a key {key!r}, {text}")
    return config


def _is_held(code: object) -> bool:
    """True if all code that a config names (``auto_map``) is of `HELD_CODE`."""
    if not isinstance(code, dict):
        return False
    for one in code.values():
        # A tokenizer may name a fast class too, or none.
        name = one[0] if isinstance(one, list) and one[1:] == [None] else one
        if not isinstance(name, str) or not HELD_CODE.fullmatch(name):
            return False
    return True


def class_in(folder: Path) -> str | None:
    """Class of the pipeline, or of its prompts alone, in ``folder``; None without an index, else "" for none.

    Classes for another task with the same parts count as the plain one: a pipeline for inpainting is the
    pipeline without "Inpaint" in its name.
    """
    if not (folder / MODEL_INDEX).is_file():
        return None
    stated = read_config(folder, MODEL_INDEX).get("_class_name")
    return "" if stated is None else _TASKS.sub("", str(stated))


def find_weights(folder: Path, stem: str, variant: str | None = None) -> str | None:
    """Name of the weights file: that of ``variant``, else ``stem.safetensors``, else the float16 copy.

    If the weights are in several files, it is the name of their index.
    """
    for kind in (variant, None, "fp16"):
        found = weights_of_variant(folder, stem, kind)
        if found is not None:
            return found
    return None


def weights_of_variant(
    folder: Path, stem: str, variant: str | None, ending: str = "safetensors"
) -> str | None:
    """Name of the weights file of this ``variant``, or of its index; None if there is neither."""
    dot = f".{variant}" if variant else ""
    plain = f"{stem}{dot}.{ending}"
    for name in (plain, f"{stem}.{ending}.index{dot}.json", f"{plain}.index.json"):
        if _is_there(folder / name):
            return name
    return None


def read_weights(
    folder: Path, stem: str, variant: str | None = None
) -> tuple[Path, dict[str, Tensor]]:
    """The file that `find_weights` names, and its mapped tensors.

    Raises `HddmError` for a file that is missing or broken, or a link that leaves the folder.
    """
    name = find_weights(folder, stem, variant)
    if name is None:
        pickled = [path.name for path in sorted(folder.glob("*.bin"))]
        hint = f"only {', '.join(pickled)}; save it as safetensors" if pickled else "fetch it"
        raise HddmError(f"{folder}: no {stem}.safetensors, {hint}")
    path = folder / name
    if name.endswith(".json"):
        return path, read_index(path)[0]
    return path, read_safetensors(inside(folder, name))


def _is_there(path: Path) -> bool:
    # A broken link is there, and `inside` says what is wrong with it.
    return path.exists() or path.is_symlink()


def read_file(path: Path, allow_pickle: bool) -> dict[str, Any]:
    """The content of a weights file: tensors by name, or nested dictionaries for a pickle."""
    if file_kind(path) == "safetensors":
        return dict(read_safetensors(path))
    return read_pickle(path, allow_pickle)


def read_index(path: Path, allow_pickle: bool = False) -> tuple[dict[str, Tensor], list[Path]]:
    """Read all tensors of a ``.safetensors.index.json`` or ``.bin.index.json``, and list its shards.

    Shards are read by their content; ``allow_pickle`` is as for `read_pickle`. Raises `HddmError` for a
    broken index, a shard outside the folder (before any is opened), an unreadable shard, and any tensor on
    which index and shards disagree.
    """
    weight_map: Any = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise HddmError(f"{path}: has no weight_map from tensors to files; fetch it again")
    for key, name in weight_map.items():
        if not isinstance(name, str) or "/" in name:
            raise HddmError(
                f"{path}: weight_map gives {key!r} to {name!r}, which is not a plain file name"
            )
        inside(path.parent, name)
    tensors: dict[str, Tensor] = {}
    problems = []
    names = sorted(set(weight_map.values()))
    for name in names:
        # Messages should show the name in the folder, not the hash behind a link.
        for key, value in read_file(path.parent / name, allow_pickle).items():
            if not isinstance(value, Tensor):
                problems.append(f"{name}: {key!r} is {an(type(value).__name__)}")
            elif weight_map.get(key) == name:
                tensors[key] = value
            else:
                stated = weight_map.get(key, "no file")
                problems.append(f"{name} holds {key!r}, which the index gives to {stated}")
    for key in weight_map.keys() - tensors.keys():
        problems.append(f"{weight_map[key]} lacks {key!r}")
    if problems:
        listed = "; ".join(shown(sorted(problems), 10))
        raise HddmError(f"{path}: does not fit its files, fetch them again: {listed}")
    return tensors, [path.parent / name for name in names]
