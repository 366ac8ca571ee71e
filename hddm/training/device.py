"""Hardware of a training, through accelerate, and the optimizers whose steps it takes or skips.

AdamW trains all parameters, or Muon the matrices and AdamW the rest.
"""

import contextlib
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend

from hddm.training.settings import Recipe, splits_weights
from hddm.training.sharding import MuonOfParts, Shards, own_part
from hddm.utils.errors import HddmError

log = logging.getLogger(__name__)
TF32 = "tf32"


class Flags(NamedTuple):
    """What any process may request after a step."""

    stop: bool
    save: bool


@dataclass(frozen=True)
class Readings:
    """Figures of a step, on their way from the device to the CPU while the next step begins."""

    skipped: Tensor
    """On the device: 1 where the mean loss or the gradient's norm is not finite, else 0."""
    _values: Tensor
    _processes: int
    _copied: torch.cuda.Event | None

    def read(self) -> tuple[Tensor, Tensor, float, bool, Flags]:
        """Wait for losses and times (batch,), the norm, whether the step was skipped, and the joint flags."""
        if self._copied is not None:
            self._copied.synchronize()
        values = self._values.cpu()
        norm, skipped = values[-2:]
        rows = values[:-2].view(self._processes, -1, 2)
        losses, times = rows[:, :-1].flatten(0, 1).T
        raised = rows[:, -1].amax(0) > 0
        flags = Flags(*raised.tolist())
        return losses, times, norm.item(), bool(skipped), flags


class Device:
    """Hardware of one training; within its block torch's generators and thread count are the training's own.

    With several processes (``accelerate launch``) each takes its share of every batch, and gradients are
    averaged; with `shard_weights` it also holds its part of the weights only. Missing hardware, or a batch
    that does not divide, raises `HddmError`.
    """

    def __init__(self, recipe: Recipe) -> None:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState
        from accelerate.utils import AutocastKwargs

        # A process may train twice, with another precision.
        AcceleratorState._reset_state()
        is_split = splits_weights(recipe)
        self.accelerator = Accelerator(
            mixed_precision=recipe.mixed_precision,
            cpu=recipe.device == "cpu",
            step_scheduler_with_optimizer=False,
            # Copies in bfloat16 that were kept would be of whole weights.
            kwargs_handlers=[AutocastKwargs(cache_enabled=not is_split)],
        )
        self.target: torch.device = self.accelerator.device
        if recipe.device not in ("auto", self.target.type):
            raise HddmError(f"`device` {recipe.device}: not available; use cpu")
        self.processes = int(self.accelerator.num_processes)
        self.is_main = bool(self.accelerator.is_main_process)
        self._threads = recipe.threads
        self.scaler: torch.amp.GradScaler = self.accelerator.scaler or torch.amp.GradScaler(
            enabled=False
        )
        """Scales losses in fp16; in other precisions it is not enabled and does nothing."""
        parts = self.processes * recipe.gradient_accumulation_steps
        if recipe.batch_size % parts:
            text = f"must be a multiple of {parts}, for {self.processes} processes with equal parts"
            raise HddmError(f"`batch_size` {recipe.batch_size}: {text}")
        self.weight_parts = self.processes if is_split else 1
        """Parts that weights are split into, one for each process, or one for all."""
        if is_split and not self.splits_weights:
            log.warning(
                "`shard_weights`: there is one process, so nothing is split; start several with torchrun"
            )
        self._inside = contextlib.ExitStack()

    def __enter__(self) -> "Device":
        devices = [self.target.index or 0] if self.target.type == "cuda" else []
        self._inside.enter_context(torch.random.fork_rng(devices=devices))
        self._inside.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(self._threads)
        self._inside.enter_context(float32_products(self.target))
        return self

    def __exit__(self, *ended: object) -> None:
        self._inside.close()

    @property
    def splits_weights(self) -> bool:
        """Each process holds its part of the weights only."""
        return self.weight_parts > 1

    @property
    def weight_part(self) -> int:
        """Number of the part of the weights that this process holds."""
        return int(self.accelerator.process_index) if self.splits_weights else 0

    def place(self, network: nn.Module) -> Shards | None:
        """Move ``network`` to the device, whole, or this process's part of it."""
        if self.splits_weights:
            return Shards(network, self.target, self.processes)
        network.to(self.target)
        return None

    def distributed(self, module: nn.Module) -> nn.Module:
        """Return ``module``, wrapped to average its gradients over processes; split weights do so already."""
        if self.processes == 1 or self.splits_weights:
            return module
        devices = [self.target] if self.target.type == "cuda" else None
        wrapped: nn.Module = nn.parallel.DistributedDataParallel(module, device_ids=devices)
        return wrapped

    def share(self, batch_size: int) -> slice:
        """Return the samples of a batch that are this process's."""
        number = batch_size // self.processes
        start = self.accelerator.process_index * number
        return slice(start, start + number)

    def moved(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return inputs on the device."""
        # Times are float64, which MPS lacks.
        stays = torch.float64 if self.target.type == "mps" else None
        moved: dict[str, Tensor] = {}
        for name, value in inputs.items():
            if value.dtype is stays:
                moved[name] = value
            else:
                moved[name] = value.to(self.target, non_blocking=True)
        return moved

    def clip(
        self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], limit: float
    ) -> Tensor:
        """Clip gradients to a norm of ``limit``; return their norm before that, not waiting for a GPU."""
        self.scaler.unscale_(optimizer)
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        # The comparison would wait for a GPU; on a CPU it saves a pass over gradients within the limit.
        if self.target.type != "cpu" or not norm <= limit:
            nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return norm

    def update(self, optimizer: torch.optim.Optimizer, skipped: Tensor) -> None:
        """Take a step of the optimizer, which changes nothing where ``skipped``, on the device, is 1.

        In fp16 the scaler decides in its place, and gradients beyond range lower the scale.
        """
        if self.scaler.is_enabled():
            self.scaler.step(optimizer)
            self.scaler.update()
            return
        optimizer.found_inf = skipped  # type: ignore[attr-defined]
        optimizer.step()

    def can_scale_down(self) -> bool:
        """True in fp16 while the loss scale is at least 1, so that an overflow only lowers it."""
        return self.scaler.is_enabled() and self.scaler.get_scale() >= 1

    def gathered(self, losses: Tensor, t: Tensor | None, norm: Tensor, flags: Flags) -> Readings:
        """Gather a step's losses and times (batch,) and the ``flags`` of all processes; without ``t`` NaN."""
        losses = losses.float()
        times = torch.full_like(losses, math.nan) if t is None else t.to(losses)
        own = torch.stack([losses, times], dim=1)
        # Read from the host without waiting, as the inputs are.
        raised = torch.tensor([[float(flag) for flag in flags]]).to(own, non_blocking=True)
        rows: Tensor = self.accelerator.gather(torch.cat([own, raised]))
        rows = rows.view(self.processes, -1, 2)
        norm = norm.float()
        is_fine = rows[:, :-1, 0].mean().isfinite() & norm.isfinite()
        skipped = (~is_fine).float()
        values = torch.cat([rows.flatten(), norm[None], skipped[None]])
        copied = None
        if self.target.type == "cuda":
            values = values.to("cpu", non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        return Readings(skipped, values, self.processes, copied)

    def agreed(self, now: bool, gathered: bool) -> bool:
        """What all processes act on: ``now`` for one process, else what they had ``gathered`` in the step."""
        return now if self.processes == 1 else gathered


@contextlib.contextmanager
def float32_products(device: torch.device) -> Iterator[str]:
    """Multiply float32 matrices in TF32 for a block, on a CUDA device; yields the precision.

    TF32 has 10 bits of mantissa and float32's range, and sums are in float32. Elsewhere nothing changes.
    """
    if device.type != "cuda":
        yield "ieee"
        return
    backends: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)  # type: ignore[attr-defined]
    before = [one.fp32_precision for one in backends]
    for one in backends:
        one.fp32_precision = TF32
    try:
        yield TF32
    finally:
        for one, precision in zip(backends, before, strict=True):
            one.fp32_precision = precision


def default_attention(device: torch.device, mixed_precision: str) -> str:
    """Kernel that torch's attention chooses by default, for heads of width 64, on a CPU or a CUDA device."""
    if device.type not in ("cpu", "cuda"):
        return "unknown"
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mixed_precision, torch.float32)
    tokens = torch.empty(1, 2, 64, 64, device=device, dtype=dtype, requires_grad=True)
    return SDPBackend(torch._fused_sdp_choice(tokens, tokens, tokens)).name.lower()


@contextlib.contextmanager
def placed(network: nn.Module, device: torch.device) -> Iterator[None]:
    """Move ``network`` to ``device`` for a block, and to the CPU afterwards."""
    network.to(device)
    try:
        yield
    finally:
        network.to("cpu")


# Layers that make the output of our networks and diffusers': their matrices are AdamW's, as in Muon's recipe.
ENDS = ("final_layer", "head", "proj_out", "proj_out_1", "proj_out_2", "norm_out")


def optimizer_of(network: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """Return the optimizer of the parameters that require gradients; each group holds its peak rate.

    What state it keeps says `state_bytes`.

    Muon makes the momentum of a matrix orthogonal by Newton and Schulz's iteration and scales it by
    max(1, rows/columns)^½ (K. Jordan, "Muon: an optimizer for hidden layers in neural networks", 2024).
    Packed matrices of queries, keys and values are one matrix to it.
    """
    matrices = set[str]() if recipe.muon_learning_rate is None else _matrices(network)
    inner: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in network.named_parameters():
        if not parameter.requires_grad:
            continue
        if name in matrices:
            inner.append(parameter)
        else:
            rest.append(parameter)
    decay = recipe.weight_decay
    optimizers: list[torch.optim.Optimizer] = []
    if rest:
        optimizers.append(
            torch.optim.AdamW(rest, lr=recipe.learning_rate, weight_decay=decay, fused=True)
        )
    if inner and recipe.muon_learning_rate is not None:
        rate = recipe.muon_learning_rate
        optimizers.append(_Muon(inner, lr=rate, weight_decay=decay, adjust_lr_fn="original"))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return optimizers[0] if len(optimizers) == 1 else _Together(optimizers)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the state that an optimizer of `optimizer_of` has after its first step.

    Muon keeps one average for each number, AdamW two, and its count of steps in float32 for each tensor.
    """
    total = 0
    for one in optimizer._optimizers if isinstance(optimizer, _Together) else [optimizer]:
        is_muon = isinstance(one, torch.optim.Muon)
        for group in one.param_groups:
            for parameter in group["params"]:
                total += (1 if is_muon else 2) * parameter.nbytes
                total += 0 if is_muon else torch.float32.itemsize
    return total


def _matrices(network: nn.Module) -> set[str]:
    """Names of the matrices that map features to features: of linear layers and of packed attention."""
    found: set[str] = set()
    for place, module in network.named_modules():
        if place.partition(".")[0] in ENDS:
            continue
        for name, parameter in module.named_parameters(place, recurse=False):
            is_linear = isinstance(module, nn.Linear) or name.endswith("in_proj_weight")
            if is_linear and parameter.ndim == 2:
                found.add(name)
    return found


class _Muon(MuonOfParts):
    """Muon that changes nothing where the tensor ``found_inf`` is 1, as torch's fused AdamW does.

    So a GPU decides by itself whether a step is skipped, and Python need not wait for it.
    """

    found_inf: Tensor | None = None
    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        kept = []
        if self.found_inf is not None:
            is_skipped = self.found_inf > 0
            parameters: list[Any] = []
            for group in self.param_groups:
                parameters += [p for p in group["params"] if p.grad is not None]
            for parameter in parameters:
                gradient = own_part(parameter.grad)
                average = self.momentum_of(parameter)
                # The average with itself is the average itself.
                gradient.copy_(torch.where(is_skipped, average, gradient))
                own = own_part(parameter)
                kept.append((own, own.clone()))
        super().step()
        for parameter, before in kept:
            parameter.copy_(torch.where(is_skipped, before, parameter))


class _Together(torch.optim.Optimizer):
    """Optimizers of different parameters as one, with one state and one ``found_inf``."""

    found_inf: Tensor | None = None
    _step_supports_amp_scaling = True

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        groups: list[dict[str, Any]] = []
        for one in optimizers:
            groups += one.param_groups
        super().__init__([{"params": group["params"]} for group in groups], {})
        self.param_groups = groups
        self._optimizers = optimizers
        for one in optimizers:
            one.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self._optimizers:
            one.found_inf = self.found_inf  # type: ignore[attr-defined]
            one.step()
