"""Images to one size, against torchvision's transforms, which diffusers' training scripts use."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hddm.data.images import Interpolation, fit_image
from tests.artefacts import refusal

SIZES = [(40, 30), (30, 41), (17, 17), (8, 8), (5, 9), (64, 8), (8, 13)]


def _image(width: int, height: int, gray: bool = False) -> Image.Image:
    shape = (height, width) if gray else (height, width, 3)
    return Image.fromarray(np.random.default_rng(width).integers(0, 256, shape).astype(np.uint8))


@pytest.mark.parametrize("interpolation", ["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"])
@pytest.mark.parametrize("size", SIZES)
def test_scaling_and_centre_crop_are_those_of_torchvision(
    size: tuple[int, int], interpolation: Interpolation
) -> None:
    transforms = pytest.importorskip("torchvision.transforms")
    mode = transforms.InterpolationMode(interpolation)
    theirs = transforms.Compose([transforms.Resize(8, interpolation=mode), transforms.CenterCrop(8)])
    for gray in (False, True):
        image = _image(*size, gray)
        ours = fit_image(image, 8, interpolation=interpolation)
        assert ours.size == (8, 8)
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs(image)))


@pytest.mark.parametrize("size", SIZES)
def test_a_random_crop_is_that_of_torchvision_at_its_place(size: tuple[int, int]) -> None:
    transforms = pytest.importorskip("torchvision.transforms")
    resize = transforms.Resize(8, interpolation=transforms.InterpolationMode.LANCZOS)
    scaled = np.asarray(resize(_image(*size)))
    height, width = scaled.shape[:2]
    places = {scaled[i : i + 8, j : j + 8].tobytes() for i in range(height - 7) for j in range(width - 7)}
    draws, before = torch.Generator().manual_seed(0), torch.get_rng_state()
    ours = {np.asarray(fit_image(_image(*size), 8, "random", generator=draws)).tobytes() for _ in range(400)}
    assert ours == places
    assert torch.equal(torch.get_rng_state(), before)


def test_a_centre_crop_without_scaling_takes_the_middle_by_hand() -> None:
    pixels = np.arange(8 * 12, dtype=np.uint8).reshape(8, 12)
    np.testing.assert_array_equal(np.asarray(fit_image(Image.fromarray(pixels), 8)), pixels[:, 2:10])
    np.testing.assert_array_equal(np.asarray(fit_image(Image.fromarray(pixels.T), 8)), pixels.T[2:10])


def test_a_strip_that_would_fill_the_memory_is_named() -> None:
    told = refusal(fit_image, Image.new("L", (100_000, 1)), 512, name=Path("a/strip.png"))
    assert "a/strip.png: 100000×1 becomes 51200000×512" in told
