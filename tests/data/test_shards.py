"""Shards: every image once, whole and unchanged, or not at all."""

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hddm.data.partition import partition
from hddm.data.shard_records import MIN_IMAGES, find_shards
from hddm.data.shards import open_shard
from tests.artefacts import CLASSES, PER_CLASS, contents, copied, edit_json, pixels_of, refusal


@pytest.fixture
def shard(shards: Path, tmp_path: Path) -> Path:
    """A shard to spoil, away from its partition."""
    return copied(shards / "shard_0", tmp_path)


def _rewrite(shard: Path, images: list[dict[str, Any]]) -> None:
    """Change the list of images, with a hash that fits: by a definition of the test's own."""
    manifest = json.loads((shard / "manifest.json").read_text())
    lines = [json.dumps(manifest["classes"])]
    lines += [f"{entry['file']} {entry['sha256']} {entry['label']}" for entry in images]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    edit_json(shard / "manifest.json", images=images, hash=digest)


def _entries(shard: Path) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads((shard / "manifest.json").read_text())["images"]
    return entries


def test_every_image_is_in_one_shard_with_its_label(images: Path, shards: Path) -> None:
    expected = contents(images)
    found: dict[str, bytes] = {}
    for folder in find_shards(shards):
        for entry in _entries(folder):
            name = entry["file"].removeprefix("images/")
            assert name not in found
            found[name] = (folder / entry["file"]).read_bytes()
            assert hashlib.sha256(found[name]).hexdigest() == entry["sha256"]
            assert CLASSES[entry["label"]] == name.split("/")[0]
    assert found == expected


def test_shards_follow_content_and_are_of_like_size_and_the_record_of_the_partition_says_so(
    shards: Path,
) -> None:
    loaded = [open_shard(folder) for folder in find_shards(shards)]
    for shard in loaded:
        assert max(shard.labels.bincount()) >= 0.8 * len(shard)
    record = json.loads((shards / "partition.json").read_text())
    assert record["hashes"] == [shard.hash for shard in loaded]
    assert record["sizes"] == [len(shard) for shard in loaded] == [PER_CLASS, PER_CLASS]
    assert (record["images"], record["features"], record["seed"]) == (2 * PER_CLASS, "pixel_pca", 0)


def test_a_shard_carried_away_is_complete(shard: Path, shards: Path) -> None:
    there, here = open_shard(shards / "shard_0"), open_shard(shard)
    assert torch.equal(pixels_of(there), pixels_of(here))
    assert (there.hash, there.index, there.num_shards) == (here.hash, here.index, 2)
    assert (here.classes, here.images.min() >= -1, here.images.max() <= 1) == (CLASSES, True, True)
    for pixels, entry in zip(pixels_of(here), _entries(shard), strict=True):
        with Image.open(shard / entry["file"]) as image:
            assert np.asarray(image).tolist() == pixels[0].tolist()


def test_shards_of_one_partition_share_a_name_and_no_others_do(
    images: Path, shards: Path, whole: Path, tmp_path: Path
) -> None:
    partition(images, tmp_path / "again", 2)
    assert contents(tmp_path / "again") == contents(shards)
    one, two = (open_shard(folder).partition for folder in find_shards(shards))
    assert one is not None
    assert one == two != open_shard(whole).partition


def test_an_older_shard_is_refused_with_the_remedy(shard: Path) -> None:
    edit_json(shard / "manifest.json", format="1.2")
    open_shard(shard)
    edit_json(shard / "manifest.json", format="1.1")
    told = "format 1.1 is no longer read; make the shard again, by hddm partition and hddm encode"
    assert told in refusal(open_shard, shard)


def test_a_changed_or_missing_image_is_refused_by_name(shard: Path) -> None:
    name = _entries(shard)[3]["file"]
    shutil.copyfile(shard / _entries(shard)[4]["file"], shard / name)
    assert f"{shard / name}: its content changed" in refusal(open_shard, shard)
    (shard / name).unlink()
    assert f"{shard / name}: no such file" in refusal(open_shard, shard)


@pytest.mark.parametrize("key", ["label", "file", "sha256", "classes"])
def test_a_changed_manifest_is_refused(key: str, shard: Path) -> None:
    entries, classes = _entries(shard), list(CLASSES)
    if key == "classes":
        classes.reverse()
    else:
        entries[0][key] = 1 - entries[0]["label"] if key == "label" else entries[1][key]
    edit_json(shard / "manifest.json", images=entries, classes=classes)
    assert "does not match its hash" in refusal(open_shard, shard)


@pytest.mark.parametrize("label", [2, -1])
def test_a_label_that_is_no_class_is_refused(label: int, shard: Path) -> None:
    entries = _entries(shard)
    entries[5]["label"] = label
    _rewrite(shard, entries)
    assert f"{entries[5]['file']} has label {label} of 2 classes" in refusal(open_shard, shard)


def test_a_path_outside_the_folder_is_refused_before_it_is_opened(shard: Path) -> None:
    secret = shard.parent / "secret.png"
    shutil.copyfile(shard / _entries(shard)[0]["file"], secret)
    (shard / "link.png").symlink_to(secret)
    for name in ("../secret.png", str(secret), "link.png", "images/../../secret.png"):
        entries = _entries(shard)
        entries[0]["file"] = name
        _rewrite(shard, entries)
        told = (
            "link.png: is a link to .*outside"
            if name == "link.png"
            else f"{name!r} points outside the folder"
        )
        assert re.search(told, refusal(open_shard, shard))


def test_a_list_that_fits_is_accepted_unless_it_is_too_short_to_train_on(shard: Path) -> None:
    """Else the other refusals would refuse everything."""
    entries = _entries(shard)
    _rewrite(shard, entries[:MIN_IMAGES])
    assert len(open_shard(shard)) == MIN_IMAGES
    _rewrite(shard, entries[:3])
    assert f"has 3 images; an expert needs at least {MIN_IMAGES}" in refusal(open_shard, shard)


def test_an_unknown_key_and_a_newer_format_are_named(shard: Path) -> None:
    edit_json(shard / "manifest.json", num_shard=3)
    assert "manifest.json: unknown key 'num_shard'; did you mean 'num_shards'?" in refusal(open_shard, shard)
    edit_json(shard / "manifest.json", format="2.0")
    assert "format 2.0 is newer" in refusal(open_shard, shard)


def test_a_folder_that_is_no_shard_is_named(tmp_path: Path) -> None:
    assert f"{tmp_path}: is not a shard (it has no manifest.json)" in refusal(open_shard, tmp_path)
    assert "is not a partition (it has no partition.json)" in refusal(find_shards, tmp_path)
    for read in (open_shard, find_shards):
        assert f"{tmp_path / 'missing'}: no such folder" in refusal(read, tmp_path / "missing")


def test_a_partition_is_no_shard_and_a_shard_no_partition(shards: Path, shard: Path) -> None:
    first = shards / "shard_0"
    said = f"{shards}: is a partition, not a shard; name one of its folders, as {first}"
    assert said in refusal(open_shard, shards)
    for folder, hint in ((first, f", {shards}"), (shard, "")):
        said = f"{folder}: is a shard, not a partition; name the folder of all shards{hint}"
        assert refusal(find_shards, folder) == said


def test_too_few_images_a_shard_are_refused_before_anything_is_written(images: Path, tmp_path: Path) -> None:
    told = "48 images are too few for `shards` 4: it takes 64"
    assert told in refusal(partition, images, tmp_path / "out", 4)
    assert not list(tmp_path.iterdir())


def test_an_existing_partition_is_replaced_only_when_asked(
    images: Path, shards: Path, tmp_path: Path
) -> None:
    out = copied(shards, tmp_path)
    assert "overwrite=True" in refusal(partition, images, out, 1)
    assert contents(out) == contents(shards)
    partition(images, out, 1, overwrite=True)
    assert len(find_shards(out)) == 1
