"""Images in memory and brought to one size: what is read, and what is refused by name."""

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

from hddm.data.images import (
    OversizedImageError,
    decode_image,
    fit_image,
    open_holes,
    read_image,
    to_bytes,
    to_unit_range,
)
from hddm.utils.errors import HddmError
from tests.artefacts import load_images, refusal
from tests.shard_files import as_file, bomb

NOISE = np.random.default_rng(0)
GRAY = NOISE.integers(0, 256, (5, 7)).astype(np.uint8)
COLOUR = NOISE.integers(0, 256, (5, 7, 3)).astype(np.uint8)


def _write(path: Path, pixels: np.ndarray, mode: str | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(pixels)
    (image.convert(mode) if mode else image).save(path)
    return path


def test_gray_stays_gray_and_becomes_colour_among_colour(tmp_path: Path) -> None:
    gray, colour = _write(tmp_path / "g" / "1.png", GRAY), _write(tmp_path / "c" / "1.png", COLOUR)
    assert torch.equal(load_images(gray.parent).pixels, torch.from_numpy(GRAY)[None, None])
    expected = torch.from_numpy(COLOUR).permute(2, 0, 1)[None]
    assert torch.equal(load_images(colour.parent).pixels, expected)
    both = load_images(tmp_path)
    assert torch.equal(both.pixels[:1], expected)
    assert torch.equal(both.pixels[1], torch.from_numpy(GRAY).expand(3, -1, -1))


@pytest.mark.parametrize("mode", ["RGBA", "P", "CMYK", "LA", "1"])
def test_other_8_bit_modes_are_converted(mode: str, tmp_path: Path) -> None:
    suffix = ".jpg" if mode == "CMYK" else ".png"
    path = _write(tmp_path / f"a{suffix}", COLOUR, mode)
    with Image.open(path) as image:
        assert image.mode == mode
        expected = np.asarray(image.convert("L" if mode == "1" else "RGB"))
    pixels = load_images(tmp_path).pixels[0].permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(pixels.squeeze(), expected)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bit_gray_is_scaled_to_8_bits_by_rounding(kind: str) -> None:
    deep = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    expected = np.round(deep / 257).astype(np.uint8)
    assert (expected.min(), expected.max()) == (0, 255)
    np.testing.assert_array_equal(decode_image(as_file(deep, kind), Path("deep")), expected)


# What each orientation asks for, by the EXIF standard: first row and first column of the upright image.
TURNS = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: a[::-1].swapaxes(0, 1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: a[:, ::-1].swapaxes(0, 1),
}


@pytest.mark.parametrize("orientation", TURNS)
@pytest.mark.parametrize(
    "pixels", [GRAY, COLOUR, GRAY.astype(np.uint16) * 257], ids=["gray", "colour", "deep"]
)
def test_exif_orientation_is_applied(orientation: int, pixels: np.ndarray) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = as_file(pixels, "PNG", exif=exif)
    expected = TURNS[orientation](GRAY if pixels.dtype == np.uint16 else pixels)
    np.testing.assert_array_equal(decode_image(content, Path("a")), expected)


def test_transparency_is_dropped_and_shows_the_colours_below() -> None:
    alpha = NOISE.integers(0, 256, (5, 7, 1)).astype(np.uint8)
    content = as_file(np.concatenate([COLOUR, alpha], 2), "PNG")
    np.testing.assert_array_equal(decode_image(content, Path("a")), COLOUR)
    found, opaque = read_image(content, Path("a")), read_image(as_file(COLOUR, "PNG"), Path("a"))
    assert (found.mode, found.format, found.is_transparent) == ("RGBA", "PNG", True)
    assert not opaque.is_transparent


@pytest.mark.filterwarnings("error")
def test_a_palette_with_several_transparent_colours_gives_its_colours_and_no_warning() -> None:
    palette = NOISE.integers(0, 256, (4, 3)).astype(np.uint8)
    image = Image.fromarray(GRAY % 4, "P")
    image.putpalette(palette.tobytes())
    content = as_file(image, "PNG", transparency=bytes([0, 255, 128, 7]))
    np.testing.assert_array_equal(decode_image(content, Path("a")), palette[GRAY % 4])


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("width", "told"), [(9460, "is 9460×9460, more than"), (10**6, "has more than")]
)
def test_a_decompression_bomb_is_named_before_it_is_decoded(width: int, told: str) -> None:
    with pytest.raises(OversizedImageError, match=f"bomb.png: {told} 89478485 pixels"):
        decode_image(bomb(width, 9460), Path("bomb.png"))


def test_formats_of_other_programs_are_not_handed_to_them() -> None:
    assert "a.png: cannot be read as an image" in refusal(
        decode_image, as_file(COLOUR, "EPS"), Path("a.png")
    )


def test_an_image_of_another_size_and_a_broken_one_are_named(tmp_path: Path) -> None:
    _write(tmp_path / "1.png", GRAY)
    path = _write(tmp_path / "2.png", GRAY[:4])
    assert "2.png: is 7×4, 1.png is 7×5; hddm encode --resolution N" in refusal(
        load_images, tmp_path
    )
    path.write_bytes(path.read_bytes()[:40])
    assert f"{path}: cannot be read as an image" in refusal(load_images, tmp_path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_damage_of_any_kind_is_an_error_that_names_the_file(kind: str) -> None:
    whole = as_file(NOISE.integers(0, 256, (40, 40, 3)).astype(np.uint8), kind)
    draws, refused = np.random.default_rng(1), 0
    damaged = [whole[:n] for n in range(0, 60)]
    for _ in range(150):
        content = bytearray(whole)
        for place in draws.integers(0, 60, 3).tolist():
            content[place] = int(draws.integers(256))
        damaged.append(bytes(content))
    for content in damaged:
        try:
            decode_image(content, Path("some.file"))
        except HddmError as error:
            assert str(error).startswith("some.file: ")  # noqa: PT017
            refused += 1
    assert refused >= 60


def test_bytes_map_linearly_to_minus_one_to_one_and_values_beyond_are_clipped_or_refused() -> None:
    levels = torch.arange(256, dtype=torch.uint8)
    expected = torch.linspace(-1, 1, 256, dtype=torch.float64)
    torch.testing.assert_close(to_unit_range(levels).double(), expected, rtol=0, atol=1e-7)
    assert torch.equal(to_bytes(expected.float()), levels)
    assert to_bytes(torch.tensor([-1.3, 1.2, -9.0, 9.0])).tolist() == [0, 255, 0, 255]
    for value in (torch.nan, torch.inf):
        images = torch.zeros(4, 1, 2, 2)
        images[2, 0, 1, 1] = value
        assert re.search(r"1 images hold NaN or Inf.*\[2\]", refusal(to_bytes, images))


SIZES = [(40, 30), (30, 41), (17, 17), (8, 8), (5, 9), (64, 8), (8, 13)]


def _image(width: int, height: int, gray: bool = False) -> Image.Image:
    shape = (height, width) if gray else (height, width, 3)
    return Image.fromarray(np.random.default_rng(width).integers(0, 256, shape).astype(np.uint8))


@pytest.mark.parametrize("size", SIZES)
def test_scaling_and_centre_crop_are_those_of_torchvision(size: tuple[int, int]) -> None:
    transforms = pytest.importorskip("torchvision.transforms")
    mode = transforms.InterpolationMode.LANCZOS
    theirs = transforms.Compose(
        [transforms.Resize(8, interpolation=mode), transforms.CenterCrop(8)]
    )
    for gray in (False, True):
        image = _image(*size, gray)
        ours = fit_image(image, 8)
        assert ours.size == (8, 8)
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs(image)))


def test_a_strip_that_would_fill_the_memory_is_named() -> None:
    told = refusal(fit_image, Image.new("L", (100_000, 1)), 512, name=Path("a/strip.png"))
    assert "a/strip.png: 100000×1 becomes 51200000×512" in told


def test_holes_are_what_is_fully_transparent_in_every_mode() -> None:
    """With levels of alpha, in a palette, beside gray, turned by EXIF, and none without transparency."""
    alpha = np.array([[0, 1, 128], [255, 0, 254]], np.uint8)
    white = np.where(alpha == 0, 255, 0)
    colour = Image.new("RGB", (3, 2), "red").convert("RGBA")
    colour.putalpha(Image.fromarray(alpha))
    gray = colour.convert("LA")
    palette = Image.fromarray(np.array([[0, 1, 2], [3, 0, 1]], np.uint8))
    palette.putpalette(list(range(12)))
    turned = Image.Exif()
    turned[ExifTags.Base.Orientation] = 3
    cases: list[tuple[Image.Image, dict[str, Any], Any]] = [
        (colour, {}, white),
        (gray, {}, white),
        (palette, {"transparency": 0}, white),
        (colour, {"exif": turned}, white[::-1, ::-1]),
        (colour.convert("RGB"), {}, None),
        (palette, {}, None),
    ]
    for image, options, expected in cases:
        file = io.BytesIO()
        image.save(file, "png", **options)
        found = open_holes(file.getvalue(), Path("mask"))
        if expected is None:
            assert found is None
        else:
            assert (np.asarray(found) == expected).all()
