"""hddm encode --buckets: pictures of any aspect ratio, in rows of a few shapes."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hddm.data.images import buckets_of, cropped_share, fit_image, nearest_bucket
from hddm.data.shard_records import read_encoded_manifest
from hddm.data.shards import open_shard
from hddm.utils.errors import HddmError, UsageError
from tests.artefacts import Command, Died, contents, edit_json, refusal
from tests.component_files import write_clip, write_vae
from tests.shard_files import encode, write_shard

SIZES = [(16, 16), (24, 40), (30, 20), (10, 30), (33, 31)]
"""Heights and widths; at 16 pixels with steps of 4 the buckets are 16×16, 12×20 and 20×12."""
BUCKETS = [0, 1, 2, 1, 0]
SHAPES = [(16, 16), (12, 20), (20, 12)]


def _pictures(num: int = 20) -> list[np.ndarray]:
    draws = np.random.default_rng(0)
    sizes = [SIZES[k % len(SIZES)] for k in range(num)]
    return [draws.integers(0, 256, (*size, 3)).astype(np.uint8) for size in sizes]


def _rows(num: int = 20) -> list[int]:
    """Pictures in the order of rows: bucket by bucket."""
    return sorted(range(num), key=lambda k: BUCKETS[k % len(BUCKETS)])


def _fitted(picture: np.ndarray, size: Sequence[int]) -> torch.Tensor:
    """The picture scaled by Pillow until it covers ``size`` (H, W), and cut from its middle."""
    height, width = picture.shape[:2]
    scale = max(size[0] / height, size[1] / width)
    scaled = int(width * scale + 1e-9), int(height * scale + 1e-9)
    image = Image.fromarray(picture).resize(scaled, Image.Resampling.LANCZOS)
    left, top = round((scaled[0] - size[1]) / 2), round((scaled[1] - size[0]) / 2)
    return torch.from_numpy(np.array(image)[top : top + size[0], left : left + size[1]]).permute(2, 0, 1)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    captions = [f"a cat and {n} dog" for n in range(20)]
    write_shard(tmp_path / "source", _pictures(), [n % 2 for n in range(20)], captions)
    return tmp_path / "source"


def test_buckets_have_about_the_area_of_the_square_and_bounded_ratios() -> None:
    # 256²/224 = 292.6 and 256²/192 = 341.3, to multiples of 32; to 160 would belong 416, and 2.6 is too long.
    expected = ((256, 256), (224, 288), (192, 352), (288, 224), (352, 192))
    assert buckets_of(256, 32) == expected
    assert buckets_of(16, 4) == ((16, 16), (12, 20), (20, 12))
    for side, step in ((512, 64), (1024, 64), (256, 16)):
        for height, width in buckets_of(side, step):
            assert height % step == width % step == 0
            assert 0.5 <= height / width <= 2
            assert abs(height * width / side**2 - 1) <= step / min(height, width) / 2
            assert (width, height) in buckets_of(side, step)


@pytest.mark.parametrize(
    ("size", "bucket"),
    [
        ((250, 260), 0),
        ((480, 640), 1),
        # log(3/2) = 0.405 lies between log(288/224) = 0.251 and log(352/192) = 0.606, nearer to the first.
        ((400, 600), 1),
        ((1080, 1920), 2),
        ((100, 1000), 2),
        ((600, 400), 3),
        ((1000, 100), 4),
    ],
)
def test_a_picture_belongs_to_the_nearest_ratio(size: tuple[int, int], bucket: int) -> None:
    assert nearest_bucket(size, buckets_of(256, 32)) == bucket


def test_a_picture_covers_its_bucket_and_loses_little() -> None:
    # 400 rows become 224, and 600 columns 336, of which 288 stay.
    picture = np.random.default_rng(0).integers(0, 256, (400, 600), dtype=np.uint8)
    scaled = Image.fromarray(picture).resize((336, 224), Image.Resampling.LANCZOS)
    expected = np.asarray(scaled)[:, 24:312]
    assert np.array_equal(np.asarray(fit_image(Image.fromarray(picture), (224, 288))), expected)
    assert cropped_share((400, 600), (224, 288)) == pytest.approx(1 - 288 / 336)
    assert cropped_share((600, 400), (224, 288)) == pytest.approx(1 - (400 / 600) * (224 / 288))
    assert cropped_share((112, 144), (224, 288)) == 0


def test_latents_of_a_bucket_are_those_of_the_fitted_pictures(source: Path, tmp_path: Path) -> None:
    vae = write_vae(tmp_path / "vae")
    write_clip(tmp_path, tokens=24)
    networks = {name: tmp_path / name for name in ("vae", "text_encoder", "tokenizer")}
    options = {"resolution": 16, "dtype": "float32", "random_flip": True, "batch_size": 3, **networks}
    shard = open_shard(encode(source, tmp_path / "out", rows=5, buckets=True, bucket_step=4, **options))
    assert (shard.shape, len(shard)) == ((4, 8, 8), 20)
    assert {shape: rows.tolist() for shape, rows in shard.buckets.items()} == {
        (4, 8, 8): list(range(8)),
        (4, 6, 10): list(range(8, 16)),
        (4, 10, 6): list(range(16, 20)),
    }
    pictures = _pictures()
    for bucket, rows in enumerate(shard.buckets.values()):
        own = [k for k in range(20) if BUCKETS[k % 5] == bucket]
        pixels = torch.stack([_fitted(pictures[k], SHAPES[bucket]) for k in own]) / 127.5 - 1
        for flip in (False, True):
            with torch.no_grad():
                expected = vae.encode(pixels.flip(-1) if flip else pixels).latent_dist.mean
            found = shard.take(rows, flip=torch.full((len(rows),), flip))
            assert torch.allclose(found, expected * vae.config.scaling_factor, atol=1e-5)
    # Labels, captions and tokens go along.
    assert shard.labels.tolist() == [k % 2 for k in _rows()]
    assert shard.captions == tuple(f"a cat and {k} dog" for k in _rows())
    squares = open_shard(encode(source, tmp_path / "squares", **options))
    assert torch.allclose(
        shard.texts.take(torch.arange(20)), squares.texts.take(torch.tensor(_rows())), atol=1e-5
    )
    assert shard.hash == squares.hash
    words = r"samples of \(4, 8, 8\) and \(4, 6, 10\) make no batch; take those of one bucket"
    with pytest.raises(HddmError, match=words):
        shard.take(torch.tensor([0, 8]))


def test_pixels_are_bucketed_too_and_the_counts_are_told(source: Path, tmp_path: Path, hddm: Command) -> None:
    options = ("--resolution", 16, "--buckets", "--out", tmp_path / "out")
    code, out, _ = hddm("encode", source, *options)
    assert code == 0
    # 30×10 becomes 36×12, of which 20 columns stay.
    expected = "pictures by bucket: 16×16: 8, 20×12: 8, 12×20: 4; at most 44% of one was cropped"
    assert out.splitlines() == [f"{tmp_path / 'out'}: 20 images as pixels, 3×16×16", f"  {expected}"]
    shard, pictures = open_shard(tmp_path / "out"), _pictures()
    for row, k in enumerate(_rows()):
        pixels = _fitted(pictures[k], SHAPES[BUCKETS[k % 5]])
        assert torch.equal(shard.take(torch.tensor([row]))[0], pixels / 127.5 - 1)
    assert read_encoded_manifest(tmp_path / "out").encoding.buckets == ((3, 16, 16), (3, 12, 20), (3, 20, 12))
    assert hddm("inspect", tmp_path / "out")[0] == 0


def test_a_killed_encoding_goes_on_to_the_same_bytes(source: Path, tmp_path: Path) -> None:
    options = {"resolution": 16, "buckets": True, "bucket_step": 4, "crop": "random", "rows": 3}
    whole = contents(encode(source, tmp_path / "whole", **options))
    seen = 0

    def die(images: int) -> None:
        nonlocal seen
        seen += images
        if seen > 9:
            raise Died

    with pytest.raises(Died):
        encode(source, tmp_path / "out", on_images=die, **options)
    assert not (tmp_path / "out").exists()
    assert contents(encode(source, tmp_path / "out", **options)) == whole


def test_a_picture_that_cannot_be_read_is_left_out_of_its_bucket_by_name(tmp_path: Path) -> None:
    pictures: list[np.ndarray | bytes] = [*_pictures()]
    pictures[6] = b"no picture"
    write_shard(tmp_path / "source", pictures, [n % 2 for n in range(20)])
    options = {"resolution": 16, "buckets": True, "max_bad": 1}
    shard = open_shard(encode(tmp_path / "source", tmp_path / "out", **options))
    assert [len(rows) for rows in shard.buckets.values()] == [8, 7, 4]
    assert shard.labels.tolist() == [k % 2 for k in _rows() if k != 6]
    assert [one.file for one in read_encoded_manifest(tmp_path / "out").skipped] == ["images/006.png"]


def test_folders_without_buckets_say_nothing_of_them(source: Path, tmp_path: Path) -> None:
    """So that older versions read them, and a training that one of them began goes on."""
    encode(source, tmp_path / "out", resolution=16)
    for name in ("manifest.json", "images.jsonl"):
        assert "bucket" not in (tmp_path / "out" / name).read_text()


def test_buckets_that_cannot_be_are_refused(source: Path, tmp_path: Path) -> None:
    asked = [
        ({}, "--buckets: needs --resolution"),
        ({"resolution": 18}, "--resolution 18: is no multiple of the buckets' step, 4"),
        ({"resolution": 16, "bucket_step": 16}, "--bucket-step 16: leaves the square alone"),
    ]
    for options, words in asked:
        with pytest.raises(UsageError) as caught:
            encode(source, tmp_path / "out", buckets=True, **options)
        assert words in caught.value.message
    write_vae(tmp_path / "vae", factor=4)
    options = {"resolution": 36, "buckets": True, "bucket_step": 6, "vae": tmp_path / "vae"}
    assert "sides that are multiples of 4, not" in refusal(encode, source, tmp_path / "out", **options)


def test_a_manifest_whose_files_are_of_other_buckets_is_refused(source: Path, tmp_path: Path) -> None:
    folder = encode(source, tmp_path / "out", resolution=16, buckets=True)
    files = json.loads((folder / "manifest.json").read_text())["data"]
    for spoilt in ([{**files[0], "bucket": 7}, *files[1:]], [files[1], files[0], files[2]]):
        edit_json(folder / "manifest.json", data=spoilt)
        assert "its files are of other buckets than its images" in refusal(open_shard, folder)
