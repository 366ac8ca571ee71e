"""Features of images: those of the libraries that define them, whatever the images are like."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModel, CLIPVisionModelWithProjection

from hddm.data.features import SIDE, PixelPca, open_feature_extractor
from hddm.data.sources import open_source
from hddm.data.sources.base import ImageSource
from hddm.utils.streams import Use, stream
from tests.artefacts import edit_json, refusal
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
                rows.append(CLIPVisionModelWithProjection.from_pretrained(folder)(pixels).image_embeds[0])
            else:
                rows.append(AutoModel.from_pretrained(folder)(pixels).last_hidden_state[0, 0])
    expected = torch.stack(rows).numpy()
    assert features.shape == (5, 12 if kind == "clip_vision_model" else 16)
    np.testing.assert_allclose(features, expected, atol=1e-5 * np.abs(expected).max())
    assert np.abs(features[0] - features[1]).max() > 0.05 * np.abs(expected).max()


def test_other_weights_and_another_processor_are_another_extractor(tmp_path: Path) -> None:
    names = {}
    for seed in (0, 1):
        folder = write_vision_model(tmp_path / str(seed), "dinov2", seed)
        names[seed] = open_feature_extractor(str(folder)).identity
    again = open_feature_extractor(str(write_vision_model(tmp_path / "again", "dinov2", 0))).identity
    edit_json(tmp_path / "again" / "preprocessor_config.json", do_center_crop=False)
    cropped = open_feature_extractor(str(tmp_path / "again")).identity
    assert names[0] == again
    assert len({*names.values(), cropped}) == 3


def test_a_model_folder_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    for file, told in {
        "model.safetensors": "holds no model.safetensors",
        "preprocessor_config.json": "holds no preprocessor_config.json",
        "config.json": "config.json: no such file",
    }.items():
        folder = write_vision_model(tmp_path / file, "dinov2")
        (folder / file).unlink()
        torch.save({}, folder / "pytorch_model.bin")
        assert told in refusal(open_feature_extractor, str(folder))


def test_models_of_other_types_and_code_of_their_own_are_refused(tmp_path: Path) -> None:
    folder = write_vision_model(tmp_path / "model", "dinov2")
    edit_json(folder / "preprocessor_config.json", image_processor_type="MineProcessor")
    prepare = open_feature_extractor(str(folder)).prepare
    told = refusal(prepare, _source(tmp_path / "images", noise(1)), tmp_path)
    assert "image_processor_type MineProcessor is none of" in told
    edit_json(folder / "config.json", model_type="mine", auto_map={"AutoModel": "mine.Model"})
    assert "model_type 'mine' is not one of dinov2, " in refusal(open_feature_extractor, str(folder))
    told = refusal(open_feature_extractor, "pixel")
    assert told.startswith("`features` pixel: no such folder")
    assert "did you mean 'pixels'?" in told


def test_weights_that_lack_tensors_are_not_filled_with_random_ones(tmp_path: Path) -> None:
    folder = write_vision_model(tmp_path / "model", "dinov2")
    config = json.loads((folder / "config.json").read_text())
    edit_json(folder / "config.json", num_hidden_layers=config["num_hidden_layers"] + 1)
    prepare = open_feature_extractor(str(folder)).prepare
    told = refusal(prepare, _source(tmp_path / "images", noise(1)), tmp_path)
    assert re.search(r"its weights lack .* tensors of Dinov2Model", told)


@pytest.mark.parametrize("name", ["dinov2", "facebook/dinov2-small"])
def test_a_hub_name_without_network_and_cache_is_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    told = refusal(open_feature_extractor, name)
    assert told.startswith("`features` facebook/dinov2-")
    assert "is not in the cache and cannot be fetched" in told


def test_pixel_features_are_the_principal_components_of_a_sample_which_are_kept(tmp_path: Path) -> None:
    images = noise(50, 5, 4)
    source = _source(tmp_path / "images", images)
    extractor, again = (PixelPca(dimensions=6, sample=20, seed=5) for _ in range(2))
    extractor.prepare(source, tmp_path)
    flat = np.stack(images).reshape(50, -1) / 255
    rows = np.sort(np.random.default_rng(stream(5, Use.FEATURE_IMAGES)).choice(50, 20, replace=False))
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
