"""Partitions of any source: what goes where, by features or class, and what is held out."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hddm.data.check import check_data
from hddm.data.images import save_png
from hddm.data.partition import partition
from hddm.data.shard_records import find_shards, read_manifest
from hddm.data.shards import open_shard
from hddm.inspection.folders import inspected
from tests.artefacts import (
    CLASSES,
    Command,
    copied,
    draw,
    number_of_pixels,
    refusal,
    shard_files,
    write_images,
)
from tests.data.conftest import PER_CLASS
from tests.data.test_sources import write_tar


@pytest.fixture
def tars(many: Path, tmp_path: Path) -> Path:
    """The same images in a tar, with captions."""
    files = {}
    for number, path in enumerate(sorted(many.rglob("*.png"))):
        files[f"{number:04d}.png"] = path.read_bytes()
        files[f"{number:04d}.txt"] = f"picture {number}".encode()
    return write_tar(tmp_path / "train.tar", files)


def test_images_of_a_tar_keep_captions_and_files_are_linked(
    many: Path, tars: Path, tmp_path: Path
) -> None:
    originals = [path.read_bytes() for path in sorted(many.rglob("*.png"))]
    seen = []
    for folder in partition(tars, tmp_path / "out", 2):
        shard = open_shard(folder)
        for entry, caption in zip(read_manifest(folder).images, shard.captions, strict=True):
            number = int(caption.removeprefix("picture "))
            assert (folder / entry.file).read_bytes() == originals[number]
            seen.append(number)
    assert sorted(seen) == list(range(2 * PER_CLASS))
    (folder,) = partition(many, tmp_path / "linked", 1)
    for name in shard_files(folder):
        assert (folder / name).samefile(many / name.removeprefix("images/"))


def test_bad_images_are_skipped_by_name(many: Path, tmp_path: Path, hddm: Command) -> None:
    images, out = copied(many, tmp_path), tmp_path / "out"
    bad = images / "rows" / "bad.png"
    bad.write_bytes(b"nothing")
    with Image.open(images / "rows" / "07.png") as image:
        image.save(images / "rows" / "again.bmp")
    code, told, err = hddm("partition", images, "--shards", 1, "--out", out, "--max-bad", 1)
    assert told.startswith(f"{out / 'shard_0'}: 81 images\n1 image is a copy of another\n")
    assert (code, f"skipped {bad}: cannot be read" in err) == (0, True)
    record = inspected(out)
    assert (list(record["skipped"]), record["images"]) == (["rows/bad.png"], 81)


@pytest.mark.integration
def test_only_features_beside_the_partition_are_replaced(
    many: Path, images: Path, tmp_path: Path, hddm: Command
) -> None:
    assert hddm("partition", many, "--out", tmp_path / "out", "--shards", 2)[0] == 0
    other = ["partition", images, "--out", tmp_path / "out", "--shards", 2, "--overwrite"]
    code, _, err = hddm(*other, "--cache", tmp_path / "out.features")
    assert (code, "holds features of other images" in err) == (1, True)
    assert hddm(*other)[0] == 0
    assert inspected(tmp_path / "out")["images"] == 48


def test_an_image_that_changed_since_its_features_is_refused(many: Path, tmp_path: Path) -> None:
    images, cache = copied(many, tmp_path), tmp_path / "cache"
    partition(images, tmp_path / "out", 1, cache=cache)
    path = images / "rows" / "07.png"
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:-1] + b"\0")
    told = refusal(partition, images, tmp_path / "again", 1, cache=cache)
    remedy = f"remove {cache}, or name another folder with `cache`"
    assert told == f"{path}: changed since its features were computed; {remedy}"
    assert not (tmp_path / "again").exists()


def test_a_partition_or_a_shard_is_no_source_of_images(many: Path, tmp_path: Path) -> None:
    (shard,) = partition(many, tmp_path / "one", 1)
    for folder in (tmp_path / "one", shard):
        told = f"{folder}: is already a partition or a shard; name the original images"
        assert refusal(partition, folder, tmp_path / "again", 1) == told
    (again,) = partition(shard / "images", tmp_path / "again", 1)
    assert open_shard(again).hash == open_shard(shard).hash


def test_the_report_shows_every_shard_enlarged_by_whole_pixels(many: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    folders = partition(many, out, 2, held_out=0.5)
    page = (out / "report.html").read_text()
    for k, folder in enumerate(folders):
        assert f'src="pictures/shard_{k}.png"' in page
        with Image.open(out / "pictures" / f"shard_{k}.png") as picture:
            # 24 pictures, eight a line.
            assert picture.size == (8 * 98 - 2, 3 * 98 - 2)
            cell = np.asarray(picture)[:96, :96]
        assert f"<td>{len(shard_files(folder))}</td>" in page
        small = cell[::24, ::24, 0]
        np.testing.assert_array_equal(
            np.kron(small, np.ones((24, 24), dtype=np.uint8)), cell[..., 0]
        )
        assert small.tobytes() in {
            np.asarray(Image.open(path)).tobytes() for path in many.rglob("*.png")
        }
    for name in CLASSES:
        assert name in page


def test_shards_by_class_have_their_classes_and_all_names(
    many: Path, tmp_path: Path, hddm: Command
) -> None:
    out = tmp_path / "out"
    options = ["--classes", "a=rows", "--classes", "b=columns", "--held-out", 0.4]
    code, _, err = hddm("partition", many, *options, "--out", out)
    assert (code, err) == (0, "")
    for k, name in enumerate(("rows", "columns")):
        for manifest in (
            read_manifest(out / f"shard_{k}"),
            read_manifest(out / "held_out" / f"shard_{k}"),
        ):
            assert {Path(one.file).parts[1] for one in manifest.images} == {name}
            assert {manifest.classes[one.label or 0] for one in manifest.images} == {name}
            assert tuple(manifest.classes) == CLASSES
    assert "divided by class" in (out / "report.html").read_text()
    assert "pass one" in hddm("partition", many, "--out", tmp_path / "x")[2]
    both = ["--classes", "a=rows,columns", "--shards", 1]
    assert "pass one" in hddm("partition", many, *both, "--out", tmp_path / "x")[2]
    rows, columns = ("rows",), ("columns",)
    for wrong in ([rows], [rows, rows], [rows, (*columns, "else")]):
        text = refusal(partition, many, tmp_path / "x", 2, classes=wrong)
        assert "its classes are columns, rows; name each of them in one of 2 shards" in text


def test_some_classes_are_taken_as_if_they_were_all(
    images: Path, tmp_path: Path, hddm: Command
) -> None:
    some, alone = tmp_path / "some", tmp_path / "alone"
    shutil.copytree(images / "rows", tmp_path / "rows-alone" / "rows")
    assert hddm("partition", images, "--only", "rows", "--shards", 1, "--out", some)[0] == 0
    assert hddm("partition", tmp_path / "rows-alone", "--shards", 1, "--out", alone)[0] == 0
    assert read_manifest(some / "shard_0").hash == read_manifest(alone / "shard_0").hash
    told = hddm("partition", images, "--only", "dogs", "--shards", 1, "--out", tmp_path / "x")[2]
    assert "has no class dogs; it has columns, rows" in told


def test_several_sources_are_taken_together(images: Path, tmp_path: Path, hddm: Command) -> None:
    other, out = write_images(tmp_path / "other", per_class=20, side=4), tmp_path / "out"
    code, shown, err = hddm("partition", images, other / "rows", "--shards", 1, "--out", out)
    assert (code, err) == (0, "")
    # Images without a class have made all of them have none.
    assert read_manifest(out / "shard_0").classes == []
    assert f"{out / 'shard_0'}: 68 images" in shown


def test_held_out_images_are_shards_of_their_own_and_no_training_images(
    many: Path, tmp_path: Path
) -> None:
    plain = partition(many, tmp_path / "plain", 1)[0]
    (folder,) = partition(many, tmp_path / "out", 1, held_out=0.4)
    held = tmp_path / "out" / "held_out" / "shard_0"
    training, kept = shard_files(folder), shard_files(held)
    assert not training.keys() & kept.keys()
    assert training | kept == shard_files(plain)
    assert 20 <= len(kept) <= 44
    ours, theirs = open_shard(folder), open_shard(held)
    assert (theirs.held_out_of, theirs.partition, ours.held_out_of) == (
        ours.hash,
        ours.partition,
        None,
    )
    record = inspected(tmp_path / "out")
    assert (record["sizes"], record["held_out"], record["images"]) == (
        [len(training)],
        (len(kept),),
        80,
    )
    assert (record["held_out_share"], find_shards(tmp_path / "out")) == (0.4, [folder])


def test_a_share_that_leaves_too_few_is_refused(
    many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition(many, tmp_path / "one", 1, held_out=0.2)
    monkeypatch.setattr("hddm.data.partition.compute_features", pytest.fail)
    for shards, share in ((1, 0.19), (1, 0.81), (2, 0.399)):
        told = refusal(partition, many, tmp_path / "none", shards, held_out=share)
        assert (
            f"80 images are too few for `shards` {shards} and `held_out` {share:g}, to have 16 on"
            in told
        )
    assert "`held_out` 1.0: must be below 1" in refusal(
        partition, many, tmp_path / "none", 1, held_out=1.0
    )
    assert {path.name for path in tmp_path.iterdir()} == {"one"}


def _twins(folder: Path, is_held_out: bool, share: float) -> Path:
    """40 images that differ, and 40 copies of one more, of which a share holds all out or none."""
    levels = (np.full((4, 4, 3), level, dtype=np.uint8) for level in range(256))
    same = next(one for one in levels if (number_of_pixels(one) < share) == is_held_out)
    for name in ("rows", "same"):
        (folder / name).mkdir(parents=True)
    for number, image in enumerate(draw("rows", 40, 0)):
        save_png(image, folder / "rows" / f"{number:02d}.png")
        Image.fromarray(same).save(folder / "same" / f"{number:02d}.png")
    return folder


def test_a_shard_of_copies_has_no_held_out_images_where_all_are_trained_on(tmp_path: Path) -> None:
    folders = partition(_twins(tmp_path / "images", False, 0.4), tmp_path / "out", 2, held_out=0.4)
    record = inspected(tmp_path / "out")
    (k,) = (k for k, kept in enumerate(record["held_out"]) if not kept)
    assert record["sizes"][k] == 40
    assert open_shard(folders[k]).classes == ("rows", "same")
    assert [path.name for path in (tmp_path / "out" / "held_out").iterdir()] == [f"shard_{1 - k}"]


def test_a_shard_that_chance_leaves_nothing_to_train_on_is_told(tmp_path: Path) -> None:
    images = _twins(tmp_path / "images", True, 0.4)
    told = refusal(partition, images, tmp_path / "out", 2, held_out=0.4)
    assert "has 0 images left to train on and needs 16" in told


def test_copies_are_kept_on_one_side_whatever_their_files(
    many: Path, tmp_path: Path, hddm: Command
) -> None:
    images, out = copied(many, tmp_path), tmp_path / "out"
    for path in sorted(images.rglob("0?.png")):
        for end in ("a.png", "b.bmp"):
            with Image.open(path) as image:
                image.convert("RGB").save(path.with_name(f"{path.stem}{end}"))
    code, told, _ = hddm("partition", images, "--out", out, "--shards", 2, "--held-out", 0.4)
    record = inspected(out)
    kept = sum(record["held_out"])
    assert (code, record["copies"], record["images"]) == (0, 40, 120)
    assert (
        f"{kept} of 120 images, {100 * kept / 120:.1f} % (--held-out 0.4 is exact only on" in told
    )
    assert "40 images are copies of others; equal images are kept together" in told
    groups = check_data(out).duplicates
    assert sum(len(group) - 1 for group in groups) == 40
    assert all(len({name.startswith("held_out/") for name in group}) == 1 for group in groups)
