"""Files of a component's folder, held inside it."""

from pathlib import Path
from typing import Any

from torch import Tensor

from hddm.errors import HddmError
from hddm.files import read_json
from hddm.paths import inside
from hddm.weight_files import read_safetensors

_CODE = ("auto_map", "custom_pipeline", "trust_remote_code")


def read_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """The JSON file ``name`` of a component.

    Raises:
        HddmError: for a file that is missing, leads out of the folder or asks for foreign code.
    """
    if not folder.is_dir():
        raise HddmError(f"{folder}: no such folder")
    config = read_json(inside(folder, name) if _is_there(folder / name) else folder / name)
    for key in _CODE:
        if key in config:
            raise HddmError(f"{folder / name}: has a key {key!r}, which asks for foreign code; refused")
    return config


def find_weights(folder: Path, stem: str, variant: str | None = None) -> str | None:
    """Name of the file of weights: that of ``variant``, else ``stem.safetensors``, else the float16 copy."""
    names = [f"{stem}.{variant}.safetensors"] if variant else []
    names += [f"{stem}.safetensors", f"{stem}.fp16.safetensors"]
    return next((one for one in names if _is_there(folder / one)), None)


def read_weights(folder: Path, stem: str, variant: str | None = None) -> tuple[Path, dict[str, Tensor]]:
    """The file that `find_weights` names, and its tensors, mapped.

    Raises:
        HddmError: where there is none, for a link that leaves the folder, for a broken file.
    """
    name = find_weights(folder, stem, variant)
    if name is None:
        pickled = [path.name for path in sorted(folder.glob("*.bin"))]
        hint = f"only {', '.join(pickled)}; save it as safetensors" if pickled else "fetch it"
        raise HddmError(f"{folder}: no {stem}.safetensors, {hint}")
    return folder / name, read_safetensors(inside(folder, name))


def _is_there(path: Path) -> bool:
    # A broken link is there, and `inside` says what is wrong with it.
    return path.exists() or path.is_symlink()
