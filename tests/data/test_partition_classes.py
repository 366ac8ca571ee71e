"""Partitions by class, of some classes, and of several sources of images; the digits as a folder."""

from pathlib import Path

import pytest

from hddm.data.partition import partition
from hddm.data.shard_records import read_manifest
from tests.artefacts import CLASSES, Command, refusal, write_images


def test_shards_by_class_have_their_classes_and_all_names(many: Path, tmp_path: Path, hddm: Command) -> None:
    out = tmp_path / "out"
    options = ["--classes", "a=rows", "--classes", "b=columns", "--held-out", 0.4]
    code, _, err = hddm("partition", many, *options, "--out", out)
    assert (code, err) == (0, "")
    for k, name in enumerate(("rows", "columns")):
        for manifest in (read_manifest(out / f"shard_{k}"), read_manifest(out / "held_out" / f"shard_{k}")):
            assert {Path(one.file).parts[1] for one in manifest.images} == {name}
            assert {manifest.classes[one.label or 0] for one in manifest.images} == {name}
            assert tuple(manifest.classes) == CLASSES
    assert "divided by class" in (out / "report.html").read_text()
    assert not (out / "clusters.safetensors").exists()
    assert "pass one" in hddm("partition", many, "--out", tmp_path / "x")[2]
    both = ["--classes", "a=rows,columns", "--shards", 1]
    assert "pass one" in hddm("partition", many, *both, "--out", tmp_path / "x")[2]
    rows, columns = ("rows",), ("columns",)
    for wrong in ([rows], [rows, rows], [rows, columns, ("else",)], [rows, (*columns, "else")]):
        text = refusal(partition, many, tmp_path / "x", 2, classes=wrong)
        assert "its classes are columns, rows; name each of them in one of 2 shards" in text


def test_some_classes_are_taken_as_if_there_were_no_others(
    images: Path, tmp_path: Path, hddm: Command
) -> None:
    some, alone = tmp_path / "some", tmp_path / "alone"
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "rows").symlink_to(images / "rows")
    (tmp_path / "rows-alone").mkdir()
    for path in (images / "rows").iterdir():
        target = tmp_path / "rows-alone" / "rows" / path.name
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(path.read_bytes())
    assert hddm("partition", images, "--only", "rows", "--shards", 1, "--out", some)[0] == 0
    assert hddm("partition", tmp_path / "rows-alone", "--shards", 1, "--out", alone)[0] == 0
    assert read_manifest(some / "shard_0").hash == read_manifest(alone / "shard_0").hash
    told = hddm("partition", images, "--only", "dogs", "--shards", 1, "--out", tmp_path / "x")[2]
    assert "has no class dogs; it has columns, rows" in told


def test_several_sources_are_taken_together(images: Path, tmp_path: Path, hddm: Command) -> None:
    other, out = write_images(tmp_path / "other", per_class=20, side=4), tmp_path / "out"
    code, shown, err = hddm("partition", images, other / "rows", "--shards", 1, "--out", out)
    assert (code, err) == (0, "")
    manifest = read_manifest(out / "shard_0")
    assert len(manifest.images) == 48 + 20
    # Images without a class have made all of them have none.
    assert manifest.classes == []
    assert f"{out / 'shard_0'}: 68 images" in shown


@pytest.mark.integration
def test_the_digits_are_class_folders_on_two_sides(tmp_path: Path, hddm: Command) -> None:
    pytest.importorskip("sklearn")
    out = tmp_path / "digits"
    assert hddm("data", "digits", "--out", out)[0] == 0
    counts = [len(list((out / side).rglob("*.png"))) for side in ("train", "held_out")]
    assert counts == [1438, 359]
    assert sorted(path.name for path in (out / "train").iterdir()) == [str(k) for k in range(10)]
    assert "exists" in hddm("data", "digits", "--out", out)[2]
