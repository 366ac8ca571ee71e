"""Small safetensors files that are there whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from hddm.errors import HddmError


def write_tensors(path: Path, tensors: dict[str, np.ndarray], note: Any = None) -> None:
    """Write ``path`` under another name first; ``note`` is JSON in its header."""
    draft = path.with_name(f".{path.name}.part-{os.getpid()}")
    try:
        save_file(tensors, draft, {"note": json.dumps(note)})
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


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
