"""Arguments of a pipeline's methods: options of diffusers, dtypes, noise, pictures."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from hddm.data.images import as_trained, to_unit_range
from hddm.editing import DEFAULT_RESAMPLING
from hddm.experts.model_index import COMPONENTS, unnumbered
from hddm.networks.prompts import family_in, read_prompts
from hddm.networks.text_encoder import read_text_encoder, read_tokenizer
from hddm.networks.vae import read_vae
from hddm.utils.errors import HddmError, choose, did_you_mean

_NO_EFFECT: Mapping[str, Collection[object]] = {
    "local_files_only": (True, False),
    "low_cpu_mem_usage": (True, False),
    "use_safetensors": (True,),
    "safe_serialization": (True,),
    "device_map": ("cpu",),
    "subfolder": ("",),
}
"""Values of diffusers' keywords that request what is done anyway; so do None and, for all others, False."""
_REMEDIES = {
    "device_map": '; move the pipeline with .to("cuda")',
    "push_to_hub": '; call push_to_hub("OWNER/NAME") of the pipeline',
}
_OF_DOWNLOADS = ("cache_dir", "token", "proxies")
"""Keywords without effect on a local folder, whatever their value; a token must not get into a message."""
_KNOWN = {
    *(*_NO_EFFECT, *_REMEDIES, *_OF_DOWNLOADS, "variant", "revision", "custom_revision", "custom_pipeline"),
    *("quantization_config", "offload_folder", "safety_checker", "max_memory", "trust_remote_code"),
    *("force_download", "load_connected_pipeline", "use_onnx", "offload_state_dict", "output_loading_info"),
    *("requires_safety_checker", "use_flashpack", "disable_mmap", "provider", "sess_options"),
    *("provider_options", "max_shard_size", "repo_id", "commit_message", "private", "create_pr"),
}
"""Keywords of diffusers' loaders and writers."""
_GRID = "pass num_inference_steps; the grid is linear in t, except for the scheduler's shift"
CALLING = {
    "eta": "samples follow an ODE, and eta is the noise of DDIM's steps",
    "timesteps": _GRID,
    "sigmas": _GRID,
    "guidance_rescale": "pass guidance_scale=hddm.velocity.Guidance(scale, rescale=…)",
    "clip_skip": "the experts use the layer that they were trained with",
    "cross_attention_kwargs": "here a LoRA is an expert of its own (hddm convert)",
    "callback": "pass callback_on_step_end",
    "callback_steps": "pass callback_on_step_end",
}
"""Keywords of diffusers' calls, with what to do instead of passing a value."""
_OURS = {"num_images": "num_images_per_prompt", "steps": "num_inference_steps"}
"""Keywords of a call by the names of ``hddm sample``."""
PARTS = ("scheduler", "router", *COMPONENTS)
"""Parts that may be passed to `from_pretrained` in place of those in the folder."""

NETWORKS = ("experts", "router", "vae", "text_encoder")
"""Parts that have a dtype."""

Dtype = torch.dtype | str | Mapping[str, torch.dtype | str] | None
Images = Image.Image | np.ndarray[Any, Any] | Tensor | Sequence[Image.Image]
"""As in diffusers: Pillow images, arrays (N, H, W, C) in [0, 1], or tensors (N, C, H, W) in [-1, 1]."""


@dataclass(frozen=True)
class Begin:
    """What the images of a call begin with, and their size; see `hddm.HDDMPipeline.__call__`."""

    image: Images | None = None
    mask_image: Images | None = None
    strength: float | None = None
    resampling_steps: int = DEFAULT_RESAMPLING
    height: int | None = None
    width: int | None = None


def pixels_of(images: Images, channels: int, size: tuple[int, int], name: str = "image") -> Tensor:
    """Pictures (N, C, H, W) in [-1, 1]; Pillow images are cropped and resized to ``size`` (H, W).

    Raises `HddmError` for other types, and for arrays of another range.
    """
    if isinstance(images, np.ndarray):
        if images.size and not 0 <= images.min() <= images.max() <= 1:
            raise HddmError(f"{name}: array of {images.min():g} to {images.max():g}; pass pixels from 0 to 1")
        images = torch.from_numpy(images).float().movedim(-1, -3) * 2 - 1
    if isinstance(images, Tensor):
        pixels = images.float() if images.ndim == 4 else images.float()[None]
    else:
        listed = [images] if isinstance(images, Image.Image) else list(images)
        kinds = {type(one).__name__ for one in listed if not isinstance(one, Image.Image)}
        if kinds or not listed:
            found = " and ".join(sorted(kinds)) or "nothing"
            raise HddmError(f"{name}: pass Pillow images, an array or a tensor, not {found}")
        modes = [as_trained(one, name).convert("L" if channels == 1 else "RGB") for one in listed]
        fitted = [ImageOps.fit(one, size[::-1], Image.Resampling.LANCZOS) for one in modes]
        rows = [torch.from_numpy(np.array(one)).view(*size, channels) for one in fitted]
        pixels = to_unit_range(torch.stack(rows).movedim(-1, 1))
    return pixels


def mask_of(masks: Images, images: Images, size: tuple[int, int]) -> Tensor:
    """Masks (N, 1, H, W) of ``images``, True where they are at least half white.

    Raises `HddmError` as `pixels_of`, for a mask without white, and for a Pillow image of another aspect
    ratio than its picture, which would be cropped differently.
    """
    if isinstance(masks, np.ndarray | Tensor):
        # As in diffusers, a mask is in [0, 1], also as a tensor.
        found = torch.as_tensor(masks).float()
        if found.shape[-1] == 1 and found.ndim > 2:
            found = found.movedim(-1, -3)
        if found.ndim < 4:
            found = found.view(-1, 1, *found.shape[-2:])
        is_open = found >= 0.5
    else:
        is_open = pixels_of(masks, 1, size, "mask_image") >= 0
        pictures = [
            one for side in (masks, images) for one in (side if isinstance(side, Sequence) else [side])
        ]
        sizes = [one.size for one in pictures if isinstance(one, Image.Image)]
        ratios = [width / height for width, height in sizes]
        if max(ratios) > 1.02 * min(ratios):
            mask, image = ("×".join(map(str, one)) for one in (sizes[0], sizes[-1]))
            raise HddmError(f"mask_image of {mask} pixels is cropped unlike image of {image}; crop both")
    if not is_open.flatten(1).any(1).all():
        raise HddmError("mask_image: no pixel is white, so nothing would be new; paint what is to change")
    return is_open


def refuse_options(call: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Refuse unknown ``options`` of ``call``, and those of diffusers that request what hddm does not do."""
    for name, value in options.items():
        if name not in _KNOWN:
            near = did_you_mean(name, [*inspect.signature(call).parameters, *_KNOWN, *PARTS])
            raise HddmError(f"{call.__name__} takes no {name!r}{near}")
        if name not in _OF_DOWNLOADS and value is not None and value not in _NO_EFFECT.get(name, (False,)):
            raise HddmError(
                f"{call.__name__}({name}={value!r}) is not supported: hddm reads and writes local folders of "
                f"safetensors only, and runs no code from them{_REMEDIES.get(name, '')}"
            )


def refuse_call_options(options: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse keywords of a call that are not ``known``, or whose value would change something."""
    for name, value in options.items():
        if name not in CALLING:
            near = did_you_mean(_OURS.get(name, name), [*known, *CALLING])
            raise TypeError(f"HDDMPipeline takes no {name!r}{near}")
        if value not in (None, 1 if name == "callback_steps" else 0):
            raise HddmError(f"{name}={value!r} is not supported: {CALLING[name]}")


def dtypes_of(dtype: Dtype, torch_dtype: Dtype) -> dict[str, torch.dtype]:
    """Dtype of each of `NETWORKS`: one for all, or a dictionary by part, as diffusers' loaders take it.

    Parts that a dictionary leaves out get its ``default``, else float32, as does ``auto``. ``torch_dtype`` is
    the old name. Raises `HddmError` for both names at once, an unknown part, and other values.
    """
    if dtype is not None and torch_dtype is not None:
        raise HddmError(f"pass dtype={dtype} or torch_dtype={torch_dtype}, its old name, not both")
    requested = torch_dtype if dtype is None else dtype
    by_part = dict(requested) if isinstance(requested, Mapping) else {"default": requested}
    for name, value in by_part.items():
        if name not in (*NETWORKS, "default"):
            raise HddmError(f"dtype: {choose(name, (*NETWORKS, 'default'))}, not {name!r}")
        if value not in ("auto", None) and not (isinstance(value, torch.dtype) and value.is_floating_point):
            raise HddmError(f"dtype {value!r}: pass a floating dtype of torch, such as torch.bfloat16")
    found = {name: by_part.get(name, by_part.get("default")) for name in NETWORKS}
    return {name: one if isinstance(one, torch.dtype) else torch.float32 for name, one in found.items()}


def read_parts(
    folder: Path, places: Mapping[str, str], dtypes: Mapping[str, torch.dtype], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Components of a pipeline: those ``given``, the others from their ``places`` in a folder."""
    found = dict(given)
    for name in places.keys() - given.keys():
        place, kind = folder / places[name], unnumbered(name)
        if kind == "tokenizer":
            found[name] = read_tokenizer(place)
        else:
            is_whole = kind == "text_encoder" and family_in(place) is not None
            read = read_vae if kind == "vae" else read_prompts if is_whole else read_text_encoder
            found[name] = read(place, dtypes[kind])
    return found
