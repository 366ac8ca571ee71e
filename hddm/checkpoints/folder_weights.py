"""Files of weights in a diffusers model folder: variants, sets and shards."""

import re
from pathlib import Path
from typing import Any

from hddm.checkpoints.sources import Reading, Tensors, read_file
from hddm.errors import HddmError, did_you_mean
from hddm.files import read_json
from hddm.paths import inside
from hddm.weight_files import read_index

STEM = "diffusion_pytorch_model"
_WEIGHTS = re.compile(rf"{STEM}(?:\.(\w+))?\.(?:safetensors|bin)(?:\.index(?:\.(\w+))?\.json)?")


def weight_sets(folder: Path, reading: Reading) -> dict[Any, str]:
    """Variants of the file name by set of weights: a ``non_ema`` one beside the plain makes that averaged."""
    if reading.variant is None and _find(folder, "non_ema") and _find(folder, None):
        return {"ema": "", "raw": "non_ema"}
    return {"raw" if reading.variant == "non_ema" else "unstated": reading.variant or ""}


def _find(folder: Path, variant: str | None) -> str | None:
    """Name of the weights file or index of a variant, safetensors before pickles."""
    dot = f".{variant}" if variant else ""
    for ending in ("safetensors", "bin"):
        for name in (
            f"{STEM}{dot}.{ending}",
            f"{STEM}.{ending}.index{dot}.json",
            f"{STEM}{dot}.{ending}.index.json",
        ):
            if (folder / name).exists() or (folder / name).is_symlink():
                return name
    return None


def set_of(folder: Path, file: str, reading: Reading) -> dict[Any, str]:
    """The set of weights that a file named by the user holds."""
    match = _WEIGHTS.fullmatch(file)
    if match is None:
        raise HddmError(
            f"{folder / file}: is no whole model of diffusers (a shard?); name its folder instead"
        )
    variant = match[1] or match[2] or ""
    if reading.variant not in (None, variant):
        raise HddmError(f"--variant {reading.variant}: {folder / file} is another file; drop the option")
    if variant == "non_ema":
        return {"raw": variant}
    return {"ema" if not variant and _find(folder, "non_ema") else "unstated": variant}


def found_file(folder: Path, variant: str) -> str:
    """Name of the weights file or index of a variant.

    Raises:
        HddmError: where there is none.
    """
    name = _find(folder, variant)
    if name is None:
        found = [match[1] or match[2] for match in map(_WEIGHTS.fullmatch, _names(folder)) if match]
        others = sorted({one for one in found if one})
        hint = f"; there are variants: pass --variant {' or '.join(others)}" if others else ""
        wanted = f"{STEM}{'.' + variant if variant else ''}.safetensors"
        raise HddmError(f"{folder}: no {wanted}{hint or did_you_mean(wanted, _names(folder))}")
    return name


def read_weights(folder: Path, name: str, allow_pickle: bool) -> tuple[Tensors, list[Path]]:
    """The tensors of a file or of an index's shards, and these files."""
    # The link's own name is checked; an index is opened under its own, beside its shards.
    resolved = inside(folder, name)
    if name.endswith(".json"):
        tensors = read_index(folder / name, allow_pickle)
        shards = set(read_json(resolved)["weight_map"].values())
        return tensors, [folder / shard for shard in sorted(shards)]
    content = read_file(resolved, allow_pickle)
    return {key: value for key, value in content.items() if hasattr(value, "shape")}, [folder / name]


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []
