"""What hddm evaluate reads: partitions for their images, and all images that cannot be read by name."""

import json
from pathlib import Path

import pytest

from hddm.data.partition import partition
from hddm.evaluation.images import read_data
from tests.artefacts import Command, copied, refusal
from tests.component_files import write_vae
from tests.shard_files import encode, write_partition


@pytest.fixture(scope="module")
def shards(many: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of them and, held out, a share of each."""
    out = tmp_path_factory.mktemp("shards") / "shards"
    partition(many, out, 2, held_out=0.4)
    return out


@pytest.mark.integration
def test_a_partition_stands_for_its_training_images_or_those_it_holds_out(
    many: Path, shards: Path, tmp_path: Path
) -> None:
    record = json.loads((shards / "partition.json").read_text())
    sides = read_data({"reference": shards, "held_out": shards})
    counts = [sides[role].record.images for role in ("reference", "held_out")]
    assert counts == [sum(record["sizes"]), sum(record["held_out"])]
    held_out = read_data({"held_out": shards / "held_out"})["held_out"]
    assert held_out.record.hash == sides["held_out"].record.hash
    one = read_data({"images": shards / "held_out" / "shard_0"})["images"]
    assert one.record.images == record["held_out"][0]
    # All of them, in another order.
    partition(many, tmp_path / "plain", 2)
    whole, folder = (read_data({"reference": path})["reference"] for path in (tmp_path / "plain", many))
    assert whole.record.hash == folder.record.hash
    assert whole.images.classes == folder.images.classes
    rows = [folder.images.files.index(name.split("/images/")[1]) for name in whole.images.files]
    assert whole.images.pixels.equal(folder.images.pixels[rows])
    assert whole.images.labels.equal(folder.images.labels[rows])


def test_encoded_pixels_are_brought_back_and_latents_are_refused(shards: Path, tmp_path: Path) -> None:
    encode(shards, tmp_path / "pixels")
    for role in ("reference", "held_out"):
        images, encoded = (read_data({role: path})[role] for path in (shards, tmp_path / "pixels"))
        assert encoded.record.hash == images.record.hash
        assert encoded.images.pixels.equal(images.images.pixels)
        assert encoded.images.labels.equal(images.images.labels)
    write_vae(tmp_path / "vae")
    latents = encode(write_partition(tmp_path / "colour"), tmp_path / "latents", vae=tmp_path / "vae")
    told = "holds latents, and figures are of pixels; name the partition"
    assert told in refusal(read_data, {"reference": latents})


def test_a_partition_without_held_out_images_has_none(tmp_path: Path) -> None:
    plain = write_partition(tmp_path / "plain")
    told = "holds no held-out images; hddm partition --held-out keeps some"
    assert told in refusal(read_data, {"held_out": plain})


def test_bad_images_of_all_sides_are_named_at_once_and_left_out_when_asked(
    many: Path, classifier: str, home: Path, tmp_path: Path, hddm: Command
) -> None:
    samples, shards = copied(many, tmp_path), tmp_path / "shards"
    partition(many, shards, 1)
    changed = shards / "shard_0" / "images" / "rows" / "03.png"
    # The file itself is the one in the folder of images.
    changed.unlink()
    changed.write_bytes(b"other")
    (samples / "columns" / "05.png").write_bytes(b"nothing")
    command = ["evaluate", samples, "--reference", shards, "--features", classifier]
    code, out, err = hddm(*command, "--max-bad", 1)
    told = f"{samples}, {shards}: 2 images cannot be read, and 1 may be; hddm data check lists all; repair"
    assert (code, out, told in err) == (1, "", True)
    assert f"  {samples / 'columns/05.png'}: cannot be read as an image" in err
    assert f"  {changed}: its content changed since the partition" in err
    code, out, err = hddm(*command, "--max-bad", 2, "--json")
    assert code == 0
    assert f"skipped {shards / 'shard_0/images/rows/03.png'}: cannot be read\n" in err
    result = json.loads(out)
    for role, name in (("images", "columns/05.png"), ("reference", "shard_0/images/rows/03.png")):
        assert (result["data"][role]["skipped"], result["data"][role]["images"]) == ([name], 159)
    assert (result["comparable"], result["reasons"]) == (False, ["1 sample could not be read"])
    # Labels stay with their images.
    group = read_data({"reference": samples}, 1)["reference"]
    assert group.images.files[5] == "columns/06.png"
    assert group.images.labels.tolist() == [0] * 79 + [1] * 80
