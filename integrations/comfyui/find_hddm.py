"""Makes `hddm` importable in ComfyUI's process, whether it was installed or not.

The nodes that mix need the modules of hddm that convert and choose, which use nothing but what ComfyUI has.
So hddm's own requirements need not be installed, and cannot replace a torch that works.
"""

import importlib.util
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
NEEDED = "conversion.py"
PLACES = (HERE / "vendor", HERE.parent.parent)
"""Where hddm is without having been installed: in the pack, or around a pack that was linked."""


def find_hddm() -> None:
    """Make ``import hddm`` find one that has what the nodes need: an installed one, or that of the pack.

    Raises:
        ImportError: if there is none.
    """
    installed = importlib.util.find_spec("hddm")
    origin = None if installed is None else installed.origin
    if origin is not None and (Path(origin).parent / NEEDED).is_file():
        return
    for place in PLACES:
        if (place / "hddm" / NEEDED).is_file():
            # In front of an older hddm, or of another package of this name.
            sys.path.insert(0, str(place))
            return
    raise ImportError(
        f"{HERE}: this folder has no hddm inside; make one that has, in a checkout of hddm: "
        f"python integrations/build_pack.py {HERE}"
    )
