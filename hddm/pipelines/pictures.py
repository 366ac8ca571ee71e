"""Pictures into and out of a pipeline: what samples begin with, and what a VAE makes of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from diffusers import AutoencoderKL, AutoencoderTiny
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn.functional import adaptive_max_pool2d

from hddm.conditions import Conditions
from hddm.data.images import as_trained, to_unit_range
from hddm.editing import DEFAULT_RESAMPLING, Picture
from hddm.experts.ensemble_folders import ENSEMBLE_FILE, numbered
from hddm.networks.vae import decode, latents_of, scale_of
from hddm.pipelines.parts import Offloading
from hddm.running import Batch, Plan
from hddm.utils.errors import HddmError
from hddm.utils.records import EXPERT_FILE

Vae: TypeAlias = AutoencoderKL | AutoencoderTiny
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
    edit_from: str | None = None


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


class Pictures(Offloading):
    """What a pipeline does with pictures and its VAEs."""

    ensemble: Any
    _folder: Path | None = None

    @property
    def _no_vae(self) -> str:
        """That there is no VAE and how to add one, in words."""
        if (folder := self._folder) is None:
            remedy = "vae="
        elif (folder / EXPERT_FILE).exists():
            remedy = f"hddm assemble {folder} --vae FOLDER --out ENSEMBLE"
        elif (folder / ENSEMBLE_FILE).exists():
            remedy = f"hddm assemble {folder} --vae FOLDER"
        else:
            remedy = f"as {folder / 'vae'}"
        return f" and has no VAE; add one ({remedy})"

    def vae_of(self, expert: int) -> Vae | None:
        """The VAE of an expert's latents; None for pixels, and if there is none."""
        number = self.ensemble.vaes[expert]
        return None if number < 0 else getattr(self, numbered("vae", number))

    def picture(self, begin: Begin, expert: int, source: Conditions | None = None) -> Picture | None:
        """What images begin with, in an expert's units, encoded by its VAE, and conditions that describe it.

        A latent is new if any of its pixels is. Raises `HddmError` for a strength or mask without an image,
        and for pictures that do not fit.
        """
        image, mask_image, strength = begin.image, begin.mask_image, begin.strength
        if image is None:
            if strength is not None or mask_image is not None or begin.edit_from is not None:
                lone = "`edit_from`" if mask_image is None else "`mask`"
                lone = lone if strength is None else f"`strength` {strength:g}"
                raise HddmError(f"{lone}: changes a picture; pass one (`init_image`, image=)")
            return None
        if strength is None:
            strength = 0.8 if mask_image is None else 1.0
        part, (size, shape) = self.vae_of(expert), self.size_and_shape(expert, begin.height, begin.width)
        if part is None and not self.experts.facts[expert].makes_pictures and not isinstance(image, Tensor):
            raise HddmError(f"image: expert {expert} makes latents {shape}{self._no_vae}, or pass latents")
        x_0 = pixels = pixels_of(image, shape[0] if part is None else part.config.in_channels, size)
        mask = pixel_mask = None if mask_image is None else mask_of(mask_image, image, size)
        if part is not None:
            with self.present(part) as vae:
                x_0 = latents_of(vae, pixels)
            if pixel_mask is not None:
                mask = adaptive_max_pool2d(pixel_mask.float(), shape[1:]) > 0
        return Picture(x_0.cpu(), strength, mask, begin.resampling_steps, pixels, pixel_mask, source)

    def images_of(self, how: Plan, batch: Batch, samples: Tensor) -> Tensor:
        """Images of a batch's samples (`decode`), in which its picture keeps its own pixels."""
        picture = how.picture(batch.kind)
        return self.decode(samples, batch.kind, None if picture is None else picture.rows(batch.rows))

    def decode(self, latents: Tensor, expert: int = 0, picture: Picture | None = None) -> Tensor:
        """Images (N, C, H, W) in [-1, 1] of an expert's samples: decoded by its VAE, or clipped pixels.

        Pixels that a ``picture`` keeps are its own.
        """
        if (part := self.vae_of(expert)) is None:
            images = latents.float().clamp(-1, 1)
        else:
            with self.present(part) as vae:
                images = decode(vae, latents.to(vae.device))
        return images if picture is None else picture.kept_in(images)

    @property
    def image_size(self) -> tuple[int, int]:
        """Image height and width in pixels; of the first expert if they differ."""
        return self.size_and_shape(0)[0]

    def size_and_shape(
        self, expert: int, height: int | None = None, width: int | None = None
    ) -> tuple[tuple[int, int], tuple[int, ...]]:
        """Image height and width in pixels, by default an expert's own, and the shape of its samples.

        Raises `HddmError` for sides that its VAE cannot have.
        """
        (channels, *own), vae = self.experts.facts[expert].sample_shape, self.vae_of(expert)
        factor = 1 if vae is None else scale_of(vae)
        size = (height or factor * own[0], width or factor * own[1])
        if any(not isinstance(side, int) or side < 1 or side % factor for side in size):
            raise HddmError(f"`height` {size[0]}, `width` {size[1]}: must be multiples of {factor} pixels")
        return size, (channels, size[0] // factor, size[1] // factor)
