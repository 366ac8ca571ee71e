"""The list of a shard's images: in its manifest or in a table beside it, with the same meaning."""

import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hddm.data import entries as columns
from hddm.data import shard_records
from hddm.data.check import check_data
from hddm.data.entries import Entries, ImageEntry, in_parts, shard_hash
from hddm.data.held_out import open_held_out
from hddm.data.partition import partition
from hddm.data.shard_records import (
    captions_of,
    entry_labels,
    open_images,
    read_manifest,
    sketch_of,
)
from hddm.data.shards import open_shard
from hddm.inspection.folders import inspected
from hddm.training.expert import train_expert
from tests.artefacts import copied, edit_json, expert_settings, refusal
from tests.data.test_sources import write_tar
from tests.shard_files import encode, noise, with_table, write_shard

NUM = 20
LABELS = [n % 2 for n in range(NUM)]
CAPTIONS = ["", *[f"Bild {n}: “schön” \\ \n 🐈" for n in range(1, NUM)]]


def entry(number: int, **changes: Any) -> ImageEntry:
    """One image of a list."""
    digest = hashlib.sha256(str(number).encode()).hexdigest()
    values = {"file": f"images/ä {number}.png", "sha256": digest, "label": number % 3}
    return ImageEntry.model_validate({**values, **changes})


MIXED = [
    entry(0, label=None),
    entry(1, caption="a"),
    entry(2, caption=""),
    entry(3, label=None, caption="ß"),
    entry(4),
]


def test_columns_hold_what_they_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "PART", 2)
    held = Entries.of(MIXED)
    assert (list(held), held[3], len(held)) == (MIXED, MIXED[3], 5)
    assert list(held[1:4]) == MIXED[1:4]
    assert list(held[1:][held.are_captioned[1:]]) == MIXED[1:4]
    parts = list(in_parts(MIXED))
    assert [len(part) for part in parts] == [2, 2, 1]
    assert list(Entries.joined([held[3:], *parts])) == MIXED[3:] + MIXED
    assert (entry_labels(held), captions_of(held)) == (None, None)
    assert entry_labels(held[1:3]) == [1, 2]
    captions = captions_of(held[1:4])
    assert captions is not None
    assert list(captions) == ["a", "", "ß"]
    assert list(Entries.of(())) == list(Entries.joined([])) == []


def test_the_hash_is_that_of_the_lines_of_all_images(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ['["c\\u00e4t", "dog"]']
    for one in MIXED:
        caption = "" if one.caption is None else f" {json.dumps(one.caption)}"
        lines.append(f"{one.file} {one.sha256} {one.label}{caption}")
    expected = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    for part in (2, 100):
        monkeypatch.setattr(columns, "PART", part)
        assert shard_hash(Entries.of(MIXED), ["cät", "dog"]) == expected


def test_a_sketch_is_the_smallest_of_many_hashes() -> None:
    hashes = [hashlib.sha256(str(n).encode()).hexdigest() for n in range(20_000)]
    expected = tuple(sorted(one[:16] for one in hashes)[:128])
    assert sketch_of([*hashes, *hashes[:9]]) == expected
    assert sketch_of(Entries.of([entry(0)]).hashes()) == (entry(0).sha256[:16],)


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    """A shard whose manifest lists its images."""
    write_shard(tmp_path / "listed", noise(NUM), LABELS, CAPTIONS)
    return tmp_path / "listed"


@pytest.fixture
def tabled(listed: Path, tmp_path: Path) -> Path:
    """The same shard with a table of its images."""
    return with_table(listed, tmp_path / "tabled")


def test_both_forms_open_alike(listed: Path, tabled: Path) -> None:
    there, here = read_manifest(listed), read_manifest(tabled)
    assert list(there.images) == list(here.images)
    assert there.hash == here.hash == shard_hash(here.images, here.classes)
    assert (there.table, here.table is None) == (None, False)
    record = json.loads((tabled / "manifest.json").read_text())
    content = (tabled / "images.parquet").read_bytes()
    assert "images" not in record
    assert record["table"] == {
        "file": "images.parquet",
        "sha256": hashlib.sha256(content).hexdigest(),
        "rows": NUM,
    }
    one, two = open_shard(listed), open_shard(tabled)
    assert torch.equal(one.images, two.images)
    assert torch.equal(one.labels, two.labels)
    assert (list(one.captions), one.sketch) == (list(two.captions), two.sketch)


def test_a_table_is_read_by_pyarrow_as_it_is(tabled: Path) -> None:
    file = pq.ParquetFile(tabled / "images.parquet")
    found = file.read().to_pydict()
    assert file.metadata.num_row_groups == 3
    expected = [f"images/{n:03d}.png" for n in range(NUM)]
    digests = [hashlib.sha256((tabled / name).read_bytes()).digest() for name in expected]
    assert (found["file"], found["sha256"]) == (expected, digests)
    assert (found["label"], found["caption"]) == (LABELS, CAPTIONS)


def test_a_shard_of_an_older_format_opens(listed: Path) -> None:
    edit_json(listed / "manifest.json", format="1.4")
    assert len(open_shard(listed)) == NUM
    edit_json(listed / "manifest.json", format="1.3")
    assert "format 1.3 is no longer read" in refusal(read_manifest, listed)


def test_a_partition_writes_long_lists_to_tables_with_the_same_hashes(
    many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files: dict[str, bytes] = {}
    for number, path in enumerate(sorted(many.rglob("*.png"))):
        files[f"{number:04d}.png"] = path.read_bytes()
        files[f"{number:04d}.txt"] = f"picture {number}".encode()
    source, cache = write_tar(tmp_path / "train.tar", files), tmp_path / "cache"
    partition(source, tmp_path / "lists", 2, held_out=0.4, cache=cache)
    monkeypatch.setattr(shard_records, "LARGEST_LIST", 18)
    monkeypatch.setattr(columns, "PART", 5)
    partition(source, tmp_path / "tables", 2, held_out=0.4, cache=cache)
    has_table = []
    for name in ("shard_0", "shard_1", "held_out/shard_0", "held_out/shard_1"):
        one = read_manifest(tmp_path / "lists" / name)
        two = read_manifest(tmp_path / "tables" / name)
        assert list(one.images) == list(two.images)
        assert (one.hash, one.partition, one.held_out_of) == (
            two.hash,
            two.partition,
            two.held_out_of,
        )
        has_table.append(two.table is not None)
        assert has_table[-1] == (len(one.images) > 18)
    assert len(set(has_table)) == 2
    folders = [tmp_path / name / "partition.json" for name in ("lists", "tables")]
    assert folders[0].read_bytes() == folders[1].read_bytes()


@pytest.mark.integration
def test_training_is_the_same(listed: Path, tabled: Path, tmp_path: Path) -> None:
    settings = expert_settings("flow", steps=3, class_conditional=True)
    losses, weights = [], []
    for shard in (listed, tabled):
        out = tmp_path / f"expert-of-{shard.name}"
        losses.append(train_expert(shard, out, settings))
        weights.append((out / "diffusion_pytorch_model.safetensors").read_bytes())
    assert losses[0] == losses[1]
    assert weights[0] == weights[1]


def test_encoding_check_inspection_and_held_out_images_are_the_same(
    listed: Path, tabled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tabled / "images" / "007.png").write_bytes(b"no image")
    shutil.copy(tabled / "images" / "007.png", listed / "images" / "007.png")
    reports = [check_data(shard) for shard in (listed, tabled)]
    assert [report.bad[0].name for report in reports] == ["images/007.png"] * 2
    counts = [report.parts[0].model_dump(exclude={"name", "bad"}) for report in reports]
    assert counts[0] == counts[1]
    assert (counts[0]["captions"], counts[0]["empty_captions"]) == (NUM, 1)
    encoded = [encode(listed, tmp_path / "one", rows=6, max_bad=1)]
    monkeypatch.setattr(shard_records, "LARGEST_LIST", 3)
    monkeypatch.setattr(columns, "PART", 7)
    encoded.append(encode(tabled, tmp_path / "two", rows=6, max_bad=1))
    one, two = (open_shard(folder) for folder in encoded)
    assert (len(one), len(two)) == (NUM - 1, NUM - 1)
    assert torch.equal(one.images, two.images)
    assert list(two.captions) == CAPTIONS[:7] + CAPTIONS[8:]
    assert (encoded[1] / "images.parquet").read_bytes() == (tabled / "images.parquet").read_bytes()
    for folders in ((listed, tabled), encoded):
        assert inspected(folders[0]) == inspected(folders[1])
    told = [refusal(open_held_out, folder, one) for folder in encoded]
    assert [text.replace("two", "one") for text in told] == [told[0]] * 2
    assert "all its images are also training images" in told[0]


def test_an_image_of_a_table_is_checked_when_it_is_read(tabled: Path) -> None:
    source = open_images(tabled)
    assert (source.files[3], len(source.images), source.labels) == ("images/003.png", NUM, LABELS)
    assert [len(source.read(n)) for n in (2, 3)] == [
        (tabled / f"images/{n:03d}.png").stat().st_size for n in (2, 3)
    ]
    shutil.copy(tabled / "images/004.png", tabled / "images/003.png")
    assert "images/003.png: its content changed" in refusal(source.read, 3)


def test_a_table_without_pyarrow_is_refused_by_what_to_install(
    listed: Path, tabled: Path, many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    remedy = "needs pyarrow: pip install '.[parquet]'"
    assert f"images.parquet: Parquet {remedy}" in refusal(open_shard, tabled)
    assert len(open_shard(listed)) == NUM
    monkeypatch.setattr(shard_records, "LARGEST_LIST", 19)
    told = f"a shard of 20 images (more than 19) {remedy}"
    assert told in refusal(encode, listed, tmp_path / "out")
    assert f"a shard of 40 images (more than 19) {remedy}" in refusal(
        partition, many, tmp_path / "out", 2
    )
    assert {path.name for path in tmp_path.iterdir()} == {"listed", "tabled"}


def test_a_changed_cut_or_missing_table_is_refused(tabled: Path, tmp_path: Path) -> None:
    content = (tabled / "images.parquet").read_bytes()
    for number, spoilt in enumerate((content[:-9], content + b"\0", content[:50] + content[51:])):
        folder = copied(tabled, tmp_path / str(number))
        (folder / "images.parquet").write_bytes(spoilt)
        told = refusal(open_shard, folder)
        assert told == (
            f"{folder / 'images.parquet'}: changed since it was written; copy the shard again"
        )
    (tabled / "images.parquet").unlink()
    assert refusal(open_shard, tabled) == f"{tabled / 'images.parquet'}: no such file"


def test_a_manifest_with_both_forms_or_none_is_refused(listed: Path, tabled: Path) -> None:
    table = json.loads((tabled / "manifest.json").read_text())["table"]
    told = "has to hold either images or a table of them; copy the shard again"
    edit_json(listed / "manifest.json", table=table)
    assert refusal(open_shard, listed) == f"{listed / 'manifest.json'}: {told}"
    edit_json(tabled / "manifest.json", table=None)
    assert told in refusal(open_shard, tabled)


def _sealed(folder: Path, content: dict[str, Any], rows: int | None = None, **options: Any) -> Path:
    """Write a table with hashes that fit, as an attacker would."""
    table = pa.table(content)
    path = folder / "images.parquet"
    how = {"compression": "none", "use_dictionary": False, **options}
    pq.write_table(table, path, **how)
    record = json.loads((folder / "manifest.json").read_text())
    lines = [json.dumps(record["classes"])]
    for one in table.to_pylist():
        file, digest, label = one["file"], one["sha256"], one["label"]
        caption = one.get("caption")
        text = "" if caption is None else f" {json.dumps(caption)}"
        digits = digest.hex() if isinstance(digest, bytes) else digest
        lines.append(f"{file} {digits} {label}{text}")
    sealed = {
        "file": path.name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "rows": len(table) if rows is None else rows,
    }
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    edit_json(folder / "manifest.json", table=sealed, hash=digest)
    return folder


def _content(folder: Path) -> dict[str, Any]:
    table = pq.read_table(folder / "images.parquet")
    return {name: table[name] for name in table.column_names}


def test_a_sealed_table_opens(tabled: Path) -> None:
    """So that the refusals below are for what was changed."""
    assert len(open_shard(_sealed(tabled, _content(tabled)))) == NUM


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("../secret.png", "the name '../secret.png' points outside the folder"),
        ("/etc/passwd", "the name '/etc/passwd' points outside the folder"),
        ("images/../../x", "points outside the folder"),
        ("C:x", "points outside the folder"),
        ("a\\b", "points outside the folder"),
        ("a\nb", "points outside the folder"),
        ("", "points outside the folder"),
        ("images/004.png", "manifest.json: lists images/004.png twice; copy the shard again"),
    ],
)
@pytest.mark.parametrize("has_table", [False, True])
def test_names_that_lead_out_or_repeat_are_refused_in_both_forms(
    has_table: bool, name: str, told: str, listed: Path, tabled: Path
) -> None:
    content = _content(tabled)
    files = content["file"].to_pylist()
    files[3] = name
    folder = _sealed(tabled, {**content, "file": pa.array(files)})
    if not has_table:
        digest = json.loads((tabled / "manifest.json").read_text())["hash"]
        images = json.loads((listed / "manifest.json").read_text())["images"]
        images[3]["file"] = name
        edit_json(listed / "manifest.json", images=images, hash=digest)
        folder = listed
    found = refusal(open_shard, folder)
    assert told in found
    assert "\n" not in found


def _column(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda content: {**content, name: change(content[name])}


def _without_first(values: Any) -> Any:
    return pa.array([None, *values.to_pylist()[1:]], values.type)


WRONG: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], dict[str, Any], str]] = {
    "no caption": (
        lambda content: {name: content[name] for name in ("file", "sha256", "label")},
        {},
        "has the columns file string, sha256 fixed_size_binary[32], label int32, not file string",
    ),
    "hexadecimal digits": (
        _column("sha256", lambda values: pa.array([one.as_py().hex() for one in values])),
        {},
        "sha256 string, label int32",
    ),
    "labels of 64 bits": (
        _column("label", lambda values: values.cast(pa.int64())),
        {},
        "label int64, caption string, not",
    ),
    "no file": (_column("file", _without_first), {}, "has an image without a file or SHA-256"),
    "no hash": (_column("sha256", _without_first), {}, "has an image without a file or SHA-256"),
    "a label below 0": (
        _column("label", lambda values: pa.array([-1] * len(values), pa.int32())),
        {},
        "or a label below 0",
    ),
    "fewer rows": (lambda content: content, {"rows": NUM - 1}, "holds 20 images, not 19"),
    "10^12 rows": (lambda content: content, {"rows": 10**12}, "holds 20 images, not 1000000000000"),
    "compressed": (
        lambda content: content,
        {"compression": "zstd"},
        "its column file is compressed",
    ),
    "a megabyte a row from one": (
        _column("caption", lambda values: pa.array(["x" * 2**20] * len(values))),
        {"use_dictionary": ["caption"]},
        "its column caption is compressed",
    ),
    "no UTF-8": (
        _column(
            "file",
            lambda values: pa.StringArray.from_buffers(
                len(values),
                pa.py_buffer(b"".join(n.to_bytes(4, "little") for n in range(len(values) + 1))),
                pa.py_buffer(b"\xff" * len(values)),
            ),
        ),
        {},
        "cannot be read as Parquet",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_hostile_table_is_refused_in_one_line(kind: str, tabled: Path) -> None:
    change, options, told = WRONG[kind]
    content = change(_content(tabled))
    if kind == "no UTF-8":
        pq.write_table(
            pa.table(content), tabled / "images.parquet", compression="none", use_dictionary=False
        )
        digest = hashlib.sha256((tabled / "images.parquet").read_bytes()).hexdigest()
        table = {"file": "images.parquet", "sha256": digest, "rows": NUM}
        edit_json(tabled / "manifest.json", table=table)
    else:
        _sealed(tabled, content, **options)
    found = refusal(open_shard, tabled)
    assert found.startswith(f"{tabled / 'images.parquet'}: ")
    assert told in found
    assert "\n" not in found


def test_a_table_outside_the_folder_is_refused(tabled: Path) -> None:
    shutil.move(tabled / "images.parquet", tabled.parent / "images.parquet")
    record = json.loads((tabled / "manifest.json").read_text())
    edit_json(tabled / "manifest.json", table=record["table"] | {"file": "../images.parquet"})
    assert "points outside the folder" in refusal(open_shard, tabled)


def test_a_misspelt_key_of_an_image_is_told_with_the_nearest(listed: Path) -> None:
    images = json.loads((listed / "manifest.json").read_text())["images"]
    images[2]["fil"] = images[2].pop("file")
    edit_json(listed / "manifest.json", images=images)
    assert "unknown key 'images.2.fil'; did you mean 'file'?" in refusal(read_manifest, listed)
