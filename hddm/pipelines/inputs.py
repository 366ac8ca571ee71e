"""Arguments of a pipeline's calls: options of diffusers, dtypes, noise, pictures."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from hddm.data.images import as_trained, to_unit_range
from hddm.experts.model_index import COMPONENTS
from hddm.networks.text_encoder import read_text_encoder, read_tokenizer
from hddm.networks.vae import read_vae
from hddm.noise import Generated, Generators, Latents, Noise, Seeded
from hddm.utils.errors import HddmError, did_you_mean

_NO: Collection[object] = (None, False)
_NONE: Collection[object] = (None,)
LOADING: Mapping[str, Collection[object]] = {
    "local_files_only": (True, False, None),
    "use_safetensors": (True, None),
    "low_cpu_mem_usage": (True, False, None),
    "device_map": ("cpu", None),
    "subfolder": ("", None),
    **dict.fromkeys(("variant", "revision", "custom_revision", "custom_pipeline"), _NONE),
    **dict.fromkeys(("quantization_config", "offload_folder", "safety_checker", "max_memory"), _NONE),
    **dict.fromkeys(("trust_remote_code", "force_download", "load_connected_pipeline", "use_onnx"), _NO),
    **dict.fromkeys(("offload_state_dict", "output_loading_info", "requires_safety_checker"), _NO),
    **dict.fromkeys(("use_flashpack", "disable_mmap"), _NO),
}
"""Keywords of diffusers' loaders, with the values that have no effect here."""
SAVING: Mapping[str, Collection[object]] = {
    "safe_serialization": (True, None),
    **dict.fromkeys(("variant", "max_shard_size", "repo_id", "commit_message", "subfolder"), _NONE),
    **dict.fromkeys(("push_to_hub", "private", "create_pr"), _NO),
}
CALLING: Mapping[str, tuple[Collection[object], str]] = {
    "eta": ((None, 0), "samples follow an ODE, and eta is the noise of DDIM's steps"),
    "timesteps": (_NONE, "pass num_inference_steps; the grid is linear in t, but for the scheduler's shift"),
    "sigmas": (_NONE, "pass num_inference_steps; the grid is linear in t, but for the scheduler's shift"),
    "guidance_rescale": ((None, 0), "pass guidance_scale=hddm.velocity.Guidance(scale, rescale=…)"),
    "clip_skip": (_NONE, "the experts take the layer that they were trained with"),
    "cross_attention_kwargs": (_NONE, "a LoRA is an expert of its own here (hddm convert)"),
    "callback": (_NONE, "pass callback_on_step_end"),
    "callback_steps": ((None, 1), "pass callback_on_step_end"),
}
"""Keywords of diffusers' calls: the values that have no effect here, and what to do about others."""
_OURS = {"num_images": "num_images_per_prompt", "steps": "num_inference_steps"}
"""Keywords of a call by the names of ``hddm sample``."""
_OF_DOWNLOADS = ("cache_dir", "token", "proxies")
"""Keywords without effect on a local folder, whatever their value; a token must not get into a message."""
_REMEDIES = {
    "device_map": '; move the pipeline by .to("cuda")',
    "push_to_hub": '; call push_to_hub("OWNER/NAME") of the pipeline',
}
PARTS = ("scheduler", "router", *COMPONENTS)
"""Parts that are passed to diffusers' loaders in place of those in a folder."""

NETWORKS = ("experts", "router", "vae", "text_encoder")
"""Parts that have a dtype."""

Dtype = torch.dtype | str | Mapping[str, torch.dtype | str] | None
Images = Image.Image | np.ndarray[Any, Any] | Tensor | Sequence[Image.Image]
"""As diffusers takes them: of Pillow, arrays (N, H, W, C) in [0, 1], tensors (N, C, H, W) in [-1, 1]."""


def noise_from(
    num: int,
    shape: tuple[int, ...],
    seed: int | None,
    start: int,
    generator: Generators,
    latents: Tensor | None,
) -> Noise:
    """The noise of ``num`` images from ``start`` on, by the arguments of a call; see `hddm.noise`."""
    if min(seed or 0, start) < 0:
        raise HddmError(f"seed and start begin at 0, not at {seed} and {start}")
    if start and seed is None:
        raise HddmError(f"start {start} counts images under a seed; pass one")
    if seed is not None and generator is not None:
        raise HddmError("pass a seed or a generator, not both")
    if latents is not None and latents.shape != (num, *shape):
        raise HddmError(f"latents are {tuple(latents.shape)}, and {num} images need {(num, *shape)}")
    if seed is None:
        return Generated(generator, num, shape, latents)
    return Seeded(seed) if latents is None else Latents(latents, start, Seeded(seed))


def pixels_of(images: Images, channels: int, size: tuple[int, int], name: str = "image") -> Tensor:
    """Pictures (N, C, H, W) in [-1, 1]; those of Pillow are cropped and resized to ``size`` (H, W).

    Raises `HddmError` for arrays and tensors of another size or range, and for other types.
    """
    if isinstance(images, Image.Image):
        images = [images]
    if isinstance(images, np.ndarray):
        if images.size and not 0 <= images.min() <= images.max() <= 1:
            raise HddmError(f"{name}: array of {images.min():g} to {images.max():g}; pass pixels from 0 to 1")
        images = torch.from_numpy(images).float().movedim(-1, -3) * 2 - 1
    if isinstance(images, Tensor):
        pixels = images.float() if images.ndim == 4 else images.float()[None]
    elif isinstance(images, Sequence) and images and all(isinstance(one, Image.Image) for one in images):
        kind = "L" if channels == 1 else "RGB"
        told = [as_trained(one, name).convert(kind) for one in images]
        fitted = [ImageOps.fit(one, size[::-1], Image.Resampling.LANCZOS) for one in told]
        rows = [torch.from_numpy(np.array(one)).view(*size, channels) for one in fitted]
        pixels = to_unit_range(torch.stack(rows).movedim(-1, 1))
    else:
        kinds = " and ".join(sorted({type(one).__name__ for one in _listed(images)})) or "nothing"
        raise HddmError(f"{name}: pass pictures of Pillow, an array or a tensor, not {kinds}")
    if pixels.ndim != 4 or pixels.shape[1:] != (channels, *size):
        raise HddmError(f"{name} is {tuple(pixels.shape)}, and this ensemble makes {(channels, *size)}")
    return pixels


def mask_of(masks: Images, images: Images, size: tuple[int, int]) -> Tensor:
    """Masks (N, 1, H, W) of ``images``, True where they are at least half white.

    Raises `HddmError` as `pixels_of`, for masks with nothing white, and for pictures of Pillow of another
    aspect than their images, which are cropped otherwise.
    """
    if isinstance(masks, np.ndarray | Tensor):
        # A mask is in [0, 1] as diffusers has it, in tensors too.
        found = torch.as_tensor(masks).float()
        if found.shape[-1] == 1 and found.ndim > 2:
            found = found.movedim(-1, -3)
        if found.ndim < 4:
            found = found.view(-1, 1, *found.shape[-2:])
        if found.shape[1:] != (1, *size):
            raise HddmError(f"mask_image is {tuple(found.shape)}, and this ensemble makes {(1, *size)}")
        is_open = found >= 0.5
    else:
        is_open = pixels_of(masks, 1, size, "mask_image") >= 0
        sides = [one.size for one in (*_listed(masks), *_listed(images)) if isinstance(one, Image.Image)]
        ratios = [width / height for width, height in sides]
        if max(ratios) > 1.02 * min(ratios):
            of, other = ("×".join(map(str, one)) for one in (sides[0], sides[-1]))
            raise HddmError(f"mask_image of {of} pixels is cropped unlike image, of {other}; crop them alike")
    if not is_open.flatten(1).any(1).all():
        raise HddmError("mask_image: no pixel is white, so nothing would be new; paint what is to change")
    return is_open


def _listed(images: Images) -> Sequence[object]:
    return images if isinstance(images, Sequence) else [images]


def refuse_options(call: str, options: Mapping[str, Any], harmless: Mapping[str, Collection[object]]) -> None:
    """Refuse keywords whose value would change what hddm does in one way only."""
    for name, value in options.items():
        known = (type(one) is type(value) and one == value for one in harmless.get(name, ()))
        if name not in _OF_DOWNLOADS and not any(known):
            remedy = _REMEDIES.get(name, "")
            raise HddmError(
                f"{call}({name}={value!r}) is not supported; nothing but a local folder of safetensors is "
                f"read or written, and no code of it runs{remedy}"
            )


def refuse_call_options(options: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse keywords of a call that are not ``known``, or whose value would change something."""
    for name, value in options.items():
        if name not in CALLING:
            near = did_you_mean(_OURS.get(name, name), [*known, *CALLING])
            raise TypeError(f"HDDMPipeline takes no {name!r}{near}")
        harmless, remedy = CALLING[name]
        if value not in harmless:
            raise HddmError(f"{name}={value!r} is not supported: {remedy}")


def dtypes_of(dtype: Dtype, torch_dtype: Dtype) -> dict[str, torch.dtype]:
    """Dtype of each of `NETWORKS`, as diffusers' loaders take it: one for all, or a dictionary by part.

    A part that a dictionary leaves out has that of ``default``, or float32, which ``auto`` stands for too.
    ``torch_dtype`` is the former name. Raises `HddmError` for both at once, another part, and what is no
    floating dtype.
    """
    if dtype is not None and torch_dtype is not None:
        raise HddmError(f"pass dtype={dtype}, or torch_dtype={torch_dtype}, its former name; not both")
    asked = torch_dtype if dtype is None else dtype
    by_part = dict(asked) if isinstance(asked, Mapping) else {"default": asked}
    for name, value in by_part.items():
        if name not in (*NETWORKS, "default"):
            known = f"has {', '.join(NETWORKS)} and default{did_you_mean(name, NETWORKS)}"
            raise HddmError(f"dtype: there is no part {name!r}; an ensemble {known}")
        if value not in ("auto", None) and not (isinstance(value, torch.dtype) and value.is_floating_point):
            raise HddmError(f"dtype {value!r}: pass a floating dtype of torch's, such as torch.bfloat16")
    found = {name: by_part.get(name, by_part.get("default")) for name in NETWORKS}
    return {name: one if isinstance(one, torch.dtype) else torch.float32 for name, one in found.items()}


def read_parts(
    folder: Path, places: Mapping[str, str], dtypes: Mapping[str, torch.dtype], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Parts of a pipeline: those ``given``, and the other `COMPONENTS`, by their ``places`` in a folder."""
    found = dict(given)
    for name, place in places.items():
        if name in given:
            continue
        match kind := name.rstrip("_23"):
            case "vae":
                found[name] = read_vae(folder / place, dtypes[kind])
            case "text_encoder":
                found[name] = read_text_encoder(folder / place, dtypes[kind])
            case "tokenizer":
                found[name] = read_tokenizer(folder / place)
    return found
