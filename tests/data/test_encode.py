"""hddm encode: what is stored is what other tools make of the images, also by a run that was killed."""

import contextlib
import json
import multiprocessing
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import CLIPTokenizer

from hddm.data.shard_records import find_shards
from hddm.data.shards import open_shard
from hddm.networks.text_encoder import text_encoder_record_of
from hddm.networks.vae import vae_record_of
from hddm.utils.errors import HddmError
from hddm.utils.work import Draft, open_draft
from tests.artefacts import Command, contents, killed_at_every_change, refusal
from tests.component_files import write_clip, write_vae
from tests.shard_files import encode, noise, write_partition, write_shard


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = [load_file(path) for path in sorted(folder.glob("data-*.safetensors"))]
    return {name: torch.cat([one[name] for one in files]) for name in files[0]}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A shard of 20 images in colour."""
    write_shard(tmp_path / "source", noise(20), [n % 2 for n in range(20)])
    return tmp_path / "source"


def test_pixels_are_those_of_the_images(source: Path, tmp_path: Path) -> None:
    folder = encode(source, tmp_path / "out", rows=7)
    assert [one["rows"] for one in json.loads((folder / "manifest.json").read_text())["data"]] == [
        7,
        7,
        6,
    ]
    expected = torch.from_numpy(np.stack(noise(20))).permute(0, 3, 1, 2)
    assert torch.equal(_tensors(folder)["pixels"], expected)
    there, here = open_shard(source), open_shard(folder)
    assert torch.equal(there.images, here.images)
    assert here.labels.tolist() == [n % 2 for n in range(20)]
    assert (here.hash, here.partition, here.classes) == (there.hash, there.partition, there.classes)
    assert (here.space, here.shape, here.vae, here.texts) == ("pixels", (3, 8, 8), None, None)


@pytest.mark.parametrize("mirrored", [False, True])
def test_latents_are_those_of_diffusers(mirrored: bool, source: Path, tmp_path: Path) -> None:
    vae = write_vae(tmp_path / "vae", scaling_factor=0.4, shift_factor=0.1)
    folder = encode(
        source, tmp_path / "out", vae=tmp_path / "vae", dtype="float32", random_flip=mirrored
    )
    images = torch.from_numpy(np.stack(noise(20))).permute(0, 3, 1, 2) / 127.5 - 1
    found = _tensors(folder)
    assert set(found) == (
        {"mean", "std", "mirrored_mean", "mirrored_std"} if mirrored else {"mean", "std"}
    )
    for prefix, given in [("", images), ("mirrored_", images.flip(-1))][: 1 + mirrored]:
        with torch.no_grad():
            expected = vae.encode(given).latent_dist
        assert torch.allclose(found[f"{prefix}mean"], expected.mean, atol=1e-5)
        assert torch.allclose(found[f"{prefix}std"], expected.std, rtol=1e-4)
    shard = open_shard(folder)
    assert shard.vae == vae_record_of(tmp_path / "vae")
    assert (shard.space, shard.shape) == ("latents", (4, 4, 4))
    assert torch.allclose(shard.images, (found["mean"] - 0.1) * 0.4)


def test_a_tiny_vae_has_means_alone_and_batches_only_matter_by_rounding(
    source: Path, tmp_path: Path
) -> None:
    vae = write_vae(tmp_path / "vae", "tiny")
    images = torch.from_numpy(np.stack(noise(20))).permute(0, 3, 1, 2) / 127.5 - 1
    with torch.no_grad():
        expected = vae.encode(images).latents
    for batch in (1, 20):
        options: dict[str, Any] = {"vae": tmp_path / "vae", "dtype": "float32", "batch_size": batch}
        folder = encode(source, tmp_path / str(batch), **options)
        assert set(_tensors(folder)) == {"mean"}
        assert torch.allclose(open_shard(folder).images, expected, atol=1e-5)


def test_gray_images_are_given_to_a_vae_in_three_channels(tmp_path: Path) -> None:
    write_shard(tmp_path / "gray", noise(16, colour=False))
    write_shard(
        tmp_path / "colour", [np.stack([one] * 3, axis=2) for one in noise(16, colour=False)]
    )
    write_vae(tmp_path / "vae")
    gray, colour = (
        _tensors(encode(tmp_path / name, tmp_path / f"{name}-out", vae=tmp_path / "vae"))
        for name in ("gray", "colour")
    )
    assert torch.equal(gray["mean"], colour["mean"])
    pixels = _tensors(encode(tmp_path / "gray", tmp_path / "pixels"))["pixels"]
    assert pixels.shape == (16, 1, 8, 8)


def test_one_image_in_colour_makes_a_partition_of_three_channels(tmp_path: Path) -> None:
    root = write_partition(tmp_path / "shards", 16, colour=False)
    shutil.rmtree(root / "shard_1")
    write_shard(root / "shard_1", [*noise(15, colour=False), *noise(1)], shard=1, num_shards=2)
    assert [open_shard(folder).shape for folder in find_shards(encode(root, tmp_path / "out"))] == [
        (3, 8, 8)
    ] * 2


def test_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    captions = [f"a cat and {n} dog" for n in range(16)]
    write_shard(tmp_path / "source", noise(16), captions=captions)
    model = write_clip(tmp_path, tokens=24)
    tokenizer = CLIPTokenizer.from_pretrained(tmp_path / "tokenizer")
    networks = {name: tmp_path / name for name in ("text_encoder", "tokenizer")}
    folder = encode(
        tmp_path / "source", tmp_path / "out", dtype="float32", batch_size=5, **networks
    )
    ids = tokenizer(
        [*captions, ""], padding="max_length", max_length=24, return_tensors="pt"
    ).input_ids
    expected = model(ids)[0]
    shard = open_shard(folder)
    assert torch.allclose(shard.texts.take(torch.arange(16)), expected[:16], atol=1e-5)
    assert torch.allclose(shard.texts.null, expected[16], atol=1e-5)
    assert shard.text_encoder == text_encoder_record_of(tmp_path / "text_encoder", 24)
    assert list(shard.captions) == captions


def test_a_partition_is_encoded_with_its_held_out_images(tmp_path: Path) -> None:
    root = write_partition(tmp_path / "shards", held_out=3)
    out = encode(root, tmp_path / "out", rows=5)
    assert (out / "partition.json").read_bytes() == (root / "partition.json").read_bytes()
    for k, folder in enumerate(find_shards(out)):
        shard, held_out = open_shard(folder), open_shard(out / "held_out" / f"shard_{k}")
        assert (shard.index, len(shard), len(held_out)) == (k, 20, 3)
        assert held_out.held_out_of == shard.hash == open_shard(root / f"shard_{k}").hash
        assert torch.equal(shard.images, open_shard(root / f"shard_{k}").images)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "shards"]


def test_bad_images_are_left_out_by_name_up_to_a_number(tmp_path: Path) -> None:
    images, labels, kept = (
        noise(20),
        [n % 2 for n in range(20)],
        [n for n in range(20) if n not in (3, 11)],
    )
    source = tmp_path / "damaged"
    write_shard(source, [images[n] if n in kept else b"no image" for n in range(20)], labels)
    # Missing ones are bad, too.
    (source / "images" / "011.png").unlink()
    told, *details = refusal(encode, source, tmp_path / "none", max_bad=1).splitlines()
    assert "2 images cannot be read, and 1 may be" in told
    assert ["003.png" in details[0], "011.png" in details[1]] == [True, True]
    folder = encode(source, tmp_path / "out", max_bad=2, rows=5)
    skipped = json.loads((folder / "manifest.json").read_text())["skipped"]
    assert [one["file"] for one in skipped] == ["images/003.png", "images/011.png"]
    assert str(tmp_path) not in json.dumps(skipped)
    expected = torch.from_numpy(np.stack([images[n] for n in kept])).permute(0, 3, 1, 2)
    assert torch.equal(_tensors(folder)["pixels"], expected)
    found = open_shard(folder).labels
    assert found.tolist() == [labels[n] for n in kept]


def test_latents_beyond_their_dtype_are_refused_with_the_image(
    source: Path, tmp_path: Path
) -> None:
    vae = write_vae(tmp_path / "vae")
    vae.quant_conv.bias.data[:4] += 1e5
    vae.save_pretrained(tmp_path / "vae")
    message = refusal(encode, source, tmp_path / "out", vae=tmp_path / "vae")
    assert (
        "images/000.png: its mean reaches 1e+05, beyond float16; store `dtype` float32" in message
    )
    assert [path.name for path in tmp_path.iterdir() if "encoding" in path.name] == []
    for dtype in ("float32", "bfloat16"):
        shard = open_shard(encode(source, tmp_path / dtype, vae=tmp_path / "vae", dtype=dtype))
        assert shard.images.mean() == pytest.approx(1e5 * 0.18215, rel=1e-2)


def test_options_that_do_not_fit_are_refused(source: Path, tmp_path: Path) -> None:
    write_vae(tmp_path / "vae", factor=8)
    write_clip(tmp_path)
    text, words, out = tmp_path / "text_encoder", tmp_path / "tokenizer", tmp_path / "out"
    cases: list[tuple[str, dict[str, Any]]] = [
        (
            "multiples of 8, not 12×12; change `resolution`",
            {"vae": tmp_path / "vae", "resolution": 12},
        ),
        ("`tokenizer`: text needs", {"text_encoder": text}),
        ("`text_encoder`: text needs", {"tokenizer": words}),
        ("not all of its images have captions", {"text_encoder": text, "tokenizer": words}),
        ("images of several sizes; bring them to one with `resolution`", {}),
    ]
    write_shard(tmp_path / "unlike", [*noise(10), *noise(10, 8, 12)])
    for message, options in cases:
        assert message in refusal(
            encode, source if options else tmp_path / "unlike", out, **options
        )
    assert "is an encoded shard" in refusal(encode, encode(source, tmp_path / "done"), out)
    assert not out.exists()


def test_missing_captions_are_found_before_any_network_is_read(
    source: Path, tmp_path: Path
) -> None:
    """The folders hold nothing, which reading them would find out."""
    names = ("vae", "text_encoder", "tokenizer")
    for name in names:
        (tmp_path / name).mkdir()
    networks = {name: tmp_path / name for name in names}
    assert "not all of its images have captions" in refusal(
        encode, source, tmp_path / "out", **networks
    )


def test_the_command_encodes_inspects_and_replaces(
    source: Path, tmp_path: Path, hddm: Command
) -> None:
    write_vae(tmp_path / "vae")
    out = tmp_path / "out"
    options = ("--vae", tmp_path / "vae", "--resolution", 8, "--random-flip")
    code, told, _ = hddm("encode", source, "--out", out, *options)
    assert (code, told) == (0, f"{out}: 20 images as latents, 4×4×4\n")
    record = json.loads(hddm("inspect", out, "--json")[1])
    assert (record["kind"], record["images"]) == ("encoded shard", 20)
    assert record["vae"] == vae_record_of(tmp_path / "vae").model_dump()
    assert hddm("encode", source, "--out", out, "--resolution", 4, "--overwrite")[0] == 0
    assert open_shard(out).shape == (3, 4, 4)


ROWS = 4
FILES = 12
"""Of data: two shards of 20 images and held-out ones of 4, 4 rows a file."""


def _encode(
    root: Path,
    out: Path,
    overwrite: bool = False,
    on_images: Callable[[int], None] = lambda number: None,
    **options: Any,
) -> list[int]:
    """Encode; the numbers of images that came at a time."""
    numbers: list[int] = []

    def note(number: int) -> None:
        numbers.append(number)
        on_images(number)

    options = {"vae": root / "vae", "random_flip": True, "batch_size": 3, **options}
    encode(root / "shards", out, ROWS, overwrite, note, **options)
    return numbers


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A partition, a VAE, and ``whole``: what an uninterrupted run makes of them."""
    root = tmp_path_factory.mktemp("resume")
    write_partition(root / "shards", held_out=4)
    write_vae(root / "vae")
    _encode(root, root / "whole")
    assert len(list((root / "whole").rglob("data-*"))) == FILES
    return root


def _open(
    target: Path, identity: dict[str, Any], overwrite: bool = False
) -> contextlib.AbstractContextManager[Draft]:
    return open_draft(
        target, "manifest.json", identity, "encoding", lambda: "it is kept", overwrite
    )


def _records(out: Path) -> list[Path]:
    return sorted((out.parent / f".{out.name}.encoding" / "parts").rglob("*.done.json"))


def test_a_killed_process_is_gone_on_with_to_the_same_bytes(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    # Forked, it has no libraries to import: that would take longer than all else.
    context = multiprocessing.get_context("fork")
    for wanted in (1, 4, 7):
        # With pauses, in which a kill hits.
        process = context.Process(
            target=_encode, args=(root, out, False, lambda _: time.sleep(0.01))
        )
        process.start()
        deadline = time.monotonic() + 60
        while len(_records(out)) < wanted and process.is_alive() and time.monotonic() < deadline:
            time.sleep(0.002)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert not out.exists()
        assert wanted <= len(_records(out)) < FILES
    kept = len(_records(out))
    # A file that is done counts at once, one that is encoded in batches of 3.
    assert _encode(root, out).count(ROWS) == kept
    assert contents(out) == contents(root / "whole")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def _interrupted(root: Path, out: Path, after: int) -> Path:
    """The draft that a run leaves that fails after ``after`` images."""
    seen: list[int] = []

    def fail(number: int) -> None:
        seen.append(number)
        if sum(seen) > after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _encode(root, out, on_images=fail)
    assert not out.exists()
    return out.parent / f".{out.name}.encoding"


def test_an_unfinished_encoding_of_other_options_is_named(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    draft = _interrupted(root, out, 9)
    told, *details = refusal(_encode, root, out, dtype="float32").splitlines()
    assert f"{draft} holds an unfinished encoding of other options" in told
    assert any(line.startswith("  encoding.dtype: ") and "float32" in line for line in details)
    assert len(_records(out)) == 2
    _encode(root, out, overwrite=True, dtype="float32")
    record = json.loads((out / "shard_0" / "manifest.json").read_text())
    assert record["encoding"]["dtype"] == "float32"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("overwrite", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_kill_at_any_change_of_a_draft_leaves_nothing_for_long(
    overwrite: bool, tmp_path: Path
) -> None:
    out = tmp_path / "out"

    def write(content: str) -> None:
        with _open(out, {"a": content}, overwrite) as draft:
            (draft.whole / "manifest.json").write_text(json.dumps({"format": "1.0", "of": content}))
            (draft.whole / f"{content}.txt").write_text(content)

    def check() -> None:
        with contextlib.suppress(HddmError):
            write("new")
        # A run that is refused clears up, too.
        assert contents(tmp_path).keys() == {"out/manifest.json", "out/new.txt"}
        shutil.rmtree(out)
        if overwrite:
            write("old")

    if overwrite:
        write("old")
    assert killed_at_every_change(lambda: write("new"), check) > 8


def test_an_output_larger_than_the_disk_is_refused(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    told = refusal(_encode, root, tmp_path / "out")
    assert re.search(r"out: needs [1-9].* kB, and 1 kB are free on its disk", told)
    assert list(tmp_path.iterdir()) == []
