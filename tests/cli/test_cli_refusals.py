"""Wrong input on the command line: one line on standard error, no traceback, nothing written."""

import json
import subprocess
import sys
from pathlib import Path

from hddm.data.shard_records import ImageEntry, content_hash
from tests.artefacts import Command, contents, copied, edit_json, largest_file

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
        message = _refused(hddm, "sample", class_expert, "--out", tmp_path / "out", f"--class-labels={label}")
        assert ("did you mean 'columns'?" in message) == (label == "colums")
        assert f"--class-labels {label}: no class" in message
        assert "the model's classes are columns, rows" in message
    assert not list(tmp_path.iterdir())


def test_a_wrong_training_writes_nothing(shards: Path, tmp_path: Path, hddm: Command) -> None:
    small = copied(shards / "shard_0", tmp_path)
    manifest = json.loads((small / "manifest.json").read_text())
    images = manifest["images"][:3]
    few = content_hash([ImageEntry.model_validate(one) for one in images], manifest["classes"])
    edit_json(small / "manifest.json", images=images, hash=few)
    options = ["--out", tmp_path / "out", *TRAIN]
    before = contents(tmp_path)
    assert "has 3 images; an expert needs at least 16" in _refused(hddm, "train", "expert", small, *options)
    config = tmp_path / "x.json"
    train = ["train", "expert", shards / "shard_0", *options, "--objective", "ddpm", "--schedule", config]
    assert str(config) in _refused(hddm, *train)
    assert contents(tmp_path) == before
    config.write_text(json.dumps({"_class_name": "FlowMatchEulerDiscreteScheduler"}))
    assert "is for flow matching; use --objective flow" in _refused(hddm, *train)
    assert not (tmp_path / "out").exists()


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
    assert "has no benchmark.json of" in _refused(hddm, "quickstart", "--out", tmp_path, "--overwrite")
    assert contents(tmp_path) == before


def test_a_broken_image_is_named(images: Path, tmp_path: Path, hddm: Command) -> None:
    spoilt = copied(images, tmp_path)
    (spoilt / "rows" / "03.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    code, out, err = hddm("partition", spoilt, "--out", tmp_path / "out", "--shards", 2)
    error, image, kept = err.splitlines()
    assert (code, out) == (1, "")
    assert kept.startswith(f"  {tmp_path / 'out.features'}: features of the images so far, kept for the next")
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
        finished = subprocess.run([HDDM, "inspect", images], stdout=full, stderr=subprocess.PIPE, text=True)
    told = "hddm: a file, or the output: No space left on device; free some space\n"
    assert (finished.returncode, finished.stderr) == (1, told)


def test_a_result_replaces_no_link_and_no_other_file(images: Path, tmp_path: Path, hddm: Command) -> None:
    mine = tmp_path / "mine.json"
    mine.write_text('{"precious": true}')
    (tmp_path / "link.json").symlink_to(mine)
    before = contents(tmp_path)
    for out, said in (
        ("link.json", f"is a link to {mine}; name the file itself"),
        ("nowhere/a.json", f"{tmp_path / 'nowhere'} is not a folder; create it first"),
        ("mine.json", "is not a result of an evaluation"),
    ):
        command = ("evaluate", images, "--reference", images, "--overwrite", "--out", tmp_path / out)
        assert said in _refused(hddm, *command)
    assert "choose another file, or pass --overwrite" in _refused(hddm, *command[:-3], *command[-2:])
    assert contents(tmp_path) == before
