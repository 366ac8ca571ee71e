"""Features of images: those of the libraries that define them, computed once, whatever interrupts that."""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file, save
from transformers import AutoImageProcessor, AutoModel, CLIPVisionModelWithProjection

from hddm.data.features import (
    SIDE,
    ImageFeatures,
    PixelPca,
    compute_features,
    open_feature_extractor,
)
from hddm.data.sources import open_source
from hddm.data.sources.base import ImageSource
from hddm.utils.streams import Use, stream
from tests.artefacts import PER_CLASS, contents, copied, edit_json, refusal
from tests.shard_files import noise
from tests.vision_files import write_vision_model


def _source(folder: Path, images: list[np.ndarray]) -> ImageSource:
    folder.mkdir()
    for number, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{number:03d}.png")
    return open_source(folder)


@pytest.mark.parametrize("kind", ["dinov2", "dinov2_with_registers", "clip_vision_model"])
def test_features_of_a_vision_model_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    folder = write_vision_model(tmp_path / "model", kind)
    images = [*noise(3, 20, 30), *noise(2, 31, 17)]
    extractor = open_feature_extractor(str(folder))
    extractor.prepare(_source(tmp_path / "images", images), tmp_path)
    features = extractor(images)

    processor = AutoImageProcessor.from_pretrained(folder)
    rows = []
    for image in images:
        pixels = processor(Image.fromarray(image), return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            if kind == "clip_vision_model":
                rows.append(
                    CLIPVisionModelWithProjection.from_pretrained(folder)(pixels).image_embeds[0]
                )
            else:
                rows.append(AutoModel.from_pretrained(folder)(pixels).last_hidden_state[0, 0])
    expected = torch.stack(rows).numpy()
    assert features.shape == (5, 12 if kind == "clip_vision_model" else 16)
    np.testing.assert_allclose(features, expected, atol=1e-5 * np.abs(expected).max())
    assert np.abs(features[0] - features[1]).max() > 0.05 * np.abs(expected).max()


def test_pickled_models_other_types_and_code_of_their_own_are_refused(tmp_path: Path) -> None:
    folder = write_vision_model(tmp_path / "pickled", "dinov2")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    told = refusal(lambda: open_feature_extractor(str(folder)).identity)
    assert told == f"{folder / 'model.safetensors'}: no such file"
    for name, changes in (
        ("preprocessor_config.json", {"image_processor_type": "MineProcessor"}),
        ("config.json", {"model_type": "mine", "auto_map": {"AutoModel": "mine.Model"}}),
    ):
        folder = write_vision_model(tmp_path / name, "dinov2")
        edit_json(folder / name, **changes)
        assert "use one of dinov2, " in refusal(open_feature_extractor, str(folder))


def test_weights_that_lack_tensors_are_not_filled_with_random_ones(tmp_path: Path) -> None:
    folder = write_vision_model(tmp_path / "model", "dinov2")
    config = json.loads((folder / "config.json").read_text())
    edit_json(folder / "config.json", num_hidden_layers=config["num_hidden_layers"] + 1)
    prepare = open_feature_extractor(str(folder)).prepare
    told = refusal(prepare, _source(tmp_path / "images", noise(1)), tmp_path)
    assert re.search(r"its weights lack .* tensors of Dinov2Model", told)


def test_pixel_features_are_the_principal_components_of_a_sample_which_are_kept(
    tmp_path: Path,
) -> None:
    images = noise(50, 5, 4)
    source = _source(tmp_path / "images", images)
    extractor, again = (PixelPca(dimensions=6, sample=20, seed=5) for _ in range(2))
    extractor.prepare(source, tmp_path)
    flat = np.stack(images).reshape(50, -1) / 255
    rows = np.sort(
        np.random.default_rng(stream(5, Use.FEATURE_IMAGES)).choice(50, 20, replace=False)
    )
    centred = flat - flat[rows].mean(0)
    axes = np.linalg.svd(centred[rows], full_matrices=False)[2][:6]
    features = extractor(images)
    # An axis may point either way.
    np.testing.assert_allclose(np.abs(features), np.abs(centred @ axes.T), atol=1e-4)
    (tmp_path / "images" / "000.png").unlink()
    again.prepare(source, tmp_path)
    np.testing.assert_array_equal(again(images), features)


def test_images_of_any_size_are_compared_at_one_small_size(tmp_path: Path) -> None:
    """One picture in three sizes, twice, is nearer to its copies than to the other picture."""
    images = [
        np.asarray(Image.fromarray(first).resize((side, side + 10), Image.Resampling.BICUBIC))
        for first in noise(2, 8, 8)
        for side in (64, 100, 48)
    ]
    extractor = PixelPca()
    extractor.prepare(_source(tmp_path / "images", images), tmp_path)
    features = extractor(images)
    within = np.linalg.norm(features[:3] - features[0], axis=1).max()
    assert within < 0.2 * np.linalg.norm(features[3:] - features[0], axis=1).min()
    basis = np.asarray(extractor._components)
    assert basis.shape[1] == 3 * SIDE * SIDE


PART = 10
NUM = 2 * PER_CLASS


class Interrupted(BaseException):
    """As a signal is."""


class Counted(PixelPca):
    """Pixel features that count images, and are interrupted before more than ``most`` of them."""

    batch = 4

    def __init__(self, most: int = 10**6) -> None:
        super().__init__(dimensions=4)
        self.most, self.images = most, 0

    def __call__(self, images: Sequence[NDArray[np.uint8]]) -> NDArray[np.float32]:
        self.images += len(images)
        if self.images > self.most:
            raise Interrupted
        return super().__call__(images)


@pytest.fixture
def source(images: Path, tmp_path: Path) -> ImageSource:
    """Images that a test may spoil."""
    return open_source(copied(images, tmp_path))


def _compute(
    source: ImageSource, folder: Path, extractor: PixelPca | None = None, **options: int
) -> ImageFeatures:
    return compute_features(source, extractor or Counted(), folder, part=PART, **options)


def test_features_are_in_the_order_of_images_and_computed_once(
    source: ImageSource, tmp_path: Path
) -> None:
    found = _compute(source, tmp_path / "cache")
    extractor = Counted()
    extractor.prepare(source, tmp_path / "cache")
    pixels = [np.asarray(Image.open(source.root / name).convert("RGB")) for name in source.files]
    np.testing.assert_allclose(found[np.arange(NUM)], extractor(pixels), atol=1e-6)
    rows = np.random.default_rng(0).permutation(NUM)[:17]
    np.testing.assert_array_equal(found[rows], found[np.arange(NUM)][rows])
    for digest, name in zip(found.files, source.files, strict=True):
        assert digest.tobytes() == hashlib.sha256((source.root / name).read_bytes()).digest()
    before, again = contents(tmp_path / "cache"), Counted()
    _compute(source, tmp_path / "cache", again)
    assert again.images == 0
    assert contents(tmp_path / "cache") == before


@pytest.mark.parametrize("most", [0, 10, 25])
def test_an_interrupted_run_goes_on_with_the_same_bits(
    most: int, source: ImageSource, tmp_path: Path
) -> None:
    _compute(source, tmp_path / "whole")
    with pytest.raises(Interrupted):
        _compute(source, tmp_path / "cache", Counted(most))
    rest = Counted()
    _compute(source, tmp_path / "cache", rest)
    assert rest.images == NUM - most // PART * PART
    assert contents(tmp_path / "cache") == contents(tmp_path / "whole")


def test_features_of_other_images_are_refused_unless_they_may_go(
    source: ImageSource, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    _compute(source, cache)
    assert "  extractor: was " in refusal(_compute, source, cache, PixelPca(dimensions=4, seed=1))
    path = source.root / source.files[6]
    path.write_bytes(path.read_bytes() + b"\0")
    assert "  source: was " in refusal(_compute, open_source(source.root), cache)
    (source.root / source.files[5]).unlink()
    fewer = open_source(source.root)
    told = refusal(_compute, fewer, cache)
    assert told.startswith(f"{cache}: holds features of other images")
    assert "  images: was 48, is 47" in told.splitlines()
    _compute(fewer, cache, replace=True)
    _compute(fewer, tmp_path / "fresh")
    assert contents(cache) == contents(tmp_path / "fresh")
    (cache / "features.json").unlink()
    before = contents(cache)
    told = refusal(_compute, fewer, cache, replace=True)
    assert f"{cache}: has files, but no features.json; move it away, or choose another" in told
    assert contents(cache) == before


def test_a_spoilt_part_is_made_again(source: ImageSource, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    _compute(source, cache)
    whole, part = contents(cache), cache / "part_00002.safetensors"
    record = part.with_name(f"{part.name}.done.json")
    good = load_file(part)
    nan = good["features"].clone()
    nan[0] = torch.nan
    spoilt = [
        part.read_bytes()[:-7],
        *(save(good | {"features": one}) for one in (nan, nan[:, :1].contiguous())),
    ]
    for path, content in [*((part, one) for one in spoilt), (record, b"{"), (record, b"{}")]:
        path.write_bytes(content)
        again = Counted()
        _compute(source, cache, again)
        assert again.images == PART
        assert contents(cache) == whole
    (cache / "part_00000.safetensors").unlink()
    _compute(source, cache)
    assert contents(cache) == whole


@pytest.mark.parametrize("rows", [list(range(10, 20)), [9, 10, 47]])
def test_broken_images_are_left_out_by_name(
    rows: list[int], source: ImageSource, tmp_path: Path
) -> None:
    whole = _compute(source, tmp_path / "whole")
    for row in rows:
        (source.root / source.files[row]).write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    _, *lines = refusal(_compute, source, tmp_path / "strict", max_bad=len(rows) - 1).splitlines()
    for line, row in zip(lines, rows, strict=True):
        assert line.startswith(f"  {source.root / source.files[row]}: cannot be read")
    found = _compute(source, tmp_path / "strict", max_bad=len(rows))
    assert sorted(found.broken) == rows
    assert found.rows.tolist() == [row for row in range(NUM) if row not in rows]
    np.testing.assert_array_equal(found.files, whole.files[found.rows])
    assert found[np.array([0, len(found) - 1])].shape == (2, 4)


def test_features_that_are_not_finite_are_refused_by_image(
    source: ImageSource, tmp_path: Path
) -> None:
    class Spoilt(Counted):
        def __call__(self, images: Sequence[NDArray[np.uint8]]) -> NDArray[np.float32]:
            features = super().__call__(images)
            if self.images == 8:
                features[2] = np.nan
            return features

    told = f"{source.root / source.files[6]}: pixel_pca gives NaN or Inf for it"
    assert told in refusal(_compute, source, tmp_path / "cache", Spoilt())
