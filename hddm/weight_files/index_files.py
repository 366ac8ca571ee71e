"""Weights in several files under one index."""

from pathlib import Path
from typing import Any

from torch import Tensor

from hddm.errors import HddmError
from hddm.files import read_json
from hddm.paths import inside
from hddm.weight_files.kinds import kind_of
from hddm.weight_files.pickles import read_pickle
from hddm.weight_files.safetensors_files import read_safetensors

_SHOWN = 10


def read_index(path: Path, allow_pickle: bool = False) -> dict[str, Tensor]:
    """Every tensor that ``*.safetensors.index.json`` or ``*.bin.index.json`` spreads over shards.

    The shards' content decides how they are read; ``allow_pickle`` is that of `read_pickle`.

    Raises:
        HddmError: for a broken index, a shard outside the folder (before any is opened), a shard that
            cannot be read, and any tensor that index and shards disagree about.
    """
    weight_map = _read_map(path)
    shards = {name: _shard(path, name) for name in sorted(set(weight_map.values()))}
    tensors: dict[str, Tensor] = {}
    problems = []
    for name, shard in shards.items():
        content = _read_shard(shard, allow_pickle)
        for key, value in content.items():
            if weight_map.get(key) == name:
                tensors[key] = value
            else:
                problems.append(
                    f"{name} holds {key!r}, which the index gives to {weight_map.get(key, 'no file')}"
                )
    problems += [f"{weight_map[key]} lacks {key!r}" for key in weight_map.keys() - tensors.keys()]
    if problems:
        more = f"; … and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise HddmError(
            f"{path}: does not fit its files, fetch them again: {'; '.join(sorted(problems)[:_SHOWN])}{more}"
        )
    return tensors


def _read_map(path: Path) -> dict[str, str]:
    content: Any = read_json(path).get("weight_map")
    if not isinstance(content, dict) or not content:
        raise HddmError(f"{path}: has no weight_map from tensors to files; fetch it again")
    for key, name in content.items():
        if not isinstance(name, str):
            raise HddmError(f"{path}: weight_map gives {key!r} to {name!r}, which is no file name")
    return content


def _shard(path: Path, name: str) -> Path:
    if "/" in name:
        raise HddmError(f"{path}: weight_map names {name!r}, which is no plain file name; refused")
    try:
        inside(path.parent, name)
    except HddmError as error:
        raise HddmError(f"{path}: weight_map names {name!r}, refused ({error})") from error
    # The name in the folder, not the hash behind a link, is what messages should say.
    return path.parent / name


def _read_shard(path: Path, allow_pickle: bool) -> dict[str, Tensor]:
    if kind_of(path) == "safetensors":
        return read_safetensors(path)
    content = read_pickle(path, allow_pickle)
    for key, value in content.items():
        if not isinstance(value, Tensor):
            raise HddmError(f"{path}: {key!r} is a {type(value).__name__}, and a shard holds tensors only")
    return content
