"""Inception and CLIP features: those of clean-fid on the same files, which are random or small here."""

import json
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
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torchvision.models import inception_v3
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

from hddm.data.images import load_images
from hddm.evaluation import features as extractors
from hddm.evaluation.features import (
    CLIP,
    INCEPTION,
    PublishedWeights,
    choose_extractor,
    clip_features,
    open_extractor,
)
from hddm.utils.files import sha256_of
from tests.artefacts import Command, refusal

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

    def __init__(self, layers: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = layers or _Layers()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.fixture
def inception(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in where clean-fid's file would be."""
    return _put_in_place(torch.jit.script(_Inception()), home, monkeypatch)


def _put_in_place(network: Any, home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Save ``network`` as if it were the published file; return its folder."""
    folder = home / ".cache" / "clean-fid"
    folder.mkdir(parents=True)
    network.save(str(folder / INCEPTION.name))
    record = INCEPTION.record.model_copy(update={"hash": sha256_of(folder / INCEPTION.name)})
    monkeypatch.setattr(extractors, "INCEPTION", replace(INCEPTION, record=record))
    return folder


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Twelve images in colour."""
    return _draw(tmp_path / "pictures", 256)


def _draw(folder: Path, brightest: int) -> Path:
    folder.mkdir()
    for index, array in enumerate(np.random.default_rng(0).integers(0, brightest, (12, 20, 20, 3))):
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


@pytest.mark.slow
def test_evaluate_reports_the_fid_on_all_layers_of_inception(
    pictures: Path, tmp_path: Path, home: Path, hddm: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tr (C_a C_b)^½ is the sum of the singular values of A B^T / √((n-1)(m-1)), A and B centred."""
    torch.manual_seed(0)
    layers = inception_v3(weights=None, aux_logits=False, init_weights=False).eval()
    layers.fc = nn.Identity()
    with torch.no_grad():
        network = torch.jit.trace(_Inception(layers).eval(), torch.rand(2, 3, 299, 299))
    weights = _put_in_place(network, home, monkeypatch)
    # Each takes seconds with so many features.
    monkeypatch.setattr("hddm.evaluation.evaluate.RESAMPLES", 2)
    dark, result = _draw(tmp_path / "dark", 128), tmp_path / "fid.json"
    command = ["evaluate", dark, "--reference", pictures, "--features", "inception", "--allow-few"]
    code, _, err = hddm(*command, "--out", result)
    assert code == 0, err
    theirs = InceptionV3W(str(weights), download=False).eval()
    a, b = (_of_clean_fid(folder, theirs) for folder in (dark, pictures))
    means, parts = (a.mean(0), b.mean(0)), [(side - side.mean(0)) / len(side[1:]) ** 0.5 for side in (a, b)]
    cross = np.linalg.norm(parts[0] @ parts[1].T, "nuc")
    expected = np.square(means[0] - means[1]).sum() + sum(np.square(part).sum() for part in parts) - 2 * cross
    content = json.loads(result.read_text())
    assert content["splits"][0]["distance"]["value"] == pytest.approx(expected, rel=1e-3)
    assert content["features"]["name"] == INCEPTION.record.name


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
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    del tensors["visual_projection.weight"]
    save_file(tensors, file)
    told = "lacks 1 tensors of CLIP, as visual_projection.weight"
    assert told in refusal(clip_features, file, SMALL)


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
    few, many = choose_extractor(training, 2048), choose_extractor(training, 2049)
    assert few.record.name == "small classifier of the training images"
    assert few.record.choice == (
        "auto: not Inception, since it needs more than 2048 images a side and there are 2048"
    )
    assert (many.record.name, many.record.choice[:5]) == ("Inception (clean-fid)", "auto:")
    assert "more than 2048 images" in many.record.choice
    (inception / INCEPTION.name).unlink()
    assert "not on disk" in choose_extractor(training, 5000).record.choice


def test_the_folder_in_the_environment_comes_first_and_another_file_is_refused(
    images: Path, tmp_path: Path, inception: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extractors, "INCEPTION", INCEPTION)
    assert INCEPTION.find() == inception / INCEPTION.name
    told = refusal(open_extractor, "inception", load_images(images), 48)
    assert re.search(f"is another file .*{INCEPTION.record.hash}", told)
    (tmp_path / INCEPTION.name).touch()
    monkeypatch.setenv("HDDM_INCEPTION", str(tmp_path))
    assert INCEPTION.find() == tmp_path / INCEPTION.name
