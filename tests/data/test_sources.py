"""Folders, metadata.jsonl, tar shards and Parquet: images, names, labels, captions, or a refusal by name."""

import io
import json
import re
import tarfile
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from hddm.data.sources import open_source
from hddm.data.sources.base import ImageSource
from hddm.utils.errors import HddmError
from tests.artefacts import refusal
from tests.shard_files import as_file


def encoded(value: int, kind: str = "PNG") -> bytes:
    """A 2×2 gray image."""
    return as_file(np.full((2, 2), value, np.uint8), kind)


def write(folder: Path, files: Mapping[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def write_metadata(folder: Path, *rows: object) -> None:
    (folder / "metadata.jsonl").write_text("\r\n".join(map(json.dumps, rows)) + "\n")


def write_tar(path: Path, files: Mapping[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def _labels(source: ImageSource) -> tuple[int, ...] | None:
    return None if source.labels is None else tuple(source.labels)


def _captions(source: ImageSource) -> tuple[str, ...] | None:
    return None if source.captions is None else tuple(source.captions)


def values(source: ImageSource) -> dict[str, int]:
    """The gray level of each image, by name."""
    assert list(source.files) == sorted(source.files)
    return {name: level(source.read(i)) for i, name in enumerate(source.files)}


def level(content: bytes) -> int:
    with Image.open(io.BytesIO(content)) as image:
        return int(np.asarray(image)[0, 0])


def test_class_folders_are_labels_and_other_files_are_left_alone(tmp_path: Path) -> None:
    files = {"b/1.png": 20, "a/2.PNG": 10, "a/deep/1.png": 30}
    write(
        tmp_path, {name: encoded(value) for name, value in files.items()} | {"notes.txt": b"none"}
    )
    source = open_source(tmp_path)
    assert values(source) == files
    assert (source.classes, _labels(source), _captions(source)) == (("a", "b"), (0, 0, 1), None)
    assert source.images[2].path == tmp_path / "b/1.png"
    flat = open_source(write(tmp_path, {"1.png": encoded(1)}))
    assert (flat.classes, flat.labels, len(flat)) == ((), None, 4)


def test_files_that_are_no_images_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = {"a/1.png": "PNG", "a/2.gif": "GIF", "b/3.TIF": "TIFF", "b/4.tiff": "TIFF"}
    write(tmp_path, {name: encoded(7, kind) for name, kind in names.items()})
    (tmp_path / "sampling.json").write_text("{}")
    assert list(open_source(tmp_path).files) == list(names)
    assert not caplog.text
    faces = {f"b/{i}.PGM": encoded(i, "PPM") for i in range(3)}
    write(tmp_path, faces | {"a/1.txt": b"none", "a/LICENCE": b"none", ".git/index.pgm": b"none"})
    assert len(open_source(tmp_path)) == 4
    assert f"{tmp_path}: left out 3 .pgm, 1 .txt, 1 LICENCE; only .bmp, .gif, " in caplog.text


def test_a_class_folder_in_either_unicode_form_has_the_same_class(tmp_path: Path) -> None:
    write(tmp_path, {"cafe\u0301/1.png": encoded(1), "caf\u00e9/2.png": encoded(2)})
    source = open_source(tmp_path)
    assert (source.classes, _labels(source)) == (("caf\u00e9",), (0, 0))


def test_metadata_gives_captions_and_labels_by_file(tmp_path: Path) -> None:
    write(tmp_path, {"x/1.png": encoded(1), "2.png": encoded(2), "3.png": encoded(3)})
    write_metadata(
        tmp_path,
        {"file_name": "x/1.png", "text": "one", "label": "dog"},
        {"file_name": "./3.png", "text": "", "label": "cat"},
        {"file_name": "2.png", "text": "zwei ü", "label": "dog"},
    )
    source = open_source(tmp_path)
    assert values(source) == {"2.png": 2, "3.png": 3, "x/1.png": 1}
    assert _captions(source) == ("zwei ü", "", "one")
    assert (source.classes, _labels(source)) == (("cat", "dog"), (1, 0, 1))
    write_metadata(
        tmp_path,
        *(
            {"file_name": f"{name}.png", "label": k}
            for name, k in {"x/1": 3, "2": 0, "3": 0}.items()
        ),
    )
    source = open_source(tmp_path)
    assert (_labels(source), source.classes, _captions(source)) == (
        (0, 0, 3),
        ("0", "1", "2", "3"),
        None,
    )


def test_two_caption_columns_need_a_choice(tmp_path: Path) -> None:
    write(tmp_path, {"1.png": encoded(1)})
    write_metadata(tmp_path, {"file_name": "1.png", "text": "a", "caption": "b", "prompt": "c"})
    assert "has columns text and caption; choose one with `caption_column`" in refusal(
        open_source, tmp_path
    )
    for column, text in (("text", "a"), ("caption", "b"), ("prompt", "c")):
        assert _captions(open_source(tmp_path, column)) == (text,)
    message = refusal(open_source, tmp_path, caption_column="promt")
    assert message.endswith("did you mean 'prompt'?")


def test_metadata_that_does_not_fit_its_images_lists_them(tmp_path: Path) -> None:
    write(tmp_path, {f"{i}.png": encoded(i) for i in range(3)})
    write_metadata(tmp_path, {"file_name": "0.png"}, {"file_name": "gone.png"})
    assert refusal(open_source, tmp_path).endswith("\n  1.png\n  2.png\n  gone.png")


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([{"file_name": "../1.png"}], "'../1.png' points outside"),
        ([{"file_name": "/etc/1.png"}], "'/etc/1.png' points outside"),
        ([{"text": "a"}], "line 1 has no file_name"),
        ([{"file_name": "1.png"}, {"file_name": "./1.png"}], "line 2 names 1.png again"),
        ([["1.png"]], "line 1: holds no JSON object"),
        ([{"file_name": "1.png", "text": "a"}, {"file_name": "2.png"}], "2.png has caption none"),
        (
            [{"file_name": "1.png", "label": 10**12}, {"file_name": "2.png"}],
            "1.png has label 10000",
        ),
        (
            [{"file_name": "1.png", "label": "a"}, {"file_name": "2.png", "label": 1}],
            "2.png has label 1",
        ),
    ],
)
def test_a_spoilt_line_of_metadata_is_named(rows: list[Any], told: str, tmp_path: Path) -> None:
    write(tmp_path, {"1.png": encoded(1), "2.png": encoded(2)})
    write_metadata(tmp_path, *rows)
    assert told in refusal(open_source, tmp_path)


def test_a_line_that_is_no_json_and_a_link_out_of_the_folder_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    write(tmp_path, {"outside.png": encoded(1), "images/1.png": encoded(1)})
    write(folder, {"metadata.jsonl": b'{"file_name": "1.png"}\n{"file_name": \n'})
    assert "line 2: cannot be read as JSON" in refusal(open_source, folder)
    (folder / "2.png").symlink_to(tmp_path / "outside.png")
    write_metadata(folder, {"file_name": "1.png"}, {"file_name": "2.png"})
    assert "2.png: is a link to" in refusal(open_source, folder)


@pytest.mark.parametrize("name", ["train/metadata.jsonl", "metadata.csv"])
def test_metadata_in_another_place_or_format_is_not_passed_over(name: str, tmp_path: Path) -> None:
    write(tmp_path, {"train/1.png": encoded(1), name: b'{"file_name": "1.png"}\n'})
    assert f"{tmp_path / name}: captions are read from metadata.jsonl in the folder" in refusal(
        open_source, tmp_path
    )


def test_missing_empty_and_mixed_folders_are_refused(tmp_path: Path) -> None:
    assert "no such folder" in refusal(open_source, tmp_path / "missing")
    assert "holds no images" in refusal(open_source, tmp_path)
    write(tmp_path, {"1.png": encoded(1), "1.zip": b"PK"})
    assert "is not a folder, .tar or .parquet" in refusal(open_source, tmp_path / "1.zip")
    write_tar(tmp_path / "a.tar", {"1.png": encoded(1)})
    assert "holds 1 image files (as 1.png) and 1 .tar (as a.tar)" in refusal(open_source, tmp_path)


def test_tar_shards_give_images_captions_and_labels_by_key(tmp_path: Path) -> None:
    write_tar(
        tmp_path / "part" / "b.tar",
        {
            "2.PNG": encoded(20),
            "2.txt": b"two\n",
            "2.cls": b"2",
            "2.seg.png": encoded(99),
            "README": b"-",
        },
    )
    # Parts of a sample need not lie together, and a folder of its own has a name of its own.
    files = {
        "./1.cls": b"0\n",
        "1.jpg": encoded(10, "JPEG"),
        "x.y/1.png": encoded(30),
        "1.txt": b"one",
    }
    files |= {"x.y/1.txt": b"three", "x.y/1.cls": b"1", "._1.jpg": b"no image"}
    write_tar(tmp_path / "a.tar", files)
    source = open_source(tmp_path)
    assert values(source) == {"a/1.jpg": 10, "a/x.y/1.png": 30, "part/b/2.PNG": 20}
    assert _captions(source) == ("one", "three", "two")
    assert (_labels(source), source.classes) == ((0, 1, 2), ("0", "1", "2"))
    assert source.images[0].path is None


def test_one_tar_is_a_source_by_itself_with_json_beside_each_image(tmp_path: Path) -> None:
    rows = [{"caption": "b", "url": "http", "label": "cat"}, {"caption": "a", "label": "dog"}]
    files = {}
    for i, row in enumerate(rows):
        files |= {f"{i}.bmp": encoded(i, "BMP"), f"{i}.json": json.dumps(row).encode()}
    source = open_source(write_tar(tmp_path / "one.tar", files))
    assert values(source) == {"0.bmp": 0, "1.bmp": 1}
    assert (_captions(source), _labels(source), source.classes) == (
        ("b", "a"),
        (0, 1),
        ("cat", "dog"),
    )


def test_a_txt_goes_before_the_json_as_img2dataset_writes_both(tmp_path: Path) -> None:
    files = {
        "1.png": encoded(1),
        "1.txt": b"short",
        "1.json": b'{"caption": "short too", "alt": "long"}',
    }
    path = write_tar(tmp_path / "a.tar", files)
    assert _captions(open_source(path)) == ("short",)
    assert _captions(open_source(path, "caption")) == ("short too",)
    assert _captions(open_source(path, "alt")) == ("long",)


@pytest.mark.parametrize("name", ["../1.png", "/1.png", "a/../../1.png", "a\\1.png", "a\n.png"])
def test_names_that_leave_the_folder_are_refused(name: str, tmp_path: Path) -> None:
    assert repr(name)[1:-1] in refusal(
        open_source, write_tar(tmp_path / "a.tar", {name: encoded(1)})
    )


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE]
)
def test_links_and_devices_are_refused_by_name(kind: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        member = tarfile.TarInfo("x/1.png")
        member.type, member.linkname = kind, "/etc/passwd"
        archive.addfile(member)
    assert f"{path}: x/1.png is not a regular file" in refusal(open_source, path)


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"1.txt": b"a", "2.png": b"x"}, "holds 1.txt; a sample has one image, named 1"),
        ({"1.png": b"x", "1.jpg": b"x"}, "holds 1.jpg and 1.png; a sample has one image"),
        ({"1.png": b"x", "1.txt": b"a", "2.png": b"x"}, "2.png has caption none"),
        ({"1.png": b"x", "1.cls": b"one"}, "1.cls cannot be read as a class number"),
        ({"1.png": b"x", "1.cls": b"1", "1.json": b'{"label": 1}'}, "has columns cls and label"),
        ({"1.png": b"x", "1.json": b"[]"}, "1.json: holds no JSON object"),
        ({"1.png": b"x", "1.txt": b"\xff"}, "1.txt cannot be read as UTF-8"),
        ({"1.png": b"x", "1.txt": b"a" * (2**20 + 1)}, "1.txt has 1048577 bytes"),
    ],
)
def test_a_spoilt_sample_is_named(files: dict[str, bytes], told: str, tmp_path: Path) -> None:
    assert told in refusal(open_source, write_tar(tmp_path / "a.tar", files))


def test_damaged_cut_and_joined_archives_are_refused(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {f"{i}.png": encoded(i) for i in range(4)})
    whole = path.read_bytes()
    path.write_bytes(whole + whole)
    assert "a.tar: damaged or joined" in refusal(open_source, path)
    path.write_bytes(whole[:1024] + b"\xff" * 512 + whole[1536:])
    assert "a.tar: damaged or joined" in refusal(open_source, path)
    path.write_bytes(whole[:1500])
    assert "a.tar: " in refusal(open_source, path)
    path.write_bytes(b"no archive" * 100)
    assert "is not a plain tar archive" in refusal(open_source, path)
    path.write_bytes(whole)
    source = open_source(path)
    path.write_bytes(whole[:1024])
    assert re.search(r"3\.png: .* was cut short", refusal(source.read, 3))


IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def rows_of(levels: list[int], path: str | None = None) -> list[dict[str, object]]:
    return [{"bytes": encoded(level), "path": path} for level in levels]


def write_parquet(
    path: Path, columns: dict[str, Any], features: dict[str, Any] | None = None, rows: int = 2
) -> Path:
    """A file with ``rows`` rows a group, and ``features`` where ``datasets`` declares them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(columns)
    if features is not None:
        declared = json.dumps({"info": {"features": features}}).encode()
        table = table.replace_schema_metadata({b"huggingface": declared})
    pq.write_table(table, path, row_group_size=rows)
    return path


def test_the_hugging_face_layout_gives_images_class_names_and_captions(tmp_path: Path) -> None:
    write_parquet(
        tmp_path / "train-00000-of-00001.parquet",
        {
            "image": pa.array(rows_of([10, 20, 30, 40, 50], "a/b.JPG"), IMAGE),
            "label": pa.array([1, 0, 1, 1, 0], pa.int64()),
            "text": ["one", "two", "three", "four", "five"],
        },
        {
            "image": {"_type": "Image"},
            "label": {"names": ["cat", "dog", "owl"], "_type": "ClassLabel"},
            "text": {"dtype": "string", "_type": "Value"},
        },
    )
    source = open_source(tmp_path)
    prefix = "train-00000-of-00001"
    assert values(source) == {f"{prefix}/{i:08d}.jpg": 10 * (i + 1) for i in range(5)}
    assert (source.classes, _labels(source)) == (("cat", "dog", "owl"), (1, 0, 1, 1, 0))
    assert _captions(source) == ("one", "two", "three", "four", "five")
    assert source.images[0].path is None


def test_the_layout_of_cifar_is_read_by_its_declared_columns(tmp_path: Path) -> None:
    columns = {
        "img": pa.array(rows_of([1, 2]), IMAGE),
        "fine_label": [4, 2],
        "thumbnail": [b"no", b"image"],
    }
    classes = {"names": list("abcde"), "_type": "ClassLabel"}
    path = write_parquet(
        tmp_path / "a.parquet", columns, {"img": {"_type": "Image"}, "fine_label": classes}
    )
    source = open_source(path)
    assert values(source) == {"00000000.img": 1, "00000001.img": 2}
    assert (_labels(source), source.classes) == ((4, 2), tuple("abcde"))
    columns["coarse_label"] = [0, 1]
    both = {"img": {"_type": "Image"}, "fine_label": classes, "coarse_label": classes}
    write_parquet(path, columns, both)
    assert "fine_label and coarse_label; choose one with `label_column`" in refusal(
        open_source, path
    )
    assert _labels(open_source(path, label_column="coarse_label")) == (0, 1)


def test_plain_binary_columns_and_bare_labels_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, {"image": [encoded(1), encoded(2)], "label": [2, 0], "caption": ["a", "b"]})
    source = open_source(path)
    assert list(values(source).values()) == [1, 2]
    assert (_labels(source), source.classes, _captions(source)) == (
        (2, 0),
        ("0", "1", "2"),
        ("a", "b"),
    )
    source = open_source(
        write_parquet(path, {"x": pa.array([encoded(1)], pa.large_binary()), "label": ["b"]})
    )
    assert (source.classes, list(values(source).values())) == (("b",), [1])


def test_files_of_a_folder_follow_each_other_by_name(tmp_path: Path) -> None:
    for name, levels in (("b", [3, 4, 5]), ("a", [1, 2])):
        write_parquet(tmp_path / f"{name}.parquet", {"image": pa.array(rows_of(levels), IMAGE)})
    source = open_source(tmp_path)
    names = ("a/00000000", "a/00000001", "b/00000000", "b/00000001", "b/00000002")
    assert values(source) == {f"{name}.img": level for level, name in enumerate(names, 1)}
    assert [source.read(i) for i in (4, 0, 3)] == [encoded(5), encoded(1), encoded(4)]
    assert (_labels(source), _captions(source)) == (None, None)


def test_a_row_without_an_image_is_named_when_it_is_read(tmp_path: Path) -> None:
    rows = [*rows_of([1]), {"bytes": None, "path": "/somewhere/else.png"}, None]
    source = open_source(write_parquet(tmp_path / "a.parquet", {"image": pa.array(rows, IMAGE)}))
    assert source.read(0) == encoded(1)
    for i, name in ((1, "00000001.png"), (2, "00000002.img")):
        assert f"a.parquet/{name}: its row holds no image" in refusal(source.read, i)


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"label": [1, 2]}, "hold encoded images, named image (none of label do)"),
        ({"a": [b"x"], "b": [b"y"]}, "hold encoded images, named image (a and b of a, b do)"),
        ({"image": [b"x"], "text": [["a", "b"]]}, "00000000.img has caption ['a', 'b']"),
        ({"image": [b"x", b"y"], "label": [1, None]}, "00000001.img has label none"),
    ],
)
def test_what_does_not_fit_is_named(columns: dict[str, Any], told: str, tmp_path: Path) -> None:
    assert told in refusal(open_source, write_parquet(tmp_path / "a.parquet", columns))


def test_labels_outside_the_declared_classes_and_files_of_several_sets_are_refused(
    tmp_path: Path,
) -> None:
    features = {"label": {"names": ["a", "b"], "_type": "ClassLabel"}}
    path = write_parquet(
        tmp_path / "a.parquet", {"image": [b"x", b"y"], "label": [0, -1]}, features
    )
    assert "00000001.img has label -1 of 2 classes" in refusal(open_source, path)
    write_parquet(tmp_path / "a" / "1.parquet", {"image": [b"x"]})
    write_parquet(tmp_path / "a" / "2.parquet", {"image": [b"x"], "label": [1]})
    assert "2.parquet: has other columns or classes than" in refusal(open_source, tmp_path / "a")
    for name in ("train-00000-of-00001", "test-00000-of-00001"):
        write_parquet(tmp_path / "b" / f"{name}.parquet", {"image": [b"x"]})
    assert "holds the splits test, train; name one file" in refusal(open_source, tmp_path / "b")


@pytest.mark.parametrize("kind", [IMAGE, pa.binary()], ids=["struct", "binary"])
def test_a_file_that_states_more_rows_than_it_has_is_named(kind: Any, tmp_path: Path) -> None:
    """Found by the soak: wherever the footer has the number of rows, another one is no IndexError."""
    level = rows_of([1, 2, 3]) if kind == IMAGE else [encoded(level) for level in (1, 2, 3)]
    path = write_parquet(tmp_path / "a.parquet", {"image": pa.array(level, kind)}, rows=3)
    content, refused = path.read_bytes(), 0
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    # Thrift writes 3 as 6, and 7 as 14.
    for place in (k for k in range(footer, len(content) - 8) if content[k] == 6):
        path.write_bytes(content[:place] + b"\x0e" + content[place + 1 :])
        try:
            source = open_source(path)
            assert [source.read(i) for i in range(len(source.files))] == [
                encoded(k) for k in (1, 2, 3)
            ]
        except HddmError as error:
            refused += "rows where its row groups state" in str(error)
    assert refused >= 2


def test_archives_and_members_in_any_order_are_sorted_by_the_names_of_images(
    tmp_path: Path,
) -> None:
    # "a.z/" sorts before "a/", but "a.tar" before "a.z.tar"; and "a/b" lies between the images of "a".
    write_tar(tmp_path / "a.tar", {"c.png": encoded(5), "a.png": encoded(2)})
    write_tar(tmp_path / "a.z.tar", {"1.png": encoded(1)})
    write_tar(tmp_path / "a" / "b.tar", {"2.png": encoded(4), "1.png": encoded(3)})
    source = open_source(tmp_path)
    expected = ["a.z/1.png", "a/a.png", "a/b/1.png", "a/b/2.png", "a/c.png"]
    assert list(values(source).items()) == [(name, n) for n, name in enumerate(expected, 1)]
    assert [source.images[i].size for i in range(5)] == [len(encoded(n)) for n in range(1, 6)]


def test_two_archives_with_an_image_of_one_name_are_refused(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"b/1.png": encoded(1)})
    write_tar(tmp_path / "a" / "b.tar", {"1.png": encoded(2)})
    told = f"{tmp_path}: two archives hold an image named a/b/1.png; rename one archive"
    assert refusal(open_source, tmp_path) == told


def test_an_empty_row_group_shifts_no_image(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"image": pa.array(rows_of([1, 2, 3]), IMAGE)})
    with pq.ParquetWriter(path, table.schema) as writer:
        for start, stop in ((0, 0), (0, 2), (2, 2), (2, 3), (3, 3)):
            writer.write_table(table[start:stop])
    assert list(values(open_source(path)).values()) == [1, 2, 3]


@pytest.mark.slow
def test_a_long_source_is_held_in_columns(tmp_path: Path) -> None:
    """Objects for each image would take gigabytes for ten million."""
    num = 4000
    files: dict[str, bytes] = {}
    content = encoded(1)
    for number in range(num):
        files[f"{number:06d}.png"] = content
        files[f"{number:06d}.json"] = json.dumps({"text": "a cat", "label": "x"}).encode()
    write_tar(tmp_path / "tar" / "a.tar", files)
    rows = {"image": pa.array([content] * num), "text": ["a cat"] * num, "label": [3] * num}
    write_parquet(tmp_path / "parquet" / "a.parquet", rows, rows=1000)
    (tmp_path / "folder").mkdir()
    for number in range(num):
        (tmp_path / "folder" / f"{number}.png").touch()
    for kind in ("tar", "parquet", "folder"):
        open_source(tmp_path / kind)
        tracemalloc.start()
        source = open_source(tmp_path / kind)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(source) == num
        assert held / num < 150, kind
