"""The Paris release (arXiv:2510.03434) as published: text-to-image experts and their router.

    expert_0/ … expert_7/   diffusion_pytorch_model.safetensors
    router/                 pytorch_model.safetensors
    scheduler/  vae/  text_encoder/  tokenizer/

Its networks are hddm's own transformers, tensor for tensor. Config files are not read:
sizes come from the tensors, and the head width, which no tensor states, is 72 in experts and 64 in the
router. All take 1000 t as time; experts predict the velocity of the common path. Only headers are read here,
and links may not leave the release's folder.
"""

import math
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor

from hddm.condition_names import TEXT
from hddm.experts.ensemble_records import SCHEDULER_FILE
from hddm.experts.expert import Expert
from hddm.experts.records import EXPERT_FILE, PARIS_EXPERT, ExpertRecord, RouterRecord, SourceRecord
from hddm.networks.families.expert import EXPERT
from hddm.networks.folders import unread
from hddm.networks.text_encoder import text_encoder_record_of
from hddm.networks.transformers import RouterTransformer
from hddm.networks.unread import Unread
from hddm.networks.vae import vae_record_of
from hddm.predictions import PredictionType
from hddm.schedules import LinearSchedule
from hddm.utils.errors import HddmError, shown
from hddm.utils.files import inside, read_json
from hddm.utils.records import parse_record
from hddm.utils.tensors import TensorInfo, count_blocks, read_header, shape_of

EXPERT_HEAD, ROUTER_HEAD = 72, 64
"""Width of an attention head."""
TIME_SCALE = 1000.0
LATENT_SCALE = 0.18215
TOKENS = 77
"""Tokens that a prompt is padded to."""
PAPER = "arXiv:2510.03434"
ROUTER = "router"

_NAMES = ("diffusion_pytorch_model.safetensors", "pytorch_model.safetensors")
_MISFIT = "network of Paris"
"""Stands in messages for the config that the release lacks."""
_MARKERS = {"layers.0.scale_shift_table", "t_block.1.weight", "text_proj.weight", "pos_embed"}

Shapes = Mapping[str, TensorInfo | Tensor]


def is_paris(folder: Path) -> bool:
    """True where ``folder`` holds the Paris release, by the tensor names of its first expert.

    A release whose expert cannot be read counts too (`paris_experts` says what is wrong); expert folders that
    hddm wrote do not, even with the same tensor names.
    """
    numbers = _numbers(folder)
    if not numbers or (folder / f"expert_{numbers[0]}" / EXPERT_FILE).exists():
        return False
    try:
        return read_header(_weights_of(folder, f"expert_{numbers[0]}"))[0].keys() >= _MARKERS
    except HddmError:
        return (folder / ROUTER).is_dir()


def paris_experts(folder: Path) -> list[Expert]:
    """The experts, in order, from headers without weights.

    Raises `HddmError` for a missing expert, for anything but one safetensors file per expert, for links that
    leave the folder, and for tensors that make no such network (all are listed).
    """
    numbers = _numbers(folder)
    missing = [f"expert_{k}" for k in range(numbers[-1]) if k not in numbers]
    if missing:
        lacks = f"expert_{numbers[-1]} and lacks {', '.join(shown(missing, 10))}"
        raise HddmError(f"{folder}: has {lacks}; fetch the whole release")
    paths = [_weights_of(folder, f"expert_{k}") for k in numbers]
    every = [expert_arguments(read_header(path)[0], path) for path in paths]
    networks = []
    for path, arguments in zip(paths, every, strict=True):
        networks.append(unread(EXPERT.network, arguments, path, str(path.with_name(_MISFIT))))
    record = _expert_record(folder, every[0])
    experts = []
    for path, network in zip(paths, networks, strict=True):
        experts.append(Expert(network, record, folder=path.parent))
    return experts


def paris_router(
    folder: Path, experts: Sequence[Expert]
) -> tuple[Unread[RouterTransformer], RouterRecord]:
    """The router of all ``experts``, without shards (unpublished); raises as `paris_experts`."""
    path, shape = _weights_of(folder, ROUTER), experts[0].record.sample_shape
    arguments = router_arguments(read_header(path)[0], path)
    network = unread(RouterTransformer, arguments, path, str(path.with_name(_MISFIT)))
    if arguments["num_experts"] != len(experts):
        knows = (
            f"distinguishes {arguments['num_experts']} experts, and {folder} holds {len(experts)}"
        )
        raise HddmError(f"{path}: {knows}; fetch the whole release")
    return network, RouterRecord(
        time_scale=TIME_SCALE, sample_shape=shape, shard_hashes=(), shard_images=()
    )


def expert_arguments(tensors: Shapes, path: Path) -> dict[str, Any]:
    """Arguments of an expert's transformer; `HddmError` where the tensors' sizes make no network."""
    text = shape_of(tensors, "text_proj.weight", 2, str(path))[1]
    return _sizes(tensors, EXPERT_HEAD, "scale_shift_table", path) | {"text_dim": text}


def router_arguments(tensors: Shapes, path: Path) -> dict[str, Any]:
    """Arguments of `RouterTransformer`; raises as `expert_arguments`."""
    num_experts = shape_of(tensors, "head.4.weight", 2, str(path))[0]
    sizes = _sizes(tensors, ROUTER_HEAD, "adaLN_modulation.1.weight", path)
    return {"num_experts": num_experts} | sizes


def _sizes(tensors: Shapes, head: int, in_every_block: str, path: Path) -> dict[str, Any]:
    """Arguments that expert and router share."""
    _, channels, patch, _ = shape_of(tensors, "patch_embed.weight", 4, str(path))
    _, tokens, width = shape_of(tensors, "pos_embed", 3, str(path))
    shape_of(tensors, f"layers.0.{in_every_block}", 2, str(path))
    if width % head:
        raise HddmError(
            f"{path}: a width of {width} does not divide into heads of {head}, which Paris has"
        )
    return {
        "sample_size": math.isqrt(tokens) * patch,
        "in_channels": channels,
        "patch_size": patch,
        "hidden_size": width,
        "depth": count_blocks(tensors, "layers"),
        "num_heads": width // head,
    }


def _expert_record(folder: Path, arguments: Mapping[str, Any]) -> ExpertRecord:
    """The record of all experts in ``folder``, given their network's arguments."""
    scheduler, side = None, arguments["sample_size"]
    if _component(folder, "scheduler") is not None:
        inside(folder, SCHEDULER_FILE)
        scheduler = read_json(folder / SCHEDULER_FILE)
    vae, encoder = _component(folder, "vae"), _component(folder, "text_encoder")
    record = {
        "objective": "flow",
        "prediction_type": PredictionType.FLOW_PREDICTION,
        "schedule": LinearSchedule().config,
        "schedule_source": PAPER if scheduler is None else SCHEDULER_FILE,
        "time_scale": TIME_SCALE,
        "sample_shape": (arguments["in_channels"], side, side),
        "space": "latents",
        "latent_scale": LATENT_SCALE,
        "vae": None if vae is None else vae_record_of(vae),
        "text_encoder": None if encoder is None else text_encoder_record_of(encoder, TOKENS),
        "shift": (scheduler or {}).get("shift", 1.0),
        "conditions": (TEXT,),
        "weights": "unstated",
        # Hashing 20 GB would take longer than reading them.
        "source": SourceRecord(
            layout="paris", files={}, scheduler=scheduler, hddm=version("hddm-diffusion")
        ),
        "licence": "MIT",
    }
    return parse_record(record, ExpertRecord, str(folder / SCHEDULER_FILE))


def _component(folder: Path, name: str) -> Path | None:
    """Folder of a component; a broken link counts as present, and its reader says what is wrong."""
    is_there = inside(folder, name).exists() or (folder / name).is_symlink()
    return folder / name if is_there else None


def _numbers(folder: Path) -> list[int]:
    """Numbers of the folders ``expert_<number>`` in order; there may be gaps."""
    numbers = []
    for path in folder.glob(f"{PARIS_EXPERT}*"):
        match = re.fullmatch(r"expert_(0|[1-9][0-9]{0,3})", path.name)
        if match:
            numbers.append(int(match[1]))
    return sorted(numbers)


def _weights_of(folder: Path, owner: str) -> Path:
    """The only safetensors file of an expert or the router; of several, the one with the release's name."""
    # A linked folder is checked before it is listed.
    names = sorted(path.name for path in inside(folder, owner).glob("*.safetensors"))
    chosen = [name for name in _NAMES if name in names][:1] or names
    if len(chosen) != 1:
        holds = ", ".join(shown(names, 10)) or "no safetensors"
        raise HddmError(
            f"{folder / owner}: holds {holds}, and needs one file, {_NAMES[owner == ROUTER]}; fetch the "
            "whole release (pickles are not read)"
        )
    inside(folder, f"{owner}/{chosen[0]}")
    # Messages should show the name in the folder, not the hash behind a link.
    return folder / owner / chosen[0]
