"""The VAE of a latent expert: read strictly, identified by its encoder, decoding latents to images."""

import contextlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hddm.networks.components import STEM, Held, read_config, read_weights
from hddm.networks.encoders import READ_VAES, VAES
from hddm.networks.folders import (
    empty_network,
    fill,
    of_diffusers,
    parse_config,
    refuse_other_tensors,
    stored_names,
)
from hddm.networks.identity import Scaling, UnreadVae, VaeRecord, fingerprint
from hddm.utils.errors import HddmError, one_line
from hddm.utils.memory import Fitting
from hddm.utils.tensors import refuse_non_finite

if TYPE_CHECKING:
    from hddm.networks.vae_types import Vae

VAE_CLASSES = of_diffusers(*READ_VAES)
LARGEST_SCALE = 1e6
AT_ONCE = 2**22
"""Pixels that are decoded together: those of four pictures of 1024×1024."""
_ENCODER = ("encoder.", "quant_conv.")
_PER_CHANNEL = ("latents_mean", "latents_std")


def read_vae(folder: Path, dtype: torch.dtype = torch.float32) -> "Vae":
    """Read the VAE in a diffusers folder, in evaluation mode, whatever the dtype of its file.

    Raises `HddmError` for a file that is missing or leaves the folder, another class, an unknown config key,
    an unsound scale of latents, and tensors that are missing, left over, of another shape or not finite.
    """
    network, weights, arguments, path = _open(folder)
    refuse_non_finite(path, weights)
    fill(network, {key: value.to(dtype) for key, value in weights.items()}, arguments, str(path))
    return network


def vae_record_of(place: Path | Held, variant: str | None = None) -> VaeRecord:
    """Identity of the latent space of the VAE in a folder, preferably from its file of ``variant``.

    Scale and shift are the config's, or the documented defaults of its class. Raises as `read_vae`.
    """
    network, weights, _, _ = _open(place, variant)
    found = fingerprint(_encoder_of(weights))
    kind, scaling = type(network).__name__, scaling_of(network.config)
    return VaeRecord(kind=kind, fingerprint=found, **asdict(scaling))


def _encoder_of(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in weights.items() if key.startswith(_ENCODER)}


def identify_vae(place: Path | Held, variant: str | None = None) -> VaeRecord | UnreadVae:
    """As `vae_record_of`; of a VAE that cannot be read, its class and content as far as they can be."""
    try:
        return vae_record_of(place, variant)
    except HddmError as error:
        path = place.path if isinstance(place, Held) else place
        reason = one_line(error.message.replace(str(path), path.name), 300)
        return _unread(place, variant, reason)


def _unread(place: Path | Held, variant: str | None, reason: str) -> UnreadVae:
    """What can still be known of a VAE that cannot be read."""
    config: dict[str, Any] = {}
    with contextlib.suppress(HddmError):
        config = dict(place.config) if isinstance(place, Held) else read_config(place)
    kind = one_line(config.get("_class_name"), 60)
    scale, shift = None, None
    if not any(config.get(key) is not None for key in _PER_CHANNEL):
        with contextlib.suppress(HddmError):
            default = VAES[kind].default_scale if kind in VAES else None
            scale, shift = scale_and_shift({"scaling_factor": default} | config)
    found = None
    with contextlib.suppress(HddmError):
        if isinstance(place, Held):
            weights = place.weights
        else:
            _, weights = read_weights(place, STEM, variant)
        found = fingerprint(_encoder_of(weights) or weights)
    return UnreadVae(kind=kind, reason=reason, fingerprint=found, scale=scale, shift=shift)


def vae_class(vae: nn.Module) -> str:
    """Class of a VAE, compiled or not."""
    return type(getattr(vae, "_orig_mod", vae)).__name__


def scale_of(vae: "Vae") -> int:
    """Ratio of the VAE's image width to its latent width."""
    levels = vae.config.get("decoder_block_out_channels") or vae.config["block_out_channels"]
    return int(2 ** (len(levels) - 1))


def encode(vae: "Vae", images: Tensor) -> tuple[Tensor, Tensor | None]:
    """Mean and standard deviation (N, C, h, w) of z for ``images`` (N, 3, H, W) in [-1, 1], float32.

    z is neither shifted nor scaled; some classes have no deviation (`hddm.networks.encoders`). Raises
    `HddmError` for images that the VAE does not take, and for z that is not finite.
    """
    factor, channels = scale_of(vae), vae.config.in_channels
    has_odd_side = any(side % factor for side in images.shape[2:])
    if images.ndim != 4 or images.shape[1] != channels or has_odd_side:
        sizes = f"images (N, {channels}, H, W) with H and W multiples of {factor}"
        raise HddmError(f"the VAE encodes {sizes}, not {tuple(images.shape)}")
    with torch.no_grad():
        encoded = vae.encode(images.to(vae.device, vae.dtype))
    distribution = getattr(encoded, "latent_dist", None)
    what, remedy = "latents of images", "encode in float32"
    if distribution is None:
        _refuse_images(encoded.latents, what, remedy)
        return encoded.latents.float(), None
    _refuse_images(distribution.mean, what, remedy)
    _refuse_images(distribution.std, what, remedy)
    return distribution.mean.float(), distribution.std.float()


def latents_of(vae: "Vae", images: Tensor) -> Tensor:
    """Latents (N, C, h, w) for the mean of z, scaled as samples are; `decode` makes ``images`` of them."""
    return scaling_of(vae.config).samples(encode(vae, images)[0])


def decode(vae: "Vae", latents: Tensor) -> Tensor:
    """Decode samples (N, C, h, w) to images (N, 3, H, W) in [-1, 1], float32.

    The decoder gets z, which the latents are scaled from (`Scaling`); its output is clipped to [-1, 1]. A
    float16 VAE whose config has ``force_upcast``, such as Stable Diffusion XL's, decodes in float32, since it
    would overflow. As many images as `AT_ONCE` pixels hold are decoded together, fewer where these do not
    fit the memory, and one larger than that in overlapping tiles (diffusers' ``enable_tiling``).

    Raises `HddmError` for latents or images that are not finite, and for one that does not fit the memory.
    """
    _refuse_images(latents, "latents", "the samples are broken before any VAE")
    scaling, given = scaling_of(vae.config), vae.dtype
    upcast = given == torch.float16 and vae.config.force_upcast
    try:
        if upcast:
            # Not diffusers' own `to`, which warns of such a cast.
            nn.Module.to(vae, torch.float32)
        z = scaling.z(latents.to(vae.device, torch.float32))
        images = _decoded(vae, z.to(vae.dtype))
    finally:
        if upcast:
            # Lossless: these numbers come from float16.
            nn.Module.to(vae, given)
    _refuse_images(
        images, "images", f"decode in float32 instead of {str(given).removeprefix('torch.')}"
    )
    return images.clamp(-1, 1)


def _decoded(vae: "Vae", z: Tensor) -> Tensor:
    """Images (N, 3, H, W) of ``z``, float32, in parts."""
    pixels = scale_of(vae) ** 2 * z.shape[-2] * z.shape[-1]
    is_tiled = pixels > AT_ONCE and hasattr(vae, "enable_tiling")
    was_tiled = getattr(vae, "use_tiling", False)

    def part(first: int, end: int) -> Tensor:
        with torch.no_grad():
            found: Tensor = vae.decode(z[first:end], return_dict=False)[0]
        return found.float()

    if is_tiled and not was_tiled:
        vae.enable_tiling()
    try:
        parts = Fitting("images to decode", max(1, AT_ONCE // pixels)).run(len(z), part)
    finally:
        if is_tiled and not was_tiled:
            vae.disable_tiling()
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _open(
    place: Path | Held, variant: str | None = None
) -> tuple[Any, dict[str, Tensor], dict[str, Any], Path]:
    """The empty VAE in ``place``, its tensors under current names, its arguments and the file."""
    if isinstance(place, Held):
        origin, config = str(place.path), dict(place.config)
    else:
        origin, config = str(place / "config.json"), read_config(place)
    stated = config.get("_class_name")
    if isinstance(stated, str) and stated in VAES:
        for key in VAES[stated].derived:
            config.pop(key, None)
    kind, arguments = parse_config(config, VAE_CLASSES, origin)
    if isinstance(place, Held):
        path, stored = place.path, place.weights
    else:
        path, stored = read_weights(place, STEM, variant)
    network = empty_network(kind, arguments, len(stored), origin)
    names = stored_names(network.state_dict(), stored)
    weights = {name: stored[old] for name, old in names.items() if old in stored}
    used = set(names.values())
    left = {old: value for old, value in stored.items() if old not in used}
    refuse_other_tensors(network.state_dict(), weights | left, path)
    scaling_of(network.config, origin)
    return network, weights, arguments, path


def scale_and_shift(
    config: Mapping[str, Any], origin: str = "the VAE's config"
) -> tuple[float, float]:
    """Factors of latents by a VAE's config; `HddmError` for what is no number in their range."""
    scale, shift = config["scaling_factor"], config.get("shift_factor") or 0.0
    are_numbers = isinstance(scale, int | float) and isinstance(shift, int | float)
    if not are_numbers or not 0 < scale < LARGEST_SCALE or not abs(shift) < LARGEST_SCALE:
        stated = f"scaling_factor {str(scale)[:40]} and shift_factor {str(shift)[:40]}"
        raise HddmError(
            f"{origin}: {stated} must be numbers below {LARGEST_SCALE:.0e}, the first positive"
        )
    return float(scale), float(shift)


def scaling_of(config: Mapping[str, Any], origin: str = "the VAE's config") -> Scaling:
    """How a VAE's config scales latents: by two numbers, or by statistics of each channel and one.

    Raises `HddmError` for what is no number in its range, and statistics without each other, of another
    number of channels, or beside a shift.
    """
    scale, shift = scale_and_shift(config, origin)
    stated = [key for key in _PER_CHANNEL if config.get(key) is not None]
    if not stated:
        return Scaling(scale, shift)
    if len(stated) == 1:
        (missing,) = set(_PER_CHANNEL) - set(stated)
        raise HddmError(f"{origin}: states {stated[0]} of each channel, without {missing}")
    if shift:
        raise HddmError(f"{origin}: states a shift_factor beside the latents_mean of each channel")
    mean, deviation = (config[key] for key in _PER_CHANNEL)
    channels = config.get("latent_channels")
    for key, values, least in (
        (_PER_CHANNEL[0], mean, -LARGEST_SCALE),
        (_PER_CHANNEL[1], deviation, 1 / LARGEST_SCALE),
    ):
        fits = isinstance(values, list | tuple) and len(values) == channels
        fits = fits and all(isinstance(one, int | float) for one in values)
        if not fits or not all(least <= one <= LARGEST_SCALE for one in values):
            raise HddmError(
                f"{origin}: {key} {str(values)[:60]} must be {channels} numbers, one for each channel, from "
                f"{least:g} to {LARGEST_SCALE:g}"
            )
    return Scaling(scale, 0.0, tuple(map(float, mean)), tuple(map(float, deviation)))


def _refuse_images(batch: Tensor, what: str, remedy: str) -> None:
    """Raise `HddmError` that names the rows of ``batch`` with NaN or Inf, if there are any."""
    broken = [str(i) for i, one in enumerate(batch) if not one.isfinite().all()]
    if broken:
        raise HddmError(
            f"{what} {', '.join(broken[:10])} of {len(batch)} hold NaN or Inf; {remedy}"
        )
