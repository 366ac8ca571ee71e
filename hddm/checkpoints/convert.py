"""Conversions: a planned checkpoint becomes an expert folder, complete and checked, or nothing.

`write` writes and checks, `summary` and `verdict` are what is printed. The check (`verify`) compares what was
written with the source's own network, at `TIMES` noise levels inside the expert's range, on fixed inputs in
float32: the raw outputs of both networks, and the expert's velocity against the closed form

    u with s(u)/a(u) = t/(1 - t),  y = (a + s) x,  v from the source's output at (y, u)

computed here a second time, in float64 and from the betas themselves.
"""

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hddm.calibration import FILE_NAME as CALIBRATION
from hddm.calibration import Calibration
from hddm.checkpoints.architecture import Built
from hddm.checkpoints.diffusers_models import named_failure, streamed
from hddm.checkpoints.layouts import Forward
from hddm.checkpoints.plan import TEXT, Plan
from hddm.checkpoints.plan import Conversion as Conversion
from hddm.checkpoints.plan import plan as plan
from hddm.checkpoints.sources import Checkpoint, Conventions
from hddm.experts.records import (
    EXPERT_FILE,
    EXTRAS_FILE,
    FORMAT,
    Expert,
    ExpertRecord,
    field_of,
    foreign_calibration,
    read_nulls,
    write_records,
)
from hddm.networks.folders import WEIGHTS, empty_network, open_network
from hddm.networks.wrappers import EXPERT_NETWORKS, FLUX, OPTIONAL_CONDITIONS, text_width
from hddm.schedules import CosineSchedule, DiscreteSchedule, Schedule
from hddm.utils.errors import HddmError
from hddm.utils.files import check_absent, new_folder, sha256_of, write_json
from hddm.utils.records import read_record
from hddm.utils.tensors import write_safetensors
from hddm.velocity import PredictionType, VelocityField

TIMES = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Shares of the expert's range of noise levels."""
LARGEST_DIFFERENCE = 1e-4
LARGEST_FOLD_ERROR = 0.5
LARGEST_VELOCITY_ERROR = 1e-4
TOKENS = 8
_ENOUGH = {"UNet2DModel": 64, "UNet2DConditionModel": 64, "SD3Transformer2DModel": 64, FLUX: 16}
"""Height and width at which networks that take several are compared: a large sample takes much longer."""


@dataclass(frozen=True)
class ConversionCheck:
    """The result of the check.

    ``difference`` is the largest of any output number; ``function_error`` the same as a root mean square,
    relative to the source's; ``velocity_errors`` are relative, a time t each.
    """

    difference: float
    function_error: float
    velocity_errors: Mapping[float, float]

    @property
    def is_exact(self) -> bool:
        """True where both are within their limits."""
        return (
            self.difference <= LARGEST_DIFFERENCE
            and max(self.velocity_errors.values()) <= LARGEST_VELOCITY_ERROR
        )

    @property
    def is_finite(self) -> bool:
        """True where no number is NaN or Inf."""
        return math.isfinite(self.difference) and all(map(math.isfinite, self.velocity_errors.values()))


def write(plan: Plan, out: Path, check: bool = True, overwrite: bool = False) -> ConversionCheck | None:
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
    facts = read_record(source.path / EXPERT_FILE, ExpertRecord, FORMAT)
    if foreign := foreign_calibration(source.path, facts):
        raise HddmError(f"{source.path}: {foreign}; nothing was written")
    stored = source.path / CALIBRATION
    # Refuses one that no fit gives, or with NaN.
    if Calibration.load(source.path) is not None:
        shutil.copyfile(stored, draft / CALIBRATION)


def _checked(plan: Plan, draft: Path) -> ConversionCheck:
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
    facts = read_record(folder / EXPERT_FILE, ExpertRecord, FORMAT)
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


@torch.no_grad()
def verify(
    source: Forward | None,
    written: VelocityField,
    outputs: list[Tensor],
    conventions: Conventions,
    conditions: Mapping[str, Tensor],
    extra: Mapping[str, Tensor] | None = None,
    network: str = "",
) -> ConversionCheck:
    """Measure both networks and the velocity, a state at a time.

    Args:
        source: the source's own network; None where the head is fresh, so that there is no function to
            compare, and the velocity is held against the written network's own output.
        written: the expert as its folder has it, uncalibrated.
        outputs: grows by the raw output of ``written``'s network at every call.
        conventions: of the source.
        conditions: one row each, of the source.
        extra: further ones that the converted network takes, such as text that was added.
        network: its class, by which a large sample is replaced by a smaller one.
    """
    assert written.sample_shape is not None
    channels, *size = written.sample_shape
    size = [min(one, _ENOUGH.get(network, one)) for one in size]
    schedule, prediction_type = conventions.schedule, conventions.prediction_type
    low, high = written.range
    noise = torch.Generator().manual_seed(0)
    squares, wanted, largest, errors = 0.0, 0.0, 0.0, {}
    for share in TIMES:
        t = low + share * (high - low)
        x = torch.randn(1, channels, *size, generator=noise) * math.hypot(1 - t, t)
        given: dict[str, Any] = {**conditions, **(extra or {})}
        v = written.velocity(x, torch.tensor([t], dtype=torch.float64), **given)
        a, s, u = _native(schedule, t)
        y = (a + s) * x
        timestep = torch.tensor([u * conventions.time_scale], dtype=torch.float32)
        expected = outputs[-1] if source is None else source(y, timestep, conditions)
        difference = (outputs[-1] - expected).double()
        squares, wanted = squares + difference.square().sum().item(), wanted + expected.square().sum().item()
        # A comparison with NaN is false, so the maximum would hide one.
        largest = max(largest, difference.abs().max().item()) if difference.isfinite().all() else math.nan
        closed = _closed_form(
            prediction_type, expected[:, : x.shape[1]].double(), x.double(), y.double(), a, s, t
        )
        errors[round(t, 4)] = ((v.double() - closed).norm() / closed.norm().clamp_min(1e-30)).item()
        if not math.isfinite(largest):
            break
    return ConversionCheck(largest, math.sqrt(squares / max(wanted, 1e-30)), errors)


def _native(schedule: Schedule, t: float) -> tuple[float, float, float]:
    """(a, s, u) with s/a = t/(1 - t)."""
    if isinstance(schedule, DiscreteSchedule):
        kept = np.cumprod(1 - schedule.betas.double().numpy())
        kept = kept[kept > 0]
        log_ratio = np.log1p(-kept) - np.log(kept)
        wanted = 2 * math.log(t / (1 - t))
        u = float(np.interp(wanted, log_ratio, np.arange(len(kept))))
        if wanted > log_ratio[-1]:
            # Beyond it alpha/sigma goes to the zero of the last index in a straight line.
            u += 1 - math.exp((log_ratio[-1] - wanted) / 2)
        return 1 / math.sqrt(1 + math.exp(wanted)), 1 / math.sqrt(1 + math.exp(-wanted)), u
    if isinstance(schedule, CosineSchedule):
        u = 2 / math.pi * math.atan2(t, 1 - t)
        return math.cos(math.pi * u / 2), math.sin(math.pi * u / 2), u
    return 1 - t, t, t


def _closed_form(
    kind: PredictionType, output: Tensor, x: Tensor, y: Tensor, a: float, s: float, t: float
) -> Tensor:
    match kind:
        case PredictionType.EPSILON:
            return output - (y - s * output) / a
        case PredictionType.SAMPLE:
            return (y - a * output) / s - output
        case PredictionType.V_PREDICTION:
            return (s * y + a * output - (a * y - s * output)) / (a * a + s * s)
        case PredictionType.FLOW_PREDICTION:
            return output


def example_conditions(
    names: tuple[str, ...], network: str, config: Mapping[str, Any], num_classes: int | None
) -> dict[str, Tensor]:
    """One row of fixed random conditions of the shapes that a network takes."""
    noise = torch.Generator().manual_seed(1)
    found: dict[str, Tensor] = {}
    for name in names:
        match name:
            case "class_labels":
                found[name] = torch.randint(num_classes or 1, (1,), generator=noise)
            case "encoder_hidden_states":
                found[name] = torch.randn(1, TOKENS, text_width(config) or 1, generator=noise)
            case "text_embeds":
                count = (
                    config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
                )
                found[name] = torch.randn(1, count, generator=noise)
            case "time_ids":
                found[name] = torch.tensor([[64.0, 64.0, 0.0, 0.0, 64.0, 64.0]])
            case "resolution":
                found[name] = torch.tensor([[64.0, 64.0]])
            case "aspect_ratio":
                found[name] = torch.tensor([[1.0]])
            case "pooled_projections":
                found[name] = torch.randn(1, config["pooled_projection_dim"], generator=noise)
            case "guidance":
                found[name] = torch.tensor([3.5])
    return found


def summary(plan: Plan) -> list[str]:
    """Lines on the source and on what will be written."""
    source, facts, conventions = plan.source, plan.facts, plan.conventions
    low, high = conventions.schedule.range
    lines = [
        f"layout: {source.layout} ({', '.join(path.name for path in source.files)})",
        f"weights: {_weights(source)}",
        f"predicts: {conventions.prediction_type.value}"
        + (", with a learned variance that is dropped" if facts.variance_head else ""),
        f"schedule: {conventions.schedule_source}; noise range t = {low:.4f} … {high:.4f}",
        f"samples: {'×'.join(map(str, facts.sample_shape))} {facts.space}, latent scale "
        + (f"{facts.latent_scale:g}" if facts.latent_scale is not None else "not stated"),
        f"conditions: {', '.join(facts.conditions) or 'none'}"
        + (f" (null class {facts.null_class})" if facts.null_class is not None else ""),
        f"network: {plan.built.network.__name__}, {plan.parameters:,} parameters, {plan.size / 1e6:,.1f} MB",
        f"licence: {facts.licence or 'not stated by the source (--licence records it)'}",
    ]
    if facts.shift != 1:
        lines.append(f"shift: {facts.shift:.6g}, of the time grid that samples want")
    if facts.vae is not None:
        lines.append(f"vae: {facts.vae.kind}, known by its encoder {facts.vae.fingerprint}")
    if facts.text_encoder is not None:
        text = facts.text_encoder
        lines.append(f"text encoder: {text.kind} {text.fingerprint}, {text.tokens}×{text.width} tokens")
    elif TEXT in facts.conditions:
        lines.append(f"text encoder: not recorded, since {source.no_text_encoder}")
    if TEXT in plan.nulls:
        tokens = "×".join(map(str, plan.nulls[TEXT].shape))
        lines.append(f"no text: {tokens} tokens of the source's own, for guidance and calibration")
    heads = plan.facts.source.options.get("num_heads") if plan.facts.source else None
    if heads is not None:
        lines.append(f"heads: {heads}, as you said; nothing in the file can confirm it")
    if source.prefix:
        lines.append(f"prefix: {source.prefix!r} stripped from every key")
    for name, reason in source.table.benign.items():
        if name in plan.extras:
            lines.append(f"not needed: {name}, {reason}")
    if plan.built.modulation_error is not None:
        lines.append(
            f"fold: {plan.source_parameters:,} to {plan.parameters:,} parameters, relative error of the "
            f"modulation {plan.built.modulation_error:.2e}"
        )
    return lines + [f"note: {note}" for note in (*source.notes, *conventions.notes)]


def _weights(source: Checkpoint) -> str:
    if list(source.sets) == ["unstated"]:
        return "one set; the source does not say whether they are averaged"
    return f"{source.chosen} (present: {', '.join(source.sets)})"


def verdict(plan: Plan, verified: ConversionCheck | None) -> list[str]:
    """Lines on the result of the check."""
    if verified is None:
        return ["verify: skipped"]
    if plan.is_restarted:
        return ["verify: the network runs; its head is fresh, so there is no function to compare"]
    errors = ", ".join(f"{error:.1e} at t = {t}" for t, error in verified.velocity_errors.items())
    if plan.built.modulation_error is not None:
        return [
            f"verify: outputs are off the source's by {verified.function_error:.2e} (relative, root mean "
            f"square), at most {verified.difference:.2e}; a higher --modulation-rank comes closer"
        ]
    return [
        f"verify: outputs differ from the source's by at most {verified.difference:.1e} "
        f"(limit {LARGEST_DIFFERENCE:.0e})",
        f"verify: velocity against the closed form, relative: {errors}",
    ]
