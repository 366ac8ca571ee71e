"""What the script keeps of an output: its hash, and what tells a rounding error from another result."""

import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

Value = Tensor | Mapping[str, Tensor] | bytes
"""An output: a tensor, several by name, or the content of a file."""
Outputs = Iterator[tuple[str, Value]]
"""Outputs by name."""
Digest = dict[str, str | float]

OWN_TO_A_RUN = {
    *("format", "hddm", "_diffusers_version", "transformers_version"),
    *("seconds", "threads", "device", "source_sha256"),
}
"""Keys of JSON documents whose values are versions, times, or hashes of files that hold these."""
MODELS = {"expert.json", "router.json", "ensemble.json"}
"""Records beside which a manifest holds hashes of files with times."""
_PNG = b"\x89PNG"
PROSE = {".html", ".md"}
"""Suffixes of files that are read by people alone."""


def digest(value: Value) -> Digest:
    """The SHA-256 of a value, what kind of value it is, and for tensors their norm."""
    sha256 = hashlib.sha256()
    if isinstance(value, bytes) and value.startswith(_PNG):
        # A picture also says how it was made, and by which release.
        value = torch.from_numpy(np.array(Image.open(io.BytesIO(value))))
    if isinstance(value, bytes):
        sha256.update(value)
        return {"sha256": sha256.hexdigest(), "kind": f"{len(value)} bytes"}
    tensors = {"": value} if isinstance(value, Tensor) else value
    squares = 0.0
    kinds = []
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        kind = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        sha256.update(f"{name} {kind}\n".encode())
        sha256.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
        squares += float(tensor.double().square().sum())
        kinds.append(kind)
    kind = kinds[0] if isinstance(value, Tensor) else f"{len(kinds)} tensors"
    return {"sha256": sha256.hexdigest(), "kind": kind, "norm": squares**0.5}


def document(content: Any, root: Path) -> bytes:
    """A JSON document without what differs from run to run.

    Keys are sorted. Left out are keys without a value, `OWN_TO_A_RUN`, and names of JSON files, which have
    hashes of files with such keys as their values. Paths begin at ``root``.
    """
    return json.dumps(_settled(content, str(root)), sort_keys=True, ensure_ascii=False).encode()


def _settled(content: Any, root: str) -> Any:
    if isinstance(content, dict):
        kept = {}
        for key, value in content.items():
            if value is not None and key not in OWN_TO_A_RUN and not key.endswith(".json"):
                kept[key] = _settled(value, root)
        return kept
    if isinstance(content, list | tuple):
        return [_settled(value, root) for value in content]
    if isinstance(content, str):
        return content.replace(root, "ROOT")
    return content


def file_value(path: Path, root: Path) -> Value:
    """The content of a file: tensors of safetensors, a settled JSON document, or else its bytes."""
    if path.suffix == ".safetensors":
        return load_file(path)
    if path.suffix == ".json":
        return document(json.loads(path.read_text()), root)
    return path.read_bytes()


def files_of(folder: Path, root: Path, kept: Callable[[Path], bool] = lambda path: True) -> Outputs:
    """The files below a folder that are ``kept``, by their paths there."""
    for path in sorted(folder.rglob("*")):
        place = path.relative_to(folder)
        if path.is_file() and not _is_passed_over(path, place) and kept(place):
            yield str(place), file_value(path, root)


def _is_passed_over(path: Path, place: Path) -> bool:
    is_hidden = any(part.startswith(".") for part in place.parts)
    is_of_model = path.name == "manifest.json" and any(
        (path.parent / one).exists() for one in MODELS
    )
    return is_hidden or is_of_model or path.suffix in PROSE


def under(prefix: str, outputs: Outputs) -> Outputs:
    """The same outputs with a prefix to their names."""
    for name, value in outputs:
        yield f"{prefix}/{name}", value
