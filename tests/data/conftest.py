"""Images that the tests of this room share. A test that spoils them copies them first."""

from pathlib import Path

import pytest

from tests.artefacts import write_images

PER_CLASS = 40


@pytest.fixture(scope="session")
def many(root: Path) -> Path:
    """80 images in two class folders."""
    return write_images(root / "many" / "images", PER_CLASS)
