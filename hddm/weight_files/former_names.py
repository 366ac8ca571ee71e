"""Names of tensors in files of former versions of diffusers, which its own loader still renames."""

from collections.abc import Iterable

# Attention before 0.15.
_ATTENTION = {".to_q.": ".query.", ".to_k.": ".key.", ".to_v.": ".value.", ".to_out.0.": ".proj_attn."}


def former_name(name: str) -> str:
    """What diffusers called the tensor ``name`` once; ``name`` itself where it never changed."""
    for new, old in _ATTENTION.items():
        if new in name:
            return name.replace(new, old)
    return name


def stored_names(names: Iterable[str], stored: Iterable[str]) -> dict[str, str]:
    """The name in a file, which holds ``stored``, of each tensor that a network calls by ``names``."""
    held = set(stored)
    return {
        name: former_name(name) if name not in held and former_name(name) in held else name for name in names
    }
