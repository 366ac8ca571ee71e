"""Which hddm the nodes for ComfyUI import, in a Python of their own."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from integrations.comfyui.find_hddm import HERE, NEEDED

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
sys.path[:0] = [sys.argv[1], sys.argv[2]]
if sys.argv[3]:
    import hddm
from find_hddm import find_hddm
find_hddm()
import hddm
print(hddm.whose)
"""


def package(place: Path, whose: str) -> None:
    """An hddm that says whose it is."""
    (place / "hddm").mkdir(parents=True)
    (place / "hddm" / "__init__.py").write_text(f"whose = '{whose}'")
    (place / "hddm" / NEEDED).touch()


def installed(place: Path, version: str) -> Path:
    """A folder of installed packages, as pip leaves it."""
    package(place, "installed")
    facts = place / f"hddm_diffusion-{version}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: hddm-diffusion\nVersion: {version}\n"
    )
    return place


def checkout(place: Path, version: str) -> Path:
    """A checkout on the path of Python."""
    package(place, "installed")
    (place / "pyproject.toml").write_text(
        f'[project]\nname = "hddm-diffusion"\nversion = "{version}"\n'
    )
    return place


def pack(place: Path, version: str, has_own: bool = True) -> Path:
    """The pack's folder in ``custom_nodes``, as far as it finds hddm."""
    if has_own:
        package(place / "vendor", "pack")
    else:
        place.mkdir(parents=True)
    shutil.copy(HERE / "find_hddm.py", place)
    (place / "pyproject.toml").write_text(
        f'[project]\nname = "hddm-nodes"\nversion = "{version}"\n'
    )
    return place


def imported(own: Path, other: Path, is_loaded: bool = False) -> str:
    """Whose hddm is imported, or why none is."""
    command = [sys.executable, "-c", SCRIPT, str(own), str(other), "yes" if is_loaded else ""]
    found = subprocess.run(command, cwd=own, capture_output=True, text=True)
    if found.returncode == 0:
        return found.stdout.strip()
    return found.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("kind", [installed, checkout])
@pytest.mark.parametrize(
    ("version", "whose"), [("0.9.0", "pack"), ("0.10.0", "pack"), ("0.11.0", "installed")]
)
def test_the_newer_hddm_is_imported(kind: object, version: str, whose: str, tmp_path: Path) -> None:
    assert callable(kind)
    other = kind(tmp_path / "other", version)
    assert imported(pack(tmp_path / "nodes" / "pack", "0.10.0"), other) == whose


def test_one_of_unknown_version_is_not_imported(tmp_path: Path) -> None:
    package(tmp_path / "other", "installed")
    own = pack(tmp_path / "nodes" / "pack", "0.10.0")
    assert imported(own, tmp_path / "other") == "pack"


def test_an_older_hddm_is_refused_with_both_versions_where_there_is_no_choice(
    tmp_path: Path,
) -> None:
    other = installed(tmp_path / "other", "0.9.0")
    alone = pack(tmp_path / "alone" / "pack", "0.10.0", has_own=False)
    own = pack(tmp_path / "nodes" / "pack", "0.10.0")
    for message in (imported(alone, other), imported(own, other, is_loaded=True)):
        assert "these nodes need hddm 0.10.0 or a later one, and" in message
        assert f"hddm 0.9.0 in {other}; remove that, or update it" in message
    newer = installed(tmp_path / "newer", "0.10.1")
    assert imported(alone, newer) == imported(own, newer, is_loaded=True) == "installed"


def test_a_pack_without_any_hddm_says_how_to_make_one(tmp_path: Path) -> None:
    other = tmp_path / "other" / "hddm"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("# Another package of this name.")
    own = pack(tmp_path / "nodes" / "pack", "0.10.0", has_own=False)
    assert "has no hddm inside; make one that has" in imported(own, other.parent)


def test_the_pack_has_the_version_of_the_hddm_inside() -> None:
    versions = []
    for project in (ROOT / "pyproject.toml", HERE / "pyproject.toml"):
        versions.append(tomllib.loads(project.read_text())["project"]["version"])
    assert versions[0] == versions[1]
