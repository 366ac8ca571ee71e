"""Folders of images in memory: what is read, and what is refused by name."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hddm.data.images import decode, load_images, save_png, to_bytes, to_unit_range
from hddm.errors import HddmError

NOISE = np.random.default_rng(0)
GRAY = NOISE.integers(0, 256, (5, 7)).astype(np.uint8)
COLOUR = NOISE.integers(0, 256, (5, 7, 3)).astype(np.uint8)


def _write(path: Path, pixels: np.ndarray, mode: str | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(pixels)
    (image.convert(mode) if mode else image).save(path)
    return path


def _refusal(folder: Path) -> str:
    with pytest.raises(HddmError) as caught:
        load_images(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_class_folders_become_labels_in_sorted_order(tmp_path: Path) -> None:
    for name, value in (("b/1.png", 20), ("a/2.png", 10), ("a/deep/1.png", 30)):
        _write(tmp_path / name, np.full((2, 2), value, np.uint8))
    images = load_images(tmp_path)
    assert images.files == ("a/2.png", "a/deep/1.png", "b/1.png")
    assert images.classes == ("a", "b")
    assert images.labels is not None
    assert images.labels.tolist() == [0, 0, 1]
    assert images.pixels[:, 0, 0, 0].tolist() == [10, 30, 20]


def test_a_flat_folder_has_no_labels(tmp_path: Path) -> None:
    _write(tmp_path / "1.png", GRAY)
    _write(tmp_path / "a" / "2.png", GRAY)
    images = load_images(tmp_path)
    assert images.labels is None
    assert images.classes == ()
    assert len(images) == 2


def test_gray_stays_gray_and_colour_keeps_its_channels(tmp_path: Path) -> None:
    gray, colour = _write(tmp_path / "g" / "1.png", GRAY), _write(tmp_path / "c" / "1.png", COLOUR)
    assert torch.equal(load_images(gray.parent).pixels, torch.from_numpy(GRAY)[None, None])
    expected = torch.from_numpy(COLOUR).permute(2, 0, 1)[None]
    assert torch.equal(load_images(colour.parent).pixels, expected)


def test_gray_among_colour_becomes_colour(tmp_path: Path) -> None:
    _write(tmp_path / "1.png", GRAY)
    _write(tmp_path / "2.png", COLOUR)
    pixels = load_images(tmp_path).pixels
    assert pixels.shape == (2, 3, 5, 7)
    for channel in pixels[0]:
        assert torch.equal(channel, torch.from_numpy(GRAY))


@pytest.mark.parametrize("mode", ["RGBA", "P", "CMYK", "LA", "1"])
def test_other_8_bit_modes_are_converted(mode: str, tmp_path: Path) -> None:
    suffix = ".jpg" if mode == "CMYK" else ".png"
    path = _write(tmp_path / f"a{suffix}", COLOUR, mode)
    with Image.open(path) as image:
        assert image.mode == mode
        expected = np.asarray(image.convert("L" if mode == "1" else "RGB"))
    pixels = load_images(tmp_path).pixels[0].permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(pixels.squeeze(), expected)


def test_16_bit_gray_is_refused_with_a_remedy(tmp_path: Path) -> None:
    _write(tmp_path / "deep.png", GRAY.astype(np.uint16) * 256)
    message = _refusal(tmp_path)
    assert "deep.png" in message
    assert "convert it" in message


def test_images_of_another_size_are_named(tmp_path: Path) -> None:
    _write(tmp_path / "1.png", GRAY)
    _write(tmp_path / "2.png", GRAY[:4])
    message = _refusal(tmp_path)
    assert "2.png: is 7×4, 1.png is 7×5" in message


@pytest.mark.parametrize("name", ["a.JPEG", "b.Jpg", "c.WebP", "d.BMP"])
def test_suffixes_in_any_case_are_found(name: str, tmp_path: Path) -> None:
    _write(tmp_path / name, COLOUR)
    assert load_images(tmp_path).files == (name,)


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    _write(tmp_path / "1.png", GRAY)
    (tmp_path / "notes.txt").write_text("no image")
    assert load_images(tmp_path).files == ("1.png",)


def test_missing_and_empty_folders_are_refused(tmp_path: Path) -> None:
    assert "no such folder" in _refusal(tmp_path / "missing")
    assert "holds no images" in _refusal(tmp_path)


def test_a_broken_png_is_named(tmp_path: Path) -> None:
    _write(tmp_path / "good.png", GRAY)
    (tmp_path / "bad.png").write_bytes((tmp_path / "good.png").read_bytes()[:40])
    assert f"{tmp_path / 'bad.png'}: cannot be read as an image" in _refusal(tmp_path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP"])
def test_damage_of_any_kind_is_an_error_that_names_the_file(kind: str) -> None:
    buffer = io.BytesIO()
    Image.fromarray(NOISE.integers(0, 256, (40, 40, 3)).astype(np.uint8)).save(buffer, kind)
    whole, draws, refused = buffer.getvalue(), np.random.default_rng(1), 0
    damaged = [whole[:n] for n in range(0, 60)]
    for _ in range(150):
        content = bytearray(whole)
        for place in draws.integers(0, 60, 3).tolist():
            content[place] = int(draws.integers(256))
        damaged.append(bytes(content))
    for content in damaged:
        try:
            decode(content, Path("some.file"))
        except HddmError as error:
            assert str(error).startswith("some.file: ")  # noqa: PT017
            refused += 1
    assert refused >= 60


def test_bytes_map_linearly_to_minus_one_to_one() -> None:
    levels = torch.arange(256, dtype=torch.uint8)
    expected = torch.linspace(-1, 1, 256, dtype=torch.float64)
    torch.testing.assert_close(to_unit_range(levels).double(), expected, rtol=0, atol=1e-7)
    assert torch.equal(to_bytes(expected.float()), levels)


def test_values_beyond_the_range_are_clipped_not_wrapped() -> None:
    assert to_bytes(torch.tensor([-1.3, 1.2, -9.0, 9.0])).tolist() == [0, 255, 0, 255]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_images_that_are_not_finite_are_refused_by_number(value: float) -> None:
    images = torch.zeros(4, 1, 2, 2)
    images[2, 0, 1, 1] = value
    with pytest.raises(HddmError, match=r"1 images hold NaN or Inf.*\[2\]"):
        to_bytes(images)


@pytest.mark.parametrize("pixels", [GRAY[None], COLOUR.transpose(2, 0, 1)], ids=["gray", "colour"])
def test_a_saved_png_opens_elsewhere_as_it_was(pixels: np.ndarray, tmp_path: Path) -> None:
    save_png(torch.from_numpy(pixels.copy()), tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        again = np.asarray(image)
    np.testing.assert_array_equal(again if again.ndim == 2 else again.transpose(2, 0, 1), pixels.squeeze())
