"""Small safetensors files that are complete or absent."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from hddm.utils.errors import HddmError
from hddm.utils.files import write_whole


def write_tensors(path: Path, tensors: dict[str, np.ndarray], note: Any = None) -> None:
    """Write ``path`` complete or not at all; ``note`` is JSON in its header.

    Raises:
        HddmError: where it cannot be written.
    """
    write_whole(path, lambda draft: save_file(tensors, draft, {"note": json.dumps(note)}))


def read_tensors(path: Path, only: str | None = None) -> tuple[dict[str, np.ndarray], Any]:
    """Tensors by name, or ``only`` one of them, and the note.

    Raises:
        HddmError: for a file that is spoilt.
    """
    try:
        with safe_open(path, "np") as file:
            note = json.loads((file.metadata() or {}).get("note", "null"))
            names = list(file.keys()) if only is None else [only]
            return {name: file.get_tensor(name) for name in names}, note
    except (SafetensorError, ValueError) as error:
        raise HddmError(f"{path}: cannot be read ({error}); remove it") from error
