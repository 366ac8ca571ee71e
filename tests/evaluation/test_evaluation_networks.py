"""Inception and CLIP features: those of clean-fid on the same files, which are random or small here."""

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cleanfid import fid
from cleanfid.inception_torchscript import InceptionV3W
from PIL import Image
from torch import Tensor, nn
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

from hddm.evaluation import features as extractors
from hddm.evaluation.features import (
    CLIP,
    INCEPTION,
    PublishedWeights,
    clip_features,
    open_extractor,
)
from hddm.utils.files import sha256_of
from tests.artefacts import Command, load_images, refusal

SMALL = CLIPVisionConfig(
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    patch_size=56,
    intermediate_size=32,
    projection_dim=12,
)


class _Layers(nn.Module):
    """Stands in for Inception's layers: as many features, of images of the same size."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(3 * 6 * 6, 2048)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.adaptive_avg_pool2d(x, [6, 6]).flatten(1))


class _Inception(nn.Module):
    """As in the published file, ``layers`` takes images of 299×299 in [-1, 1] and gives 2048 features."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _Layers()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.fixture
def inception(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in where clean-fid's file would be."""
    folder = home / ".cache" / "clean-fid"
    folder.mkdir(parents=True)
    torch.jit.script(_Inception()).save(str(folder / INCEPTION.name))
    record = INCEPTION.record.model_copy(update={"hash": sha256_of(folder / INCEPTION.name)})
    monkeypatch.setattr(extractors, "INCEPTION", replace(INCEPTION, record=record))
    return folder


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Twelve images in colour."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for index, array in enumerate(np.random.default_rng(0).integers(0, 256, (12, 20, 20, 3))):
        Image.fromarray(array.astype(np.uint8)).save(folder / f"{index:02d}.png")
    return folder


def _of_clean_fid(folder: Path, model: Callable[[Tensor], Any], **more: Any) -> np.ndarray:
    found: np.ndarray = fid.get_folder_features(
        str(folder), model, num_workers=0, device=torch.device("cpu"), mode="clean", verbose=False, **more
    )
    return found


def test_inception_features_are_those_of_clean_fid(inception: Path, pictures: Path, home: Path) -> None:
    images = load_images(pictures)
    extractor = open_extractor("inception", images, 12)
    theirs = _of_clean_fid(pictures, InceptionV3W(str(inception), download=False).eval())
    ours = extractor.features(images.normalised)
    np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-4, atol=1e-4)
    assert (extractor.record.dimensions, extractor.record.hash) == (
        2048,
        sha256_of(inception / INCEPTION.name),
    )
    assert "299" in extractor.record.resize


def test_clip_features_are_those_of_clean_fid(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its CLIP-FID runs OpenAI's package, for which transformers' network of the same weights stands in."""
    torch.manual_seed(0)
    network = CLIPVisionModelWithProjection(SMALL).eval()
    network.save_pretrained(tmp_path / "clip")
    openai = SimpleNamespace(encode_image=lambda x: network(pixel_values=x).image_embeds, eval=lambda: None)
    monkeypatch.setitem(sys.modules, "clip", SimpleNamespace(load=lambda name, device: (openai, None)))
    monkeypatch.delitem(sys.modules, "cleanfid.clip_features", raising=False)
    from cleanfid.clip_features import CLIP_fx, img_preprocess_clip

    theirs = _of_clean_fid(pictures, CLIP_fx(device="cpu"), custom_fn_resize=img_preprocess_clip)
    file = tmp_path / "clip" / "model.safetensors"
    ours = clip_features(file, SMALL)(load_images(pictures).normalised)
    assert ours.shape == (12, 12)
    np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-4, atol=1e-5)


def test_the_defaults_of_transformers_are_vit_b_32() -> None:
    """OpenAI's: 12 layers of 768 in 12 heads on patches of 32 of 224 pixels, to 512, with quick_gelu."""
    config = CLIPVisionConfig()
    sizes = (config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.patch_size)
    assert sizes == (12, 768, 12, 32)
    assert (config.image_size, config.projection_dim, config.intermediate_size) == (224, 512, 3072)
    assert (config.hidden_act, config.layer_norm_eps) == ("quick_gelu", 1e-5)


@pytest.mark.parametrize(("features", "file"), [("inception", INCEPTION), ("clip", CLIP)])
def test_missing_weights_are_one_error_with_all_that_is_needed(
    features: str, file: PublishedWeights, images: Path, home: Path, hddm: Command
) -> None:
    code, out, err = hddm("evaluate", images, "--reference", images, "--features", features)
    assert (code, out, err.count("\n")) == (1, "", 1)
    for part in (file.name, file.url, file.record.hash, str(home / file.folder)):
        assert part in err


def test_what_auto_took_and_why_is_said(images: Path, inception: Path, home: Path) -> None:
    training = load_images(images)
    few, many = (open_extractor("auto", training, n) for n in (2048, 2049))
    assert few.record.name == "small classifier of the training images"
    assert few.record.choice == (
        "auto: not Inception, since it needs more than 2048 images a side and there are 2048"
    )
    assert (many.record.name, many.record.choice[:5]) == ("Inception (clean-fid)", "auto:")
    assert "more than 2048 images" in many.record.choice
    (inception / INCEPTION.name).unlink()
    assert "not on disk" in open_extractor("auto", training, 5000).record.choice


def test_the_folder_in_the_environment_comes_first_and_another_file_is_refused(
    images: Path, tmp_path: Path, inception: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extractors, "INCEPTION", INCEPTION)
    assert INCEPTION.find() == inception / INCEPTION.name
    told = refusal(open_extractor, "inception", load_images(images), 48)
    assert re.search(f"is another file; fetch .*{INCEPTION.record.hash}", told)
    (tmp_path / INCEPTION.name).touch()
    monkeypatch.setenv("HDDM_INCEPTION", str(tmp_path))
    assert INCEPTION.find() == tmp_path / INCEPTION.name
