"""What hddm evaluate reads: partitions for their images, and all images that cannot be read by name."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hddm.data.partition import partition
from hddm.evaluation.evaluate import evaluate
from hddm.evaluation.images import read_data
from hddm.evaluation.sources import refuse_trained
from tests.artefacts import Command, copied, refusal, write_images
from tests.component_files import write_vae
from tests.shard_files import as_file, encode, noise, write_partition


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
    whole, folder = (
        read_data({"reference": path})["reference"] for path in (tmp_path / "plain", many)
    )
    assert whole.record.hash == folder.record.hash
    assert whole.images.classes == folder.images.classes
    rows = [folder.images.files.index(name.split("/images/")[1]) for name in whole.images.files]
    assert whole.images.pixels.equal(folder.images.pixels[rows])
    assert whole.images.labels.equal(folder.images.labels[rows])


def test_encoded_pixels_are_brought_back_and_latents_are_refused(
    shards: Path, tmp_path: Path
) -> None:
    encode(shards, tmp_path / "pixels")
    for role in ("reference", "held_out"):
        images, encoded = (read_data({role: path})[role] for path in (shards, tmp_path / "pixels"))
        assert encoded.record.hash == images.record.hash
        assert encoded.images.pixels.equal(images.images.pixels)
        assert encoded.images.labels.equal(images.images.labels)
    write_vae(tmp_path / "vae")
    latents = encode(
        write_partition(tmp_path / "colour"), tmp_path / "latents", vae=tmp_path / "vae"
    )
    told = "holds latents, and figures are of pixels; name the partition"
    assert told in refusal(read_data, {"reference": latents})


def test_images_of_any_shard_of_latents_are_known_by_their_files(tmp_path: Path) -> None:
    write_vae(tmp_path / "vae")
    colour = write_partition(tmp_path / "colour")
    latents = encode(colour, tmp_path / "latents", vae=tmp_path / "vae")
    for shard in ("shard_0", "shard_1"):
        fresh = colour / shard / "images"
        told = refusal(refuse_trained, "held_out", fresh, [latents])
        assert f"all its images are also training images of {latents}" in told


def test_a_partition_without_held_out_images_has_none(tmp_path: Path) -> None:
    plain = write_partition(tmp_path / "plain")
    told = "holds no held-out images; hddm partition --held-out keeps some"
    for role in ("images", "validation", "held_out"):
        assert told in refusal(read_data, {role: plain})


@pytest.mark.parametrize("role", ["validation", "held_out"])
def test_samples_that_are_named_as_held_out_images_are_these(
    role: str, shards: Path, classifier: str, home: Path
) -> None:
    result = evaluate(shards, shards, features=classifier, allow_few=True, **{role: shards})
    fresh = getattr(result.data, role)
    assert result.data.images == fresh
    assert (
        result.images
        == fresh.images
        == sum(json.loads((shards / "partition.json").read_text())["held_out"])
    )
    assert result.data.reference.hash != fresh.hash
    assert result.to(role).value == pytest.approx(0, abs=1e-4)
    assert result.to("training").value > 0.1
    # Also where nothing is compared with them.
    assert read_data({"images": shards})["images"].record.hash == fresh.hash


def test_real_images_in_the_place_of_samples_may_be_jpeg(tmp_path: Path) -> None:
    photos, training = tmp_path / "photos", write_images(tmp_path / "training")
    photos.mkdir()
    for index, image in enumerate(noise(8, 4, 4, colour=False)):
        (photos / f"{index}.jpg").write_bytes(as_file(image, "JPEG"))
    assert "JPEG compression" in refusal(read_data, {"images": photos, "reference": training})
    groups = read_data({"images": photos, "reference": training, "held_out": photos})
    assert groups["images"] is groups["held_out"]


@pytest.mark.parametrize("role", ["validation", "held_out"])
def test_images_that_are_trained_on_are_not_taken_for_fresh_ones(
    role: str, many: Path, tmp_path: Path
) -> None:
    """Known by their pixels: copies have other names, another encoding and colour."""
    fresh = write_images(tmp_path / "fresh", per_class=20, seed=50)
    for number in (3, 7):
        with Image.open(many / "rows" / f"{number:02d}.png") as image:
            image.convert("RGB").save(fresh / "columns" / f"copy-{number}.webp", lossless=True)
    told = refusal(read_data, {"reference": many, role: fresh})
    assert told.splitlines() == [
        f"`{role}` {fresh}: 2 of 42 images are also training images of {many}, such as columns/copy-3.webp, "
        "which is rows/03.png there; remove them here, or name other images; hddm partition --held-out keeps "
        "some",
        "  columns/copy-3.webp",
        "  columns/copy-7.webp",
    ]
    every = refusal(read_data, {"reference": many, role: many})
    assert (
        f"`{role}` {many}: all its images are also training images of {many}, such as columns/00.png"
        in every
    )
    # A model may copy what it was trained on.
    read_data({"images": fresh, "reference": many})


def test_shards_that_were_trained_on_are_not_taken_for_held_out_ones(
    many: Path, shards: Path, tmp_path: Path
) -> None:
    partition(many, tmp_path / "again", 1)
    for one in (shards / "shard_0", shards / "shard_1" / "images", tmp_path / "again" / "shard_0"):
        assert "are also training images" in refusal(
            read_data, {"reference": shards, "held_out": one}
        )
    read_data({"reference": shards, "held_out": shards / "held_out" / "shard_0"})
    # Of another partition of the same images.
    partition(many, tmp_path / "other", 1, held_out=0.4)
    read_data({"reference": shards, "held_out": tmp_path / "other" / "held_out"})


def test_settings_are_not_confirmed_on_images_that_chose_them(many: Path, tmp_path: Path) -> None:
    fresh = write_images(tmp_path / "fresh", per_class=20, seed=50)
    told = refusal(read_data, {"reference": many, "validation": fresh, "held_out": fresh / "rows"})
    assert (
        f"`held_out` {fresh / 'rows'}: all its images are also validation images of {fresh}" in told
    )
    partition(many, tmp_path / "shards", 1, held_out=0.3)
    told = refusal(
        read_data, {"validation": tmp_path / "shards", "held_out": tmp_path / "shards" / "held_out"}
    )
    assert "all its images are also validation images" in told


def test_images_of_a_partition_may_become_equal_as_they_are_encoded(tmp_path: Path) -> None:
    """Ten shades, each in 16 versions that differ in one pixel by one level."""
    for shade in range(10):
        folder = tmp_path / "images" / f"shade-{shade}"
        folder.mkdir(parents=True)
        for place in range(16):
            image = np.full(16, 20 * shade, np.uint8)
            image[place] += 1
            (folder / f"{place}.png").write_bytes(as_file(image.reshape(4, 4)))
    partition(tmp_path / "images", tmp_path / "shards", 1, held_out=0.3)
    encoded = encode(tmp_path / "shards", tmp_path / "encoded", resolution=2)
    groups = read_data({"reference": encoded, "held_out": encoded})
    digests = [{one.numpy().tobytes() for one in group.images.pixels} for group in groups.values()]
    assert digests[0] & digests[1]


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
