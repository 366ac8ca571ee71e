"""The wheel: what a user installs."""

import re
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Files of a freshly built wheel."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, REPOSITORY]
    subprocess.run(command, check=True, capture_output=True)
    (path,) = folder.iterdir()
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_its_top_level_names_are_the_two_packages(wheel: dict[str, bytes]) -> None:
    names = {name.split("/")[0] for name in wheel}
    (record,) = (name for name in names if name.endswith(".dist-info"))
    assert re.fullmatch(r"hddm_diffusion-[0-9.]+\.dist-info", record)
    assert names == {"hddm", "hddm_cli", record}


def test_it_holds_every_tracked_file_of_the_packages_and_no_other(wheel: dict[str, bytes]) -> None:
    sources = {"hddm": REPOSITORY / "hddm", "hddm_cli": REPOSITORY / "cli" / "hddm_cli"}
    expected = {
        f"{package}/{path.relative_to(folder)}": path.read_bytes()
        for package, folder in sources.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name: content for name, content in wheel.items() if ".dist-info/" not in name} == expected
    report = {f"hddm/benchmark/report.{kind}" for kind in ("html.j2", "css", "js")}
    assert {"hddm/py.typed", "hddm_cli/py.typed", *report} <= expected.keys()


def test_it_installs_one_command_and_names_its_licence(wheel: dict[str, bytes]) -> None:
    def file(suffix: str) -> bytes:
        (content,) = (content for name, content in wheel.items() if name.endswith(f".dist-info/{suffix}"))
        return content

    assert file("entry_points.txt").split() == b"[console_scripts] hddm = hddm_cli.app:app".split()
    metadata = message_from_bytes(file("METADATA"))
    assert metadata["Name"] == "hddm-diffusion"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert b"Apache License" in file("licenses/LICENSE")
