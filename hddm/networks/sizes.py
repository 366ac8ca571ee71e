"""Sizes of hddm's own transformers, by name. torch is not imported with them.

The names S to XL are those of Peebles & Xie 2022 (arXiv:2212.09748, table 1), whose DiT has these sizes.
"""

import re

from hddm.utils.errors import HddmError

# Depth, width and heads.
_WIDTHS = {"S": (12, 384, 6), "B": (12, 768, 12), "L": (24, 1024, 16), "XL": (28, 1152, 16)}

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 2},
    "mini": {"depth": 4, "hidden_size": 64, "num_heads": 4, "patch_size": 4},
    "small": {"depth": 4, "hidden_size": 128, "num_heads": 4, "patch_size": 4},
} | {
    f"{name}/{patch}": {
        "depth": depth,
        "hidden_size": width,
        "num_heads": heads,
        "patch_size": patch,
    }
    for name, (depth, width, heads) in _WIDTHS.items()
    for patch in (2, 4, 8)
}
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
    depth, width, patch = (int(part) for part in found.groups()) if found else (0, 0, 0)
    if not (depth and patch and width % 8 == 0 and (0 < width < 64 or (width and width % 64 == 0))):
        own = "DEPTHxWIDTH/PATCH, as 6x192/2, the width a multiple of 64, or of 8 below 64"
        raise HddmError(f"unknown model size {name!r}: choose one of {', '.join(SIZES)}, or {own}")
    return {
        "depth": depth,
        "hidden_size": width,
        "num_heads": max(1, width // 64),
        "patch_size": patch,
    }
