"""Diffusers folders (a pipeline, or one model with its config) and expert folders, opened as checkpoints."""

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeGuard

from diffusers import ModelMixin
from torch import Tensor

from hddm.checkpoints.headers import read_headers
from hddm.checkpoints.single_files import file_layouts
from hddm.checkpoints.source_names import read_source_names
from hddm.checkpoints.sources import (
    Checkpoint,
    Declared,
    KeyTable,
    Weights,
    WeightSet,
    choose_set,
    same,
)
from hddm.experts.adapter_records import ADAPTER_WEIGHTS, base_of
from hddm.experts.ensemble_records import kept_components
from hddm.experts.expert import without_adapter
from hddm.experts.lora import open_adapted
from hddm.experts.record_folders import read_nulls
from hddm.experts.records import EXPERT_FILE, EXTRAS_FILE, FILES, read_expert_record, remedy
from hddm.networks.components import (
    STEM,
    class_in,
    read_config,
    read_file,
    read_index,
    weights_of_variant,
)
from hddm.networks.encoders import VAES as VAE_KINDS
from hddm.networks.families import Family, known_family, layouts, pipeline_networks, pipelines
from hddm.networks.families.installed import may_be_added
from hddm.networks.folders import (
    empty_network,
    of_families,
    open_network,
    parse_config,
    refuse_quantised,
    stored_names,
)
from hddm.networks.identity import UnreadVae, VaeRecord
from hddm.networks.prompts import PipelineText
from hddm.networks.vae import identify_vae, scale_and_shift
from hddm.schedule_records import DDPM_FAMILY, FAMILIES
from hddm.settings import Conversion, Reading
from hddm.utils.documents import parse_yaml
from hddm.utils.errors import HddmError, an, did_you_mean, errors_as, one_line, shown
from hddm.utils.files import inside, read_json
from hddm.utils.records import MODEL_INDEX, WEIGHTS, damage, refuse_damaged
from hddm.utils.tensors import read_safetensors

LAYOUT = "hddm"
SCHEDULER_FILE = "scheduler_config.json"
_WEIGHTS = re.compile(rf"{STEM}(?:\.(\w+))?\.(?:safetensors|bin)(?:\.index(?:\.(\w+))?\.json)?")
VAES = ("vae", "vqvae")
_PARTS = re.compile(r"vae|vqvae|(text_encoder|tokenizer)(_\d)?")
"""Parts of a pipeline that are read, besides its network."""
_OTHER_TASKS = {
    "makes videos": "Animate|Video|[TI]2V|^(Allegro|ConsisID|Helios|Latte|LTX|Mochi|PIA|SkyReels|Wan)",
    "changes a given picture": "Kontext|Fill|Edit|Pix2Pix|Upscale|Depth2Img|Variation|Control(?!Net)",
}
"""Classes of pipelines, by what their network does instead of making a picture from noise."""


def folder_layouts() -> Mapping[str, Family]:
    """Families by the layout of their folders.

    Raises `HddmError` for one of an installed package with the name of a layout of single files.
    """
    found = layouts()
    for name in found.keys() & file_layouts().keys():
        raise HddmError(
            f"layout {name} of the family of {found[name].name}: is one of single files; rename it in the "
            "package that has the family, or uninstall it"
        )
    return found


def open_pipeline(folder: Path, reading: Reading) -> Checkpoint:
    """Open the denoiser of a pipeline folder, with the pipeline's scheduler and VAE scale.

    Refuses one of which parts are missing, and names all of them.

    Only the entries that are read must be classes of diffusers; a safety checker may be anything.
    """
    index = _index(folder)
    networks = pipeline_networks()
    found = [name for name in networks if _is_there(index.get(name))]
    if len(found) != 1:
        raise HddmError(
            f"{folder / MODEL_INDEX}: needs one of {', '.join(networks)}, not {found or 'none'}"
        )
    for name in (found[0], "scheduler", *VAES):
        entry = index.get(name)
        if entry not in (None, [None, None]) and not _is_known(entry):
            text = f"{name} is {entry!r}, not a class of diffusers; hddm runs no other code"
            remedy = f", and {may_be_added()}" if name in networks else ""
            raise HddmError(f"{folder / MODEL_INDEX}: {text}{remedy}")
    # Some early pipelines of one model hold it at the root.
    at_root = found if (folder / "config.json").exists() else []
    has_schedule = isinstance(reading, Conversion) and reading.schedule is not None
    missing = []
    for name in index:
        is_read = name in networks or _PARTS.fullmatch(name)
        if (
            is_read
            and _is_there(index[name])
            and name not in at_root
            and not (folder / name).is_dir()
        ):
            missing.append(name)
    if missing:
        beside = sorted(one.name for one in folder.iterdir() if one.is_dir())
        others = ", ".join(shown(beside)) or "none"
        alone = f"hddm convert {folder / found[0]} --out EXPERT"
        if _scheduler(folder / found[0], folder) is None and not has_schedule:
            missing.append("scheduler")
            alone += " --schedule FILE, its scheduler_config.json"
        hint = "" if found[0] in missing else f", or do without: {alone}"
        text = f"no {'/, '.join(missing)}/ beside it (found {others}); fetch or rename it{hint}"
        raise HddmError(f"{folder / MODEL_INDEX}: {text}")
    model = folder / found[0]
    if model.is_dir():
        inside(folder, found[0])  # Refuses a link that leaves.
    return open_model(model if model.is_dir() else folder, reading, root=folder)


def _is_known(entry: object) -> bool:
    """True for an entry of diffusers, or of the class that the family of an installed package has."""
    if not _is_there(entry):
        return False
    library, name = entry
    if library == "diffusers":
        return True
    families = folder_layouts().values()
    return any((family.library, family.name) == (library, name) for family in families)


def _index(folder: Path) -> dict[str, Any]:
    """The index of the pipeline in ``folder``, empty where there is none; refuses `_OTHER_TASKS`."""
    index = read_config(folder, MODEL_INDEX) if (folder / MODEL_INDEX).is_file() else {}
    name = one_line(index.get("_class_name"), 60)
    for task, names in _OTHER_TASKS.items():
        if re.search(names, name):
            raise HddmError(
                f"{folder / MODEL_INDEX}: {name} {task}; hddm makes pictures from text or a class"
            )
    return index


def open_model(folder: Path, reading: Reading, root: Path | None = None) -> Checkpoint:
    """Open one model folder of the pipeline ``root``, by default the one around it."""
    above = root or (folder.parent if (folder.parent / MODEL_INDEX).is_file() else folder)
    path, index, config = folder / "config.json", _index(above), read_config(folder)
    kind, arguments = parse_config(config, of_families(folder_layouts().values()), str(path))
    family = known_family(kind)
    with errors_as(HddmError, str(path)):
        family.refuse(arguments)
    _refuse_other_pipeline(above, family)
    side, stated = reading.sample_size, arguments.get("sample_size")
    if family.states_size and side is not None and stated != [side, side]:
        if stated not in (None, side):
            raise HddmError(
                f"`sample_size` {side}: {path} says sample_size {stated!r}; drop the option"
            )
        arguments["sample_size"] = side
    sets = _weight_files(folder, reading.variant)
    chosen = choose_set(sets, reading.weights, str(folder))
    weights, files = _read_weights(folder, sets[chosen], reading.allow_pickle)
    refuse_quantised(weights, files[0])
    scheduler = _scheduler(folder, above)
    names_vae = any(_is_there(index.get(one)) for one in VAES)
    scale, is_latent, notes = _latents(above, names_vae, arguments)
    place, more = _vae_folder(above), list[str]()
    network_name: Any = index.get(folder.name)
    if _is_known(network_name) and network_name[1] != config.get("_class_name"):
        more.append(
            f"{above / MODEL_INDEX} calls it {network_name[1]}, and {path}, which is read, otherwise"
        )
    # A VAE that was not fetched, or that hddm cannot use, must not block the denoiser.
    vae = None if place is None else identify_vae(place, reading.variant)
    if isinstance(vae, UnreadVae):
        more.append(
            f"its VAE is an {vae}, so it makes no pictures by itself, and another VAE is refused"
        )
    header = read_headers(files)
    licence = _licence_of_card(above) or header.licence or family.licence(arguments)
    if header.licence not in (None, licence):
        stated = f"the header of the weights states the licence {header.licence!r}"
        more.append(f"{stated}, and the model card another, which is recorded")
    declared = Declared(
        read_json(scheduler) if scheduler else None,
        str(scheduler or ""),
        is_latent=is_latent,
        latent_scale=scale,
        notes=(*notes, *more, *header.notes),
    )
    _refuse_other_family(index.get("scheduler"), declared, above)
    text = PipelineText(above, reading.variant)
    network = empty_network(kind, arguments, len(weights), str(files[0]))
    return Checkpoint(
        path=folder,
        layout=family.layout,
        files=tuple(files),
        weights=weights,
        network=network,
        arguments=arguments,
        table=_own_table(network, weights),
        declared=declared,
        sets=tuple(sets),
        chosen=chosen,
        header=header,
        licence=licence,
        vae=vae,
        text=text,
        components=_components(place, vae, text),
        variant=reading.variant,
    )


def _refuse_other_pipeline(folder: Path, family: Family) -> None:
    """Raise an `HddmError` for the index of a known pipeline that has another kind of network."""
    name = class_in(folder)
    known = pipelines().get(name or "")
    if known is None or known in family.pipelines:
        return
    own = " or ".join(an(one.name) for one in family.pipelines) or "no pipeline"
    raise HddmError(
        f"{folder / MODEL_INDEX}: is of {an(str(name))}, and the network beside it is {an(family.name)}, "
        f"which belongs into {own}; correct _class_name"
    )


def _components(
    place: Path | None, vae: VaeRecord | UnreadVae | None, text: PipelineText
) -> dict[str, Path]:
    """Folders of the VAE in ``place``, if hddm reads it, and of the text encoders."""
    found = {}
    if place and isinstance(vae, VaeRecord):
        found["vae"] = place
    return found | text.components


def open_expert_checkpoint(folder: Path, reading: Reading) -> Checkpoint:
    """Open an expert folder; an adapter is merged into its base."""
    record = read_expert_record(folder)
    files: tuple[Path, ...] = (folder / WEIGHTS,)
    if record.adapter is None:
        network, weights, arguments = open_network(folder)
    else:
        base = base_of(folder, record.adapter)
        files = (folder / ADAPTER_WEIGHTS, base / WEIGHTS)
        network, weights, arguments = open_adapted(folder, record.adapter, base)
        record = without_adapter(record)
    choose_set({record.weights: None}, reading.weights, str(folder))
    refuse_damaged(folder, damage(folder, EXPERT_FILE, FILES), remedy(folder))
    return Checkpoint(
        path=folder,
        layout=LAYOUT,
        files=files,
        weights=weights,
        network=network,
        arguments=arguments,
        table=_own_table(network, weights),
        declared=Declared(
            record.schedule,
            str(folder / EXPERT_FILE),
            prediction_type=record.prediction_type,
            prediction_origin=str(folder / EXPERT_FILE),
            is_latent=record.space == "latents",
            latent_scale=record.latent_scale,
            kept=read_safetensors(folder / EXTRAS_FILE) if (folder / EXTRAS_FILE).exists() else {},
        ),
        sets=(record.weights,),
        chosen=record.weights,
        licence=record.licence,
        record=record,
        nulls=read_nulls(folder),
        components=kept_components(folder),
        names=read_source_names(folder),
    )


def _own_table(network: ModelMixin, weights: Weights) -> KeyTable:
    """Map names in a file to those of its own class; they differ only where older names remain."""
    names = network.state_dict()
    pairs = [same(old, name) for name, old in stored_names(names, weights).items()]
    computed = [name for name in known_family(network).computed if name not in names]
    return KeyTable(pairs, dict.fromkeys(computed, "computed anew"))


def _refuse_other_family(entry: object, declared: Declared, above: Path) -> None:
    """Refuse a scheduler config whose family of schedules differs from the pipeline's ``entry``."""
    config = declared.scheduler
    if config is None or not _is_there(entry):
        return
    is_ddpm = any(key.startswith("beta_") for key in config)
    name = config.get("_class_name", DDPM_FAMILY[0] if is_ddpm else entry[1])
    # With flow sigmas a class of the other family means the same.
    if not config.get("use_flow_sigmas") and _family(entry[1]) != _family(name):
        raise HddmError(
            f"{declared.scheduler_origin}: is {an(str(name))}, and {above / MODEL_INDEX} says "
            f"{entry[1]}, which means another schedule; correct one of them"
        )


def _family(name: object) -> object:
    return next((family for family in FAMILIES if name in family), name)


def _is_there(entry: object) -> TypeGuard[list[Any]]:
    return isinstance(entry, list) and len(entry) == 2 and entry[0] is not None


def _scheduler(folder: Path, above: Path) -> Path | None:
    """The scheduler config beside the weights, or in the pipeline that contains them."""
    nested = f"scheduler/{SCHEDULER_FILE}"
    for root, name in (
        (folder, SCHEDULER_FILE),
        (folder, nested),
        (above, nested),
        (above, SCHEDULER_FILE),
    ):
        if (root / name).exists() or (root / name).is_symlink():
            inside(root, name)
            return root / name
    return None


def _licence_of_card(above: Path) -> str | None:
    """The licence in the front matter of the model card."""
    if (above / "README.md").is_file():
        with inside(above, "README.md").open(encoding="utf-8", errors="replace") as file:
            card = re.match("---\n(.*?)^---$", file.read(65536), re.MULTILINE | re.DOTALL)
        # A card that is no YAML states nothing.
        with suppress(HddmError):
            front = parse_yaml(card[1].encode(), "README.md") if card else {}
            stated = front.get("license_name") or front.get("license")
            names: list[Any] = stated if isinstance(stated, list) else [stated]
            if names and all(isinstance(one, str) for one in names):
                return " AND ".join(names)
    return None


def _weight_files(folder: Path, variant: str | None) -> dict[WeightSet, str]:
    """Weights or index files of ``variant`` by set; beside a ``non_ema`` file, the plain one is averaged."""
    found, raw = _find(folder, variant), _find(folder, "non_ema")
    if found is None:
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        variants = set()
        for name in names:
            match = _WEIGHTS.fullmatch(name)
            if match is not None:
                variants.add(match[1] or match[2])
        variants.discard(None)
        wanted = f"{STEM}{'.' + variant if variant else ''}.safetensors"
        hint = f"; there are variants: pass `variant` {' or '.join(sorted(variants))}"
        raise HddmError(f"{folder}: no {wanted}{hint if variants else did_you_mean(wanted, names)}")
    if variant is None and raw is not None:
        return {"ema": found, "raw": raw}
    return {"raw" if variant == "non_ema" else "unstated": found}


def _find(folder: Path, variant: str | None) -> str | None:
    """Name of the weights file or index of a variant, safetensors before pickles."""
    for ending in ("safetensors", "bin"):
        found = weights_of_variant(folder, STEM, variant, ending)
        if found:
            return found
    return None


def _read_weights(
    folder: Path, name: str, allow_pickle: bool
) -> tuple[dict[str, Tensor], list[Path]]:
    """Tensors of one file or of an index's shards, and the files read."""
    # The link's own name is checked; an index is opened under its own, beside its shards.
    resolved = inside(folder, name)
    if name.endswith(".json"):
        return read_index(folder / name, allow_pickle)
    content = read_file(resolved, allow_pickle)
    tensors = {key: value for key, value in content.items() if hasattr(value, "shape")}
    return tensors, [folder / name]


def _latents(
    above: Path, is_stated: bool, arguments: Mapping[str, Any]
) -> tuple[float | None, bool, tuple[str, ...]]:
    """Scale of the VAE in the pipeline ``above``, whether there is a VAE, and what was assumed.

    ``is_stated`` says whether the pipeline's index names a VAE; ``arguments`` are the network's.
    """
    place = _vae_folder(above)
    if place is None:
        is_latent = is_stated or arguments.get("in_channels") not in (1, 3)
        return (None if is_latent else 1.0), is_latent, ()
    path = place / "config.json"
    config = read_json(inside(above, f"{place.name}/config.json"))
    kind = config.get("_class_name")
    if "scaling_factor" in config:
        return scale_and_shift(config, str(path))[0], True, ()
    if isinstance(kind, str) and kind in VAE_KINDS:
        default = VAE_KINDS[kind].default_scale
        return default, True, (f"{path}: no scaling_factor, so {kind}'s default {default}",)
    return (
        None,
        True,
        (f"{path}: no scaling_factor, and the default of {an(one_line(kind, 40))} is not known",),
    )


def _vae_folder(above: Path) -> Path | None:
    """The folder of the VAE in the pipeline ``above``; None without one."""
    for name in VAES:
        if (above / name / "config.json").exists():
            return above / name
    return None
