"""Make the folder that people copy into ComfyUI's ``custom_nodes``: the pack, with hddm's source inside.

    python integrations/build_pack.py ComfyUI/custom_nodes/hddm-nodes

An older pack in its place is replaced.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc")
_PROJECT = "pyproject.toml"


def build(out: Path) -> None:
    """Write the pack to the folder ``out``, which must be new, empty or an older pack."""
    if out.exists() and not _is_pack(out) and (out.is_file() or any(out.iterdir())):
        sys.exit(f"{out}: is there, and is no older pack; name a new folder, such as {out}-nodes")
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.absolute().parent) as scratch:
        draft = Path(scratch) / "pack"
        shutil.copytree(HERE / "comfyui", draft, ignore=_LEFT_OUT)
        shutil.copytree(HERE.parent / "hddm", draft / "vendor" / "hddm", ignore=_LEFT_OUT)
        older = Path(scratch) / "older"
        if out.exists():
            out.rename(older)
        try:
            draft.rename(out)
        except OSError:
            if older.exists():
                older.rename(out)
            raise


def _is_pack(folder: Path) -> bool:
    project, own = folder / _PROJECT, HERE / "comfyui" / _PROJECT
    if not project.is_file() or folder.is_symlink():
        return False
    return _name_in(project) == _name_in(own)


def _name_in(project: Path) -> list[str]:
    lines = project.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.startswith("name = ")]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make hddm's node pack for ComfyUI.")
    parser.add_argument("out", type=Path, help="Folder of the pack, in custom_nodes or elsewhere.")
    folder = parser.parse_args().out
    build(folder)
    print(f"{folder}: hddm's nodes; start ComfyUI again with this folder in custom_nodes")
