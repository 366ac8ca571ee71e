"""The wheel: what a user installs; packages that take seconds to import are imported where needed."""

import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from tests.artefacts import HEAVY, in_a_fresh_process
from tests.checkpoint_files import pipeline, plain_unet

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Files of a freshly built wheel."""
    folder = tmp_path_factory.mktemp("dist")
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        folder,
        REPOSITORY,
    ]
    subprocess.run(command, check=True, capture_output=True)
    (path,) = folder.iterdir()
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_it_holds_every_tracked_file_of_the_packages_and_no_other(wheel: dict[str, bytes]) -> None:
    sources = {"hddm": REPOSITORY / "hddm", "hddm_cli": REPOSITORY / "cli" / "hddm_cli"}
    expected = {
        f"{package}/{path.relative_to(folder)}": path.read_bytes()
        for package, folder in sources.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {
        name: content for name, content in wheel.items() if ".dist-info/" not in name
    } == expected


@pytest.mark.slow
def test_converting_loading_and_sampling_need_no_extra(
    images: Path, shards: Path, tmp_path: Path
) -> None:
    source, expert = pipeline(tmp_path / "source", plain_unet()), tmp_path / "expert"
    short = ["--objective", "flow", "--size", "tiny", "--steps", 1]
    done = [
        ["train", "expert", shards / "shard_0", "--out", tmp_path / "trained", *short],
        ["convert", source, "--out", expert],
        ["sample", expert, "--out", tmp_path / "samples", "--num-images", 2, "--steps", 2],
    ]
    needing = {
        "partition": [images, "--out", tmp_path / "shards", "--shards", 2],
        "benchmark": ["digits", "--out", tmp_path / "benchmark"],
        "quickstart": ["--out", tmp_path / "quickstart"],
    }
    lines = [*done, *([verb, *rest] for verb, rest in needing.items())]
    missing = ["matplotlib", "peft", "sklearn", "tensorboard", "torchvision"]
    runs = in_a_fresh_process(lines, missing)
    assert [code for code, *_ in runs[:3]] == [0, 0, 0], runs
    assert "needs tensorboard: pip install '.[train]'" in runs[0][1]
    for verb, (code, output, _) in zip(needing, runs[3:], strict=True):
        assert (code, output.count("\n")) == (1, 1)
        assert f"hddm {verb} needs" in output
        assert "pip install '.[train]'" in output
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"source", "expert", "samples", "trained", "trained.run"}


def test_it_installs_one_command_and_names_its_licence(wheel: dict[str, bytes]) -> None:
    def file(suffix: str) -> bytes:
        (content,) = (
            content for name, content in wheel.items() if name.endswith(f".dist-info/{suffix}")
        )
        return content

    assert file("entry_points.txt").split() == b"[console_scripts] hddm = hddm_cli.app:app".split()
    metadata = message_from_bytes(file("METADATA"))
    assert metadata["Name"] == "hddm-diffusion"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert b"Apache License" in file("licenses/LICENSE")


def _imported(code: str) -> set[str]:
    """Names of all modules that are there when ``code`` has run."""
    command = [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def test_importing_hddm_or_reading_a_record_imports_nothing_heavy() -> None:
    light = [
        "hddm",
        "hddm.utils.records",
        "hddm.utils.files",
        "hddm.data.shard_records",
        "hddm.data.check",
    ]
    assert not _imported(f"import {', '.join(light)}") & HEAVY


@pytest.mark.slow
def test_loading_a_model_imports_no_network_of_diffusers() -> None:
    """The class that a folder names is imported when the folder is opened."""
    # A function stays what it is when its module has been imported.
    imported = _imported(
        "import hddm.experts.loading; assert callable(hddm.load) and callable(hddm.sample)"
    )
    assert "hddm.networks.wrappers" in imported
    networks = {f"diffusers.models.{name}" for name in ("transformers", "unets", "autoencoders")}
    assert not imported & (networks | {"diffusers.pipelines", "hddm.checkpoints"})


@pytest.mark.slow
def test_training_on_one_machine_imports_nothing_of_addresses_elsewhere(
    shards: Path, tmp_path: Path
) -> None:
    settings = "objective='flow', steps=2, size='tiny', batch_size=4, device='cpu'"
    out = tmp_path / "out"
    imported = _imported(
        f"import hddm; hddm.train({str(shards / 'shard_0')!r}, {str(out)!r}, {settings})"
    )
    elsewhere = {"hddm.utils.fetching", "hddm.utils.uploading", "hddm.training.remote", "s3fs"}
    assert "hddm.utils.addresses" in imported
    assert not imported & elsewhere


def test_looking_at_images_imports_nothing_heavy(images: Path, shards: Path) -> None:
    folders = (images, shards, shards / "shard_0")
    looks = [["data", "check", images], *(["inspect", one] for one in folders)]
    for code, output, heavy in in_a_fresh_process(looks):
        assert (code, heavy) == (0, set()), output
