"""Results of evaluations on disk, in groups of one model each, and checks that they compare."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from hddm.evaluation.features import FeaturesRecord
from hddm.evaluation.images import DataRecord, SamplingRecord
from hddm.evaluation.measures import Width
from hddm.evaluation.scores import Scores
from hddm.utils.errors import HddmError
from hddm.utils.records import OpenRecord, read_record

FORMAT = "2.0"


class EvaluationData(OpenRecord):
    """Images of all sides."""

    images: DataRecord
    reference: DataRecord | None = None
    validation: DataRecord | None = None
    held_out: DataRecord | None = None


class Evaluation(Scores):
    """A result of ``hddm evaluate``: scores, and everything that they depend on."""

    oldest: ClassVar[str | None] = FORMAT
    remedy: ClassVar[str] = "evaluate the images again"

    format: str = FORMAT
    kind: Literal["evaluation"]
    features: FeaturesRecord
    data: EvaluationData
    sampling: SamplingRecord | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    comparable: bool
    reasons: tuple[str, ...]
    training_tflop: Width | None = None
    """Counted operations of the model's training; of benchmarks."""

    def __repr__(self) -> str:
        """Distances alone; the other figures are fields, and ``model_dump_json`` writes them all."""
        said = [f"{self.images} images"]
        for side in self.splits:
            if side.distance is not None:
                said.append(
                    f"distance {side.distance.value:.4g} to {side.split.replace('_', '-')} images"
                )
        if not self.comparable:
            said.append(f"not comparable ({'; '.join(self.reasons)})")
        return f"<Evaluation: {', '.join(said)}>"

    __str__ = __repr__


@dataclass(frozen=True)
class Result:
    """One evaluation, its file, and the seed that pairs it."""

    path: Path
    content: Evaluation
    seed: str


@dataclass(frozen=True)
class ResultGroup:
    """Results of one model: one, or one per training seed."""

    name: str
    results: tuple[Result, ...]

    @property
    def sources(self) -> set[str | None]:
        """The sampled models, None for unrecorded ones."""
        recorded = (result.content.sampling or SamplingRecord() for result in self.results)
        return {one.source_sha256 or one.source for one in recorded}

    @property
    def is_one_model(self) -> bool:
        """True if the results are samples of one set of weights."""
        return len(self.results) > 1 and len(self.sources) == 1 and None not in self.sources


def read_groups(paths: Sequence[Path]) -> list[ResultGroup]:
    """Read a group per path: a result, or a folder of results, one per training seed, with equal names.

    Raises `HddmError` for a folder without results, and files that are no results.
    """
    groups = []
    for path in paths:
        files = sorted(path.glob("*.json")) if path.is_dir() else [path]
        if not files:
            raise HddmError(f"{path}: holds no results (*.json); hddm evaluate --out writes them")
        results = (Result(file, read_result(file), file.stem) for file in files)
        groups.append(ResultGroup(str(path), tuple(results)))
    return groups


def read_result(path: Path) -> Evaluation:
    """Read one result; raises `HddmError` as `read_record`."""
    return read_record(path, Evaluation, FORMAT)


OWN = {
    "source",
    "source_sha256",
    "seed",
    "start",
    "num_images",
    "batch_size",
    "offload",
    "max_memory",
}
OWN |= {"format", "hddm"}
"""Fields of the sampling record that differ by model or seed, or change no image."""
_DATA = ("reference", "validation", "held_out")
_UNKNOWN = "not recorded"


def refuse_incomparable(groups: Sequence[ResultGroup], varies: Sequence[str] = ()) -> None:
    """Refuse results that differ in more than models, seeds and the sampling settings ``varies``.

    Raises `HddmError` with a line for every result marked as not comparable, every field that differs, and
    every pair of equal images in a group.
    """
    results = [result for group in groups for result in group.results]
    fields = [_fields(result.content) for result in results]
    names = list(dict.fromkeys(name for one in fields for name in one))
    lines = [
        f"{result.path}: not comparable: {reason}"
        for result in results
        if not result.content.comparable
        for reason in result.content.reasons or ["no reason is recorded"]
    ]
    lines += _same_images(groups)
    differing = []
    for name in [name for name in names if name not in varies or _is_fixed(name)]:
        # In the order of the results; those of a benchmark share one file.
        files: dict[str, dict[str, None]] = {}
        for result, one in zip(results, fields, strict=True):
            # That nothing of the sampling is recorded is one difference.
            if name in one or _UNKNOWN not in one["sampling"]:
                files.setdefault(one.get(name, _UNKNOWN), {})[str(result.path)] = None
        if len(files) > 1:
            differing.append(name)
            values = "; ".join(f"{value} in {', '.join(paths)}" for value, paths in files.items())
            lines.append(f"{name}: {values}")
    if lines:
        is_mended = len(lines) == len(differing) and not any(map(_is_fixed, differing))
        remedy = (
            "; `varies` NAME declares a sampling setting that differs on purpose"
            if is_mended
            else ""
        )
        raise HddmError(f"these results do not compare{remedy}", lines)


def _fields(content: Evaluation) -> dict[str, str]:
    """Fields that must agree, as texts; sampling settings by their own names."""
    data = content.data
    fields: dict[str, Any] = {
        f"features.{key}": getattr(content.features, key) for key in ("name", "hash", "resize")
    }
    fields |= {"images": data.images.images, "images.shape": data.images.shape}
    for kind in _DATA:
        for key in ("images", "hash"):
            fields[f"{kind}.{key}"] = getattr(getattr(data, kind), key, None)
    fields["sampling"] = _UNKNOWN
    if content.sampling is not None:
        sampling = content.sampling.model_dump(mode="json", exclude_unset=True, exclude=OWN)
        if not sampling.get("mask"):
            # Samples of format 1.5 have the default of what only a mask uses.
            sampling.pop("resampling_steps", None)
        labels, names = sampling.get("class_labels"), sampling.pop("class_names", None)
        if labels and names:
            pairs = zip(labels, names, strict=False)
            sampling["class_labels"] = [f"{label} ({name})" for label, name in pairs]
        fields |= {"sampling": "recorded", **sampling}
    return {name: json.dumps(value, sort_keys=True) for name, value in fields.items()}


def _is_fixed(name: str) -> bool:
    """True for a field that is no sampling setting, which `--varies` cannot free."""
    return name.startswith(("features.", "images", *_DATA))


def _same_images(groups: Sequence[ResultGroup]) -> list[str]:
    lines = []
    for group in groups:
        seen: dict[str, Result] = {}
        for result in group.results:
            first = seen.setdefault(result.content.data.images.hash, result)
            if first is not result:
                pair = f"{first.path} and {result.path}"
                lines.append(f"{pair}: the same images, which {group.name} must not count twice")
    return lines
