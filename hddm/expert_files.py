"""Whether the files of an expert folder are those that its record was written with."""

from collections.abc import Callable
from pathlib import Path

from hddm.adapters import ADAPTER_WEIGHTS
from hddm.calibration import FILE_NAME as CALIBRATION
from hddm.calibration import calibration_record
from hddm.experts import EXPERT_FILE, FILES, ExpertFacts, remedy
from hddm.files import sha256_of
from hddm.manifest import MANIFEST, damage, has_manifest
from hddm.model_folders import WEIGHTS

_COPY_AGAIN = "copy the expert again from where it was trained"


def foreign_files(folder: Path, facts: ExpertFacts, sha256: Callable[[Path], str]) -> tuple[str, ...]:
    """What is wrong where files are not those that were written with the expert: a line for each.

    Args:
        folder: the expert.
        facts: its record. What has no manifest (`hddm.manifest`) may hold hashes of weights and calibration.
        sha256: of a file that is there.

    Raises:
        HddmError: for a calibration or a manifest that cannot be read.
    """
    if found := damage(folder, EXPERT_FILE, FILES, sha256):
        return (*found, f"by its {MANIFEST}; {remedy(folder)}")
    texts = (foreign_weights(folder, facts, sha256), foreign_calibration(folder, facts, sha256))
    return tuple(text for text in texts if text)


def foreign_weights(
    folder: Path, facts: ExpertFacts, sha256: Callable[[Path], str] = sha256_of
) -> str | None:
    """What is wrong where the weights in ``folder`` are not those whose hash the record holds."""
    if facts.weights_sha256 is None:
        return None
    weights = folder / (ADAPTER_WEIGHTS if facts.adapter else WEIGHTS)
    held = sha256(weights) if weights.is_file() else None
    return _other("weights", facts.weights_sha256, held, f"{_COPY_AGAIN}, or train it anew")


def foreign_calibration(
    folder: Path, facts: ExpertFacts, sha256: Callable[[Path], str] = sha256_of
) -> str | None:
    """What is wrong where the calibration in ``folder`` is not the expert's own, None where it is.

    Without a hash in the record, and without a manifest, the shard that the calibration says it was fitted to
    must be the expert's, unless the expert was trained on in it: then it is that of an earlier training.

    Args:
        folder: the expert.
        facts: its record.
        sha256: of a file that is there.

    Raises:
        HddmError: for a calibration that cannot be read.
    """
    stored = folder / CALIBRATION
    held = sha256(stored) if stored.is_file() else None
    remedy = f"hddm calibrate {folder} --data SHARD fits its own"
    if facts.training_calibration:
        remedy = _COPY_AGAIN
    if facts.calibration_sha256 is not None:
        return _other("calibration", facts.calibration_sha256, held, remedy)
    if facts.training_calibration:
        return f"its calibration is not there, and it was trained in it; {remedy}" if held is None else None
    if has_manifest(folder):
        return None
    of = (calibration_record(folder) or {}).get("data", "").removeprefix("shard ").split()
    if facts.shard is None or len(of) != 1 or of[0] in (facts.shard.hash, facts.shard.partition):
        return None
    its = f"shard {of[0][:16]}…, and {EXPERT_FILE} says {facts.shard.hash[:16]}…"
    return f"its calibration is of {its}; {remedy}"


def _other(what: str, stated: str, held: str | None, remedy: str) -> str | None:
    if stated == held:
        return None
    be, have = ("are", "have") if what.endswith("s") else ("is", "has")
    there = f"{be} not there" if held is None else f"{have} SHA-256 {held[:16]}…"
    return f"its {what} {there}, and {EXPERT_FILE} says {stated[:16]}…; {remedy}"
