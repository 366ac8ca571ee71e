"""Named sizes of the transformers: depth, width and heads, as DiT names them.

``tiny`` and ``small`` are for tests and for images of a few hundred pixels. The others are those of
Peebles & Xie 2022 (arXiv:2212.09748, table 1); the number after the slash is the patch size.
"""

from hddm.errors import HddmError

_WIDTHS = {"S": (12, 384, 6), "B": (12, 768, 12), "L": (24, 1024, 16), "XL": (28, 1152, 16)}

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 2},
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


def size_config(name: str) -> dict[str, int]:
    """The constructor arguments of a named size.

    Raises:
        HddmError: for an unknown name; the message lists the known ones.
    """
    if name not in SIZES:
        raise HddmError(f"unknown model size {name!r}: choose one of {', '.join(SIZES)}")
    return dict(SIZES[name])
