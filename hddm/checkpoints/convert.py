"""Conversion of a planned checkpoint into an expert folder, which is complete and checked, or not written.

The check compares the folder with the source's own network at `TIMES` noise levels inside what it covers,
on fixed float32 inputs: the raw outputs of both networks, and the expert's velocity against the closed form

    u with s(u)/(a(u) d) = t/(1 - t),  y = (a d + s) x + a b,  v from the source's output at (y, u)

for own data d x_0 + b, computed here independently, in float64 and from the betas themselves.
"""

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_never

import diffusers
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hddm.calibration import Calibration
from hddm.calibration_records import FILE_NAME as CALIBRATION
from hddm.checkpoints.plan import Built, ConversionPlan, plan_conversion, summary_lines
from hddm.checkpoints.sources import Checkpoint, Forward
from hddm.condition_names import LABELS, TEXT
from hddm.data.shards import open_shard
from hddm.experts.expert import Expert
from hddm.experts.expert_folders import field_of
from hddm.experts.kept import keep_component
from hddm.experts.record_folders import read_nulls, write_records
from hddm.experts.records import EXPERT_FILE, EXTRAS_FILE, SOURCE_NAMES, read_expert_record
from hddm.experts.shard_images import check_fit
from hddm.experts.verify import warn_of_misreading
from hddm.networks.families import family_of
from hddm.networks.families.installed import FamilyError
from hddm.networks.folders import fill, open_network
from hddm.networks.wrappers import OPTIONAL_CONDITIONS, NetworkWrapper
from hddm.predictions import PredictionType
from hddm.schedules import CosineSchedule, DiscreteSchedule, EDMSchedule, Schedule
from hddm.settings import Conversion, Report, keywords, silent
from hddm.utils.copies import copy_file
from hddm.utils.errors import HddmError, UsageError, errors_as, one_line
from hddm.utils.files import (
    check_absent,
    new_folder,
    refuse_full_disk,
    sha256_of,
    write_json,
)
from hddm.utils.hub import Wanted, local
from hddm.utils.processes import switched
from hddm.utils.progress import Progress
from hddm.utils.records import WEIGHTS, write_manifest
from hddm.utils.streams import Use, generator
from hddm.utils.tensors import append_dims, has_header_of, holds_exactly, write_safetensors
from hddm.velocity import VelocityField

TIMES = (0.05, 0.5, 0.95)
"""Shares of the range of t that schedule and expert cover: each costs a run of both networks."""
LARGEST_DIFFERENCE = 1e-4
LARGEST_VELOCITY_ERROR = 1e-4
_METADATA = {"format": "pt"}
"""Of weights files, as diffusers writes them."""
_TOGETHER = 32 * 32
"""Pixels of states that are compared at several noise levels at once; larger ones take memory."""


@dataclass(frozen=True)
class ConversionCheck:
    """Errors that the check measured.

    ``difference`` is the largest absolute difference of an output number, ``velocity_errors`` the relative
    error at each time t.
    """

    difference: float
    velocity_errors: Mapping[float, float]

    @property
    def errors(self) -> str:
        """Velocity errors as text."""
        return ", ".join(f"{error:.1e} at t = {t}" for t, error in self.velocity_errors.items())


@keywords
def convert(
    source: Path,
    out: Path,
    settings: Conversion,
    *,
    data: Path | None = None,
    verify: bool = True,
    dry_run: bool = False,
    overwrite: bool = False,
    report: Report = silent,
) -> Path:
    """Turn a pretrained checkpoint into an expert folder, which is written whole or not at all.

    The network stays the same and is read as a velocity field through the exact conversion (`hddm.velocity`).

    Args:
        source: checkpoint file, model folder, pipeline folder or expert folder, or the name of one on a hub
            (`hddm.utils.hub`).
        out: the expert folder.
        settings: its fields are keywords: see `hddm.settings.Conversion`.
        data: shard of images like the model's own, to check the stated conventions on.
        verify: compare the written network with the source's on a few random states, each at a time of its
            own: raw outputs with raw outputs, and velocities, without a calibration, with the exact formula.
            VAE and text encoders are copied and not compared.
        dry_run: report the plan, and write nothing.
        overwrite: replace an expert in ``out``.
        report: is called with each line about the plan and its result.

    Returns:
        ``out``.

    Raises:
        HddmError: for an unreadable source, unknown or contradicting conventions, tensors that are not
            exactly those of the network, a failed comparison, or an existing ``out``.
    """
    source = local(source, Wanted(settings.variant, settings.weights))
    with Progress(None, "read the checkpoint"):
        planned = plan_conversion(source, settings)
    check_absent(out, EXPERT_FILE, overwrite)
    shard = None
    if data is not None:
        with errors_as(UsageError):
            shard = open_shard(data)
            check_fit(shard, planned.record, None)
    for line in summary_lines(planned, out):
        report(line)
    if dry_run:
        refuse_full_disk(out, planned.size)
        report(f"{out}: nothing written (`dry_run`)")
        return out
    with Progress(None, "convert"):
        verified = write(planned, out, verify, overwrite)
    if verified is None:
        report("verify: skipped")
    else:
        difference, limit = verified.difference, LARGEST_DIFFERENCE
        report(
            f"verify: outputs differ from the source's by at most {difference:.1e} (limit {limit:.0e})"
        )
        report(f"verify: velocity against the exact formula, relative error: {verified.errors}")
    if shard is not None:
        with Progress(None, "try it on images"):
            warn_of_misreading(out, shard)
    report(f"{out}: converted")
    return out


def write(
    plan: ConversionPlan, out: Path, check: bool = True, overwrite: bool = False
) -> ConversionCheck | None:
    """Write the expert folder; with ``check``, compare it with its source before it appears.

    Raises `HddmError`, leaving nothing behind, for an existing ``out``, a full disk, NaN or Inf, or a failed
    check.
    """
    check_absent(out, EXPERT_FILE, overwrite)
    refuse_full_disk(out, plan.size)
    with new_folder(out, EXPERT_FILE, overwrite) as draft:
        written, files = _write_or_copy(plan, draft)
        origin = plan.record.source
        assert origin is not None
        origin = origin.model_copy(update={"files": files})
        # Loading refuses NaN and values that no fit gives.
        if plan.source.record is not None and Calibration.load(plan.source.path) is not None:
            shutil.copyfile(plan.source.path / CALIBRATION, draft / CALIBRATION)
        if plan.extras:
            save_file({k: v.contiguous() for k, v in plan.extras.items()}, draft / EXTRAS_FILE)
        if plan.source.names is not None:
            write_json(draft / SOURCE_NAMES, plan.source.names.model_dump(mode="json"))
        record = plan.record.model_copy(update={"source": origin})
        write_records(draft, record, plan.nulls, written)
        for name, place in plan.components.items():
            if isinstance(place, Path):
                keep_component(draft, name, place, plan.source.variant)
            else:
                place.write(draft / name)
                write_manifest(draft / name)
        return _checked(plan, draft) if check else None


def _write_or_copy(plan: ConversionPlan, folder: Path) -> tuple[str, dict[str, str]]:
    """Write the network; return the SHA-256 of its weights, and those of the source's files by name.

    Where the only file of the source is, byte by byte, what would be written, it is copied and has one hash.
    """
    files, tensors = plan.source.files, plan.built.tensors
    weights = folder / WEIGHTS
    with ThreadPoolExecutor(1) as pool:
        if len(files) == 1 and has_header_of(files[0], tensors, _METADATA):
            with Progress(files[0].stat().st_size, "copy the weights") as progress:
                copy_file(files[0], weights, progress)
            copied = pool.submit(sha256_of, weights)
            with Progress(len(tensors), "check the weights") as progress:
                is_same = holds_exactly(weights, tensors, _METADATA, True, progress)
            if is_same:
                _write_config(folder, plan.built)
                return copied.result(), {files[0].name: copied.result()}
            # Its hash is still being computed.
            copied.result()
            weights.unlink()
        hashes = {path.name: pool.submit(sha256_of, path) for path in files}
        written = write_network(folder, plan.built)
    return written, {name: one.result() for name, one in hashes.items()}


def write_network(folder: Path, built: Built) -> str:
    """Write ``config.json`` and the weights, one tensor at a time; return the SHA-256 of the weights."""
    _write_config(folder, built)
    with Progress(len(built.tensors), "write the weights") as progress:
        return write_safetensors(folder / WEIGHTS, built.tensors, _METADATA, True, progress)


def _write_config(folder: Path, built: Built) -> None:
    config: dict[str, Any] = {
        "_class_name": type(built.network).__name__,
        "_diffusers_version": diffusers.__version__,
    }
    for key, value in built.network.config.items():
        if not key.startswith("_"):
            # Tuples become lists, as they would in the file.
            config[key] = json.loads(json.dumps(value))
    write_json(folder / "config.json", config)
    family = family_of(built.network)
    if family is not None:
        family.write_parts(built.network, folder)


def _checked(plan: ConversionPlan, draft: Path) -> ConversionCheck:
    source, network = plan.source, plan.source.class_name
    shape = _compared_shape(plan)
    try:
        found = _compare(
            plan, source.forward() if source.forward else _class_forward(source), draft, shape
        )
    except FamilyError as error:
        place = ""
        if shape != list(plan.interface.sample_shape):
            place = f" at {'×'.join(map(str, shape))}, which compared_size() chooses"
        raise HddmError(
            f"{source.path}: its {network} does not run{place}; {error.message}, or correct this config if "
            "other checkpoints run"
        ) from error
    except HddmError:
        raise
    except Exception as error:
        # A network may raise anything for inconsistent sizes.
        text = f"its {network} does not run ({type(error).__name__}: {one_line(error)})"
        remedy = "correct its config"
        if source.path.is_file():
            remedy = (
                "its tensors do not belong together, or `num_heads` or `sample_size` is not its own"
            )
        raise HddmError(f"{source.path}: {text}; {remedy}") from error
    # A comparison with NaN is false.
    is_close = all(error <= LARGEST_VELOCITY_ERROR for error in found.velocity_errors.values())
    if not (found.difference <= LARGEST_DIFFERENCE and is_close):
        raise HddmError(
            f"{source.path}: the converted network is not the source's: outputs differ by "
            f"{found.difference:.2e} (limit {LARGEST_DIFFERENCE:.0e}), velocities by {found.errors}; nothing "
            "was written"
        )
    return found


def _as_written(folder: Path) -> tuple[VelocityField, list[Tensor]]:
    """The expert in a folder, uncalibrated, and a list that collects its network's raw outputs.

    It is built as `hddm.load` does, except that weights stay mapped.
    """
    record = read_expert_record(folder)
    network, weights, arguments = open_network(folder)
    fill(network, weights, arguments, str(folder))
    field = field_of(Expert(network, record, None, read_nulls(folder)))
    adapter = field.network
    assert isinstance(adapter, nn.Module)
    outputs: list[Tensor] = []

    # The adapter drops what is not part of the prediction, unpacks rows, and turns the sign.
    observed = network if record.variance_head else adapter
    turned = record.negated and observed is adapter

    def keep(module: nn.Module, given: object, output: Any) -> None:
        raw = output[0] if isinstance(output, tuple) else output
        outputs.append(-raw if turned else raw)

    observed.register_forward_hook(keep)
    return field, outputs


def _class_forward(source: Checkpoint) -> Forward:
    """Run the source's network, with the source's weights renamed to fit."""
    origin = str(source.files[0])
    weights = source.table.renamed(source.weights, origin)
    fill(source.network, weights, source.arguments, origin)
    return NetworkWrapper(source.network).full_output


_LAYERS = (nn.functional.linear, nn.functional.conv2d)
"""Functions whose results never share memory with the weight, their second argument."""


class _InFloat32(TorchFunctionMode):
    """Casts each parameter where it is used, so that memory never holds a large network as a whole.

    The weights of layers are cast into one place of memory, since new memory costs more than the cast. All
    tensors are brought to ``device`` where they meet: networks stay where they are mapped.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._place = torch.empty(0, device=device)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in _LAYERS and len(args) > 1 and isinstance(args[1], nn.Parameter):
            args = (args[0], self._in_place(args[1]), *args[2:])
        named: dict[str, Any] = {}
        for key, value in (kwargs or {}).items():
            named[key] = self._cast(value)
        return func(*map(self._cast, args), **named)

    def _in_place(self, weight: nn.Parameter) -> Tensor:
        """A layer's weight in float32, for the next call alone."""
        if weight.dtype == torch.float32 and weight.device == self._device:
            return weight
        if len(self._place) < weight.numel():
            self._place = torch.empty(weight.numel(), device=self._device)
        return self._place[: weight.numel()].view(weight.shape).copy_(weight)

    def _cast(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(self._cast, value))
        if not isinstance(value, Tensor):
            return value
        if isinstance(value, nn.Parameter):
            return value.to(self._device, torch.float32)
        # A number on the CPU meets tensors of any device.
        return value.to(self._device) if self._device.type != "cpu" and value.ndim else value


@dataclass(frozen=True)
class _Levels:
    """Times at which both networks are compared; each of the other fields has an entry for each of them."""

    times: list[float]
    """t of the common path."""
    native: list[tuple[float, float, float]]
    """(a, s, u) of the source's own path."""
    x: Tensor
    """States of the common path (times, C, H, W)."""
    y: Tensor
    """The same states as the source's network takes them."""
    timesteps: Tensor
    """(times,) as the source's network takes them."""

    @classmethod
    def of(cls, plan: ConversionPlan, written: VelocityField, shape: Sequence[int]) -> "_Levels":
        """Random states of ``shape`` (C, H, W) within the part of t that schedule and expert cover."""
        low = max(written.range[0], written.noise_range[0])
        high = min(written.range[1], written.noise_range[1])
        times = [low + share * (high - low) for share in TIMES]
        units = plan.conventions.path_units
        native = [_native(plan.conventions.schedule, t, units.scale) for t in times]
        x = torch.randn(len(times), *shape, generator=generator(0, Use.CONVERSION_STATES))
        x *= append_dims(torch.tensor([math.hypot(1 - t, t) for t in times]), x.ndim)
        y = append_dims(torch.tensor([a * units.scale + s for a, s, _ in native]), x.ndim) * x
        if units.shifts:
            y += append_dims(torch.tensor([a for a, _, _ in native]), x.ndim) * units.shift_like(y)
        scaled = [u * plan.conventions.time_scale for _, _, u in native]
        return cls(times, native, x, y, torch.tensor(scaled, dtype=torch.float32))


@torch.no_grad()
def _compare(
    plan: ConversionPlan, source: Forward, draft: Path, shape: Sequence[int]
) -> ConversionCheck:
    """Compare the raw outputs and the velocity of the network in ``draft`` with the source's own network."""
    written, outputs = _as_written(draft)
    conditions = _examples(plan)
    levels = _Levels.of(plan, written, shape)
    # Only the written network takes text that was added.
    is_text_added = plan.built.network is not plan.source.network
    found, wanted = [], []
    # oneDNN brings the weights of a convolution into its own order at each run. For small states that takes
    # longer than the convolution; for large ones, torch's other way takes much more memory. The switch is of
    # the whole process; `torch.backends.mkldnn.flags` would warn of TF32.
    onednn = torch.backends.mkldnn
    with (
        _InFloat32(plan.device),
        switched(onednn, "enabled", onednn.enabled and not _are_small(levels.x)),
        Progress(len(levels.times), "compare with the source") as progress,
    ):
        for rows in torch.arange(len(levels.times)).split(_rows_at_once(levels.x)):
            own: dict[str, Any] = {}
            for name, one in conditions.items():
                own[name] = one[rows]
            known_there = dict(own)
            if is_text_added:
                known_there.pop(TEXT, None)
            now = torch.tensor(levels.times, dtype=torch.float64)[rows]
            found.append(written.velocity(levels.x[rows], now, **own))
            wanted.append(source(levels.y[rows], levels.timesteps[rows], known_there))
            progress(len(rows))
    expected = torch.cat(wanted).cpu()
    difference = (torch.cat(outputs).cpu() - expected).double().abs().max().item()
    return ConversionCheck(
        difference, _velocity_errors(plan, levels, torch.cat(found).cpu(), expected)
    )


def _examples(plan: ConversionPlan) -> dict[str, Tensor]:
    """Conditions that the written network needs, a row for each time: all alike, but for one of no class."""
    noise, config = generator(0, Use.CONVERSION_CONDITIONS), plan.built.network.config
    interface, conditions = plan.interface, {}
    for name in interface.conditions:
        if name not in OPTIONAL_CONDITIONS:
            row = plan.source.family.example(name, config, interface.num_classes, noise)
            conditions[name] = torch.cat([row] * len(TIMES))
    if LABELS in conditions and interface.null_class is not None:
        conditions[LABELS][-1] = interface.null_class
    return conditions


def _compared_shape(plan: ConversionPlan) -> list[int]:
    """Shape (C, H, W) of the states that are compared."""
    channels, height, width = plan.interface.sample_shape
    # A layout's own network has the positions of one size.
    if plan.source.forward is not None:
        return [channels, height, width]
    config = plan.built.network.config
    return [channels, *plan.source.family.compared_size(config, (height, width))]


def _rows_at_once(states: Tensor) -> int:
    """How many states run at once: small ones all, so that a large network is read from memory once."""
    return len(states) if _are_small(states) else 1


def _are_small(states: Tensor) -> bool:
    return math.prod(states.shape[2:]) <= _TOGETHER


def _velocity_errors(
    plan: ConversionPlan, levels: _Levels, velocities: Tensor, outputs: Tensor
) -> dict[float, float]:
    """Relative errors of the expert's velocities, by time, given the outputs of the source's network."""
    channels, conventions = levels.x.shape[1], plan.conventions
    units, sign = conventions.path_units, -1 if conventions.negated else 1
    errors = {}
    for k, t in enumerate(levels.times):
        a, s, _ = levels.native[k]
        output, y = sign * outputs[k, :channels].double(), levels.y[k].double()
        z, eps = _closed_form(conventions.prediction_type, output, y, a, s)
        exact = eps - (z - units.shift_like(z)) / units.scale
        error = (velocities[k].double() - exact).norm() / exact.norm().clamp_min(1e-30)
        errors[round(t, 4)] = error.item()
    return errors


def _native(schedule: Schedule, t: float, scale: float) -> tuple[float, float, float]:
    """(a, s, u) with s/a = scale t/(1 - t)."""
    ratio = scale * t / (1 - t)
    if isinstance(schedule, DiscreteSchedule):
        kept = np.cumprod(1 - schedule.betas.double().numpy())
        kept = kept[kept > 0]
        log_ratio = np.log1p(-kept) - np.log(kept)
        wanted = 2 * math.log(ratio)
        u = float(np.interp(wanted, log_ratio, np.arange(len(kept))))
        if wanted > log_ratio[-1]:
            # Beyond it alpha/sigma goes to the zero of the last index in a straight line.
            u += 1 - math.exp((log_ratio[-1] - wanted) / 2)
        return 1 / math.sqrt(1 + math.exp(wanted)), 1 / math.sqrt(1 + math.exp(-wanted)), u
    if isinstance(schedule, CosineSchedule):
        u = 2 / math.pi * math.atan(ratio)
        return math.cos(math.pi * u / 2), math.sin(math.pi * u / 2), u
    if isinstance(schedule, EDMSchedule):
        sigma = ratio * schedule.sigma_data
        norm = math.hypot(sigma, schedule.sigma_data)
        return schedule.sigma_data / norm, sigma / norm, math.log(sigma) / 4
    return 1 / (1 + ratio), ratio / (1 + ratio), ratio / (1 + ratio)


def _closed_form(
    kind: PredictionType, output: Tensor, y: Tensor, a: float, s: float
) -> tuple[Tensor, Tensor]:
    """(z, eps) with y = a z + s eps, by the definition of each ``kind`` of output."""
    match kind:
        case PredictionType.EPSILON:
            return (y - s * output) / a, output
        case PredictionType.SAMPLE:
            return output, (y - a * output) / s
        case PredictionType.V_PREDICTION:
            norm = a * a + s * s
            return (a * y - s * output) / norm, (s * y + a * output) / norm
        case PredictionType.FLOW_PREDICTION:
            # On the straight path: z = y - s v, eps = y + a v.
            return y - s * output, y + a * output
        case _:
            assert_never(kind)
