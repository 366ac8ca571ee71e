"""Plans of conversions: the source is recognised, and everything is decided, before anything is written."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from hddm.checkpoints.architecture import PAPER_STEPS, Built, reshape, restart
from hddm.checkpoints.diffusers_models import DIFFUSERS_LAYOUTS, open_expert
from hddm.checkpoints.diffusers_models import LAYOUT as HDDM
from hddm.checkpoints.folders import PIPELINE, STEM, open_model, open_pipeline
from hddm.checkpoints.layouts import UnstatedHeads
from hddm.checkpoints.single_files import FILE_LAYOUTS, IMAGENET_LICENCE, LDM, open_file
from hddm.checkpoints.sources import Checkpoint, Conventions, Reading, resolve, with_shift
from hddm.experts.records import EXPERT_FILE, ExpertRecord, SourceRecord
from hddm.networks.folders import differences, empty_network
from hddm.networks.identity import TextEncoderRecord
from hddm.networks.wrappers import Interface, interface_of
from hddm.schedules import LinearSchedule
from hddm.utils.errors import HddmError, UsageError, choose
from hddm.utils.tensors import Planned
from hddm.velocity import PredictionType

LAYOUTS = (*FILE_LAYOUTS, LDM, *DIFFUSERS_LAYOUTS, HDDM)
_ENDINGS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")
PAPER = "paper"
TEXT = "encoder_hidden_states"


@dataclass(frozen=True)
class Conversion:
    """Options of a conversion.

    Args:
        reading: how the source is read.
        schedule: a diffusers scheduler config instead of the source's.
        prediction_type: as the user states it.
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

    source: Checkpoint
    conventions: Conventions
    built: Built
    interface: Interface
    facts: ExpertRecord
    nulls: Mapping[str, Tensor]
    extras: Mapping[str, Tensor]
    size: int
    parameters: int
    source_parameters: int

    @property
    def is_restarted(self) -> bool:
        """True for a head that starts anew by the paper's recipe, with no function to preserve."""
        assert self.facts.source is not None
        return bool(self.facts.source.options["recipe"] == PAPER)


def open_source(path: Path, reading: Reading) -> Checkpoint:
    """Open the checkpoint at ``path``, recognised by its content.

    A folder without any config may hold one file of weights; a file that lies beside the ``config.json`` of
    its diffusers model is that model with exactly that file.

    Raises:
        HddmError: for content of no known layout, or another than asked for.
    """
    if reading.layout is not None and reading.layout not in LAYOUTS:
        raise UsageError(f"--layout {reading.layout}: {choose(reading.layout, list(LAYOUTS))}")
    if not path.exists():
        raise HddmError(f"{path}: no such file or folder")
    if not path.is_dir():
        if path.name.startswith(STEM) and (path.parent / "config.json").exists():
            return open_model(path.parent, reading, file=path.name)
        return open_file(path, reading)
    if (path / EXPERT_FILE).exists():
        return open_expert(path, reading)
    if (path / PIPELINE).exists():
        return open_pipeline(path, reading)
    if (path / "config.json").exists():
        return open_model(path, reading)
    files = sorted(one for one in path.iterdir() if one.suffix in _ENDINGS)
    sources, refusals = [], []
    for file in files:
        try:
            sources.append(open_file(file, reading))
        except UnstatedHeads:
            raise
        except HddmError as error:
            refusals.append(error)
    if len(sources) == 1:
        return sources[0]
    if len(files) == 1:
        raise refusals[0]
    if (path / "snapshots").is_dir():
        raise HddmError(f"{path}: a hub cache; give the folder of one revision in its snapshots/")
    found = ", ".join(file.name for file in files) or "none"
    reasons = "".join(f"; {error}" for error in refusals)
    raise HddmError(
        f"{path}: holds none of {EXPERT_FILE}, {PIPELINE} and config.json, and not one checkpoint file "
        f"(found: {found}){reasons}"
    )


def plan(path: Path, conversion: Conversion) -> Plan:
    """Read a source and decide everything, without writing.

    Raises:
        HddmError: for a source that cannot be read, of no known layout, of unknown conventions, or whose
            tensors are not exactly those of its network.
    """
    source = open_source(path, conversion.reading)
    _refuse_idle(source, conversion.reading)
    conventions = resolve(source, conversion.schedule, conversion.prediction_type)
    origin = str(source.files[0])
    tensors, extras = _own_tensors(source, origin)
    end = conventions.schedule.end * conventions.time_scale
    built = reshape(
        source, tensors, end, conversion.architecture, conversion.modulation_rank, conversion.text_dim
    )
    size = _size(source, conversion.reading)
    interface = _interface(built, source, size)
    conventions = with_shift(conventions, source, interface)
    if conversion.recipe == PAPER:
        built = restart(built, interface.sample_shape[0])
        interface = _interface(built, source, size)
        conventions = Conventions(
            LinearSchedule(), PredictionType.FLOW_PREDICTION, PAPER_STEPS, "recipe paper", conventions.notes
        )
    if built.network is source.network and conversion.architecture is None:
        extras |= source.kept
    nulls = {name: extras[key] for name, key in source.nulls.items() if key in extras}
    if source.empty_prompt is not None:
        nulls[TEXT] = _no_text(source, built.arguments)
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


def _refuse_idle(source: Checkpoint, reading: Reading) -> None:
    """Refuse options that would change nothing."""
    states_itself = source.layout == HDDM or source.layout in DIFFUSERS_LAYOUTS
    if reading.hints.num_heads is not None and states_itself:
        raise HddmError(f"--num-heads: {source.path} has a config.json that states it; drop the option")
    if source.layout in (*FILE_LAYOUTS, LDM, HDDM) and reading.variant is not None:
        raise HddmError(f"--variant {reading.variant}: {source.path} has no variants; drop the option")


def _licence(source: Checkpoint, stated: str | None) -> str | None:
    if stated and source.licence not in (None, stated, IMAGENET_LICENCE):
        raise HddmError(
            f"--licence {stated}: {source.path} states {source.licence!r}; drop the option, or mend it there"
        )
    return stated or source.licence


def _no_text(source: Checkpoint, arguments: Mapping[str, Any]) -> Tensor:
    assert source.empty_prompt is not None
    tokens, wanted = source.empty_prompt(), arguments.get("cross_attention_dim")
    if tokens.shape[1] != wanted:
        raise HddmError(
            f"{source.path}: the text encoder beside it gives tokens of width {tokens.shape[1]}, not {wanted}"
        )
    return tokens


def _text_encoder(source: Checkpoint, interface: Interface) -> TextEncoderRecord | None:
    if source.facts is not None:
        return source.facts.text_encoder
    if source.text_encoder is None or TEXT not in interface.conditions:
        return None
    return source.text_encoder()


def _scheduler(source: Checkpoint) -> dict[str, Any] | None:
    declared = source.declared
    is_own = declared.scheduler is not None and "_class_name" in declared.scheduler
    return dict(declared.scheduler or {}) if is_own and not declared.is_layout_rule else None


def _short_origin(origin: str) -> str:
    """The last two parts of a path; other text as it is."""
    return "/".join(Path(origin).parts[-2:]) if origin.endswith(".json") else origin


def _own_tensors(source: Checkpoint, origin: str) -> tuple[list[Planned], dict[str, Tensor]]:
    tensors, extras = source.table.to_ours(source.weights, origin)
    tensors = [Planned(t.name, t.shape, t.dtype, t.read, origin) for t in tensors]
    network = empty_network(source.network, source.arguments, len(source.weights), origin)
    found = {one.name: torch.empty(one.shape, dtype=one.dtype, device="meta") for one in tensors}
    problems = differences(network.state_dict(), found)
    if problems:
        raise HddmError(f"{origin}: does not fit its {source.network.__name__}: {'; '.join(problems)}")
    return tensors, extras


def _size(source: Checkpoint, reading: Reading) -> tuple[int, int] | None:
    """Height and width of a sample, for a network whose config does not state them."""
    side = reading.hints.sample_size
    if source.facts is not None:
        return source.facts.sample_shape[1:]
    return None if side is None else (side, side)


def _interface(built: Built, source: Checkpoint, size: tuple[int, int] | None) -> Interface:
    # The network's config has the defaults of its class besides the arguments.
    network = empty_network(built.network, built.arguments, len(built.tensors), "architecture")
    try:
        return interface_of(built.network.__name__, network.config, size)
    except HddmError as error:
        raise HddmError(f"{source.path}: {error}") from error


def _facts(
    source: Checkpoint, conventions: Conventions, interface: Interface, conversion: Conversion
) -> ExpertRecord:
    paper = conversion.recipe == PAPER
    own = source.facts
    is_flow = conventions.prediction_type is PredictionType.FLOW_PREDICTION
    changes = {
        "architecture": conversion.architecture,
        "modulation_rank": conversion.modulation_rank if conversion.architecture else None,
        "text_dim": conversion.text_dim,
        "recipe": conversion.recipe,
        "variant": conversion.reading.variant,
        "num_heads": conversion.reading.hints.num_heads,
        "sample_size": conversion.reading.hints.sample_size,
        "schedule": conversion.schedule.name if conversion.schedule else None,
        "prediction_type": conversion.prediction_type,
    }
    return ExpertRecord(
        objective="flow" if is_flow or (own and own.objective == "flow") else "ddpm",
        prediction_type=conventions.prediction_type,
        schedule=conventions.schedule.config,
        schedule_source=_short_origin(conventions.schedule_source),
        time_scale=conventions.time_scale,
        sample_shape=interface.sample_shape,
        space="latents" if source.is_latent else "pixels",
        latent_scale=source.latent_scale,
        vae=own.vae if own else source.vae,
        text_encoder=_text_encoder(source, interface),
        shift=conventions.shift,
        variance_head=interface.variance_head,
        round_time=paper or bool(own and own.round_time),
        conditions=interface.conditions,
        classes=own.classes if own else tuple(map(str, range(interface.num_classes or 0))),
        null_class=interface.null_class,
        weights=source.chosen,
        shard=own.shard if own else None,
        training=own.training if own else {},
        training_calibration=bool(own and own.training_calibration and not paper),
        source=SourceRecord(
            layout=source.layout,
            files={},
            scheduler=_scheduler(source),
            prefix=source.prefix,
            options={key: value for key, value in changes.items() if value is not None},
            hddm=version("hddm-diffusion"),
            before=own.source if own else None,
        ),
        licence=_licence(source, conversion.licence),
    )
