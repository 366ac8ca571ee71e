"""Makes the folder that people copy into ComfyUI's ``custom_nodes``: the pack, with hddm's source inside.

python integrations/build_pack.py OUT
"""

import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc")


def build(out: Path) -> None:
    """Write the pack to the new folder ``out``."""
    shutil.copytree(HERE / "comfyui", out, ignore=_LEFT_OUT)
    shutil.copytree(HERE.parent / "hddm", out / "vendor" / "hddm", ignore=_LEFT_OUT)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
