"""Experts of one architecture merged into one by averaging their weights (model soups, arXiv:2203.05482)."""

import functools
import json
import math
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hddm.checkpoints.convert import write_network
from hddm.checkpoints.folders import open_expert_checkpoint
from hddm.checkpoints.plan import Built
from hddm.checkpoints.sources import Checkpoint
from hddm.experts.compatibility import candidates_of, common_shift, note_unrecorded_scales
from hddm.experts.decisions import SHARE_TOLERANCE
from hddm.experts.expert import Expert
from hddm.experts.kept import keep_component, whole_components
from hddm.experts.record_folders import write_records
from hddm.experts.records import (
    EXPERT_FILE,
    EXTRAS_FILE,
    WEAK_FILE,
    ExpertRecord,
    SourceRecord,
    joint_licence,
)
from hddm.fit import Findings, compare_kinds, compare_students
from hddm.settings import Reading
from hddm.utils.errors import UsageError, one_line
from hddm.utils.files import check_absent, new_folder, refuse_full_disk, sha256_once
from hddm.utils.tensors import Planned, promoted

_ALIKE = {
    *("prediction_type", "schedule", "time_scale", "variance_head"),
    *("data_scale", "data_shift", "negated"),
    *("conditions", "classes", "null_class", "text_encoder", "noise_range"),
}
"""Keys of a record that must be equal, besides what `_compare_kinds` compares."""


def merge_experts(
    experts: Sequence[Path],
    out: Path,
    weights: Sequence[float] | None = None,
    overwrite: bool = False,
) -> list[str]:
    """Average the weights of two experts or more into one dense expert; return notes for the user.

        W = sum_k w_k W_k,   w_k >= 0,   sum_k w_k = 1

    in float64, and written in the dtype of the parts. ``weights`` are equal by default. Adapters are merged
    into their bases first. Calibrations and weak models belong to other functions, and are left out. The
    record has the hashes and weights of the parts, and their shard where all have one; what a layout has
    besides weights stays where it is alike, and components and all else are the first expert's.

    Raises:
        UsageError: for weights that are not one number per expert.
        HddmError: before writing, with a line for each expert that differs in network, config, conventions,
            conditions or classes, or was trained in its calibration; and for NaN and Inf.
    """
    shares = shares_of(experts, weights)
    parts = [open_expert_checkpoint(folder, Reading()) for folder in experts]
    found = Findings()
    records = [one.record for one in parts if one.record is not None]
    opened = []
    for folder, record in zip(experts, records, strict=True):
        opened.append(Expert(None, record, folder=folder))
    _compare_kinds(opened, found)
    _compare(parts, opened, found)
    found.refuse("these experts cannot be merged, and nothing was written:")
    check_absent(out, EXPERT_FILE, overwrite)
    if weak := [str(folder) for folder in experts if (folder / WEAK_FILE).exists()]:
        of = ", ".join(weak)
        found.note(f"the weak models are left out, of {of}, so the result cannot be guided by one")
    found.note(
        f"{out} has no calibration, since its weights are new; hddm calibrate {out} fits one"
    )
    extras = _common_extras(parts)
    files = {}
    for number, part in enumerate(parts):
        for path in part.files:
            files[f"{number}/{path.name}"] = sha256_once(path)
    shard = records[0].shard
    is_one_shard = all(one.shard == shard for one in records)
    update: dict[str, Any] = {
        "weights": "unstated",
        "shard": shard if is_one_shard else None,
        "training": {},
        "shift": common_shift(opened, found),
        "licence": joint_licence(one.licence for one in records),
        "source": SourceRecord(
            layout="merge",
            files=files,
            options={"experts": [folder.resolve().name for folder in experts], "weights": shares},
            hddm=version("hddm-diffusion"),
        ),
    }
    tensors = _averages(parts, shares)
    refuse_full_disk(out, sum(math.prod(one.shape) * one.dtype.itemsize for one in tensors))
    with new_folder(out, EXPERT_FILE, overwrite) as draft:
        written = write_network(draft, Built(parts[0].network, tensors))
        if extras:
            save_file(extras, draft / EXTRAS_FILE, {"format": "pt"})
        write_records(draft, records[0].model_copy(update=update), parts[0].nulls, written)
        for name, folder in whole_components(experts[0]).items():
            keep_component(draft, name, folder)
    return found.notes


def _common_extras(parts: Sequence[Checkpoint]) -> dict[str, Tensor]:
    """The tensors that no network needs and that are the same in all parts."""
    found = {}
    for name, tensor in parts[0].declared.kept.items():
        if all(_has_same(part, name, tensor) for part in parts):
            found[name] = tensor.contiguous()
    return found


def _has_same(part: Checkpoint, name: str, tensor: Tensor) -> bool:
    """True if ``part`` keeps a tensor of this name with the same values."""
    own = part.declared.kept.get(name)
    return own is not None and torch.equal(tensor, own)


def shares_of(experts: Sequence[Path], weights: Sequence[float] | None) -> list[float]:
    """The parts of experts, which sum to 1; raises `UsageError` for weights that do not."""
    given = list(weights or [1 / len(experts)] * len(experts))
    if len(given) != len(experts) or min(given) < 0 or not abs(sum(given) - 1) <= SHARE_TOLERANCE:
        stated = ",".join(f"{one:g}" for one in given)
        raise UsageError(
            f"`weights` {stated}: give {len(experts)} numbers of 0 or more that sum to 1"
        )
    return [one / math.fsum(given) for one in given]


def _compare_kinds(experts: Sequence[Expert], found: Findings) -> None:
    """Record the differences that keep samples of any ensemble from being mixed."""
    candidates = candidates_of(experts)
    compare_kinds(candidates, found)
    compare_students(candidates, True, found)
    note_unrecorded_scales(experts, found)
    for one in experts:
        if one.record.space == "latents" and one.record.latent_space is None:
            found.note(f"{one.name} does not record its VAE; taken on trust")


def _compare(parts: Sequence[Checkpoint], experts: Sequence[Expert], found: Findings) -> None:
    """Record the differences from the first expert, besides those of any ensemble."""
    first = _qualities(parts[0], experts[0].record)
    for one, expert in zip(parts, experts, strict=True):
        name, record = expert.name, expert.record
        for key, value in _qualities(one, record).items():
            # Another network has other keys in its config.
            if value != first.get(key, value):
                found.differ(name, f"{key} {one_line(value, 60)}, not {one_line(first[key], 60)}")
        if record.training_calibration:
            text = (
                "was trained together with its calibration, so its weights cannot be merged alone"
            )
            found.differ(name, text)


def _qualities(part: Checkpoint, record: ExpertRecord) -> dict[str, Any]:
    """What the experts that are merged must have in common, by the name that messages give it."""
    found: dict[str, Any] = {"network": part.class_name}
    # Lists and tuples mean the same in a config.
    config = json.loads(json.dumps(dict(part.network.config)))
    for key, value in config.items():
        if not key.startswith("_"):
            found[f"{key} of its network"] = value
    found |= record.model_dump(mode="json", include=_ALIKE)
    found["null values"] = {name: value.tolist() for name, value in part.nulls.items()}
    return found


def _averages(parts: Sequence[Checkpoint], shares: Sequence[float]) -> list[Planned]:
    """The averages of all tensors, each computed when it is written."""
    weights = [one.table.renamed(one.weights, str(one.files[0])) for one in parts]
    origin, planned = ", ".join(str(one.path) for one in parts), []
    for name, tensor in weights[0].items():
        tensors = [one[name] for one in weights]
        dtypes = [one.dtype for one in tensors]
        dtype = promoted(*dtypes)
        average = functools.partial(_average, tensors, shares, dtype)
        planned.append(Planned(name, tuple(tensor.shape), dtype, average, origin))
    return planned


def _average(tensors: Sequence[Tensor], shares: Sequence[float], dtype: torch.dtype) -> Tensor:
    total = torch.zeros(tensors[0].shape, dtype=torch.float64)
    for tensor, share in zip(tensors, shares, strict=True):
        total.add_(tensor.double(), alpha=share)
    return total.to(dtype)
