"""A pretrained checkpoint to an expert folder, whole and checked, or nothing."""

import json
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
from safetensors.torch import save_file
from torch import Tensor, nn

from hddm.calibration import FILE_NAME as CALIBRATION
from hddm.checkpoints.architecture import Built
from hddm.checkpoints.diffusers_models import named_failure, streamed
from hddm.checkpoints.plan import TEXT, Plan
from hddm.checkpoints.plan import Conversion as Conversion
from hddm.checkpoints.plan import plan as plan
from hddm.checkpoints.verify import LARGEST_DIFFERENCE, Verified, example_conditions, verify
from hddm.errors import HddmError
from hddm.expert_files import foreign_calibration
from hddm.experts import EXPERT_FILE, EXTRAS_FILE, FORMAT, Expert, ExpertFacts, read_nulls, write_records
from hddm.facts import read_facts
from hddm.files import check_absent, new_folder, sha256_of, write_json
from hddm.loading import field_of
from hddm.model_folders import WEIGHTS, open_network
from hddm.network_configs import empty_network
from hddm.networks import EXPERT_NETWORKS, OPTIONAL_CONDITIONS
from hddm.velocity import VelocityField
from hddm.weight_files import write_safetensors

LARGEST_FOLD_ERROR = 0.5


def write(plan: Plan, out: Path, check: bool = True, overwrite: bool = False) -> Verified | None:
    """Write the expert folder; with ``check`` it is compared with its source before it appears.

    Raises:
        HddmError: for an ``out`` that exists, a disk without room, NaN or Inf in a tensor, or a check that
            fails; then nothing is left.
    """
    check_absent(out, EXPERT_FILE, overwrite)
    refuse_full_disk(out, plan.size)
    with new_folder(out, EXPERT_FILE, overwrite) as draft:
        with _hashes(plan.source.files) as hashes:
            write_network(draft, plan.built)
        facts = plan.facts
        assert facts.source is not None
        facts = facts.model_copy(update={"source": facts.source.model_copy(update={"files": hashes})})
        _carry_calibration(plan, draft)
        if plan.extras:
            save_file({k: v.contiguous() for k, v in plan.extras.items()}, draft / EXTRAS_FILE)
        write_records(draft, facts, plan.nulls)
        return _checked(plan, draft) if check else None


def write_network(folder: Path, built: Built) -> None:
    """Write ``config.json`` and the weights, a tensor at a time."""
    network = empty_network(built.network, built.arguments, len(built.tensors), str(folder))
    config = {key: value for key, value in network.config.items() if not key.startswith("_")}
    names = {"_class_name": built.network.__name__, "_diffusers_version": diffusers.__version__}
    write_json(folder / "config.json", names | json.loads(json.dumps(config)))
    write_safetensors(folder / WEIGHTS, built.tensors, {"format": "pt"}, check_finite=True)


def refuse_full_disk(out: Path, size: int) -> None:
    """Raise where the disk of ``out`` has less than ``size`` bytes free."""
    above = next(folder for folder in out.absolute().parents if folder.exists())
    free = shutil.disk_usage(above).free
    if free < size * 1.02:
        raise HddmError(f"{out}: needs {size / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free on its disk")


@contextmanager
def _hashes(files: tuple[Path, ...]) -> Iterator[dict[str, str]]:
    """SHA-256 by file name, computed beside what the block does; complete when the block ends."""
    hashes: dict[str, str] = {}
    with ThreadPoolExecutor(1) as pool:
        pending = [(path.name, pool.submit(sha256_of, path)) for path in files]
        yield hashes
        hashes.update({name: future.result() for name, future in pending})


def _carry_calibration(plan: Plan, draft: Path) -> None:
    """Keep what an expert was calibrated with, unless it was fitted to a function that has changed.

    Raises:
        HddmError: for a calibration that is not the expert's own, since the copy would record it as such.
    """
    source = plan.source
    if source.facts is None or plan.is_restarted:
        return
    if not (plan.facts.training_calibration or plan.built.modulation_error is None):
        return
    # The facts of a merged adapter know no files.
    facts = read_facts(source.path / EXPERT_FILE, ExpertFacts, FORMAT)
    if foreign := foreign_calibration(source.path, facts):
        raise HddmError(f"{source.path}: {foreign}; nothing was written")
    stored = source.path / CALIBRATION
    if stored.is_file():
        shutil.copyfile(stored, draft / CALIBRATION)


def _checked(plan: Plan, draft: Path) -> Verified:
    field, outputs, config = _as_written(draft)
    network = plan.built.network.__name__
    known = tuple(name for name in plan.interface.conditions if name not in OPTIONAL_CONDITIONS)
    given = example_conditions(known, network, config, plan.interface.num_classes)
    added = {}
    if plan.facts.source and plan.facts.source.options.get("text_dim"):
        added = {TEXT: given.pop(TEXT)}
    source = None if plan.is_restarted else plan.source.forward()
    with named_failure(str(plan.source.path), network):
        found = verify(source, field, outputs, plan.conventions, given, added, network)
    is_fold = bool(plan.built.modulation_error)
    if is_fold and found.is_finite and found.function_error > LARGEST_FOLD_ERROR:
        raise HddmError(
            f"{plan.source.path}: the fold is off its outputs by {found.function_error:.2f} of them; raise "
            "--modulation-rank; nothing was written"
        )
    if not found.is_finite or not (is_fold or found.is_exact):
        errors = ", ".join(f"{error:.1e} at t = {t}" for t, error in found.velocity_errors.items())
        raise HddmError(
            f"{plan.source.path}: the converted network is not the source's: outputs differ by "
            f"{found.difference:.2e} (limit {LARGEST_DIFFERENCE:.0e}), velocities by {errors}; nothing was "
            "written"
        )
    return found


def _as_written(folder: Path) -> tuple[VelocityField, list[Tensor], Mapping[str, Any]]:
    """The expert that a folder holds, uncalibrated; where its network's raw outputs gather; its config.

    As `hddm.load` makes it, but for weights that stay mapped.
    """
    facts = read_facts(folder / EXPERT_FILE, ExpertFacts, FORMAT)
    empty, weights, arguments = open_network(folder, EXPERT_NETWORKS)
    network = streamed(type(empty), arguments, weights, str(folder))
    outputs: list[Tensor] = []
    field = field_of(Expert(network, facts, None, read_nulls(folder)))
    adapter = field.network
    assert isinstance(adapter, nn.Module)
    # What is no part of the prediction is dropped by the adapter, and what is packed it unpacks.
    (network if facts.variance_head else adapter).register_forward_hook(
        lambda module, given, output: outputs.append(output[0] if isinstance(output, tuple) else output)
    )
    # A plain function is asked in the dtype of the state, whatever its weights are stored in.
    field.network = lambda y, timestep, **conditions: adapter(y, timestep, **conditions)
    return field, outputs, network.config
