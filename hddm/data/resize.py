"""Images to one size, with the options of diffusers' training scripts.

``train_text_to_image`` scales the shorter side to ``--resolution`` with ``--image_interpolation_mode``
(lanczos by default), then cuts a square from the middle (``--center_crop``) or from anywhere. Scaling is
Pillow's, whose filters widen where images shrink, as in torchvision's transforms of Pillow images.
"""

from typing import Literal

import torch
from PIL import Image

from hddm.data.decoding import LARGEST_IMAGE
from hddm.errors import HddmError

Crop = Literal["center", "random"]
Interpolation = Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"]


def fit_image(
    image: Image.Image,
    resolution: int,
    crop: Crop = "center",
    interpolation: Interpolation = "lanczos",
    generator: torch.Generator | None = None,
    name: object = "image",
) -> Image.Image:
    """``image`` as a square of ``resolution`` pixels a side.

    The shorter side becomes ``resolution``, the longer one floor(resolution × longer / shorter); then a
    square is cut. An image that has the size already stays as it is.

    Args:
        image: in mode L or RGB.
        resolution: pixels of a side, at least 1.
        crop: ``center``, where an odd pixel goes as in torchvision (half is rounded to even), or ``random``.
        interpolation: Pillow's filter of that name.
        generator: of the place of a random crop: uniform, one draw for rows, then one for columns; torch's
            own without.
        name: for the message.

    Raises:
        HddmError: for an image so long that it would have more than `LARGEST_IMAGE` pixels when scaled.
    """
    width, height = image.size
    shorter = min(width, height)
    size = resolution * width // shorter, resolution * height // shorter
    if size[0] * size[1] > LARGEST_IMAGE:
        raise HddmError(f"{name}: {width}×{height} becomes {size[0]}×{size[1]}; crop it or remove it")
    if size != image.size:
        image = image.resize(size, Image.Resampling[interpolation.upper()])
    spare = size[1] - resolution, size[0] - resolution
    if crop == "center":
        top, left = (round(pixels / 2) for pixels in spare)
    else:
        top, left = (
            int(torch.randint(pixels + 1, (), generator=generator)) if pixels else 0 for pixels in spare
        )
    if size == (resolution, resolution):
        return image
    return image.crop((left, top, left + resolution, top + resolution))
