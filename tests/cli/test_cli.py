"""The command line: every verb does its work, or says in one line why it cannot and writes nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from hddm import load, sample
from hddm.calibration_records import FILE_NAME as CALIBRATION
from hddm.data.entries import Entries, ImageEntry, shard_hash
from hddm.data.images import to_bytes
from hddm.utils.files import sha256_of
from tests.artefacts import Command, contents, copied, edit_json, largest_file, load_images, seal


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
        shown = ok(
            "train",
            "expert",
            shards / f"shard_{k}",
            "--out",
            out,
            "--objective",
            *options,
            *training,
        )
        assert f"{out}: trained for 3 steps, loss " in shown
    assert "trained for 3 steps, cross-entropy " in ok(
        "train", "router", shards, "--out", router, *training
    )
    ok("assemble", tmp_path / "0", tmp_path / "1", "--router", router, "--out", ensemble)
    ok("calibrate", tmp_path / "0", "--data", shards / "shard_0", "--seed", 3)
    options = [
        "--num-images",
        5,
        "--steps",
        3,
        "--strategy",
        "top-1",
        "--seed",
        4,
        "--solver",
        "heun",
    ]
    ok("sample", ensemble, "--out", tmp_path / "samples", *options)
    names = [f"{k:05d}.png" for k in range(5)]
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == [
        *names,
        "sampling.json",
    ]
    with Image.open(tmp_path / "samples" / "00004.png") as image:
        assert image.size == (4, 4)
    settings = json.loads((tmp_path / "samples" / "sampling.json").read_text())
    assert (settings["strategy"], settings["seed"], settings["source"]) == (
        "top-1",
        4,
        str(ensemble),
    )
    assert settings["device"] in ("cpu", "cuda", "mps")


def test_images_depend_on_the_seed_and_not_the_batch(
    ensemble: Path, tmp_path: Path, hddm: Command
) -> None:
    for size in (1, 5):
        options = ["--num-images", 5, "--steps", 3, "--seed", 6, "--batch-size", size]
        hddm("sample", ensemble, "--out", tmp_path / str(size), *options)
    one, five = contents(tmp_path / "1"), contents(tmp_path / "5")
    records = [json.loads(files.pop("sampling.json")) for files in (one, five)]
    assert one == five
    for name in ("batch_size", "batch_ran"):
        assert [record.pop(name) for record in records] == [1, 5]
    assert records[0] == records[1]
    written = load_images(tmp_path / "5").pixels
    assert torch.equal(written, to_bytes(sample(load(ensemble), 5, seed=6, steps=3)))


def test_a_router_that_takes_one_expert_is_warned_of(
    ensemble: Path, tmp_path: Path, hddm: Command
) -> None:
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


HDDM = Path(sys.executable).parent / "hddm"
TRAIN = ["--objective", "flow", "--steps", "2", "--size", "tiny"]


def _refused(hddm: Command, *arguments: object) -> str:
    code, out, err = hddm(*arguments)
    assert code in (1, 2)
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("hddm: ")
    return err


def test_an_unknown_class_is_refused_with_the_known(
    class_expert: Path, tmp_path: Path, hddm: Command
) -> None:
    for label in ("2", "colums", "0,,1", ""):
        message = _refused(
            hddm, "sample", class_expert, "--out", tmp_path / "out", f"--class-labels={label}"
        )
        assert ("did you mean 'columns'?" in message) == (label == "colums")
        assert f"--class-labels {label}: no class" in message
        assert "the model's classes are columns, rows" in message
    assert not list(tmp_path.iterdir())


def test_a_wrong_training_writes_nothing(shards: Path, tmp_path: Path, hddm: Command) -> None:
    small = copied(shards / "shard_0", tmp_path)
    manifest = json.loads((small / "manifest.json").read_text())
    images = manifest["images"][:3]
    few = shard_hash(Entries.of(map(ImageEntry.model_validate, images)), manifest["classes"])
    edit_json(small / "manifest.json", images=images, hash=few)
    options = ["--out", tmp_path / "out", *TRAIN]
    before = contents(tmp_path)
    assert "has 3 images; an expert needs at least 16" in _refused(
        hddm, "train", "expert", small, *options
    )
    config = tmp_path / "x.json"
    options = ["--out", tmp_path / "out", *TRAIN[2:], "--objective", "ddpm"]
    train = ["train", "expert", shards / "shard_0", *options, "--schedule", config]
    assert str(config) in _refused(hddm, *train)
    assert contents(tmp_path) == before


def test_existing_folders_stay(
    images: Path, shards: Path, ensemble: Path, tmp_path: Path, hddm: Command
) -> None:
    (tmp_path / "mine").write_text("precious")
    before = contents(tmp_path)
    for arguments in (
        ["partition", images, "--shards", 2],
        ["train", "expert", shards / "shard_0", *TRAIN],
        ["train", "router", shards, "--steps", 2],
        ["assemble", ensemble / "experts" / "0"],
        ["sample", ensemble],
    ):
        assert "--overwrite" in _refused(hddm, *arguments, "--out", tmp_path)
    assert "holds no quickstart" in _refused(hddm, "quickstart", "--out", tmp_path)
    assert "has no benchmark.json of" in _refused(
        hddm, "quickstart", "--out", tmp_path, "--overwrite"
    )
    assert contents(tmp_path) == before


def test_a_broken_image_is_named(images: Path, tmp_path: Path, hddm: Command) -> None:
    spoilt = copied(images, tmp_path)
    (spoilt / "rows" / "03.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    code, out, err = hddm("partition", spoilt, "--out", tmp_path / "out", "--shards", 2)
    error, image = err.splitlines()
    assert (code, out) == (1, "")
    assert error.startswith(f"hddm: {spoilt}: 1 image cannot be read")
    assert image.startswith(f"  {spoilt / 'rows' / '03.png'}: ")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_one_line(whole: Path, tmp_path: Path, hddm: Command) -> None:
    with largest_file(20_000):
        code, _, err = hddm("train", "expert", whole, "--out", tmp_path / "out", *TRAIN)
    assert code == 1
    assert "File too large" in err.splitlines()[-1]
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "out.run" / "checkpoints").iterdir())


def test_an_output_that_takes_no_more_is_told_with_a_remedy(images: Path) -> None:
    with Path("/dev/full").open("w") as full:
        finished = subprocess.run(
            [HDDM, "inspect", images], stdout=full, stderr=subprocess.PIPE, text=True
        )
    told = "hddm: a file, or the output: No space left on device; free some space\n"
    assert (finished.returncode, finished.stderr) == (1, told)


def test_a_result_replaces_no_link_and_no_other_file(
    images: Path, tmp_path: Path, hddm: Command
) -> None:
    mine = tmp_path / "mine.json"
    mine.write_text('{"precious": true}')
    (tmp_path / "link.json").symlink_to(mine)
    before = contents(tmp_path)
    for out, said in (
        ("link.json", "is not a result of an evaluation"),
        ("nowhere/a.json", f"{tmp_path / 'nowhere'} is not a folder; create it first"),
        ("mine.json", "is not a result of an evaluation"),
    ):
        command = (
            "evaluate",
            images,
            "--reference",
            images,
            "--overwrite",
            "--out",
            tmp_path / out,
        )
        assert said in _refused(hddm, *command)
    assert "choose another file, or pass --overwrite" in _refused(
        hddm, *command[:-3], *command[-2:]
    )
    assert contents(tmp_path) == before


def test_a_calibrated_copy_leaves_the_expert_alone(
    ddpm_expert: Path, shards: Path, tmp_path: Path, hddm: Command
) -> None:
    before = {path.name: sha256_of(path) for path in ddpm_expert.iterdir() if path.is_file()}
    out, line = tmp_path / "copy", ["calibrate", ddpm_expert, "--num-images", 16, "--steps", 2]
    code, shown, _ = hddm(*line, "--seed", 3, "--out", out)
    assert (code, shown) == (0, f"{out}: calibrated on 16 samples of its own\n")
    assert {
        path.name: sha256_of(path) for path in ddpm_expert.iterdir() if path.is_file()
    } == before
    assert sha256_of(out / CALIBRATION) != before[CALIBRATION]
    assert (
        sha256_of(out / "diffusion_pytorch_model.safetensors")
        == before["diffusion_pytorch_model.safetensors"]
    )
    assert (
        hddm("sample", out, "--num-images", 2, "--steps", 2, "--out", tmp_path / "samples")[0] == 0
    )
    assert "exists" in hddm(*line, "--out", out)[2]
    assert not list(tmp_path.glob(".*"))
