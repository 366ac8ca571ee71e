"""What is wrong with an input is told, whatever is wrong with the output besides."""

from pathlib import Path

import pytest

from tests.artefacts import Command, contents

TRAIN = "--objective flow --steps 2 --size tiny"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("partition {empty} --shards 2", "{empty}: holds no images"),
        ("encode {images}", "{images}: is no shard"),
        (f"train expert {{images}} {TRAIN}", "{images}: is no shard"),
        (f"train expert {{shards}} {TRAIN}", "{shards}: is a partition, not a shard"),
        ("train expert {shard} --init {images} --objective flow --steps 2", "{images}: no expert folder"),
        (f"train all --shards {{shard}} {TRAIN}", "{shard}: is a shard, not a partition"),
        ("train router {shard} --steps 2", "{shard}: is a shard, not a partition"),
        ("distill {expert} --data {shard} --steps 2", "{shard}: is a shard, not a partition"),
        ("convert {images}", "{images}"),
        ("convert {images} --to-layout facebook-dit", "{images}: no expert folder"),
        ("assemble {images}", "{images}"),
        ("sample {images}", "{images}: neither an expert folder"),
        ("sample {expert} --class-labels 3", "--class-labels 3: the model is unconditional"),
        ("evaluate {images} --reference {empty}", "{empty}: holds no images"),
        (
            "benchmark cifar10-small --data {empty}",
            "no such images; name by --data the folder that data.training, 'train', lies in",
        ),
    ],
)
def test_a_wrong_input_is_told_before_an_output_that_exists(
    line: str, said: str, images: Path, shards: Path, ddpm_expert: Path, tmp_path: Path, hddm: Command
) -> None:
    (tmp_path / "empty").mkdir()
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("precious")
    before = contents(tmp_path)
    names = {"empty": tmp_path / "empty", "images": images, "shards": shards, "expert": ddpm_expert}
    names["shard"] = shards / "shard_0"
    code, _, error = hddm(*line.format(**names).split(), "--out", out)
    assert code in (1, 2)
    assert said.format(**names) in error
    assert "exists" not in error
    assert contents(tmp_path) == before
