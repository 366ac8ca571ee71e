"""Diffusers folders: a pipeline, or one model with its config."""

import math
import re
from pathlib import Path
from typing import Any

from diffusers import UNet2DConditionModel

from hddm.checkpoints.diffusers_models import DIFFUSERS_LAYOUTS, class_forward, own_table
from hddm.checkpoints.empty_prompt import empty_prompt
from hddm.checkpoints.single_files import IMAGENET_LICENCE
from hddm.checkpoints.sources import Declared, Reading, Source, Tensors, choose_set, read_file
from hddm.errors import HddmError, did_you_mean
from hddm.files import read_json
from hddm.network_configs import parse_config
from hddm.weight_files import inside, read_index

PIPELINE = "model_index.json"
STEM = "diffusion_pytorch_model"
COMPONENTS = ("transformer", "unet")
SCHEDULER = "scheduler_config.json"
_WEIGHTS = re.compile(rf"{STEM}(?:\.(\w+))?\.(?:safetensors|bin)(?:\.index(?:\.(\w+))?\.json)?")


def open_pipeline(folder: Path, reading: Reading) -> Source:
    """The denoiser of a pipeline folder, with the scheduler and the VAE's scale beside it.

    Only the entries that are read are held to known classes; a safety checker may be anything.

    Raises:
        HddmError: for a custom pipeline, a component from outside diffusers, or none or two denoisers.
    """
    index = read_json(inside(folder, PIPELINE))
    for key in ("auto_map", "custom_pipeline", "trust_remote_code"):
        if key in index:
            raise HddmError(f"{folder / PIPELINE}: has a key {key!r}, which asks for foreign code; refused")
    found = [name for name in COMPONENTS if _is_there(index.get(name))]
    if len(found) != 1:
        raise HddmError(f"{folder / PIPELINE}: needs one of {', '.join(COMPONENTS)}, not {found or 'none'}")
    for name in (found[0], "scheduler", "vae"):
        _refuse_foreign(index.get(name), name, folder)
    # Some early pipelines of one model hold it at the root.
    model = folder / found[0] if (folder / found[0]).is_dir() else folder
    stated = index[found[0]][1]
    source = open_model(model, reading, root=folder)
    config_name = source.network.__name__
    if stated not in (config_name, "Transformer2DModel"):
        raise HddmError(f"{folder / PIPELINE}: says {found[0]} is a {stated}, its config a {config_name}")
    return source


def open_model(folder: Path, reading: Reading, root: Path | None = None, file: str | None = None) -> Source:
    """One model folder: ``config.json`` and weights.

    Args:
        folder: see above.
        reading: see `Reading`.
        root: the pipeline around it.
        file: name of the file of weights to take, with the variant that it says.
    """
    above = root or (folder.parent if (folder.parent / PIPELINE).is_file() else folder)
    path = inside(folder, "config.json") if (folder / "config.json").exists() else folder / "config.json"
    config = read_json(path)
    network, arguments = parse_config(config, list(DIFFUSERS_LAYOUTS.values()), str(folder / "config.json"))
    if reading.hints.sample_size is not None:
        arguments["sample_size"] = reading.hints.sample_size
    layout = next(name for name, kind in DIFFUSERS_LAYOUTS.items() if kind is network)
    if reading.layout not in (None, layout):
        raise HddmError(f"--layout {reading.layout}: {folder} is {layout}")
    sets = _weight_sets(folder, reading) if file is None else _set_of(folder, file, reading)
    chosen = choose_set({name: {} for name in sets}, reading.weights, str(folder / (file or "")))
    weights, files = _read(folder, file or _found(folder, sets[chosen]), reading.allow_pickle)
    origin = str(files[0])
    table = own_table(network, arguments, weights, origin)
    scheduler = _scheduler(folder, above)
    scale, is_latent, notes = _latents(above, arguments)
    return Source(
        path=folder,
        layout=layout,
        files=tuple(files),
        weights=weights,
        network=network,
        arguments=arguments,
        table=table,
        forward=lambda: class_forward(network, arguments, table.renamed(weights, origin), origin),
        declared=Declared(read_json(scheduler), str(scheduler)) if scheduler else Declared(),
        sets=tuple(sets),
        chosen=chosen,
        is_latent=is_latent,
        latent_scale=scale,
        licence=_licence(above, layout, arguments),
        notes=notes,
        empty_prompt=empty_prompt(above, reading.variant) if network is UNet2DConditionModel else None,
    )


def _is_there(entry: object) -> bool:
    return isinstance(entry, list) and len(entry) == 2 and entry[0] is not None


def _refuse_foreign(entry: object, name: str, folder: Path) -> None:
    if entry is None or entry == [None, None]:
        return
    if not _is_there(entry) or entry[0] != "diffusers":  # type: ignore[index]
        raise HddmError(f"{folder / PIPELINE}: {name} is {entry!r}, not a class of diffusers; refused")


def _weight_sets(folder: Path, reading: Reading) -> dict[Any, str]:
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


def _set_of(folder: Path, file: str, reading: Reading) -> dict[Any, str]:
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


def _found(folder: Path, variant: str) -> str:
    name = _find(folder, variant)
    if name is None:
        found = [match[1] or match[2] for match in map(_WEIGHTS.fullmatch, _names(folder)) if match]
        others = sorted({one for one in found if one})
        hint = f"; there are variants: pass --variant {' or '.join(others)}" if others else ""
        wanted = f"{STEM}{'.' + variant if variant else ''}.safetensors"
        raise HddmError(f"{folder}: no {wanted}{hint or did_you_mean(wanted, _names(folder))}")
    return name


def _read(folder: Path, name: str, allow_pickle: bool) -> tuple[Tensors, list[Path]]:
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


def _scheduler(folder: Path, above: Path) -> Path | None:
    """The scheduler config beside the weights, or in the pipeline around them."""
    for root, name in (
        (folder, SCHEDULER),
        (folder, f"scheduler/{SCHEDULER}"),
        (above, f"scheduler/{SCHEDULER}"),
        (above, SCHEDULER),
    ):
        if (root / name).exists() or (root / name).is_symlink():
            return inside(root, name)
    return None


def _latents(above: Path, arguments: dict[str, Any]) -> tuple[float | None, bool, tuple[str, ...]]:
    """Scale of the VAE beside, whether there is one, and what was assumed."""
    path = above / "vae" / "config.json"
    if not path.exists():
        is_latent = arguments.get("in_channels") not in (1, 3)
        return (None if is_latent else 1.0), is_latent, ()
    config = read_json(inside(above, "vae/config.json"))
    if "scaling_factor" in config:
        factor = config["scaling_factor"]
        if not isinstance(factor, int | float) or not 0 < factor < math.inf:
            raise HddmError(f"{path}: scaling_factor is {str(factor)[:40]}, and must be a positive number")
        return float(factor), True, ()
    return 0.18215, True, (f"{path}: no scaling_factor, so AutoencoderKL's default 0.18215",)


def _licence(above: Path, layout: str, arguments: dict[str, Any]) -> str | None:
    """What the model card states, else what is known of the released weights."""
    card = above / "README.md"
    if card.is_file():
        with inside(above, "README.md").open(encoding="utf-8", errors="replace") as file:
            front = file.read(65536)
        match = re.search(r"\A---\n.*?^license:\s*([^\n]+)$.*?^---$", front, re.MULTILINE | re.DOTALL)
        if match:
            return match[1].strip().strip("'\"")
    if layout == "diffusers-dit" and arguments.get("num_embeds_ada_norm") == 1000:
        return IMAGENET_LICENCE
    return None
