"""Hardware of a training: devices, precision and processes, through accelerate."""

import contextlib
import math

import torch
from torch import Tensor, nn

from hddm.training.settings import LoopSettings
from hddm.utils.errors import HddmError


class Device:
    """Hardware of one training; within its block torch's generators and thread count are the training's own.

    With several processes (``accelerate launch``) each takes its share of every batch, and gradients are
    averaged. Missing hardware or precision, or a batch that does not divide, raises `HddmError`.
    """

    def __init__(self, settings: LoopSettings) -> None:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
        if not there.get(settings.device, True):
            raise HddmError(f"--device {settings.device}: there is none; take cpu")
        is_on_cpu = settings.device == "cpu" or not any(there.values())
        if settings.mixed_precision == "fp16" and is_on_cpu:
            raise HddmError("--mixed-precision fp16 needs a GPU; on a CPU take bf16 or no")
        # A process may train twice, with another precision.
        AcceleratorState._reset_state()
        self._accelerator = Accelerator(
            mixed_precision=settings.mixed_precision,
            cpu=settings.device == "cpu",
            step_scheduler_with_optimizer=False,
        )
        self._threads = settings.threads
        self.scaler: torch.amp.GradScaler = self._accelerator.scaler or torch.amp.GradScaler(enabled=False)
        """Scales losses in fp16; in other precisions it is not enabled and does nothing."""
        parts = self.processes * settings.gradient_accumulation_steps
        if settings.batch_size % parts:
            raise HddmError(
                f"--batch-size {settings.batch_size} does not divide over {self.processes} processes with "
                f"{settings.gradient_accumulation_steps} parts each; take a multiple of {parts}"
            )
        self._inside = contextlib.ExitStack()

    def __enter__(self) -> "Device":
        devices = [self.target.index or 0] if self.target.type == "cuda" else []
        self._inside.enter_context(torch.random.fork_rng(devices=devices))
        if self._threads is not None:
            self._inside.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(self._threads)
        return self

    def __exit__(self, *ended: object) -> None:
        self._inside.close()

    @property
    def target(self) -> torch.device:
        device: torch.device = self._accelerator.device
        return device

    @property
    def processes(self) -> int:
        return int(self._accelerator.num_processes)

    @property
    def is_main(self) -> bool:
        return bool(self._accelerator.is_main_process)

    def distributed(self, module: nn.Module) -> nn.Module:
        """Return ``module``, wrapped to average its gradients over processes where there are several."""
        if self.processes == 1:
            return module
        wrapped: nn.Module = torch.nn.parallel.DistributedDataParallel(
            module, device_ids=[self.target] if self.target.type == "cuda" else None
        )
        return wrapped

    def share(self, batch_size: int) -> slice:
        """Return the samples of a batch that are this process's."""
        number = batch_size // self.processes
        start = self._accelerator.process_index * number
        return slice(start, start + number)

    def moved(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return inputs on the device."""
        # Times are float64, which MPS lacks.
        stays = torch.float64 if self.target.type == "mps" else None
        return {
            name: value if value.dtype is stays else value.to(self.target, non_blocking=True)
            for name, value in inputs.items()
        }

    def part(self, module: nn.Module, last: bool) -> contextlib.AbstractContextManager[None]:
        """Open a block for a part of a batch; gradients are exchanged after the ``last`` part only."""
        return contextlib.nullcontext() if last else self._accelerator.no_sync(module)

    def precision(self) -> contextlib.AbstractContextManager[None]:
        """Open a block for a forward pass in the chosen precision."""
        block: contextlib.AbstractContextManager[None] = self._accelerator.autocast()
        return block

    def backward(self, loss: Tensor) -> None:
        """Compute gradients of ``loss``, scaled in fp16."""
        self.scaler.scale(loss).backward()

    def clip(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], limit: float) -> Tensor:
        """Clip gradients to a norm of ``limit``; return their norm before that, not waiting for a GPU."""
        self.scaler.unscale_(optimizer)
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        # The comparison would wait for a GPU; on a CPU it saves a pass over gradients within the limit.
        if self.target.type != "cpu" or not norm <= limit:
            nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return norm

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Take a step of the optimiser; in fp16, gradients beyond range only lower the scale."""
        self.scaler.step(optimizer)
        self.scaler.update()

    def gathered(self, losses: Tensor, t: Tensor | None, norm: Tensor) -> tuple[Tensor, Tensor, float]:
        """Return losses and times (batch,) of all processes, on the CPU, and the norm; without ``t`` NaN.

        It is a step's one wait for a GPU.
        """
        losses = losses.float()
        times = torch.full_like(losses, math.nan) if t is None else t.to(losses)
        together: Tensor = self._accelerator.gather(torch.stack([losses, times], dim=1))
        values = torch.cat([together.T.flatten(), norm.float()[None]]).cpu()
        losses, times = values[:-1].view(2, -1)
        return losses, times, values[-1].item()

    def any(self, flag: bool) -> bool:
        """Return true where ``flag`` holds on any process."""
        if self.processes == 1:
            return flag
        found: Tensor = self._accelerator.reduce(torch.tensor(float(flag), device=self.target), "sum")
        return bool(found.item() > 0)

    def wait(self) -> None:
        self._accelerator.wait_for_everyone()
