"""Parquet with encoded images, written by pyarrow as Hugging Face's ``datasets`` lays it out."""

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hddm.data.sources import open_source
from hddm.utils.errors import HddmError
from tests.artefacts import refusal
from tests.data.test_sources import encoded, values, write

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
    assert (source.classes, source.labels) == (("cat", "dog", "owl"), (1, 0, 1, 1, 0))
    assert source.captions == ("one", "two", "three", "four", "five")
    assert source.images[0].path is None


def test_the_layout_of_cifar_is_read_by_its_declared_columns(tmp_path: Path) -> None:
    columns = {"img": pa.array(rows_of([1, 2]), IMAGE), "fine_label": [4, 2], "thumbnail": [b"no", b"image"]}
    classes = {"names": list("abcde"), "_type": "ClassLabel"}
    path = write_parquet(tmp_path / "a.parquet", columns, {"img": {"_type": "Image"}, "fine_label": classes})
    source = open_source(path)
    assert values(source) == {"00000000.img": 1, "00000001.img": 2}
    assert (source.labels, source.classes) == ((4, 2), tuple("abcde"))
    columns["coarse_label"] = [0, 1]
    both = {"img": {"_type": "Image"}, "fine_label": classes, "coarse_label": classes}
    write_parquet(path, columns, both)
    assert "fine_label and coarse_label; choose one with `label_column`" in refusal(open_source, path)
    assert open_source(path, label_column="coarse_label").labels == (0, 1)


def test_plain_binary_columns_and_bare_labels_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, {"image": [encoded(1), encoded(2)], "label": [2, 0], "caption": ["a", "b"]})
    source = open_source(path)
    assert list(values(source).values()) == [1, 2]
    assert (source.labels, source.classes, source.captions) == ((2, 0), ("0", "1", "2"), ("a", "b"))
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
    assert (source.labels, source.captions) == (None, None)


def test_row_groups_are_read_once_and_two_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"image": pa.array(rows_of(list(range(12))), IMAGE)})
    source = open_source(path)
    reads: list[int] = []
    original = pq.ParquetFile.read_row_group

    def read_row_group(self: pq.ParquetFile, group: int, **options: Any) -> Any:
        reads.append(group)
        return original(self, group, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", read_row_group)
    for i in range(12):
        assert source.read(i) == encoded(i)
    assert reads == [0, 1, 2, 3, 4, 5]
    source.read(8), source.read(10), source.read(0), source.read(10)
    assert reads[6:] == [0]


def test_the_size_of_an_image_changes_with_any_of_its_row_group(tmp_path: Path) -> None:
    def sizes(images: list[bytes]) -> list[int]:
        source = open_source(write_parquet(tmp_path / "a.parquet", {"image": pa.array(images)}))
        return [image.size for image in source.images]

    images = [encoded(level) for level in range(5)]
    before, after = sizes(images), sizes([*images[:2], images[2] + bytes(100), *images[3:]])
    assert [before[i] == after[i] for i in range(5)] == [True, True, False, False, True]
    # The group's bytes hold its statistics too.
    assert after[2] == after[3] >= before[2] + 100


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
        ({"image": [b"x"], "text": ["a"], "caption": ["b"]}, "choose one with `caption_column`"),
        ({"image": [b"x", b"y"], "text": ["a", None]}, "00000001.img has caption none"),
        ({"image": [b"x"], "text": [["a", "b"]]}, "00000000.img has caption ['a', 'b']"),
        ({"image": [b"x", b"y"], "label": [1, None]}, "00000001.img has label none"),
        ({"image": pa.array([], pa.binary())}, "hold no rows"),
    ],
)
def test_what_does_not_fit_is_named(columns: dict[str, Any], told: str, tmp_path: Path) -> None:
    assert told in refusal(open_source, write_parquet(tmp_path / "a.parquet", columns))


def test_labels_outside_the_declared_classes_and_files_of_several_sets_are_refused(tmp_path: Path) -> None:
    features = {"label": {"names": ["a", "b"], "_type": "ClassLabel"}}
    path = write_parquet(tmp_path / "a.parquet", {"image": [b"x", b"y"], "label": [0, -1]}, features)
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
            assert [source.read(i) for i in range(len(source.files))] == [encoded(k) for k in (1, 2, 3)]
        except HddmError as error:
            refused += "rows where its row groups state" in str(error)
    assert refused >= 2


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, {"a.parquet": b"PAR1"})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install '.[parquet]' in a checkout" in refusal(open_source, path)
