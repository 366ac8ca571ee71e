"""Images that the tests of this room share. A test that spoils them copies them first."""

from pathlib import Path

import pytest

from hddm.evaluation.features import classifier_of, save_classifier
from tests.artefacts import load_images, write_images


@pytest.fixture(scope="session")
def many(root: Path) -> Path:
    """160 images in two class folders: more than the classifier has features."""
    return write_images(root / "evaluated" / "images", per_class=80)


@pytest.fixture(scope="session")
def classifier(root: Path, many: Path) -> str:
    """File of a classifier of these images."""
    file = root / "evaluated" / "classifier.safetensors"
    save_classifier(classifier_of(load_images(many)), file)
    return str(file)
