"""The Paris release (arXiv:2510.03434) as published: text-to-image experts and their router.

    expert_0/ … expert_7/   diffusion_pytorch_model.safetensors
    router/                 pytorch_model.safetensors
    scheduler/  vae/  text_encoder/  tokenizer/

Its networks are `ExpertTransformer` and `RouterTransformer`, tensor for tensor. Config files are not read:
sizes come from the tensors, and the head width, which no tensor states, is 72 in experts and 64 in the
router. All take 1000 t as time; experts predict the velocity of the common path. Only headers are read here,
and links may not leave the release's folder.
"""

import math
import os
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

from hddm.experts.model_index import SCHEDULER_FILE, read_shift
from hddm.experts.records import EXPERT_FILE, Expert, ExpertRecord, RouterRecord, SourceRecord
from hddm.networks.folders import Unread, unread
from hddm.networks.identity import TextEncoderRecord, VaeRecord
from hddm.networks.text_encoder import text_encoder_facts
from hddm.networks.transformers import ExpertTransformer, RouterTransformer
from hddm.networks.vae import vae_facts
from hddm.schedules import LinearSchedule
from hddm.utils.errors import HddmError
from hddm.utils.files import inside, read_json
from hddm.utils.tensors import TensorInfo, read_header
from hddm.velocity import PredictionType

EXPERT_HEAD, ROUTER_HEAD = 72, 64
"""Width of an attention head."""
TIME_SCALE = 1000.0
LATENT_SCALE = 0.18215
TOKENS = 77
"""Tokens that a prompt is padded to."""
PAPER = "arXiv:2510.03434"
ROUTER = "router"

_NAMES = ("diffusion_pytorch_model.safetensors", "pytorch_model.safetensors")
_PICKLES = {".pt", ".pth", ".bin", ".ckpt"}
_MOST_ENTRIES = 10_000
"""Files in a folder and tensors in a file. An expert of Paris has 378 tensors."""
_MISFIT = "network of Paris"
"""Stands in messages for the config that the release lacks."""
_MARKERS = {"layers.0.scale_shift_table", "t_block.1.weight", "text_proj.weight", "pos_embed"}

Shapes = Mapping[str, TensorInfo | Tensor]


def is_paris(folder: Path) -> bool:
    """True where ``folder`` holds the Paris release, by the tensor names of its first expert.

    A release whose expert cannot be read counts too (`paris_experts` says what is wrong); expert folders that
    hddm wrote do not, even with the same tensor names.
    """
    try:
        names = _expert_folders(folder)
        if not names or (folder / names[0] / EXPERT_FILE).exists():
            return False
        return read_header(_weights_of(folder, names[0]))[0].keys() >= _MARKERS
    except HddmError:
        return (folder / ROUTER).is_dir()


def paris_experts(folder: Path) -> list[Expert]:
    """The experts, in order, from headers without weights.

    Raises `HddmError` for pickles only, links that leave the folder, tensors that make no such network (all
    are listed), and whatever contradicts the first expert.
    """
    names = _expert_folders(folder)
    if not names:
        raise HddmError(f"{folder}: has no expert_0/; name the folder of the whole release")
    if missing := [name for k in range(_number(names[-1])) if (name := f"expert_{k}") not in names]:
        more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        lacks = f"{', '.join(missing[:10])}{more}"
        raise HddmError(f"{folder}: has {names[-1]} and lacks {lacks}; fetch the whole release")
    paths = [_weights_of(folder, name) for name in names]
    networks: list[Unread[ExpertTransformer]] = []
    for path in paths:
        arguments = expert_arguments(_header(path), path)
        if networks:
            _refuse_unlike(arguments, networks[0].network.config, path, paths[0])
        networks.append(unread(ExpertTransformer, arguments, path, str(path.with_name(_MISFIT))))
    record = _expert_record(folder, networks[0].network.config)
    return [
        Expert(one.network, record, weights=one.read, folder=path.parent)
        for path, one in zip(paths, networks, strict=True)
    ]


def paris_router(folder: Path, experts: Sequence[Expert]) -> tuple[Unread[RouterTransformer], RouterRecord]:
    """The router of all ``experts``, without shards (unpublished); raises as `paris_experts`."""
    if not (folder / ROUTER).is_dir():
        raise HddmError(f"{folder}: has experts and no {ROUTER}/; fetch the whole release")
    path, first = _weights_of(folder, ROUTER), experts[0]
    arguments = router_arguments(_header(path), path)
    network = unread(RouterTransformer, arguments, path, str(path.with_name(_MISFIT)))
    if arguments["num_experts"] != len(experts):
        told = f"tells {arguments['num_experts']} experts apart, and {folder} holds {len(experts)}"
        raise HddmError(f"{path}: {told}; fetch the whole release")
    sample = {key: arguments[key] for key in ("sample_size", "in_channels")}
    _refuse_unlike(sample, first.network.config, path, Path(first.name))
    shape = first.facts.sample_shape
    return network, RouterRecord(time_scale=TIME_SCALE, sample_shape=shape, shard_hashes=(), shard_images=())


def _refuse_unlike(arguments: Mapping[str, Any], others: Mapping[str, Any], path: Path, other: Path) -> None:
    """Refuse sizes in ``path`` that differ from those in ``other``."""
    differing = [
        f"{key} {value} beside {others[key]}" for key, value in arguments.items() if value != others[key]
    ]
    if differing:
        raise HddmError(f"{path}: has {' and '.join(differing)} in {other}; take all from one release")


def expert_arguments(tensors: Shapes, path: Path) -> dict[str, Any]:
    """Arguments of `ExpertTransformer`; `HddmError` where the tensors' sizes make no network."""
    text = _shape(tensors, "text_proj.weight", 2, path)[1]
    return _sizes(tensors, EXPERT_HEAD, "scale_shift_table", path) | {"text_dim": text}


def router_arguments(tensors: Shapes, path: Path) -> dict[str, Any]:
    """Arguments of `RouterTransformer`; raises as `expert_arguments`."""
    num_experts = _shape(tensors, "head.4.weight", 2, path)[0]
    sizes = _sizes(tensors, ROUTER_HEAD, "adaLN_modulation.1.weight", path)
    return {"num_experts": num_experts} | sizes


def _sizes(tensors: Shapes, head: int, in_every_block: str, path: Path) -> dict[str, Any]:
    """Arguments that expert and router share."""
    _, channels, patch, across = _shape(tensors, "patch_embed.weight", 4, path)
    _, tokens, width = _shape(tensors, "pos_embed", 3, path)
    _shape(tensors, f"layers.0.{in_every_block}", 2, path)
    side = math.isqrt(tokens)
    if side**2 != tokens or patch != across:
        raise HddmError(f"{path}: {tokens} positions of {patch} × {across} patches make no square image")
    if width % head:
        raise HddmError(f"{path}: a width of {width} does not divide into heads of {head}, which Paris has")
    layers = [re.match(r"layers\.(\d{1,6})\.", name, re.ASCII) for name in tensors]
    return {
        "sample_size": side * patch,
        "in_channels": channels,
        "patch_size": patch,
        "hidden_size": width,
        "depth": 1 + max(int(match[1]) for match in layers if match),
        "num_heads": width // head,
    }


def _shape(tensors: Shapes, name: str, ndim: int, path: Path) -> tuple[int, ...]:
    if name not in tensors:
        raise HddmError(f"{path}: lacks {name}, which this network of Paris has; fetch it again")
    shape = tuple(tensors[name].shape)
    if len(shape) != ndim:
        raise HddmError(f"{path}: {name} is {shape}, and has {ndim} dimensions in Paris; fetch it again")
    return shape


def _expert_record(folder: Path, arguments: Mapping[str, Any]) -> ExpertRecord:
    """The record of all experts in ``folder``, given their network's arguments."""
    scheduler, shift = _scheduler(folder)
    side = arguments["sample_size"]
    return ExpertRecord(
        objective="flow",
        prediction_type=PredictionType.FLOW_PREDICTION,
        schedule=LinearSchedule().config,
        schedule_source=PAPER if scheduler is None else SCHEDULER_FILE,
        time_scale=TIME_SCALE,
        sample_shape=(arguments["in_channels"], side, side),
        space="latents",
        latent_scale=LATENT_SCALE,
        vae=_vae(folder),
        text_encoder=_text_encoder(folder, arguments["text_dim"]),
        shift=shift,
        conditions=("encoder_hidden_states",),
        weights="unstated",
        # Hashing 20 GB would take longer than reading them.
        source=SourceRecord(layout="paris", files={}, scheduler=scheduler, hddm=version("hddm-diffusion")),
        licence="MIT",
    )


def _component(folder: Path, name: str) -> Path | None:
    """Folder of a component; a broken link counts as present, and its reader says what is wrong."""
    is_there = inside(folder, name).exists() or (folder / name).is_symlink()
    return folder / name if is_there else None


def _scheduler(folder: Path) -> tuple[dict[str, Any] | None, float]:
    """The scheduler config and its grid's shift; None and 1 without one."""
    if _component(folder, "scheduler") is None:
        return None, 1.0
    path = folder / SCHEDULER_FILE
    inside(folder, SCHEDULER_FILE)
    shift, config = read_shift(folder), read_json(path)
    steps = config.get("num_train_timesteps", TIME_SCALE)
    if steps != TIME_SCALE:
        raise HddmError(f"{path}: num_train_timesteps is {str(steps)[:40]}, not {TIME_SCALE:g}; correct it")
    return config, shift


def _vae(folder: Path) -> VaeRecord | None:
    if (path := _component(folder, "vae")) is None:
        return None
    vae = vae_facts(path)
    if (vae.scale, vae.shift) != (LATENT_SCALE, 0.0):
        found = f"scales latents by {vae.scale:g} and shifts them by {vae.shift:g}, not {LATENT_SCALE} and 0"
        raise HddmError(f"{path}: {found}; put Paris's own VAE there (sd-vae-ft-mse)")
    return vae


def _text_encoder(folder: Path, width: int) -> TextEncoderRecord | None:
    if (path := _component(folder, "text_encoder")) is None:
        return None
    encoder = text_encoder_facts(path, TOKENS)
    if encoder.width != width:
        widths = f"its tokens are {encoder.width} wide, and the experts take {width}"
        raise HddmError(f"{path}: {widths}; put Paris's own there (CLIP ViT-L/14)")
    return encoder


def _expert_folders(folder: Path) -> list[str]:
    """Folders ``expert_<number>`` in order of their numbers, which may have gaps."""
    names = [name for name in _entries(folder) if re.fullmatch(r"expert_(0|[1-9]\d{0,3})", name, re.ASCII)]
    return sorted((name for name in names if (folder / name).is_dir()), key=_number)


def _number(name: str) -> int:
    return int(name.removeprefix("expert_"))


def _weights_of(folder: Path, part: str) -> Path:
    """The only safetensors file in a part's folder; of several, the one with the release's name."""
    # A linked folder is checked before it is listed.
    names = _entries(inside(folder, part))
    found = [name for name in names if name.endswith(".safetensors")]
    chosen = [name for name in _NAMES if name in found][:1] or found
    if len(chosen) > 1:
        raise HddmError(f"{folder / part}: holds {', '.join(chosen[:10])}; leave one of them there")
    if chosen:
        inside(folder, f"{part}/{chosen[0]}")
        # Messages should show the name in the folder, not the hash behind a link.
        return folder / part / chosen[0]
    pickles = [name for name in names if Path(name).suffix in _PICKLES]
    if pickles:
        raise HddmError(
            f"{folder / part}: holds no safetensors, only {', '.join(pickles[:10])}; read it with "
            "hddm.utils.pickles.read_pickle, which runs no code, and write it by safetensors.torch.save_file"
        )
    raise HddmError(f"{folder / part}: holds no {_NAMES[part == ROUTER]}; fetch the whole release")


def _header(path: Path) -> dict[str, TensorInfo]:
    """The tensors in a file's header, limited in number and none empty."""
    header, _ = read_header(path)
    if len(header) > _MOST_ENTRIES:
        raise HddmError(f"{path}: holds {len(header)} tensors, too many for Paris; fetch it again")
    for name, info in header.items():
        if 0 in info.shape:
            raise HddmError(f"{path}: {name!r} is empty, of shape {info.shape}; fetch it again")
    return header


def _entries(folder: Path) -> list[str]:
    """Sorted names in a folder."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in islice(entries, _MOST_ENTRIES + 1)]
    except OSError as error:
        raise HddmError(f"{folder}: cannot be read ({error.strerror}); name the release's folder") from error
    if len(names) > _MOST_ENTRIES:
        raise HddmError(f"{folder}: holds more than {_MOST_ENTRIES} files; that is not the Paris release")
    return sorted(names)
