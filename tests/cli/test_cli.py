"""The command line: every verb does its work."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from hddm import load, sample
from hddm.calibration import FILE_NAME as CALIBRATION
from hddm.data.images import load_images, to_bytes
from hddm.experts.assembly import assemble
from tests.artefacts import CLASSES, Command, contents, copied, seal


@pytest.mark.integration
def test_the_whole_work_from_images_to_samples(images: Path, tmp_path: Path, hddm: Command) -> None:
    def ok(*arguments: object) -> str:
        code, out, err = hddm(*arguments)
        assert code == 0, err
        return out

    shards, router, ensemble = tmp_path / "shards", tmp_path / "router", tmp_path / "ensemble"
    assert ok("partition", images, "--out", shards, "--shards", 2).count("24 images") == 2
    training = ["--steps", 3, "--batch-size", 8, "--size", "tiny", "--seed", 1]
    for k, options in enumerate((["ddpm"], ["flow", "--time-sampling", "logit-normal"])):
        out = tmp_path / str(k)
        shown = ok("train", "expert", shards / f"shard_{k}", "--out", out, "--objective", *options, *training)
        assert f"{out}: trained for 3 steps, loss " in shown
    assert "trained for 3 steps, cross-entropy " in ok("train", "router", shards, "--out", router, *training)
    ok("assemble", tmp_path / "0", tmp_path / "1", "--router", router, "--out", ensemble)
    ok("calibrate", tmp_path / "0", "--data", shards / "shard_0", "--seed", 3)
    options = ["--num-images", 5, "--steps", 3, "--strategy", "top-1", "--seed", 4, "--solver", "heun"]
    ok("sample", ensemble, "--out", tmp_path / "samples", *options)
    names = [f"{k:05d}.png" for k in range(5)]
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == [*names, "sampling.json"]
    with Image.open(tmp_path / "samples" / "00004.png") as image:
        assert image.size == (4, 4)
    settings = json.loads((tmp_path / "samples" / "sampling.json").read_text())
    assert (settings["strategy"], settings["seed"], settings["source"]) == ("top-1", 4, str(ensemble))
    assert settings["device"] in ("cpu", "cuda", "mps")


def test_images_depend_on_the_seed_and_not_the_batch(ensemble: Path, tmp_path: Path, hddm: Command) -> None:
    for size in (1, 5):
        options = ["--num-images", 5, "--steps", 3, "--seed", 6, "--batch-size", size]
        hddm("sample", ensemble, "--out", tmp_path / str(size), *options)
    one, five = contents(tmp_path / "1"), contents(tmp_path / "5")
    records = [json.loads(files.pop("sampling.json")) for files in (one, five)]
    assert one == five
    assert [record.pop("batch_size") for record in records] == [1, 5]
    assert records[0] == records[1]
    written = load_images(tmp_path / "5").pixels
    assert torch.equal(written, to_bytes(sample(load(ensemble), 5, seed=6, steps=3)))


def test_other_sizes_are_made_without_a_calibration(flow_expert: Path, tmp_path: Path, hddm: Command) -> None:
    bare = copied(flow_expert, tmp_path / "bare")
    (bare / CALIBRATION).unlink()
    seal(bare)
    assemble([bare], tmp_path / "ensemble", strategy="draw")
    options = ("--num-images", 3, "--steps", 1, "--width", 10, "--height", 6, "--grid")
    for source in (bare, tmp_path / "ensemble"):
        out = tmp_path / f"{source.name}-samples"
        assert hddm("sample", source, "--out", out, *options)[0] == 0
        assert load_images(out).pixels.shape == (3, 1, 6, 10)
        with Image.open(f"{out}.grid.png") as sheet:
            # Cells are squares of 90 pixels, nine times the longer side.
            assert sheet.size == (2 * 92 - 2, 2 * 92 - 2)
    told = (
        "--height 4, --width 9: a network of images of 4×4 fails on it: (4, 9) does not divide into patches"
    )
    code, _, err = hddm("sample", bare, "--out", tmp_path / "odd", "--width", 9, "--num-images", 1)
    assert told in err, err
    assert code == 1
    assert not (tmp_path / "odd").exists()
    # Nor does a calibration take other samples of as many numbers.
    for height, width in ((4, 8), (2, 8)):
        size = ("--height", height, "--width", width)
        code, _, err = hddm("sample", flow_expert, "--out", tmp_path / "odd", *size, "--num-images", 1)
        told = f"its calibration is of samples (1, 4, 4), not of (1, {height}, {width})"
        assert (code, told in err) == (1, True)


@pytest.mark.integration
def test_classes_are_taken_by_name_or_number(class_expert: Path, tmp_path: Path, hddm: Command) -> None:
    pixels = {}
    for labels in (",".join(CLASSES), "0, 1", "rows", "0"):
        options = ["--class-labels", labels, "--num-images", 3, "--steps", 2, "--guidance-scale", 1.5]
        assert hddm("sample", class_expert, "--out", tmp_path / labels, *options)[0] == 0
        pixels[labels] = load_images(tmp_path / labels).pixels
    both, columns, rows = pixels["columns,rows"], pixels["0"], pixels["rows"]
    assert torch.equal(both, pixels["0, 1"])
    assert torch.equal(both, torch.stack([columns[0], rows[1], columns[2]]))
    assert not torch.equal(columns, rows)


def test_a_router_that_takes_one_expert_is_warned_of(ensemble: Path, tmp_path: Path, hddm: Command) -> None:
    stuck = copied(ensemble, tmp_path)
    path = stuck / "router" / "diffusion_pytorch_model.safetensors"
    weights = load_file(path)
    weights["head.4.weight"].zero_()
    weights["head.4.bias"] = torch.tensor([20.0, -20.0])
    save_file(weights, path, {"format": "pt"})
    seal(path.parent)
    options = ["--num-images", 32, "--steps", 2, "--strategy", "top-1"]
    code, _, error = hddm("sample", stuck, "--out", tmp_path / "routed", *options)
    assert code == 0
    assert "expert 0 takes 100% of the weight" in error
    assert "expert 1 is never used" in error
    use = json.loads((tmp_path / "routed" / "sampling.json").read_text())["expert_use"]
    assert [row["shares"] for row in use["by_time"]] == [[1.0, 0.0]] * 2
    code, _, error = hddm("sample", stuck, "--out", tmp_path / "own", *options[:4], "--expert", 1)
    assert code == 0
    assert "expert" not in error
