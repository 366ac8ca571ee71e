"""Images that a training is measured on: what names them, and that none of them is trained on."""

from pathlib import Path

import pytest
import torch
from PIL import Image

from hddm.data.held_out import open_held_out
from hddm.data.images import to_unit_range
from hddm.data.partition import partition
from hddm.data.shards import open_shard
from tests.artefacts import draw, refusal, write_images
from tests.component_files import write_vae
from tests.shard_files import as_file, encode, noise, write_partition, write_shard


@pytest.fixture(scope="module")
def shards(many: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards, and what is held out of each."""
    out = tmp_path_factory.mktemp("held_out") / "shards"
    partition(many, out, 2, held_out=0.4)
    return out


def test_a_partition_stands_for_what_it_holds_out_of_the_shard_in_training(shards: Path) -> None:
    for k in range(2):
        training, held_out = open_shard(shards / f"shard_{k}"), shards / "held_out" / f"shard_{k}"
        for place in (shards, shards / "held_out", held_out):
            assert open_held_out(place, training).hash == open_shard(held_out).hash


def test_another_partition_stands_for_all_that_it_holds_out(
    shards: Path, many: Path, tmp_path: Path
) -> None:
    partition(many, tmp_path / "whole", 1, held_out=0.4)
    found = open_held_out(shards, open_shard(tmp_path / "whole" / "shard_0"))
    each = [open_shard(shards / "held_out" / f"shard_{k}") for k in range(2)]
    assert found.images.equal(torch.cat([one.images for one in each]))
    assert found.labels.equal(torch.cat([one.labels for one in each]))


def test_a_folder_of_images_is_measured_on_as_it_is(shards: Path, tmp_path: Path) -> None:
    training = open_shard(shards / "shard_0")
    fresh = write_images(tmp_path / "fresh", per_class=5, seed=50)
    found = open_held_out(fresh, training)
    assert (len(found), found.shape, found.classes) == (10, training.shape, training.classes)
    assert found.labels.tolist() == [0] * 5 + [1] * 5
    expected = draw("columns", 5, seed=50)
    assert found.images[:5].allclose(to_unit_range(expected))


def test_gray_images_are_in_colour_where_the_training_is(tmp_path: Path) -> None:
    write_shard(tmp_path / "shard", noise(20))
    (tmp_path / "fresh").mkdir()
    (tmp_path / "fresh" / "0.png").write_bytes(as_file(noise(1, seed=5, colour=False)[0]))
    assert open_held_out(tmp_path / "fresh", open_shard(tmp_path / "shard")).shape == (3, 8, 8)


def test_an_image_that_is_trained_on_is_refused_by_its_pixels(shards: Path, tmp_path: Path) -> None:
    training = open_shard(shards / "shard_0")
    trained = min((shards / "shard_0" / "images").rglob("*.png"))
    fresh = write_images(tmp_path / "fresh", per_class=5, seed=50)
    with Image.open(trained) as image:
        image.save(fresh / "columns" / "other.png", compress_level=0)
    told = refusal(open_held_out, fresh, training)
    assert told.startswith(
        f"`held_out` {fresh}: 1 of 11 images are also training images of {training.folder}, such as "
        f"columns/other.png, which is {trained.relative_to(training.folder)} there; remove them here, or"
    )
    for own in (training.folder, training.folder / "images"):
        assert "all its images are also training images" in refusal(open_held_out, own, training)


def test_latents_that_are_trained_on_are_refused_by_the_hashes_of_their_files(
    tmp_path: Path,
) -> None:
    write_vae(tmp_path / "vae")
    parts = write_partition(tmp_path / "parts", held_out=4)
    write_shard(tmp_path / "copy", [*noise(20, seed=7), *noise(1, seed=0)])
    write_shard(tmp_path / "fresh", noise(20, seed=7))
    latents: dict[str, Path] = {}
    for name in ("parts", "copy", "fresh"):
        latents[name] = encode(tmp_path / name, tmp_path / "latents" / name, vae=tmp_path / "vae")
    training = open_shard(latents["parts"] / "shard_0")
    assert len(open_held_out(latents["parts"], training)) == 4
    assert len(open_held_out(latents["fresh"], training)) == 20
    told = refusal(open_held_out, latents["copy"], training)
    assert "1 of 21 images are also training images" in told
    assert "such as images/020.png, which is images/000.png there" in told
    pixels = refusal(open_held_out, parts, training)
    assert "holds pixels of shape (3, 8, 8), and" in pixels
    assert "latents of shape (4, 4, 4); encode both alike (hddm encode)" in pixels
