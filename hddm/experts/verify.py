"""Verify an expert that somebody else trained: its records, hashes and weights, and its denoising."""

import contextlib
import copy
import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from hddm.calibration import START
from hddm.calibration_records import FILE_NAME as CALIBRATION
from hddm.data.shards import Shard, open_shard
from hddm.experts.adapter_records import ADAPTER_WEIGHTS, bases_in
from hddm.experts.denoising import IMAGES, LOWEST, SURE, Denoising, denoising, judged, misread
from hddm.experts.ensemble_folders import ENSEMBLE_FILE
from hddm.experts.ensemble_records import foreign_pipeline, read_ensemble_record
from hddm.experts.expert import Expert
from hddm.experts.expert_folders import field_of, open_expert
from hddm.experts.kept import whole_components
from hddm.experts.records import EXPERT_FILE, ROUTER_FILE, ExpertRecord, foreign_files
from hddm.experts.shard_images import (
    check_fit,
    check_own,
    conditions_of,
    conditions_of_rows,
    evenly_spaced,
)
from hddm.utils.errors import HddmError, UsageError, errors_as
from hddm.utils.files import sha256_of
from hddm.utils.records import HASHES, WEIGHTS, damage
from hddm.utils.tensors import available_device
from hddm.velocity import VelocityField


def problems_around(folder: Path) -> list[str]:
    """List what is wrong with an ensemble besides its experts; nothing for any other folder."""
    if not (folder / ENSEMBLE_FILE).exists():
        return []
    router = read_ensemble_record(folder).learned
    found = list(damage(folder, ENSEMBLE_FILE, sha256=sha256_of))
    if router is not None:
        for line in damage(folder / router, ROUTER_FILE, sha256=sha256_of):
            found.append(f"{router}/{line}")
    return [f"{folder}/{line}" for line in (*found, foreign_pipeline(folder)) if line]


@dataclass(kw_only=True)
class Verification:
    """Findings in an expert folder, which is fit for use if there are no ``problems``.

    ``files`` holds the SHA-256 of every file but the cache of hashes, ``base`` that of the weights that an
    adapter changes, ``trained_on`` the hash of its shard. Errors on ``images`` images are ``denoising``.
    ``notes`` are for the user.
    """

    folder: Path
    files: dict[str, str]
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    images: int = 0
    denoising: Denoising | None = None
    objective: str | None = None
    parameters: int | None = None
    base: str | None = None
    trained_on: str | None = None

    @property
    def accepted(self) -> bool:
        return not self.problems

    def report(self) -> dict[str, Any]:
        """Return plain values, for scripts."""
        return {"accepted": self.accepted} | asdict(self) | {"folder": str(self.folder)}


def verify_expert(
    folder: Path,
    data: Path | None = None,
    seed: int = 0,
    bases: Sequence[Path] = (),
    device: torch.device | str = "cpu",
) -> Verification:
    """Judge an expert folder: its records, its weights, its origin, and its denoising.

    It is read as for sampling: no code is run, and every weight of its networks must be finite. All its
    files, those of its VAE and text encoders included, must have the hashes of their manifests. Its record
    must name its shard and training, or the checkpoint that it was converted from. `judge` measures its
    denoising on the images in ``data``, held out from its shard or not. ``bases`` are folders of weights that
    an adapter may change, where they are not where it says. A wrong call has no verdict.

    Raises:
        UsageError: for a missing device, and images that are missing, damaged, too few, or not the expert's;
            all else is a problem of the `Verification`.
    """
    with errors_as(UsageError):
        place = available_device(device)
        shard = None if data is None else open_shard(data)
        known = bases_in(bases) if bases else None
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != HASHES:
            files[str(path.relative_to(folder))] = sha256_of(path)
    found = Verification(folder=folder, files=files)
    # A file may be a link, as in a hub cache.
    hashes = {(folder / name).resolve(): sha256 for name, sha256 in files.items()}
    try:
        unread = open_expert(folder, known, unheld=(WEIGHTS, ADAPTER_WEIGHTS))
        whole_components(folder, lambda path: hashes[path.resolve()])
        record = unread.record
        with errors_as(UsageError):
            found.notes += [] if shard is None else _check_images(shard, unread)
        found.problems += foreign_files(folder, lambda path: hashes[path.resolve()])
        expert = unread.read()
        if unread.weak is not None:
            unread.weak.read(torch.float32)
        reading = field_of(expert, place)
        found.problems[:0] = _provenance(record)
        if unread.calibration is None and record.sampling_steps is None and record.source is None:
            found.notes.append(f"{CALIBRATION}: is missing; hddm calibrate makes one")
        found.objective = record.objective
        found.parameters = sum(p.numel() for p in expert.network.parameters())
        found.base = record.adapter.base_sha256 if record.adapter else None
        found.trained_on = record.shard.hash if record.shard else None
        if shard is not None and not found.problems:
            # Only where the record names the shard are wrong classes a fault of the expert.
            with errors_as(UsageError) if record.shard is None else contextlib.nullcontext():
                judge(found, expert, reading, shard, seed)
    except UsageError:
        raise
    except HddmError as error:
        found.problems += (error.message, *error.details)
    return found


def warn_of_misreading(folder: Path, shard: Shard) -> None:
    """Warn where another reading of an expert fits clearly better, or images could not tell (`judged`)."""
    try:
        found = judged(field_of(open_expert(folder).read()), shard, 0)
        doubt = found.doubt
        if doubt is None and not found.is_shown:
            doubt = (
                "whether it is read as it was trained could not be told from these images, which no "
                "reading denoises clearly better than a Gaussian does; pass more, like those of its "
                "training"
            )
    except HddmError as error:
        doubt = f"was not tried on images: {error}"
    if doubt is not None:
        warnings.warn(f"{folder}: {doubt}", stacklevel=2)


def _provenance(record: ExpertRecord) -> list[str]:
    """List what is missing or wrong in a record about the expert's origin."""
    problems = []
    if record.source is None and record.shard is None:
        problems.append(f"{EXPERT_FILE}: does not say which shard it was trained on")
    if record.source is None and not record.training:
        problems.append(f"{EXPERT_FILE}: holds no record of its training")
    loss = record.training.get("final_loss", 0.0)
    if not isinstance(loss, int | float) or not math.isfinite(loss):
        problems.append(f"{EXPERT_FILE}: its training ended with a loss of {loss!r}")
    return problems


def _check_images(shard: Shard, expert: Expert) -> list[str]:
    """Notes on images of the expert's shard; refuse images of another shard, or a single one."""
    why = "`data` judges velocities, but a student of few steps predicts means over steps; leave it out"
    expert.record.refuse_student(expert.name, why)
    if len(shard) < 2:
        raise HddmError(
            f"{shard.folder}: judging an expert needs at least 2 images, not {len(shard)}"
        )
    check_fit(shard, expert.record, expert.network)
    if expert.record.shard is None:
        return [f"{shard.folder}: the expert does not record whether it was trained on such images"]
    check_own(shard, expert.record)
    if shard.held_out_of is None:
        text = "the expert was trained on these images; hddm partition --held-out keeps some"
        return [f"{shard.folder}: {text}"]
    return []


def judge(
    found: Verification, expert: Expert, field: VelocityField, shard: Shard, seed: int
) -> None:
    """Compare an expert with a Gaussian and with v = 0, and add to ``found`` what it shows.

    - They must be below a Gaussian's by `SURE` deviations, over all noise levels and where the network stands
      alone.
    - Near t = 1 its calibration must not raise its error above that of v = 0.
    - No other reading of its weights may fit clearly better (`misread`).

    Raises `HddmError` for classes other than its own, and for fewer than 2 images.
    """
    rows = evenly_spaced(shard, IMAGES)
    given = conditions_of_rows(rows, conditions_of(shard, field), shard, field)
    images = shard.take(rows)
    alone = copy.copy(field)
    if not expert.record.training_calibration:
        alone.calibration = None
    errors = denoising(field, images, given, seed, alone)
    found.images, found.denoising = len(rows), errors
    is_calibrated = expert.calibration is not None
    problems = _objections(errors, len(rows), is_calibrated)
    worse = [level for level in errors.late if not level.expert <= level.zero]
    if worse and not expert.record.training_calibration:
        bare = {level.t: level.expert for level in denoising(alone, images, given, seed).late}
        worse = [level for level in worse if not level.expert <= bare[level.t]]
    if worse:
        at = worse[0]
        text = f"at t = {at.t:g} its error is {at.expert:.4f}, and that of no velocity at all {at.zero:.4f}"
        problems.append(f"{text}: its calibration is damaged; copy the expert again")
    if (other := misread(alone, shard, seed)) is not None:
        problems.insert(0, other)
    found.problems += problems


def _objections(found: Denoising, images: int, is_calibrated: bool) -> list[str]:
    """Return the first objection, if any, to an expert with these errors on so many images."""
    if not math.isfinite(found.expert):
        return ["its velocities are not finite"]
    wrong = "trained, or its record is wrong about what it predicts"
    if found.margin <= 0:
        cause = f"it is un{wrong}"
        if not is_calibrated and found.low > 0:
            cause = "it has no calibration; hddm calibrate fits one"
        errors = f"error {found.expert:.4f}, the Gaussian's {found.gaussian:.4f}"
        return [f"it denoises no better than a Gaussian: {errors}; {cause}"]
    alone = "up to t = 0.5, where its network stands alone, its error is"
    if found.levels[0].t >= START:
        alone = f"up to t = {found.levels[:LOWEST][-1].t:g}, without its calibration, its error is"
    if found.low <= 0:
        return [f"{alone} {-found.low:.4f} above a Gaussian's; it is hardly {wrong}"]
    remedy = (
        f"take more held-out images than {images}" if images < IMAGES else "train it for longer"
    )
    whole, low = (found.margin, found.deviation), (found.low, found.low_deviation)
    for subject, (gain, deviation) in (("its error is", whole), (alone, low)):
        if not gain >= SURE * deviation:
            below = f"{gain:.4f} ± {deviation:.4f} below a Gaussian's"
            return [f"{subject} {below}, so it is not shown to be better; {remedy}"]
    return []
