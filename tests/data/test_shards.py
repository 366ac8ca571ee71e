"""Shards, of images or encoded: every image once, whole and unchanged, or not at all."""

import hashlib
import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from hddm.data.partition import partition
from hddm.data.shard_records import MEAN, MIN_IMAGES, find_shards
from hddm.data.shards import Rows, Samples, open_shard
from hddm.networks.identity import VaeRecord
from hddm.utils import records as verified
from hddm.utils.files import sha256_of
from tests.artefacts import CLASSES, PER_CLASS, contents, copied, edit_json, pixels_of, refusal
from tests.component_files import write_vae
from tests.shard_files import encode, noise, write_shard


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


def test_shards_follow_content_and_are_of_like_size(shards: Path) -> None:
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


def test_shards_of_one_partition_share_a_name(
    images: Path, shards: Path, whole: Path, tmp_path: Path
) -> None:
    partition(images, tmp_path / "again", 2)
    assert contents(tmp_path / "again") == contents(shards)
    one, two = (open_shard(folder).partition for folder in find_shards(shards))
    assert one is not None
    assert one == two != open_shard(whole).partition


def test_a_changed_or_missing_image_is_refused_by_name(shard: Path) -> None:
    name = _entries(shard)[3]["file"]
    shutil.copyfile(shard / _entries(shard)[4]["file"], shard / name)
    assert f"{shard / name}: its content changed" in refusal(open_shard, shard)
    (shard / name).unlink()
    assert f"{shard / name}: no such file" in refusal(open_shard, shard)


def test_a_file_in_place_of_a_shard_is_called_one(shard: Path) -> None:
    file = shard / "manifest.json"
    assert (
        refusal(open_shard, file)
        == f"{file}: is a file, and a shard is a folder; hddm partition writes one"
    )


def test_a_changed_manifest_is_refused(shard: Path) -> None:
    for key in ("label", "file", "sha256"):
        entries = _entries(shard)
        entries[0][key] = 1 - entries[0]["label"] if key == "label" else entries[1][key]
        edit_json(copied(shard, shard.parent / key) / "manifest.json", images=entries)
        assert "does not match its hash" in refusal(open_shard, shard.parent / key / shard.name)
    edit_json(shard / "manifest.json", classes=[*reversed(CLASSES)])
    assert "does not match its hash" in refusal(open_shard, shard)


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
            else "points outside the folder"
        )
        assert re.search(told, refusal(open_shard, shard))


SCALE, SHIFT = 0.4, 0.1


@pytest.fixture(scope="module")
def encoded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Latents of 20 images and of their mirror images, in several files."""
    root = tmp_path_factory.mktemp("encoded")
    write_shard(root / "source", noise(20), [n % 2 for n in range(20)])
    write_vae(root / "vae", scaling_factor=SCALE, shift_factor=SHIFT)
    return encode(root / "source", root / "latents", 6, vae=root / "vae", random_flip=True)


def _stored(folder: Path, name: str) -> torch.Tensor:
    files = [load_file(path)[name] for path in sorted(folder.glob("data-*"))]
    assert len(files) == 4
    return torch.cat(files).float()


def test_rows_of_several_tensors_are_those_of_one() -> None:
    whole = torch.randn(23, 3, 2, generator=torch.Generator().manual_seed(0))
    rows = Rows((whole[:5], whole[5:5], whole[5:6], whole[6:23]))
    order = torch.randperm(23, generator=torch.Generator().manual_seed(1))
    assert (len(rows), rows.shape) == (23, (3, 2))
    assert torch.equal(rows.take(order), whole[order])
    assert torch.equal(rows.take(torch.tensor([22, 22, 0])), whole[[22, 22, 0]])
    assert rows.take(torch.tensor([], dtype=torch.long)).shape == (0, 3, 2)
    with pytest.raises(IndexError):
        rows.take(torch.tensor([0, 23]))


@pytest.mark.parametrize("flip", [None, torch.tensor([True, False, False, False])])
def test_a_sample_is_drawn_from_the_posterior_in_the_model_s_scale(
    flip: torch.Tensor | None, encoded: Path
) -> None:
    shard, rows = open_shard(encoded), torch.tensor([19, 0, 7, 7])
    names = ("mean", "std", "mirrored_mean", "mirrored_std")
    mean, deviation, *mirrored = (_stored(encoded, name)[rows] for name in names)
    assert not torch.allclose(mirrored[0], mean.flip(-1))
    if flip is not None:
        mean[0], deviation[0] = mirrored[0][0], mirrored[1][0]
    assert torch.equal(shard.take(rows, None, flip), (mean - SHIFT) * SCALE)
    drawn = shard.take(rows, torch.Generator().manual_seed(3), flip)
    normal = torch.randn(mean.shape, generator=torch.Generator().manual_seed(3))
    assert torch.allclose(drawn, (mean + deviation * normal - SHIFT) * SCALE)
    assert drawn.dtype == torch.float32


def test_latents_without_mirror_images_cannot_be_mirrored() -> None:
    store = Samples(
        {MEAN: Rows((torch.zeros(4, 1, 2, 2),))}, VaeRecord(kind="tiny", fingerprint="", scale=1.0)
    )
    rows = torch.arange(4)
    assert store.take(rows, None, torch.zeros(4, dtype=torch.bool)).shape == (4, 1, 2, 2)
    told = refusal(store.take, rows, None, torch.ones(4, dtype=torch.bool))
    assert "encode them with `random_flip=True`" in told


def test_equal_samples_alone_have_equal_digests(tmp_path: Path) -> None:
    images = noise(16)
    images[9] = images[2]
    write_shard(tmp_path / "source", images)
    write_vae(tmp_path / "vae", "tiny")
    for vae in (None, tmp_path / "vae"):
        stored = open_shard(
            encode(tmp_path / "source", tmp_path / f"out-{vae is None}", 4, vae=vae)
        ).stored
        digests = [stored.digest(row) for row in range(16)]
        assert digests[9] == digests[2]
        assert len(set(digests)) == 15


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_files_are_mapped_and_not_copied_into_memory(tmp_path: Path) -> None:
    def anonymous() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024

    # So many that what one image takes in between is little beside them.
    images = noise(64, 256, 256)
    write_shard(tmp_path / "source", images)
    out = encode(tmp_path / "source", tmp_path / "out", 8)
    before = anonymous()
    shard = open_shard(out)
    for row, image in enumerate(images):
        found = ((shard.take(torch.tensor([row]))[0] + 1) * 127.5).round().permute(1, 2, 0)
        assert (found.numpy() == image).all()
    assert anonymous() - before < sum(image.nbytes for image in images) / 2
    maps = Path("/proc/self/maps").read_text()
    assert all(f"{out}/data-{k:05d}.safetensors" in maps for k in range(4))


def _spoilt(path: Path) -> bytes:
    """The content of a file with one bit turned."""
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    return bytes(content)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are read to be hashed; none is too young to be remembered."""
    names: list[str] = []

    def counted(path: Path) -> str:
        names.append(path.name)
        return sha256_of(path)

    monkeypatch.setattr(verified, "CLOCK_TICK", 0)
    monkeypatch.setattr(verified, "sha256_of", counted)
    return names


def _opened_once(encoded: Path, tmp_path: Path) -> Path:
    folder = copied(encoded, tmp_path)
    (folder / verified.HASHES).unlink(missing_ok=True)
    # Longer than a tick of the file system's clock.
    time.sleep(0.05)
    open_shard(folder)
    time.sleep(0.05)
    return folder


DATA = [f"data-{k:05d}.safetensors" for k in range(4)]


def test_files_that_are_untouched_are_hashed_once(
    encoded: Path, hashed: list[str], tmp_path: Path
) -> None:
    folder = _opened_once(encoded, tmp_path)
    assert sorted(hashed) == DATA
    before = open_shard(encoded).images
    hashed.clear()
    assert torch.equal(open_shard(folder).images, before)
    assert hashed == []
    content = (folder / DATA[2]).read_bytes()
    (folder / DATA[2]).unlink()
    (folder / DATA[2]).write_bytes(content)
    open_shard(folder)
    assert hashed == [DATA[2]]


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_changed_file_is_noticed(
    is_replaced: bool, encoded: Path, hashed: list[str], tmp_path: Path
) -> None:
    folder = _opened_once(encoded, tmp_path)
    path = folder / DATA[1]
    status, target = path.stat(), tmp_path / "new" if is_replaced else path
    target.write_bytes(_spoilt(path))
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
    target.replace(path)
    for _ in range(2):
        assert f"{DATA[1]}: changed since it was encoded" in refusal(open_shard, folder)


def test_a_file_written_just_now_is_hashed_again(
    encoded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a tick of the file system's clock, here of an hour, it could change unseen."""
    assert verified.CLOCK_TICK >= 2 * 10**9
    monkeypatch.setattr(verified, "CLOCK_TICK", 3600 * 10**9)
    folder = _opened_once(encoded, tmp_path)
    assert not (folder / verified.HASHES).exists()


def test_a_manifest_that_contradicts_itself_or_its_files_is_refused(
    encoded: Path, tmp_path: Path
) -> None:
    record = json.loads((encoded / "manifest.json").read_text())
    changes: list[tuple[str, dict[str, object]]] = [
        ("points outside", {"data": [{**record["data"][0], "file": "../x"}, *record["data"][1:]]}),
        ("holds .* not ", {"encoding": {**record["encoding"], "shape": [4, 4, 5]}}),
        ("not of 20 images", {"data": record["data"][:-1]}),
    ]
    for number, (message, change) in enumerate(changes):
        folder = copied(encoded, tmp_path / str(number))
        edit_json(folder / "manifest.json", **change)
        assert re.search(message, refusal(open_shard, folder))


def test_too_few_images_to_train_on_are_refused_but_for_held_out_ones(tmp_path: Path) -> None:
    for name, held_out_of in (("few", None), ("kept", "a")):
        write_shard(tmp_path / name, noise(MIN_IMAGES - 1), held_out_of=held_out_of)
        encode(tmp_path / name, tmp_path / f"{name}-out")
    assert "has 15 images; an expert needs at least 16" in refusal(open_shard, tmp_path / "few-out")
    assert len(open_shard(tmp_path / "kept-out")) == 15
