"""Results of evaluations on disk, in groups of one model each, and checks that they compare."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from hddm.utils.errors import HddmError, did_you_mean
from hddm.utils.files import read_json
from hddm.utils.records import OpenRecord, check_format, parse_record

FORMAT = "1.1"
KIND = "evaluation"


Figure = Annotated[float, Field(strict=True, ge=-1e30, le=1e30)]
"""A number whose square, and sums of it, are finite too."""
Width = Annotated[Figure, Field(ge=0)]
Share = Annotated[float, Field(strict=True, ge=0, le=1)]
Count = Annotated[int, Field(strict=True, ge=0, lt=2**53)]


class DistanceRecord(OpenRecord):
    """`Distance` or `KernelDistance` of `hddm.evaluation.distances`, as written."""

    value: Figure
    half_width: Width | None = None
    standard_error: Width = 0.0
    few_images: bool = False


class OverlapRecord(OpenRecord):
    """`hddm.evaluation.distances.PrecisionRecall`, as written."""

    precision: Share
    recall: Share
    images: Annotated[Count, Field(ge=1)]


class WithinConditions(OpenRecord):
    """`hddm.evaluation.diversity.ConditionDiversity`, as written."""

    distance: str
    images: Figure


class MemorisationRecord(OpenRecord):
    """`hddm.evaluation.diversity.Memorisation`, as written."""

    ratio: Figure
    half_width: Width | None = None
    mirrored: bool = False


class ShardFigures(OpenRecord):
    """`hddm.evaluation.scores.ShardDistance`, as written."""

    all: DistanceRecord
    own: DistanceRecord | None = None
    samples: Count = 0


class ScoresRecord(OpenRecord):
    """What is compared of `hddm.evaluation.scores.Scores`, with the images of either split named."""

    to_training: DistanceRecord | None = None
    to_held_out: DistanceRecord | None = None
    to_validation: DistanceRecord | None = None
    kernel_to_training: DistanceRecord | None = None
    kernel_to_held_out: DistanceRecord | None = None
    kernel_to_validation: DistanceRecord | None = None
    on_training: OverlapRecord | None = None
    on_held_out: OverlapRecord | None = None
    on_validation: OverlapRecord | None = None
    diversity: Figure | None = None
    recognised: dict[Literal["share", "real"], Figure] | None = None
    memorisation: MemorisationRecord | None = None
    within_conditions: WithinConditions | None = None
    shards: tuple[ShardFigures, ...] | None = None


class SamplingRecord(OpenRecord):
    """What evaluations read of ``sampling.json``."""

    source: str | None = None
    num_images: Count | None = None
    start: Count = 0
    class_labels: tuple[Annotated[int, Field(strict=True, ge=0, lt=2**31)], ...] | None = None
    class_names: tuple[str, ...] | None = None
    prompts: tuple[str, ...] | None = None


class MeasuredImages(OpenRecord):
    """Images of one side; of shards, both are lists."""

    images: Any
    hash: Any


class SampledImages(MeasuredImages):
    """The images that were measured."""

    shape: Any
    hash: str


class MeasuredData(OpenRecord):
    """Images of all sides."""

    images: SampledImages
    reference: MeasuredImages | None = None
    held_out: MeasuredImages | None = None
    shards: MeasuredImages | None = None


class EvaluationRecord(ScoresRecord):
    """A result as `hddm.evaluation.evaluate.evaluate_folder` makes it."""

    features: dict[str, Any]
    data: MeasuredData
    comparable: bool
    reasons: tuple[str, ...]
    sampling: SamplingRecord | None = None
    split: Literal["validation", "held-out"] = "held-out"
    training_tflop: Width | None = None
    versions: dict[str, str] = Field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """One evaluation as written (`EvaluationRecord`), its file, and the seed that pairs it."""

    path: Path
    content: dict[str, Any]
    seed: str


@dataclass(frozen=True)
class ResultGroup:
    """Results of one model: one, or one per training seed."""

    name: str
    results: tuple[Result, ...]

    @property
    def sources(self) -> set[str | None]:
        """Hashes of the sampled models, None for unrecorded ones."""
        return {(result.content.get("sampling") or {}).get("source") for result in self.results}

    @property
    def is_one_model(self) -> bool:
        """True if the results are samples of one set of weights."""
        return len(self.results) > 1 and len(self.sources) == 1 and None not in self.sources


def refuse_existing(path: Path, overwrite: bool = False) -> None:
    """Refuse a ``path`` without a folder, and an existing file, unless a result to ``overwrite``."""
    if not path.parent.is_dir():
        raise HddmError(f"--out {path}: {path.parent} is not a folder; create it first")
    if path.is_symlink():
        to = os.readlink(path)
        raise HddmError(f"--out {path}: is a link to {to}; name the file itself, or remove the link")
    if not path.exists():
        return
    if not overwrite:
        raise HddmError(f"{path} exists: choose another file, or pass --overwrite to replace it")
    read_result(path)


def read_groups(paths: Sequence[Path]) -> list[ResultGroup]:
    """Read a group per path: a result, or a folder of results, one per training seed, with equal names.

    Raises `HddmError` for a folder without results, and files that are no results.
    """
    return [ResultGroup(str(path), tuple(read_result(file) for file in _files(path))) for path in paths]


def _files(path: Path) -> list[Path]:
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise HddmError(f"{path}: holds no results (*.json); hddm evaluate --out writes them")
    return files


def read_result(path: Path) -> Result:
    """Read one result; `HddmError` for a file that is none."""
    content = read_json(path)
    if content.get("kind") != KIND:
        raise HddmError(f"{path}: is not a result of an evaluation; hddm evaluate --out writes one")
    check_format(content, FORMAT, path)
    return checked(path, content, path.stem)


def checked(path: Path, content: dict[str, Any], seed: str) -> Result:
    """A result whose ``content`` is that of an `EvaluationRecord`; anything else raises `HddmError`."""
    parse_record(content, EvaluationRecord, str(path))
    return Result(path, content, seed)


OWN = {"source", "source_sha256", "seed", "start", "num_images", "batch_size", "offload", "max_memory"}
OWN |= {"format", "hddm"}
"""Fields of the sampling record that differ by model or seed, or change no image."""
_LABELS, _NAMES = "class_labels", "class_names"
_DATA = ("reference", "held_out", "shards")
_UNKNOWN = "not recorded"
Fields = dict[str, Any]
"""Fields that must agree, by name; sampling settings by their own names."""


def refuse_incomparable(groups: Sequence[ResultGroup], varies: Sequence[str] = ()) -> None:
    """Refuse results that differ in more than models, seeds and the sampling settings ``varies``.

    Raises `HddmError` for a name in ``varies`` that is no sampling setting; with a line for every result
    marked as not comparable, every field that differs, and every pair of equal images in a group.
    """
    results = [result for group in groups for result in group.results]
    fields = [_fields(result) for result in results]
    names = list(dict.fromkeys(name for one in fields for name in one))
    settings = [name for name in names if not _is_fixed(name)]
    for name in varies:
        if name not in settings:
            raise HddmError(
                f"--varies {name}: is not a sampling setting of these results"
                f"{did_you_mean(name, settings) or '; only those may differ on purpose'}"
            )
    lines = [
        f"{result.path}: not comparable: {reason}"
        for result in results
        if not result.content["comparable"]
        for reason in result.content["reasons"] or ["no reason is recorded"]
    ]
    lines += [*_given_twice(groups), *_same_images(groups)]
    differing = [name for name in names if len({_shown(one, name) for one in fields if _says(one, name)}) > 1]
    # Different labels have different names, which are reported with them.
    allowed = {*varies, _NAMES} if _LABELS in differing else set(varies)
    differing = [name for name in differing if name not in allowed]
    for name in differing:
        # In the order of the results; those of a benchmark share one file.
        files: dict[str, dict[str, None]] = {}
        for result, one in zip(results, fields, strict=True):
            files.setdefault(_with_names(one, name), {})[str(result.path)] = None
        values = "; ".join(f"{value} in {', '.join(paths)}" for value, paths in files.items())
        lines.append(f"{name}: {values}")
    if lines:
        is_mended = len(lines) == len(differing) and not any(map(_is_fixed, differing))
        remedy = "; --varies NAME declares a sampling setting that differs on purpose" if is_mended else ""
        raise HddmError(f"these results do not compare{remedy}", lines)


def _fields(result: Result) -> Fields:
    content = result.content
    features, data = content["features"], content["data"]
    fields = {f"features.{key}": features.get(key) for key in ("name", "hash", "resize")}
    fields |= {"images": data["images"]["images"], "images.shape": data["images"]["shape"]}
    for kind in _DATA:
        for key in ("images", "hash"):
            fields[f"{kind}.{key}"] = data[kind][key] if data.get(kind) else None
    if "split" in content:
        fields["split"] = content["split"]
    sampling = content.get("sampling")
    if sampling is None:
        return {**fields, "sampling": _UNKNOWN}
    return {**fields, "sampling": "recorded", **{k: v for k, v in sampling.items() if k not in OWN}}


def _is_fixed(name: str) -> bool:
    """True for a field that is no sampling setting, which `--varies` cannot free."""
    return name.startswith(("features.", "images", "split", *_DATA))


def _given_twice(groups: Sequence[ResultGroup]) -> list[str]:
    given: dict[Path, list[Path]] = {}
    for group in groups:
        # Seeds of a benchmark share one file.
        for real, path in {result.path.resolve(): result.path for result in group.results}.items():
            given.setdefault(real, []).append(path)
    return [
        f"{paths[0]}: is on {len(paths)} sides; name each result once"
        for paths in given.values()
        if len(paths) > 1
    ]


def _same_images(groups: Sequence[ResultGroup]) -> list[str]:
    lines = []
    for group in groups:
        seen: dict[str, Result] = {}
        for result in group.results:
            first = seen.setdefault(result.content["data"]["images"]["hash"], result)
            if first is not result:
                pair = f"{first.path} and {result.path}"
                lines.append(f"{pair}: the same images, which {group.name} must not count twice")
    return lines


def _says(fields: Fields, name: str) -> bool:
    """True for a field to compare: present, or missing (except names) where sampling is recorded."""
    return name in fields or (name != _NAMES and fields["sampling"] != _UNKNOWN)


def _shown(fields: Fields, name: str) -> str:
    return json.dumps(fields[name], sort_keys=True) if name in fields else _UNKNOWN


def _with_names(fields: Fields, name: str) -> str:
    """As `_shown`, with class names if known."""
    labels, names = fields.get(_LABELS), fields.get(_NAMES)
    if name != _LABELS or not labels or not names:
        return _shown(fields, name)
    return ", ".join(f"{label} ({known})" for label, known in zip(labels, names, strict=False))
