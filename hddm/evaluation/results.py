"""Results of evaluations on disk, in groups of one model each, and checks that they compare."""

import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from hddm.evaluation.score_records import DataRecord, FeaturesRecord, SamplingRecord, Scores, Width
from hddm.utils.errors import HddmError
from hddm.utils.files import write_whole
from hddm.utils.records import OpenRecord, Record, read_record

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


def versions_of(packages: Sequence[str]) -> dict[str, str]:
    """Versions of Python and of packages that figures depend on."""
    versions = {"python": platform.python_version()}
    for name in packages:
        versions[name] = version(name)
    return versions


def write_result(out: Path, result: Record, overwrite: bool) -> None:
    """Write a result as JSON, completely or not at all."""
    text = result.model_dump_json(indent=2)
    write_whole(out, lambda draft: draft.write_text(f"{text}\n", encoding="utf-8"), overwrite)


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
        found = set()
        for result in self.results:
            recorded = result.content.sampling or SamplingRecord()
            found.add(recorded.source_sha256 or recorded.source)
        return found

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
        results = [Result(file, read_result(file), file.stem) for file in files]
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
    results: list[Result] = []
    for group in groups:
        results += group.results
    fields = [_fields(result.content) for result in results]
    # A dictionary, since the order counts.
    names: dict[str, None] = {}
    for one in fields:
        names |= dict.fromkeys(one)
    lines = []
    for result in results:
        if not result.content.comparable:
            for reason in result.content.reasons or ["no reason is recorded"]:
                lines.append(f"{result.path}: not comparable: {reason}")
    lines += _same_images(groups)
    differing = []
    for name in names:
        if name in varies and not _is_fixed(name):
            continue
        # In the order of the results; those of a benchmark share one file.
        files: dict[str, dict[str, None]] = {}
        for result, one in zip(results, fields, strict=True):
            # That nothing of the sampling is recorded is one difference.
            if name in one or _UNKNOWN not in one["sampling"]:
                files.setdefault(one.get(name, _UNKNOWN), {})[str(result.path)] = None
        if len(files) > 1:
            differing.append(name)
            values = [f"{value} in {', '.join(paths)}" for value, paths in files.items()]
            lines.append(f"{name}: {'; '.join(values)}")
    if lines:
        text = "these results do not compare"
        if len(lines) == len(differing) and not any(map(_is_fixed, differing)):
            text += "; `varies` NAME declares a sampling setting that differs on purpose"
        raise HddmError(text, lines)


def _fields(content: Evaluation) -> dict[str, str]:
    """Fields that must agree, as texts; sampling settings by their own names."""
    features, data = content.features, content.data
    fields: dict[str, Any] = {
        "features.name": features.name,
        "features.hash": features.hash,
        "features.resize": features.resize,
        "images": data.images.images,
        "images.shape": data.images.shape,
    }
    for kind in _DATA:
        side = getattr(data, kind)
        fields[f"{kind}.images"] = getattr(side, "images", None)
        fields[f"{kind}.hash"] = getattr(side, "hash", None)
    texts = {name: json.dumps(value, sort_keys=True) for name, value in fields.items()}
    return texts | sampling_fields(content)


def sampling_fields(content: Evaluation) -> dict[str, str]:
    """Settings that the images were sampled with, as texts; ``sampling`` says if they were recorded."""
    if content.sampling is None:
        return {"sampling": json.dumps(_UNKNOWN)}
    sampling = content.sampling.model_dump(mode="json", exclude_unset=True, exclude=OWN)
    if not sampling.get("mask"):
        # Samples of format 1.5 have the default of what only a mask uses.
        sampling.pop("resampling_steps", None)
    labels = sampling.get("class_labels")
    names = sampling.pop("class_names", None)
    if labels and names:
        pairs = zip(labels, names, strict=False)
        sampling["class_labels"] = [f"{label} ({name})" for label, name in pairs]
    fields = {"sampling": "recorded", **sampling}
    return {name: json.dumps(value, sort_keys=True) for name, value in fields.items()}


def _is_fixed(name: str) -> bool:
    """True for a field that is no sampling setting, which `--varies` cannot free."""
    return name.startswith(("features.", "images", *_DATA))


def _same_images(groups: Sequence[ResultGroup]) -> list[str]:
    """A line for each result of a group that measured the same images as an earlier one."""
    lines = []
    for group in groups:
        seen: dict[str, Result] = {}
        for result in group.results:
            first = seen.setdefault(result.content.data.images.hash, result)
            if first is not result:
                pair = f"{first.path} and {result.path}"
                lines.append(f"{pair}: the same images, which {group.name} must not count twice")
    return lines
