"""Held-out images of a partition: which they are, that copies stay together, shares that cannot be met."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hddm.checkpoints.inspect import inspected
from hddm.data.check import check_data
from hddm.data.images import save_png
from hddm.data.partition import partition
from hddm.data.shard_records import find_shards
from hddm.data.shards import open_shard
from hddm.utils.errors import UsageError
from tests.artefacts import Command, copied, draw, number_of_pixels, refusal, shard_files


def test_held_out_images_are_shards_of_their_own_and_no_training_images(many: Path, tmp_path: Path) -> None:
    plain = partition(many, tmp_path / "plain", 1)[0]
    (folder,) = partition(many, tmp_path / "out", 1, held_out=0.4)
    held = tmp_path / "out" / "held_out" / "shard_0"
    training, kept = shard_files(folder), shard_files(held)
    assert not training.keys() & kept.keys()
    assert training | kept == shard_files(plain)
    assert 20 <= len(kept) <= 44
    ours, theirs = open_shard(folder), open_shard(held)
    assert (theirs.held_out_of, theirs.partition, ours.held_out_of) == (ours.hash, ours.partition, None)
    record = inspected(tmp_path / "out")
    assert (record["sizes"], record["held_out"], record["images"]) == ([len(training)], (len(kept),), 80)
    assert (record["held_out_share"], find_shards(tmp_path / "out")) == (0.4, [folder])


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_a_share_outside_its_range_is_refused(share: float, many: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"`held_out` {share:g}: must be"):
        partition(many, tmp_path / "out", 1, held_out=share)


@pytest.mark.parametrize(
    ("shards", "works", "wrong"),
    [(1, 0.2, (0.02, 0.19, 0.81, 0.95)), (2, 0.4, (0.3, 0.399))],
)
def test_a_share_that_leaves_too_few_is_refused_before_features_are_computed(
    shards: int,
    works: float,
    wrong: tuple[float, ...],
    many: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    partition(many, tmp_path / "out", shards, held_out=works)
    monkeypatch.setattr("hddm.data.partition.compute_features", pytest.fail)
    for share in wrong:
        told = refusal(partition, many, tmp_path / "none", shards, held_out=share)
        assert f"80 images are too few for `shards` {shards} and `held_out` {share:g}, to have 16 on" in told
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_shards_too_small_for_two_sides_and_what_auto_may_take_are_known_before_features(
    many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hddm: Command
) -> None:
    assert len(partition(many, tmp_path / "auto", "auto", held_out=0.4)) == 2
    assert list(inspected(tmp_path / "auto")["proposal"]) == [2]
    code, lines, _ = hddm("partition", many, "--out", tmp_path / "few", "--shards", 1, "--held-out", 0.2)
    (held_out,) = inspected(tmp_path / "few")["held_out"]
    ending = ", few to test its expert on" if held_out < 16 else ""
    assert (code, lines.splitlines()[0].split(f", {held_out} held out")[1]) == (0, ending)
    monkeypatch.setattr("hddm.data.partition.compute_features", pytest.fail)
    assert "it takes 160" in refusal(partition, many, tmp_path / "out", 3, held_out=0.3)
    assert "it takes 160" in refusal(partition, many, tmp_path / "out", "auto", held_out=0.2)


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


def test_copies_are_kept_together_whatever_their_files_and_told_with_the_share_that_was_met(
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
        f"{kept} of 120 images, {100 * kept / 120:.1f} % (--held-out 0.4 is exact only on average)\n" in told
    )
    together = "equal images are kept together, all to train on or all held out"
    assert f"40 images are copies of others; {together}\n" in told
    assert together in (out / "report.html").read_text()
    report = check_data(out)
    assert (report.split, report.across_split) == (["training", "held_out"], [])
    assert sum(len(group) - 1 for group in report.duplicates + report.shared) == 40
