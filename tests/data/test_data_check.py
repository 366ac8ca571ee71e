"""hddm data check: what it counts, what it names, and when it fails."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hddm.data.check import check_data
from hddm.data.shard_records import FORMAT, PARTITION_FILE
from hddm.utils.files import write_json
from tests.artefacts import Command
from tests.data.test_sources import encoded, write, write_parquet, write_tar
from tests.shard_files import as_file, bomb, write_shard


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_modes_sizes_classes_and_bad_images_are_counted_and_named(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (6, 9, 4)).astype(np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    write(
        tmp_path,
        {
            "a/gray.png": encoded(1),
            "a/clear.png": as_file(noise),
            "b/turned.JPEG": as_file(noise[..., :3], exif=exif),
            "b/deep.png": as_file(noise[..., 0].astype(np.uint16) * 200),
            "b/cut.png": as_file(noise)[:-40],
            "b/bomb.png": bomb(),
            "b/text.png": b"not an image",
        },
    )
    report = check_data(tmp_path)
    (part,) = report.parts
    assert (report.kind, part.images) == ("images", 7)
    assert part.modes == {"L": 1, "RGBA": 1, "RGB": 1, "I;16": 1}
    assert part.sizes == {"9×6": 2, "6×9": 1, "2×2": 1}
    assert next(iter(part.sizes)) == "9×6"
    assert part.transparent == 1
    assert (part.classes, part.captions) == ({"a": 2, "b": 5}, None)
    assert {(bad.name, bad.kind) for bad in report.bad} == {
        ("b/cut.png", "corrupt"),
        ("b/bomb.png", "oversized"),
        ("b/text.png", "corrupt"),
    }
    assert all(str(tmp_path / bad.name) in bad.reason for bad in report.bad)


def test_equal_images_are_listed_whatever_their_files(tmp_path: Path, hddm: Command) -> None:
    levels = {"train/cat/1": 1, "train/cat/2": 2, "train/dog/1": 1, "train/dog/3": 3}
    write(tmp_path, {f"{name}.png": encoded(level) for name, level in levels.items()})
    write(tmp_path, {"test/dog/9.bmp": encoded(2, "BMP")})
    code, out, _ = hddm("data", "check", tmp_path)
    listed = "  test/dog/9.bmp = train/cat/2.png\n  train/cat/1.png = train/dog/1.png\n"
    assert (code, f"equal images: 2\n{listed}" in out) == (0, True)
    assert out.endswith("5 images, 0 bad, 2 that occur more than once\n")
    assert "  classes: 2, 2 images each\n" in hddm("data", "check", tmp_path / "train")[1]


def test_tar_and_parquet_are_checked_by_row(tmp_path: Path) -> None:
    files = {"1.png": encoded(1), "2.png": b"broken", "2.txt": b" ", "1.txt": b"a"}
    report = check_data(write_tar(tmp_path / "a.tar", files))
    assert [bad.name for bad in report.bad] == ["2.png"]
    assert (report.parts[0].captions, report.parts[0].empty_captions) == (2, 1)
    # More rows than are read ahead, in several row groups.
    images = [encoded(i) for i in range(100)]
    images[40], images[70], images[90] = None, images[3], images[3]
    report = check_data(write_parquet(tmp_path / "a.parquet", {"image": images}, rows=7))
    assert [(bad.name, bad.kind) for bad in report.bad] == [("00000040.img", "unreadable")]
    assert report.duplicates == [[f"{i:08}.img" for i in (3, 70, 90)]]
    assert report.parts[0].modes == {"L": 99}


def test_each_shard_of_a_partition_is_a_part_and_shared_images_are_told(tmp_path: Path) -> None:
    def write_levels(place: str, *levels: int) -> Path:
        images = [np.full((2, 2), level, np.uint8) for level in levels]
        write_shard(tmp_path / place, images, [i % 2 for i in range(len(levels))])
        return tmp_path / place / "images"

    first, second = write_levels("shard_0", 0, 1, 1), write_levels("shard_1", 3, 0)
    write_levels("held_out/shard_1", 3, 6)
    record = {"images": 5, "features": "pixel_pca", "fine_clusters": 2, "seed": 0, "sizes": [3, 2]}
    write_json(tmp_path / PARTITION_FILE, {"format": FORMAT, **record, "hashes": ["", ""]})
    (first / "002.png").unlink()
    (second / "001.png").write_bytes(encoded(6))
    report = check_data(tmp_path)
    names = ["shard_0", "shard_1", "held_out/shard_1"]
    assert (report.kind, [part.name for part in report.parts]) == ("partition", names)
    assert [(bad.name, bad.kind) for bad in report.bad] == [
        ("images/002.png", "unreadable"),
        ("images/001.png", "unreadable"),
    ]
    assert "changed since the partition" in report.bad[1].reason
    assert report.duplicates == [["shard_1/images/000.png", "held_out/shard_1/images/000.png"]]
    assert report.parts[0].classes == {"cat": 2, "dog": 1}
    assert check_data(tmp_path / "shard_0").kind == "shard"


def test_the_command_fails_beyond_max_bad_and_prints_the_report_first(
    tmp_path: Path, hddm: Command
) -> None:
    write(tmp_path, {"1.png": encoded(1), "2.png": b"x", "3.png": b"y", "4.png": encoded(1)})
    code, out, err = hddm("data", "check", tmp_path)
    assert f"corrupt: {tmp_path / '2.png'}: cannot be read as an image" in out
    assert "equal images: 1\n  1.png = 4.png\n" in out
    assert out.endswith(f"{tmp_path}: 4 images, 2 bad, 1 that occurs more than once\n")
    assert (code, f"hddm: {tmp_path}: 2 bad images, more than --max-bad 0" in err) == (1, True)
    code, out, _ = hddm("data", "check", tmp_path, "--max-bad", 2, "--json")
    assert code == 0
    assert [bad["name"] for bad in json.loads(out)["parts"][0]["bad"]] == ["2.png", "3.png"]
