"""Diffusers folders, a pipeline or one model with its config: weights, scheduler, VAE and text encoder.

An expert carries the text encoder's tokens for the empty prompt as the null value of
``encoder_hidden_states``, so that guidance and native samples need no text encoder. An empty prompt needs no
tokenizer, only its files: it is begin, end, then padding. The encoder's config numbers these tokens too,
often wrongly.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import torch
from diffusers import UNet2DConditionModel
from torch import Tensor

from hddm.checkpoints.diffusers_models import DIFFUSERS_LAYOUTS, class_forward, own_table
from hddm.checkpoints.layouts import LATENT_SCALE
from hddm.checkpoints.single_files import IMAGENET_CLASSES, IMAGENET_LICENCE
from hddm.checkpoints.sources import Checkpoint, Declared, Reading, Tensors, choose_set, read_file
from hddm.networks.folders import parse_config
from hddm.networks.identity import TextEncoderRecord, VaeRecord
from hddm.networks.text_encoder import (
    ARCHITECTURES,
    KIND,
    prompt_length,
    read_text_encoder,
    text_encoder_facts,
)
from hddm.networks.text_encoder import STEM as TEXT_STEM
from hddm.networks.vae import LARGEST_SCALE, find_weights, vae_facts
from hddm.networks.wrappers import FLUX
from hddm.schedules import DDPM_FAMILY, FLOW_MATCH_FAMILY
from hddm.utils.errors import HddmError, did_you_mean
from hddm.utils.files import inside, read_json
from hddm.utils.pickles import read_pickle
from hddm.utils.tensors import kind_of, read_safetensors

PIPELINE = "model_index.json"
COMPONENTS = ("transformer", "unet")
SCHEDULER = "scheduler_config.json"
STEM = "diffusion_pytorch_model"
_WEIGHTS = re.compile(rf"{STEM}(?:\.(\w+))?\.(?:safetensors|bin)(?:\.index(?:\.(\w+))?\.json)?")
VAES = ("vae", "vqvae", "movq")
# Class and scale of those whose config does not say.
_DEFAULT_VAES = {"vae": "AutoencoderKL", "vqvae": "VQModel"}
_DEFAULT_SCALES = {"AutoencoderKL": LATENT_SCALE, "VQModel": LATENT_SCALE, "AutoencoderTiny": 1.0}
_TOKENS = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
"""The special tokens of the tokenizer's class, where its files name none."""
_MAP = "special_tokens_map.json"
_FAST, _SLOW = "tokenizer.json", "vocab.json"
"""Either numbers the tokens; the loader prefers the first, the only one that transformers 5 saves."""


def open_pipeline(folder: Path, reading: Reading) -> Checkpoint:
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


def open_model(
    folder: Path, reading: Reading, root: Path | None = None, file: str | None = None
) -> Checkpoint:
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
    _set_size(arguments, reading.hints.sample_size, network.__name__ != FLUX, path)
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
    return Checkpoint(
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


def _set_size(arguments: dict[str, Any], side: int | None, has_place: bool, path: Path) -> None:
    """Set the size of samples that the user states where the config states none."""
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
    """The parts that the pipeline around a model states; empty without a pipeline."""
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
    """The licence in the model card, else the one known of released weights."""
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


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []


def latents_of(
    above: Path, is_stated: bool, arguments: Mapping[str, Any]
) -> tuple[float | None, bool, tuple[str, ...]]:
    """Scale of the VAE in the pipeline ``above``, whether there is one, and what was assumed.

    ``is_stated`` says whether the pipeline's index names one; ``arguments`` are the network's.

    Raises:
        HddmError: for a scale that is no positive number.
    """
    name = next((one for one in VAES if (above / one / "config.json").exists()), None)
    if name is None:
        is_latent = is_stated or arguments.get("in_channels") not in (1, 3)
        return (None if is_latent else 1.0), is_latent, ()
    path = above / name / "config.json"
    config = read_json(inside(above, f"{name}/config.json"))
    kind = config.get("_class_name", _DEFAULT_VAES.get(name))
    if name == "movq":
        return None, True, (f"{path}: whether a movq's latents are scaled is not known",)
    if "scaling_factor" in config:
        factor = config["scaling_factor"]
        if not isinstance(factor, int | float) or not 0 < factor < LARGEST_SCALE:
            raise HddmError(
                f"{path}: scaling_factor is {str(factor)[:40]}, and must be a positive number, below "
                f"{LARGEST_SCALE:.0e}"
            )
        return float(factor), True, ()
    if kind in _DEFAULT_SCALES:
        default = _DEFAULT_SCALES[kind]
        return default, True, (f"{path}: no scaling_factor, so {kind}'s default {default}",)
    return None, True, (f"{path}: no scaling_factor, and the default of a {str(kind)[:40]} is not known",)


def vae_of(above: Path, variant: str | None) -> tuple[VaeRecord | None, tuple[str, ...]]:
    """The identity of the VAE in the pipeline ``above``, or the reason why it is not known.

    The weights of the denoiser do not need it: a VAE that was not fetched, or that is of another class than
    hddm decodes with, must not be in their way.
    """
    if not (above / "vae" / "config.json").exists():
        return None, ()
    try:
        return vae_facts(above / "vae", variant), ()
    except HddmError as error:
        return None, (f"the expert does not say which VAE made its latents: {error}",)


def empty_prompt(pipeline: Path, variant: str | None) -> Callable[[], Tensor] | None:
    """Reads the tokens (tokens, width) when called; None for a pipeline without a CLIP text encoder on disk.

    Raises:
        HddmError: when called, for an encoder whose config or weights cannot be trusted.
    """
    return None if no_text_encoder(pipeline, variant) else lambda: _encode(pipeline, variant)


def text_encoder_of(pipeline: Path, variant: str | None) -> Callable[[], TextEncoderRecord] | None:
    """Reads the identity of the one CLIP text encoder; None and raises as `empty_prompt`."""
    if no_text_encoder(pipeline, variant):
        return None
    return lambda: text_encoder_facts(
        pipeline / "text_encoder",
        read_json(inside(pipeline, "tokenizer/tokenizer_config.json")).get("model_max_length"),
        variant,
    )


def no_text_encoder(pipeline: Path, variant: str | None) -> str:
    """The reason why no text encoder of a pipeline is known; empty where its one CLIP encoder is."""
    folder, tokenizer = pipeline / "text_encoder", pipeline / "tokenizer"
    if not (folder / "config.json").exists():
        return "there is no text_encoder/config.json beside"
    if (pipeline / "text_encoder_2").exists():
        return "there is a text_encoder_2 beside: one encoder is not the whole of what the network is given"
    stated = read_json(inside(pipeline, "text_encoder/config.json")).get("architectures")
    if stated not in ARCHITECTURES:
        return f"the one beside is {str(stated)[:60]}, not a {KIND}"
    if find_weights(folder, TEXT_STEM, variant) is None:
        return f"there is no text_encoder/{TEXT_STEM}.safetensors beside"
    if not (tokenizer / "tokenizer_config.json").exists():
        return "there is no tokenizer/tokenizer_config.json beside"
    if not any((tokenizer / name).exists() for name in (_FAST, _SLOW)):
        return f"there is neither tokenizer/{_FAST} nor tokenizer/{_SLOW} beside"
    return ""


def _encode(pipeline: Path, variant: str | None) -> Tensor:
    folder = pipeline / "text_encoder"
    encoder = read_text_encoder(folder, variant=variant)
    config = encoder.config
    tokens = _empty_tokens(pipeline / "tokenizer", config.vocab_size, config.max_position_embeddings)
    with torch.no_grad():
        encoded: Tensor = encoder(torch.tensor([tokens]))[0][0]
    if not encoded.isfinite().all():
        raise HddmError(f"{folder}: its tokens for the empty prompt are not finite; take the weights anew")
    return encoded


def _empty_tokens(folder: Path, vocabulary: int, positions: int) -> list[int]:
    """Tokens of no text by the tokenizer in ``folder``, padded as a pipeline pads them."""
    config = read_json(inside(folder, "tokenizer_config.json"))
    named = config
    # As the loader has it: a config that lists its added tokens is of a format after the map of tokens.
    if (folder / _MAP).exists() and "added_tokens_decoder" not in config:
        named = config | read_json(inside(folder, _MAP))
    numbers = _token_numbers(folder)
    begin, end, padding = (_token_number(folder, key, named, numbers, vocabulary) for key in _TOKENS)
    length = prompt_length(config.get("model_max_length"), positions)
    return [begin, end, *[padding] * (length - 2)][:length]


def _token_numbers(folder: Path) -> dict[Any, Any]:
    """The number of each token, unchecked."""
    if not (folder / _FAST).exists():
        return read_json(inside(folder, _SLOW))
    content = read_json(inside(folder, _FAST))
    model, added = content.get("model"), content.get("added_tokens")
    words = model.get("vocab") if isinstance(model, dict) else None
    listed = [one for one in added if isinstance(one, dict)] if isinstance(added, list) else []
    # A token that the model has too keeps its number there.
    numbers = {one["content"]: one.get("id") for one in listed if isinstance(one.get("content"), str)}
    return numbers | (words if isinstance(words, dict) else {})


def _token_number(
    folder: Path, key: str, named: dict[str, Any], numbers: dict[str, Any], vocabulary: int
) -> int:
    token = named.get(key, _TOKENS[key])
    token = token.get("content") if isinstance(token, dict) else token
    number = numbers.get(token) if isinstance(token, str) else None
    if not isinstance(number, int) or not 0 <= number < vocabulary:
        name = _FAST if (folder / _FAST).exists() else _SLOW
        raise HddmError(
            f"{folder}: {key} {str(token)[:40]!r} has no number below {vocabulary} in {name}; "
            "take the tokenizer that belongs to the text encoder"
        )
    return number
