"""Sizes of hddm's own transformers, by name. torch is not imported with them.

The names S to XL are those of Peebles & Xie 2022 (arXiv:2212.09748, table 1), whose DiT has these sizes.
"""

import re

from hddm.utils.errors import HddmError

# Depth, width and heads.
_WIDTHS = {"S": (12, 384, 6), "B": (12, 768, 12), "L": (24, 1024, 16), "XL": (28, 1152, 16)}


def _arguments(depth: int, width: int, heads: int, patch: int) -> dict[str, int]:
    return {"depth": depth, "hidden_size": width, "num_heads": heads, "patch_size": patch}


def _all_sizes() -> dict[str, dict[str, int]]:
    sizes = {
        "tiny": _arguments(depth=2, width=32, heads=2, patch=2),
        "mini": _arguments(depth=4, width=64, heads=4, patch=4),
        "small": _arguments(depth=4, width=128, heads=4, patch=4),
    }
    for name, (depth, width, heads) in _WIDTHS.items():
        for patch in (2, 4, 8):
            sizes[f"{name}/{patch}"] = _arguments(depth, width, heads, patch)
    return sizes


SIZES: dict[str, dict[str, int]] = _all_sizes()
"""Arguments of the transformers by named size; the first three are for images of a few hundred pixels.

The others are those of Peebles & Xie 2022 (arXiv:2212.09748, table 1), with the patch size after the slash.
"""


def size_config(name: str) -> dict[str, int]:
    """Return the constructor arguments of a size: a named one, or depth, width and patch, as ``6x192/2``.

    In the second form a head has 64 numbers, or all of them below a width of 64. Any other name raises
    `HddmError`.
    """
    if name in SIZES:
        return dict(SIZES[name])
    found = re.fullmatch(r"(\d{1,3})x(\d{1,5})/(\d{1,3})", name)
    depth = width = patch = 0
    if found:
        depth, width, patch = map(int, found.groups())
    if not (depth and patch and width % 8 == 0 and (0 < width < 64 or (width and width % 64 == 0))):
        own = "DEPTHxWIDTH/PATCH, as 6x192/2, the width a multiple of 64, or of 8 below 64"
        raise HddmError(f"unknown model size {name!r}: choose one of {', '.join(SIZES)}, or {own}")
    return _arguments(depth, width, max(1, width // 64), patch)
