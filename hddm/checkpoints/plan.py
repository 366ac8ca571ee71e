"""Plans of conversions: recognise the source, decide everything and report it before anything is written.

On request the network itself is changed: it gets attention to text.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
from diffusers import ModelMixin
from torch import Tensor

from hddm.checkpoints.conventions import (
    Conventions,
    resolve_conventions,
    with_data_range,
    with_shift,
)
from hddm.checkpoints.folders import open_expert_checkpoint, open_model, open_pipeline
from hddm.checkpoints.single_files import open_file
from hddm.checkpoints.sources import Checkpoint, Component, Weights, as_planned
from hddm.condition_names import TEXT
from hddm.experts.components import adding_command
from hddm.experts.paris import is_paris
from hddm.experts.records import EXPERT_FILE, ExpertRecord, SourceRecord
from hddm.networks.families import Family
from hddm.networks.families.dit import IMAGENET_LICENCE
from hddm.networks.families.expert import EXPERT
from hddm.networks.families.family import Interface
from hddm.networks.folders import empty_network, refuse_other_tensors
from hddm.networks.identity import UnreadVae, VaeRecord
from hddm.networks.layers import Attention, linear
from hddm.networks.prompts import text_parts
from hddm.schedules import LinearSchedule
from hddm.settings import Conversion, Reading
from hddm.utils.errors import HddmError, Unstated, UsageError, in_words
from hddm.utils.hub import origin_of
from hddm.utils.records import MODEL_INDEX, WHOLE
from hddm.utils.streams import Use, seed_of
from hddm.utils.tensors import Planned, available_device

Decided = TypeVar("Decided")
_ENDINGS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")


@dataclass(frozen=True)
class Built:
    """A network to write: its class and config, in an empty network, and its tensors."""

    network: ModelMixin
    tensors: list[Planned]


@dataclass(frozen=True)
class ConversionPlan:
    """A checked conversion, ready to be written."""

    source: Checkpoint
    conventions: Conventions
    built: Built
    interface: Interface
    record: ExpertRecord
    nulls: Mapping[str, Tensor]
    extras: Mapping[str, Tensor]
    device: torch.device
    """Where the written network is compared with the source's."""

    @property
    def components(self) -> dict[str, Component]:
        """Components that the expert takes over from the source: the ones in its record."""
        record = self.record
        known = {
            "vae": record.vae,
            "text_encoder": record.text_encoder,
            "tokenizer": record.text_encoder,
        }
        found: dict[str, Component] = {}
        for name, place in {**self.source.components, **self.source.text.components}.items():
            if known[name] is not None:
                found[name] = place
        return found

    @property
    def size(self) -> int:
        """Bytes of the network's weights."""
        return sum(math.prod(one.shape) * one.dtype.itemsize for one in self.built.tensors)


def open_checkpoint(path: Path, reading: Reading) -> Checkpoint:
    """Open the checkpoint at ``path`` after recognising its content.

    A folder without any config may hold one weights file. Raises `HddmError` for an unknown layout.
    """
    if not path.is_dir():
        return open_file(path, reading)
    if (path / EXPERT_FILE).exists():
        return open_expert_checkpoint(path, reading)
    if is_paris(path):
        raise UsageError(
            f"{path}: is the Paris release, which needs no conversion: hddm sample {path}"
        )
    if (path / MODEL_INDEX).exists():
        return open_pipeline(path, reading)
    if (path / "config.json").exists():
        return open_model(path, reading)
    if (path / "snapshots").is_dir():
        raise HddmError(f"{path}: a hub cache; give the folder of one revision in its snapshots/")
    return _only_file_in(path, reading)


def _only_file_in(folder: Path, reading: Reading) -> Checkpoint:
    """The only checkpoint file in a folder."""
    sources, refusals = [], []
    for file in sorted(folder.iterdir()):
        if file.suffix not in _ENDINGS:
            continue
        try:
            sources.append(open_file(file, reading))
        except Unstated:
            raise
        except HddmError as error:
            refusals.append(error)
    if len(sources) == 1:
        return sources[0]
    found = [str(one.path) for one in sources]
    found += map(str, refusals)
    raise HddmError(
        f"{folder}: holds none of {EXPERT_FILE}, {MODEL_INDEX} and config.json, and not exactly one "
        f"checkpoint file (found: {'; '.join(found) or 'none'})"
    )


_ANY: Mapping[str, int] = {"num_heads": 1, "sample_size": 64}
"""Values of options with which a source opens that does not state them; no tensor's shape depends on them."""


def open_unstated(path: Path, reading: Reading) -> tuple[Checkpoint, list[Unstated]]:
    """The checkpoint at ``path``, and what it and ``reading`` leave open, in place of which it has any value.

    Raises `HddmError` as `open_checkpoint`.
    """
    missing: list[Unstated] = []
    while True:
        try:
            source = open_checkpoint(path, reading)
            return source, [*missing, *source.declared.unstated]
        except Unstated as error:
            if getattr(reading, error.option, None) is not None or error.option not in _ANY:
                raise
            missing.append(error)
            reading = reading.model_copy(update={error.option: _ANY[error.option]})


def refuse_unstated(path: Path, missing: Sequence[Unstated]) -> None:
    """Raise one `HddmError` that names all options that are ``missing``."""
    if len(missing) == 1:
        raise missing[0]
    if missing:
        texts = "; ".join(one.text for one in missing)
        raise HddmError(
            f"{path}: does not state {len(missing)} things that a conversion needs: {texts}"
        )


def plan_conversion(path: Path, conversion: Conversion) -> ConversionPlan:
    """Read a source and decide everything, without writing.

    Raises `HddmError` for an unreadable source, an unknown layout, contradictory conventions, all missing
    options at once, or tensors that are not exactly those of its network.
    """
    source, missing = open_unstated(path, conversion)
    tensors, extras = _own_tensors(source)
    built = Built(source.network, tensors)
    if conversion.text_dim is not None:
        if source.family is not EXPERT or source.arguments.get("text_dim") is not None:
            raise HddmError(
                f"`text_dim`: {path} is no DiT without text in facebook's layout or hddm's own"
            )
        built = _with_text(source, tensors, conversion.text_dim)
    interface = _stated(
        lambda: _interface(built, source, conversion.sample_size or source.sample_size), missing
    )
    conventions = _stated(
        lambda: resolve_conventions(source, conversion.schedule, conversion.prediction_type),
        missing,
    )
    _stated(source.text.require, missing)
    refuse_unstated(path, missing)
    assert interface is not None
    assert conventions is not None
    conventions = with_shift(conventions, source, interface)
    conventions = with_data_range(conventions, source, conversion.data_range)
    extras.update(source.declared.kept)
    nulls = _nulls(source, interface)
    record = _record(source, conventions, interface, conversion)
    device = available_device(conversion.device)
    return ConversionPlan(source, conventions, built, interface, record, nulls, extras, device)


def _nulls(source: Checkpoint, interface: Interface) -> dict[str, Tensor]:
    """Null values of conditions: the source's own, and those that its family knows."""
    family = source.family
    nulls = family.defaults(interface.conditions, interface.sample_shape) | dict(source.nulls)
    tokens = source.text.empty_prompt() if family.keeps_empty_prompt else None
    if tokens is not None:
        nulls[TEXT] = tokens
    if TEXT in nulls and not nulls[TEXT].any():
        nulls |= family.null_vectors(source.arguments)
    return nulls


def _stated(decide: Callable[[], Decided], missing: list[Unstated]) -> Decided | None:
    """What is decided, or None where an option for it is missing, which is added to ``missing``."""
    try:
        return decide()
    except Unstated as error:
        missing.append(error)
        return None


def _licence(source: Checkpoint, stated: str | None) -> str | None:
    if stated and source.licence not in (None, stated, IMAGENET_LICENCE):
        raise HddmError(
            f"`licence` {stated}: {source.path} states {source.licence!r}; drop the option, or correct "
            f"it there"
        )
    return stated or source.licence


def _own_tensors(source: Checkpoint) -> tuple[list[Planned], dict[str, Tensor]]:
    origin = str(source.files[0])
    tensors, extras = source.table.to_ours(source.weights, origin)
    tensors = [replace(one, origin=origin) for one in tensors]
    found = {one.name: torch.empty(one.shape, dtype=one.dtype, device="meta") for one in tensors}
    refuse_other_tensors(source.network.state_dict(), found, source.files[0], source.class_name)
    return tensors, extras


def _with_text(source: Checkpoint, tensors: Sequence[Planned], text_dim: int) -> Built:
    """The source's network with attention to text, which makes it another network."""
    named = {one.name: one.read() for one in tensors}
    weights, config = add_text(named, source.arguments, text_dim)
    network = empty_network(EXPERT.network, config, len(weights), str(source.path))
    return Built(network, [as_planned(name, one) for name, one in weights.items()])


def _interface(built: Built, source: Checkpoint, side: int | None) -> Interface:
    """Inputs of the network; ``side`` is a sample's, for a network whose config does not state it."""
    size = None if side is None else (side, side)
    if source.record is not None:
        _, height, width = source.record.sample_shape
        size = (height, width)
    try:
        # The network's config has the defaults of its class besides the arguments.
        return source.family.interface(built.network.config, size)
    except Unstated as error:
        raise Unstated(source.path, f"{error.origin} {error.text}", error.option) from error
    except HddmError as error:
        raise HddmError(f"{source.path}: {error}") from error


def _record(
    source: Checkpoint, conventions: Conventions, interface: Interface, conversion: Conversion
) -> ExpertRecord:
    own = source.record
    vae = source.vae if own is None else own.latent_space
    is_flow = isinstance(conventions.schedule, LinearSchedule)
    text_encoder, unread_text_encoder = None, None
    if own is not None:
        text_encoder, unread_text_encoder = own.text_encoder, own.unread_text_encoder
    elif TEXT in interface.conditions:
        text_encoder, unread_text_encoder = source.text.record, source.text.unread
    scheduler = None if source.declared.is_layout_rule else source.declared.scheduler
    options = conversion.model_dump(exclude={"allow_pickle", "weights", "licence", "device"}) | {
        "schedule": conversion.schedule.name if conversion.schedule else None,
        "downloaded_from": origin_of(source.path),
    }
    return ExpertRecord(
        objective="flow" if is_flow or (own and own.objective == "flow") else "ddpm",
        prediction_type=conventions.prediction_type,
        schedule=conventions.schedule.config,
        schedule_source=_short(conventions.schedule_source),
        time_scale=conventions.time_scale,
        sample_shape=interface.sample_shape,
        data_scale=conventions.units.scale,
        data_shift=conventions.units.shifts,
        negated=conventions.negated,
        space="latents" if source.declared.is_latent else "pixels",
        latent_scale=source.declared.latent_scale,
        vae=vae if isinstance(vae, VaeRecord) else None,
        unread_vae=vae if isinstance(vae, UnreadVae) else None,
        text_encoder=text_encoder,
        unread_text_encoder=unread_text_encoder,
        shift=conventions.shift,
        noise_range=conversion.noise_range or (own.noise_range if own else WHOLE),
        variance_head=interface.variance_head,
        conditions=interface.conditions,
        classes=own.classes if own else tuple(map(str, range(interface.num_classes or 0))),
        null_class=interface.null_class,
        weights=source.chosen,
        shard=own.shard if own else None,
        training=own.training if own else {},
        training_calibration=bool(own and own.training_calibration),
        source=SourceRecord(
            layout=source.layout,
            files={},
            scheduler=dict(scheduler) if scheduler and "_class_name" in scheduler else None,
            prediction_source=_short(conventions.prediction_source),
            prefix=source.prefix,
            options={key: value for key, value in options.items() if value is not None},
            hddm=version("hddm-diffusion"),
            before=own.source if own else None,
        ),
        licence=_licence(source, conversion.licence),
    )


def _short(origin: str) -> str:
    """The last two parts of a path; other text as it is, without the marks of an option."""
    return (
        "/".join(Path(origin).parts[-2:]) if origin.endswith(".json") else origin.replace("`", "")
    )


def _missing(record: ExpertRecord, family: Family) -> list[str]:
    """Kinds of components that an expert wants, and which its source does not hold."""
    missing = []
    if record.space == "latents" and record.latent_space is None:
        missing.append("vae")
    if record.takes_text and record.text_encoder is None:
        missing += text_parts(family, record.conditions)
    return missing


def summary_lines(plan: ConversionPlan, out: Path) -> list[str]:
    """Lines for the user on the source and on what will be written to ``out``."""
    source, record, conventions = plan.source, plan.record, plan.conventions
    low, high = conventions.range
    parameters = sum(math.prod(one.shape) for one in plan.built.tensors)
    weights = f"{source.chosen} (present: {', '.join(source.sets)})"
    if source.sets == ("unstated",):
        weights = "one set; the source does not say whether they are averaged"
    lines = [
        f"layout: {source.layout} ({', '.join(path.name for path in source.files)})",
        f"weights: {weights}",
        f"predicts: {conventions.prediction_type.value}"
        + (", with a learned variance that is dropped" if record.variance_head else ""),
        f"schedule: {conventions.schedule_source}; covers t = {low:.4f} … {high:.4f}",
        f"samples: {'×'.join(map(str, record.sample_shape))} {record.space}, latent scale "
        + (f"{record.latent_scale:g}" if record.latent_scale is not None else "not stated"),
        f"conditions: {', '.join(record.conditions) or 'none'}"
        + (f" (null class {record.null_class})" if record.null_class is not None else ""),
        f"network: {type(plan.built.network).__name__}, {parameters:,} parameters, {plan.size / 1e6:,.1f} MB",
        f"licence: {record.licence or 'not stated by the source (`licence` records it)'}",
    ]
    if record.noise_range != WHOLE:
        lines.append("noise range: t = {:g} … {:g} alone".format(*record.noise_range))
    if not record.units.is_common:
        ends = record.units.own(torch.tensor([-1.0, 1.0]).view(2, 1, 1, 1))
        low, high = ends.amin().item(), ends.amax().item()
        lines.append(f"own data: from {low:g} to {high:g}, where samples are from -1 to 1")
    if record.shift != 1:
        lines.append(f"shift: {record.shift:.6g}, of the time grid that samples want")
    if record.vae is not None:
        vae = record.vae
        shift = f" and shift {vae.shift:g}" if vae.shift else ""
        units = f"scale {vae.scale:g}{shift}"
        lines.append(f"vae: {vae.kind}, known by its encoder {vae.fingerprint}, {units}")
    elif record.space == "latents" and record.unread_vae is None:
        lines.append("vae: not recorded, since the source holds none")
    if record.text_encoder is not None:
        text = record.text_encoder
        lines.append(
            f"text encoder: {text.kind} {text.fingerprint}, {text.tokens}×{text.width} tokens"
        )
    elif record.takes_text:
        lines.append(f"text encoder: not recorded, since {source.text.missing}")
    missing = _missing(record, source.family)
    if missing:
        adding = adding_command(out, missing, is_expert=True, trusts=True)
        lines.append(f"missing for pictures: {in_words(missing)}; all at once: {adding}")
    if TEXT in plan.nulls:
        tokens = "×".join(map(str, plan.nulls[TEXT].shape))
        lines.append(f"no text: {tokens} tokens of the source's own, for guidance and calibration")
    if plan.components:
        makes = "so hddm sample makes pictures of it"
        if not record.vae:
            makes = "but no VAE to make pictures with"
        elif missing:
            makes = "so hddm sample makes pictures of it, but none of prompts"
        lines.append(f"kept: {', '.join(plan.components)}; {makes}")
    if source.prefix:
        lines.append(f"prefix: {source.prefix!r} stripped from every key")
    for name, reason in source.table.benign.items():
        if name in plan.extras:
            lines.append(f"not needed: {name}, {reason}")
    return lines + [f"note: {note}" for note in (*source.declared.notes, *conventions.notes)]


def add_text(
    weights: Weights, config: Mapping[str, Any], text_dim: int
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return weights and config with cross-attention to text tokens of width ``text_dim``.

    Output projections are zero, so that outputs keep their bits with any text until training changes that;
    the rest starts as in a fresh network.
    """
    width, heads = int(config["hidden_size"]), int(config["num_heads"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(0, Use.FRESH_WEIGHTS, 1))
        modules = {"text_proj": linear(text_dim, width).state_dict()}
        for i in range(int(config["depth"])):
            modules[f"layers.{i}.cross_attn"] = Attention(width, heads, silent=True).state_dict()
    like = weights["patch_embed.weight"]
    added = {}
    for name, own in modules.items():
        for key, one in own.items():
            added[f"{name}.{key}"] = one.to(like)
    return {**weights, **added}, {**config, "text_dim": text_dim}
