"""Results of evaluations on disk, and the sides that are made of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hddm.errors import HddmError
from hddm.facts import check_format
from hddm.files import read_json, write_json, write_whole

FORMAT = "1.1"
KIND = "evaluation"


@dataclass(frozen=True)
class Result:
    """One evaluation as it was written, and the file that it lies in."""

    path: Path
    content: dict[str, Any]


@dataclass(frozen=True)
class Side:
    """Results that stand for one way to make images: one, or one a seed."""

    name: str
    results: tuple[Result, ...]


def check_absent(path: Path, overwrite: bool = False) -> None:
    """Refuse a ``path`` that a result must not be written to: to fail before the work.

    Raises:
        HddmError: for a folder that is missing, and for an existing file, unless ``overwrite`` and it is a
            result.
    """
    if not path.parent.is_dir():
        raise HddmError(f"--out {path}: {path.parent} is no folder; make it first")
    if not path.exists():
        return
    if not overwrite:
        raise HddmError(f"{path} exists: choose another file, or pass --overwrite to replace it")
    _read(path)


def write_result(path: Path, content: dict[str, Any], overwrite: bool = False) -> None:
    """Write a result whole or not at all.

    Raises:
        HddmError: where it cannot be written, or is there, unless ``overwrite``.
    """
    write_whole(path, lambda draft: write_json(draft, content), overwrite)


def read_sides(paths: Sequence[Path]) -> list[Side]:
    """A side for each path: a result, or a folder of results, one a seed.

    Raises:
        HddmError: for fewer than two paths, a folder without results, and what is no result.
    """
    if len(paths) < 2:
        raise HddmError(f"{len(paths)} result does not compare: name two or more files or folders of results")
    return [Side(str(path), tuple(_read(file) for file in _files(path))) for path in paths]


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("*.json"))
    if not files:
        raise HddmError(f"{path}: holds no results (*.json); hddm evaluate --out writes them")
    return files


def _read(path: Path) -> Result:
    content = read_json(path)
    if content.get("kind") != KIND:
        raise HddmError(f"{path}: is no result of an evaluation; hddm evaluate --out writes them")
    check_format(content, FORMAT, path)
    missing = [key for key in ("features", "data", "comparable", "reasons") if key not in content]
    if missing:
        raise HddmError(f"{path}: lacks {missing[0]!r}; evaluate the images again")
    return Result(path, content)
