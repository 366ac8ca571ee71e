"""Inception features: those of clean-fid on the same file, which is random here."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from cleanfid import fid
from cleanfid.inception_torchscript import InceptionV3W
from PIL import Image
from torch import Tensor, nn

from hddm.data.images import to_unit_range
from hddm.evaluation import feature_names
from hddm.evaluation import features as extractors
from hddm.evaluation.feature_names import INCEPTION, INCEPTION_FILE, find_inception
from hddm.evaluation.features import open_extractor
from hddm.utils.files import sha256_of
from tests.artefacts import Command, load_images, refusal


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
    torch.jit.script(_Inception()).save(str(folder / INCEPTION_FILE))
    record = INCEPTION.model_copy(update={"hash": sha256_of(folder / INCEPTION_FILE)})
    for module in (extractors, feature_names):
        monkeypatch.setattr(module, "INCEPTION", record)
    return folder


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Twelve images in colour."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for index, array in enumerate(np.random.default_rng(0).integers(0, 256, (12, 20, 20, 3))):
        Image.fromarray(array.astype(np.uint8)).save(folder / f"{index:02d}.png")
    return folder


def test_features_are_those_of_clean_fid(inception: Path, pictures: Path, home: Path) -> None:
    images = load_images(pictures)
    extractor = open_extractor("inception", images, 12)
    network, options = (
        InceptionV3W(str(inception), download=False).eval(),
        {"mode": "clean", "verbose": False},
    )
    theirs = fid.get_folder_features(
        str(pictures), network, num_workers=0, device=torch.device("cpu"), **options
    )
    ours = extractor.features(to_unit_range(images.pixels))
    np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-4, atol=1e-4)
    assert extractor.record.dimensions == 2048
    assert extractor.record.hash == sha256_of(inception / INCEPTION_FILE)
    assert "299" in extractor.record.resize


def test_missing_weights_are_one_error_with_all_that_is_needed(
    images: Path, home: Path, hddm: Command
) -> None:
    code, out, err = hddm("evaluate", images, "--reference", images, "--features", "inception")
    assert (code, out, err.count("\n")) == (1, "", 1)
    for part in (INCEPTION_FILE, "https://", INCEPTION.hash, str(home / ".cache/clean-fid")):
        assert part in err


def test_what_auto_took_and_why_is_said(images: Path, inception: Path, home: Path) -> None:
    training = load_images(images)
    few, many = (open_extractor("auto", training, n) for n in (2048, 2049))
    assert few.record.name == "small classifier of the training images"
    assert few.record.choice == (
        "auto: not Inception, since it needs more than 2048 images per side and there are 2048"
    )
    assert (many.record.name, many.record.choice[:5]) == ("Inception (clean-fid)", "auto:")
    assert "more than 2048 images" in many.record.choice
    (inception / INCEPTION_FILE).unlink()
    assert "not on disk" in open_extractor("auto", training, 5000).record.choice


def test_the_folder_in_the_environment_comes_first_and_another_file_is_refused(
    images: Path, tmp_path: Path, inception: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (extractors, feature_names):
        monkeypatch.setattr(module, "INCEPTION", INCEPTION)
    assert find_inception() == inception / INCEPTION_FILE
    told = refusal(open_extractor, "inception", load_images(images), 48)
    assert re.search(f"is another file; fetch .*{INCEPTION.hash}", told)
    (tmp_path / INCEPTION_FILE).touch()
    monkeypatch.setenv("HDDM_INCEPTION", str(tmp_path))
    assert find_inception() == tmp_path / INCEPTION_FILE
