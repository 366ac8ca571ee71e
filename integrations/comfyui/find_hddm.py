"""Makes `hddm` importable in ComfyUI's process, whether it was installed or not.

The nodes that mix need the modules of hddm that convert and choose, which use nothing but what ComfyUI has.
So hddm's own requirements need not be installed, and cannot replace a torch that works.
"""

import importlib.metadata
import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
NAME = "hddm-diffusion"
NEEDED = "conversion.py"


class FoundHddm(NamedTuple):
    """An `hddm` that can be imported."""

    place: Path
    """The folder that contains it, as one of ``sys.path``."""
    version: str
    """Empty where nothing says it."""

    @property
    def order(self) -> tuple[int, ...]:
        """The version as numbers, which compare; an unknown one is before all others."""
        return tuple(int(number) for number in re.findall(r"\d+", self.version)[:3])

    def __str__(self) -> str:
        return f"hddm {self.version or 'of unknown version'} in {self.place}"


def find_hddm(pack: Path = HERE) -> None:
    """Make ``import hddm`` find the newer one of that of this ``pack`` and an installed one.

    Of two that are equally new, that of the pack goes with its nodes.

    Raises:
        ImportError: if there is none, or an older one has been imported already.
    """
    wanted = _version_in(pack / "pyproject.toml")
    own, installed = _own(pack, wanted), _installed()
    if "hddm" in sys.modules:
        # Another pack imported it, and a process has one.
        _refuse_older(installed, wanted, pack)
        return
    if installed is not None and (own is None or installed.order > own.order):
        _refuse_older(installed, wanted, pack)
        return
    if own is None:
        raise ImportError(
            f"{pack}: this folder has no hddm inside; make one that has, in a checkout of hddm: "
            f"python integrations/build_pack.py {pack}"
        )
    # In front of an older hddm, or of another package of this name.
    sys.path.insert(0, str(own.place))


def _own(pack: Path, version: str) -> FoundHddm | None:
    """The one inside the pack, or around a pack that was linked."""
    for place in (pack / "vendor", pack.parent.parent):
        if (place / "hddm" / NEEDED).is_file():
            return FoundHddm(place, version)
    return None


def _installed() -> FoundHddm | None:
    """The one that ``import hddm`` finds; None for none, and for another package of this name."""
    spec = importlib.util.find_spec("hddm")
    if spec is None or spec.origin is None:
        return None
    place = Path(spec.origin).resolve().parent.parent
    if not (place / "hddm" / NEEDED).is_file():
        return None
    for one in importlib.metadata.distributions(name=NAME, path=[str(place)]):
        return FoundHddm(place, one.version)
    # A checkout, or the copy inside another pack.
    checkout, other_pack = _version_in(place / "pyproject.toml"), place.parent / "pyproject.toml"
    return FoundHddm(place, checkout or _version_in(other_pack))


def _refuse_older(found: FoundHddm | None, wanted: str, pack: Path) -> None:
    if found is None or found.order < FoundHddm(pack, wanted).order:
        raise ImportError(
            f"{pack}: these nodes need hddm {wanted} or a later one, and ComfyUI's Python has "
            f"{found or 'another package of that name'}; remove that, or update it, and start ComfyUI again"
        )


def _version_in(project: Path) -> str:
    """The version in a ``pyproject.toml`` of hddm, or of its nodes; empty where it is of neither."""
    if not project.is_file():
        return ""
    content = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {})
    is_ours = content.get("name") in (NAME, "hddm-nodes")
    return str(content.get("version", "")) if is_ours else ""
