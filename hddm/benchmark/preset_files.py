"""The presets that come with hddm, by name."""

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from hddm.utils.errors import UsageError, choose

_PRESETS = files("hddm.benchmark") / "presets"
_SUFFIX = ".yaml"


def preset_names() -> list[str]:
    """Names of the presets, in order."""
    names = [path.name for path in _PRESETS.iterdir()]
    return sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX))


def preset(which: str) -> Traversable | None:
    """The file of the preset called ``which``; None where a file of the user's own is meant.

    That is so where the name has a suffix or a folder in it.

    Raises:
        UsageError: for an unknown preset.
    """
    if "/" in which or Path(which).suffix:
        return None
    if which not in preset_names():
        raise UsageError(
            f"{which}: no such preset; name a file of your own by its path, as ./mine.yaml, or "
            f"{choose(which, preset_names())}"
        )
    return _PRESETS / f"{which}{_SUFFIX}"
