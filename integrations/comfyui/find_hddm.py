"""Makes `hddm` importable in ComfyUI's process, whether it was installed or not.

The nodes that mix need the modules of hddm that convert and choose, which use nothing but what ComfyUI has.
So hddm's own requirements need not be installed, and cannot replace a torch that works.
"""

import importlib.util
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PLACES = (HERE / "vendor", HERE.parent.parent)
"""Where hddm is without having been installed: in the pack, or around a pack that was linked."""


def find_hddm() -> None:
    """Add the folder of hddm to the end of `sys.path`, unless it is installed.

    Raises:
        ImportError: if it is nowhere.
    """
    if importlib.util.find_spec("hddm") is not None:
        return
    for place in PLACES:
        if (place / "hddm" / "conversion.py").is_file():
            sys.path.append(str(place))
            return
    raise ImportError(
        f"{HERE}: hddm is not in this pack; install it into ComfyUI's Python: "
        "pip install --no-deps hddm-diffusion"
    )
