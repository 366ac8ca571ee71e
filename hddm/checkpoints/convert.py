"""A pretrained checkpoint to an expert folder, whole and checked, or nothing."""

import json
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import diffusers
import torch
from safetensors.torch import save_file
from torch import Tensor

from hddm.checkpoints.architecture import PAPER_STEPS, Built, reshape, restart
from hddm.checkpoints.conventions import Conventions, resolve
from hddm.checkpoints.diffusers_models import class_forward
from hddm.checkpoints.expert_folders import EXTRAS_FILE
from hddm.checkpoints.recognise import open_source
from hddm.checkpoints.sources import Reading, Source
from hddm.checkpoints.verify import LARGEST_DIFFERENCE, Verified, example_conditions, verify
from hddm.errors import HddmError
from hddm.experts import EXPERT_FILE, ExpertFacts, SourceFacts, write_records
from hddm.files import check_absent, new_folder, write_json
from hddm.model_folders import WEIGHTS, open_network
from hddm.network_configs import differences, empty_network
from hddm.networks import EXPERT_NETWORKS, Interface, interface_of
from hddm.predictions import PredictionType
from hddm.schedules import LinearSchedule
from hddm.weight_files import Planned, sha256_of, write_safetensors


@dataclass(frozen=True)
class Conversion:
    """What the user wants of a conversion.

    Args:
        reading: how the source is read.
        schedule: a diffusers scheduler config instead of the source's.
        prediction_type: the user's word on it.
        architecture, modulation_rank, text_dim: see `hddm.checkpoints.architecture.reshape`.
        recipe: ``exact`` preserves the function; ``paper`` is that of arXiv:2603.06741, for comparison: fresh
            head and text projection, the common path, round(999 t) fed.
        licence: of the weights, where the source does not state it.
    """

    reading: Reading = field(default_factory=Reading)
    schedule: Path | None = None
    prediction_type: str | None = None
    architecture: str | None = None
    modulation_rank: int = 0
    text_dim: int | None = None
    recipe: Literal["exact", "paper"] = "exact"
    licence: str | None = None


@dataclass(frozen=True)
class Plan:
    """A conversion that is checked and ready to be written.

    ``size`` is that of the weights in bytes, ``parameters`` their number; ``source_parameters`` that of the
    source.
    """

    source: Source
    conventions: Conventions
    built: Built
    interface: Interface
    facts: ExpertFacts
    nulls: Mapping[str, Tensor]
    extras: Mapping[str, Tensor]
    size: int
    parameters: int
    source_parameters: int


def plan(path: Path, conversion: Conversion) -> Plan:
    """Read a source and decide everything, without writing.

    Raises:
        HddmError: for a source that cannot be read, of no known layout, of unknown conventions, or whose
            tensors are not exactly those of its network.
    """
    source = open_source(path, conversion.reading)
    conventions = resolve(source, conversion.schedule, conversion.prediction_type)
    origin = str(source.files[0])
    tensors, extras = _own_tensors(source, origin)
    end = conventions.schedule.end * conventions.time_scale
    built = reshape(
        source, tensors, end, conversion.architecture, conversion.modulation_rank, conversion.text_dim
    )
    interface = interface_of(built.network.__name__, _full(built.arguments, built))
    if conversion.recipe == "paper":
        built = restart(built, interface.sample_shape[0])
        interface = interface_of(built.network.__name__, _full(built.arguments, built))
        conventions = Conventions(
            LinearSchedule(), PredictionType.FLOW_PREDICTION, PAPER_STEPS, "recipe paper", conventions.notes
        )
    nulls = {name: extras[key] for name, key in source.nulls.items() if key in extras}
    count = sum(tensor.numel() for tensor in source.weights.values())
    sizes = [torch.Size(one.shape).numel() for one in built.tensors]
    return Plan(
        source=source,
        conventions=conventions,
        built=built,
        interface=interface,
        facts=_facts(source, conventions, interface, conversion),
        nulls=nulls or dict(source.null_tensors),
        extras=extras,
        size=sum(n * one.dtype.itemsize for n, one in zip(sizes, built.tensors, strict=True)),
        parameters=sum(sizes),
        source_parameters=count,
    )


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
        write_records(draft, facts, plan.nulls)
        if plan.extras:
            save_file({k: v.contiguous() for k, v in plan.extras.items()}, draft / EXTRAS_FILE)
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


def _own_tensors(source: Source, origin: str) -> tuple[list[Planned], dict[str, Tensor]]:
    tensors, extras = source.table.to_ours(source.weights, origin)
    tensors = [Planned(t.name, t.shape, t.dtype, t.read, origin) for t in tensors]
    network = empty_network(source.network, source.arguments, len(source.weights), origin)
    found = {one.name: torch.empty(one.shape, device="meta") for one in tensors}
    problems = differences(network.state_dict(), found)
    if problems:
        raise HddmError(f"{origin}: does not fit its {source.network.__name__}: {'; '.join(problems)}")
    return tensors, extras


def _full(arguments: Mapping[str, Any], built: Built) -> Mapping[str, Any]:
    """The arguments with the defaults of the class."""
    network = empty_network(built.network, arguments, len(built.tensors), "architecture")
    config: Mapping[str, Any] = network.config
    return config


def _facts(
    source: Source, conventions: Conventions, interface: Interface, conversion: Conversion
) -> ExpertFacts:
    paper = conversion.recipe == "paper"
    classes = tuple(map(str, range(interface.num_classes or 0)))
    if source.facts is not None:
        classes = source.facts.classes
    changes = {
        "architecture": conversion.architecture,
        "modulation_rank": conversion.modulation_rank if conversion.architecture else None,
        "text_dim": conversion.text_dim,
        "recipe": conversion.recipe,
        "variant": conversion.reading.variant,
        "num_heads": conversion.reading.hints.num_heads,
        "sample_size": conversion.reading.hints.sample_size,
        "schedule": str(conversion.schedule) if conversion.schedule else None,
        "prediction_type": conversion.prediction_type,
    }
    return ExpertFacts(
        objective="flow" if conventions.prediction_type is PredictionType.FLOW_PREDICTION else "ddpm",
        prediction_type=conventions.prediction_type,
        schedule=conventions.schedule.config,
        # Not where the file lay on this machine.
        schedule_source=conventions.schedule_source.removeprefix(f"{source.path}/"),
        time_scale=conventions.time_scale,
        sample_shape=interface.sample_shape,
        space="latents" if source.is_latent else "pixels",
        latent_scale=source.latent_scale,
        variance_head=interface.variance_head,
        round_time=paper,
        conditions=interface.conditions,
        classes=classes,
        null_class=interface.null_class,
        weights=source.chosen,
        shard=source.facts.shard if source.facts else None,
        source=SourceFacts(
            layout=source.layout,
            files={},
            prefix=source.prefix,
            options={key: value for key, value in changes.items() if value is not None},
            hddm=version("hddm-diffusion"),
        ),
        licence=conversion.licence or source.licence,
    )


@contextmanager
def _hashes(files: tuple[Path, ...]) -> Iterator[dict[str, str]]:
    """SHA-256 by file name, computed beside what the block does; complete when the block ends."""
    hashes: dict[str, str] = {}
    with ThreadPoolExecutor(1) as pool:
        pending = [(path.name, pool.submit(sha256_of, path)) for path in files]
        yield hashes
        hashes.update({name: future.result() for name, future in pending})


def _checked(plan: Plan, draft: Path) -> Verified:
    network, weights, arguments = open_network(draft, EXPERT_NETWORKS)
    converted = class_forward(type(network), arguments, weights, str(draft))
    config = network.config
    known = tuple(name for name in plan.interface.conditions if name != "encoder_attention_mask")
    given = example_conditions(known, type(network).__name__, config, plan.interface.num_classes)
    added = {}
    if plan.facts.source and plan.facts.source.options.get("text_dim"):
        added = {"encoder_hidden_states": given.pop("encoder_hidden_states")}
    found = verify(
        plan.source.forward() if not plan.facts.round_time else converted,
        converted,
        plan.conventions.schedule,
        plan.conventions.prediction_type,
        plan.conventions.time_scale,
        plan.interface.sample_shape,
        given,
        added,
    )
    is_preserving = plan.built.modulation_error is None
    if not found.is_finite or (is_preserving and not found.is_exact):
        errors = ", ".join(f"{error:.1e} at t = {t}" for t, error in found.velocity_errors.items())
        raise HddmError(
            f"{plan.source.path}: the converted network is not the source's: outputs differ by "
            f"{found.difference:.2e} (limit {LARGEST_DIFFERENCE:.0e}), velocities by {errors}; nothing was "
            "written"
        )
    return found
