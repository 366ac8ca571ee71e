"""The Paris release (arXiv:2510.03434) as it was published: text-to-image experts and their router.

    expert_0/ … expert_7/   diffusion_pytorch_model.safetensors
    router/                 pytorch_model.safetensors
    scheduler/  vae/  text_encoder/  tokenizer/

Its networks are `ExpertTransformer` and `RouterTransformer`, tensor for tensor. Their config files are not
read: sizes are those of the tensors, and the width of a head, which no tensor states, is 72 in the experts
and 64 in the router. All take 1000 t as time; the experts give the velocity of the common path. Headers are
read here, no weights, and nothing leads out of the release's folder.
"""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from diffusers import ModelMixin
from torch import Tensor

from hddm.experts.ensembles import SCHEDULER_FILE, read_shift
from hddm.experts.records import EXPERT_FILE, ExpertRecord, SourceRecord
from hddm.networks.folders import differences, empty_network
from hddm.networks.identity import TextEncoderRecord, VaeRecord
from hddm.networks.text_encoder import text_encoder_facts
from hddm.networks.transformers import ExpertTransformer, RouterTransformer
from hddm.networks.vae import vae_facts
from hddm.schedules import LinearSchedule
from hddm.utils.errors import HddmError
from hddm.utils.files import inside, read_json
from hddm.utils.tensors import read_header
from hddm.velocity import PredictionType

EXPERT_HEAD, ROUTER_HEAD = 72, 64
"""Width of an attention head."""
TIME_SCALE = 1000.0
LATENT_SCALE = 0.18215
TOKENS = 77
"""A prompt is padded to so many."""
PAPER = "arXiv:2510.03434"
ROUTER = "router"

_NAMES = ("diffusion_pytorch_model.safetensors", "pytorch_model.safetensors")
_PICKLES = {".pt", ".pth", ".bin", ".ckpt"}
_MOST_ENTRIES = 10_000
"""Files in a folder and tensors in a file. An expert of Paris has 378 tensors."""
_MARKERS = {"layers.0.scale_shift_table", "t_block.1.weight", "text_proj.weight", "pos_embed"}

Shapes = Mapping[str, Tensor]


@dataclass(frozen=True)
class ParisPart:
    """A file of weights, and the constructor arguments of the network that they fit."""

    weights: Path
    arguments: dict[str, Any]


def is_paris(folder: Path) -> bool:
    """True where ``folder`` holds the Paris release, by the tensor names of its first expert.

    One in its layout whose expert cannot be read counts too: `paris_experts` says what is wrong. Expert
    folders that hddm wrote do not count, though their tensors may have the same names.
    """
    try:
        names = expert_folders(folder)
        if not names or (folder / names[0] / EXPERT_FILE).exists():
            return False
        return read_header(weights_of(folder, names[0]))[0].keys() >= _MARKERS
    except HddmError:
        return (folder / ROUTER).is_dir()


def paris_experts(folder: Path) -> list[tuple[ParisPart, ExpertRecord]]:
    """The experts, in order, for `ExpertTransformer`; headers are read and no weights.

    Raises:
        HddmError: in one line with file and remedy, for a gap in the numbers, pickles alone, links that lead
            out, tensors that make no such network (all are listed), experts of different sizes, and a
            scheduler, VAE or text encoder that contradicts them.
    """
    parts: list[ParisPart] = []
    wanted: Mapping[str, Tensor] = {}
    for name in numbered(folder):
        path = weights_of(folder, name)
        found = shapes_in(path)
        arguments = expert_arguments(found, path)
        if not parts:
            wanted = expected(ExpertTransformer, arguments, found, path)
        _check_alike(arguments, parts[0] if parts else None, path)
        check_same(wanted, found, path)
        parts.append(ParisPart(path, arguments))
    facts = expert_facts(folder, parts[0].arguments)
    return [(part, facts) for part in parts]


def paris_router(folder: Path) -> tuple[ParisPart, float]:
    """The router, for `RouterTransformer`, and its time scale.

    What trained its outputs is not part of the release, so there are no `RouterRecord`.

    Raises:
        HddmError: as `paris_experts`, and for a router of another number of experts or size of samples.
    """
    names = numbered(folder)
    if not (folder / ROUTER).is_dir():
        raise HddmError(f"{folder}: has experts and no {ROUTER}/; fetch the whole release")
    path, of_expert = weights_of(folder, ROUTER), weights_of(folder, names[0])
    found = shapes_in(path)
    arguments = router_arguments(found, path)
    check_same(expected(RouterTransformer, arguments, found, path), found, path)
    if arguments["num_experts"] != len(names):
        raise HddmError(
            f"{path}: tells {arguments['num_experts']} experts apart, and {folder} holds {len(names)}; fetch "
            "the whole release"
        )
    expert = ParisPart(of_expert, expert_arguments(shapes_in(of_expert), of_expert))
    _check_alike({key: arguments[key] for key in ("sample_size", "in_channels")}, expert, path)
    return ParisPart(path, arguments), TIME_SCALE


def _check_alike(arguments: Mapping[str, Any], first: ParisPart | None, path: Path) -> None:
    """Refuse sizes that are not those of the ``first`` part."""
    if first is not None and (differing := unlike(arguments, first.arguments)):
        raise HddmError(f"{path}: has {differing} in {first.weights}; take all from one release")


def expert_arguments(tensors: Shapes, path: Path) -> dict[str, Any]:
    """Those of `ExpertTransformer`.

    Raises:
        HddmError: where a tensor that tells a size is missing, or sizes make no square of patches or no
            whole number of heads.
    """
    text = _shape(tensors, "text_proj.weight", 2, path)[1]
    return _sizes(tensors, EXPERT_HEAD, "scale_shift_table", path) | {"text_dim": text}


def router_arguments(tensors: Shapes, path: Path) -> dict[str, Any]:
    """Those of `RouterTransformer`; raises as `expert_arguments`."""
    num_experts = _shape(tensors, "head.4.weight", 2, path)[0]
    sizes = _sizes(tensors, ROUTER_HEAD, "adaLN_modulation.1.weight", path)
    return {"num_experts": num_experts} | sizes


def expected(kind: type[ModelMixin], arguments: Mapping[str, Any], found: Shapes, path: Path) -> Shapes:
    """The shapes of a network with these arguments."""
    shapes: Shapes = empty_network(kind, arguments, len(found), str(path)).state_dict()
    return shapes


def check_same(wanted: Shapes, found: Shapes, path: Path) -> None:
    """Refuse a file with any tensor missing, left over or of another shape; all are listed."""
    problems = differences(wanted, found)
    if problems:
        raise HddmError(f"{path}: is no network of Paris: {'; '.join(problems)}")


def unlike(arguments: Mapping[str, Any], others: Mapping[str, Any]) -> str:
    """Where ``arguments`` differ from ``others``, as part of a sentence; empty where they do not."""
    pairs = [(key, value, others[key]) for key, value in arguments.items() if value != others[key]]
    return " and ".join(f"{key} {value} beside {other}" for key, value, other in pairs)


def _sizes(tensors: Shapes, head: int, in_every_block: str, path: Path) -> dict[str, Any]:
    """The arguments that expert and router have in common."""
    _, channels, patch, across = _shape(tensors, "patch_embed.weight", 4, path)
    _, tokens, width = _shape(tensors, "pos_embed", 3, path)
    _shape(tensors, f"layers.0.{in_every_block}", 2, path)
    side = math.isqrt(tokens)
    if side**2 != tokens or patch != across:
        raise HddmError(
            f"{path}: {tokens} positions of {patch} × {across} patches make no square, as Paris's images are"
        )
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


def expert_facts(folder: Path, arguments: Mapping[str, Any]) -> ExpertRecord:
    """The facts of all experts in ``folder``, whose networks have these arguments.

    Raises:
        HddmError: for links that lead out of ``folder``, and a scheduler, VAE or text encoder that cannot be
            read or contradicts the experts.
    """
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


def _is_there(folder: Path, name: str) -> bool:
    # A broken link is there, and whoever reads it says what is wrong.
    return inside(folder, name).exists() or (folder / name).is_symlink()


def _scheduler(folder: Path) -> tuple[dict[str, Any] | None, float]:
    """The scheduler config, and the shift of its grid; none, and 1, where there is none."""
    if not _is_there(folder, "scheduler"):
        return None, 1.0
    inside(folder, SCHEDULER_FILE)
    shift, config = read_shift(folder), read_json(folder / SCHEDULER_FILE)
    steps = config.get("num_train_timesteps", TIME_SCALE)
    if steps != TIME_SCALE:
        raise HddmError(
            f"{folder / SCHEDULER_FILE}: num_train_timesteps is {str(steps)[:40]}, and Paris's networks "
            f"count {TIME_SCALE:g}; correct it"
        )
    return config, shift


def _vae(folder: Path) -> VaeRecord | None:
    if not _is_there(folder, "vae"):
        return None
    facts = vae_facts(folder / "vae")
    if (facts.scale, facts.shift) != (LATENT_SCALE, 0.0):
        raise HddmError(
            f"{folder / 'vae'}: scales latents by {facts.scale:g} and shifts them by {facts.shift:g}, and "
            f"Paris was trained on {LATENT_SCALE} and 0; put its own VAE there (sd-vae-ft-mse)"
        )
    return facts


def _text_encoder(folder: Path, width: int) -> TextEncoderRecord | None:
    if not _is_there(folder, "text_encoder"):
        return None
    facts = text_encoder_facts(folder / "text_encoder", TOKENS)
    if facts.width != width:
        raise HddmError(
            f"{folder / 'text_encoder'}: its tokens are {facts.width} wide, and the experts take {width}; "
            "put Paris's own there (CLIP ViT-L/14)"
        )
    return facts


def expert_folders(folder: Path) -> list[str]:
    """Folders ``expert_<number>`` in order of their numbers, which may have gaps."""
    names = [name for name in _entries(folder) if re.fullmatch(r"expert_(0|[1-9]\d{0,3})", name, re.ASCII)]
    return sorted((name for name in names if (folder / name).is_dir()), key=_number)


def numbered(folder: Path) -> list[str]:
    """The experts' folders.

    Raises:
        HddmError: where there is none, or one is missing.
    """
    names = expert_folders(folder)
    if not names:
        raise HddmError(f"{folder}: has no expert_0/; name the folder of the whole release")
    missing = [f"expert_{k}" for k in range(_number(names[-1])) if f"expert_{k}" not in names]
    if missing:
        more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        raise HddmError(
            f"{folder}: has {names[-1]} and lacks {', '.join(missing[:10])}{more}; fetch the whole release"
        )
    return names


def weights_of(folder: Path, part: str) -> Path:
    """The one safetensors file in a part's folder; of several, the one with the release's name.

    Raises:
        HddmError: for links that lead out of ``folder``, pickles alone, several files, or none.
    """
    # A linked folder is checked before it is listed.
    names = _entries(inside(folder, part))
    found = [name for name in names if name.endswith(".safetensors")]
    chosen = [name for name in _NAMES if name in found][:1] or found
    if len(chosen) > 1:
        raise HddmError(f"{folder / part}: holds {', '.join(chosen[:10])}; leave one of them there")
    if chosen:
        inside(folder, f"{part}/{chosen[0]}")
        # The name in the folder, not the hash behind a link, is what messages should say.
        return folder / part / chosen[0]
    pickles = [name for name in names if Path(name).suffix in _PICKLES]
    if pickles:
        raise HddmError(
            f"{folder / part}: holds no safetensors, only {', '.join(pickles[:10])}; read it with "
            "hddm.utils.pickles.read_pickle, which runs no code, and write it by safetensors.torch.save_file"
        )
    raise HddmError(f"{folder / part}: holds no {_NAMES[part == ROUTER]}; fetch the whole release")


def shapes_in(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, without memory for their values.

    Raises:
        HddmError: as `hddm.utils.tensors.read_header`, and for empty tensors or more than 10,000.
    """
    header, _ = read_header(path)
    if len(header) > _MOST_ENTRIES:
        raise HddmError(
            f"{path}: holds {len(header)} tensors, and no network of Paris so many; fetch it again"
        )
    for name, info in header.items():
        if 0 in info.shape:
            raise HddmError(f"{path}: {name!r} is empty, of shape {info.shape}; fetch it again")
    return {name: torch.empty(i.shape, dtype=i.dtype, device="meta") for name, i in header.items()}


def _entries(folder: Path) -> list[str]:
    """Names in a folder, sorted."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in islice(entries, _MOST_ENTRIES + 1)]
    except OSError as error:
        raise HddmError(f"{folder}: cannot be read ({error.strerror}); name the release's folder") from error
    if len(names) > _MOST_ENTRIES:
        raise HddmError(f"{folder}: holds more than {_MOST_ENTRIES} files; that is not the Paris release")
    return sorted(names)


def _number(name: str) -> int:
    return int(name.removeprefix("expert_"))
