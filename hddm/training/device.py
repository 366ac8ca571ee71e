"""Hardware of a training: devices, precision and processes, through accelerate."""

import contextlib

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

    def share(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return this process's part of a batch, on its device."""
        rank = self._accelerator.process_index
        # Times are float64, which MPS lacks.
        stays = torch.float64 if self.target.type == "mps" else None
        parts = {name: value.chunk(self.processes)[rank] for name, value in inputs.items()}
        return {
            name: part if part.dtype is stays else part.to(self.target, non_blocking=True)
            for name, part in parts.items()
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

    def gathered(self, losses: Tensor, norm: Tensor) -> tuple[Tensor, float]:
        """Return losses (batch,) of all processes, on the CPU, and the norm: a step's one wait for a GPU."""
        together: Tensor = self._accelerator.gather(losses)
        values = torch.cat([together.float(), norm.float()[None]]).cpu()
        return values[:-1], values[-1].item()

    def any(self, flag: bool) -> bool:
        """Return true where ``flag`` holds on any process."""
        if self.processes == 1:
            return flag
        found: Tensor = self._accelerator.reduce(torch.tensor(float(flag), device=self.target), "sum")
        return bool(found.item() > 0)

    def wait(self) -> None:
        self._accelerator.wait_for_everyone()
