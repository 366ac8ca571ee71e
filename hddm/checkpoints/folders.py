"""Diffusers folders: a pipeline, or one model with its config."""

import re
from pathlib import Path
from typing import Any, TypeGuard

from diffusers import UNet2DConditionModel

from hddm.checkpoints.diffusers_models import DIFFUSERS_LAYOUTS, class_forward, own_table
from hddm.checkpoints.empty_prompt import empty_prompt, no_text_encoder, text_encoder_of
from hddm.checkpoints.folder_weights import found_file, read_weights, set_of, weight_sets
from hddm.checkpoints.latents import VAES, latents_of, vae_of
from hddm.checkpoints.single_files import IMAGENET_CLASSES, IMAGENET_LICENCE
from hddm.checkpoints.sources import Declared, Reading, Source, choose_set
from hddm.errors import HddmError
from hddm.files import read_json
from hddm.interfaces import has_sample_size
from hddm.network_configs import parse_config
from hddm.paths import inside
from hddm.schedules.diffusers_configs import DDPM_FAMILY, FLOW_MATCH_FAMILY

PIPELINE = "model_index.json"
COMPONENTS = ("transformer", "unet")
SCHEDULER = "scheduler_config.json"


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
    for name in (found[0], "scheduler", *VAES):
        _refuse_foreign(index.get(name), name, folder)
    # Some early pipelines of one model hold it at the root.
    model = folder
    if (folder / found[0]).is_dir():
        inside(folder, found[0])  # Refuses a link that leaves.
        model = folder / found[0]
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
    _take_side(arguments, reading.hints.sample_size, has_sample_size(network.__name__), path)
    layout = next(name for name, kind in DIFFUSERS_LAYOUTS.items() if kind is network)
    if reading.layout not in (None, layout):
        raise HddmError(f"--layout {reading.layout}: {folder} is {layout}")
    sets = weight_sets(folder, reading) if file is None else set_of(folder, file, reading)
    chosen = choose_set({name: {} for name in sets}, reading.weights, str(folder / (file or "")))
    weights, files = read_weights(folder, file or found_file(folder, sets[chosen]), reading.allow_pickle)
    origin = str(files[0])
    table = own_table(network, arguments, weights, origin)
    scheduler = _scheduler(folder, above)
    declared = Declared(read_json(scheduler), str(scheduler)) if scheduler else Declared()
    _refuse_other_family(above, declared)
    is_stated = any(_is_there(_components(above).get(one)) for one in VAES)
    scale, is_latent, notes = latents_of(above, is_stated, arguments)
    vae, more = vae_of(above, reading.variant)
    return Source(
        path=folder,
        layout=layout,
        files=tuple(files),
        weights=weights,
        network=network,
        arguments=arguments,
        table=table,
        forward=lambda: class_forward(network, arguments, table.renamed(weights, origin), origin),
        declared=declared,
        sets=tuple(sets),
        chosen=chosen,
        is_latent=is_latent,
        latent_scale=scale,
        licence=_licence(above, layout, arguments),
        notes=(*notes, *more),
        empty_prompt=empty_prompt(above, reading.variant) if network is UNet2DConditionModel else None,
        vae=vae,
        text_encoder=text_encoder_of(above, reading.variant),
        no_text_encoder=no_text_encoder(above, reading.variant),
    )


def _take_side(arguments: dict[str, Any], side: int | None, has_place: bool, path: Path) -> None:
    """Put the side that the user says where the config says none."""
    stated = arguments.get("sample_size")
    # A class that has no place for it has it from the records of its expert.
    if side is None or stated == [side, side] or not has_place:
        return
    if stated not in (None, side):
        raise HddmError(f"--sample-size {side}: {path} says sample_size {stated!r}; drop the option")
    arguments["sample_size"] = side


def _refuse_other_family(above: Path, declared: Declared) -> None:
    """Refuse a scheduler config of another family of schedules than the pipeline around it says."""
    entry = _components(above).get("scheduler")
    if declared.scheduler is None or not _is_there(entry):
        return
    is_ddpm = any(key.startswith("beta_") for key in declared.scheduler)
    name = declared.scheduler.get("_class_name", DDPM_FAMILY[0] if is_ddpm else entry[1])
    families = [_family(entry[1]), _family(name)]
    if declared.scheduler.get("use_flow_sigmas"):
        # Of a class of the other family that means the same.
        families[1] = families[0]
    if families[0] != families[1]:
        raise HddmError(
            f"{declared.scheduler_origin}: is a {name}, and {above / PIPELINE} says "
            f"{entry[1]}, which means another schedule; correct one of them"
        )


def _family(name: object) -> object:
    return next((family for family in (DDPM_FAMILY, FLOW_MATCH_FAMILY) if name in family), name)


def _components(above: Path) -> dict[str, Any]:
    """What the pipeline around a model says of its parts; nothing where there is none."""
    return read_json(inside(above, PIPELINE)) if (above / PIPELINE).is_file() else {}


def _is_there(entry: object) -> TypeGuard[list[Any]]:
    return isinstance(entry, list) and len(entry) == 2 and entry[0] is not None


def _refuse_foreign(entry: object, name: str, folder: Path) -> None:
    if entry is None or entry == [None, None]:
        return
    if not _is_there(entry) or entry[0] != "diffusers":
        raise HddmError(f"{folder / PIPELINE}: {name} is {entry!r}, not a class of diffusers; refused")


def _scheduler(folder: Path, above: Path) -> Path | None:
    """The scheduler config beside the weights, or in the pipeline around them."""
    for root, name in (
        (folder, SCHEDULER),
        (folder, f"scheduler/{SCHEDULER}"),
        (above, f"scheduler/{SCHEDULER}"),
        (above, SCHEDULER),
    ):
        if (root / name).exists() or (root / name).is_symlink():
            inside(root, name)
            return root / name
    return None


def _licence(above: Path, layout: str, arguments: dict[str, Any]) -> str | None:
    """What the model card states, else what is known of the released weights."""
    card = above / "README.md"
    if card.is_file():
        with inside(above, "README.md").open(encoding="utf-8", errors="replace") as file:
            front = file.read(65536)
        match = re.search(r"\A---\n.*?^license:\s*([^\n]+)$.*?^---$", front, re.MULTILINE | re.DOTALL)
        if match:
            return match[1].strip().strip("'\"")
    if layout == "diffusers-dit" and arguments.get("num_embeds_ada_norm") == IMAGENET_CLASSES:
        return IMAGENET_LICENCE
    return None
