"""A plain good training loop around any network, and hddm's own; both flow matching on random images."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.timing import DTYPES
from benchmarks.training.networks import Call, Settings, awake
from hddm.training.loop import Fitted, StepReport, Task, Watcher, fit
from hddm.training.objectives import objective_of
from hddm.training.settings import ExpertRecipe, ExpertSettings, LoopFields, Recipe, resolve
from hddm.velocity import TIME_SCALE

LEARNING_RATE, DECAY, MAX_NORM = 1e-4, 0.999, 1.0
IMAGES = 4096


class PlainLoop:
    """What one writes by hand, and does well.

    Fused AdamW, autocast around forward and loss, clipping and EMA by torch's foreach kernels, gradients set
    to None, one wait for the device a step, and that at its end.
    """

    def __init__(
        self,
        network: nn.Module,
        call: Call,
        settings: Settings,
        device: str,
        dtype: str,
        compiled: bool,
    ) -> None:
        self.network, self._call, self._settings = awake(network).to(device).train(), call, settings
        self._device, self._dtype = torch.device(device), DTYPES[dtype]
        if compiled:
            network.compile()
        self._parameters: list[Tensor] = [p for p in network.parameters() if p.requires_grad]
        self._averages = [p.detach().clone() for p in self._parameters]
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=LEARNING_RATE, weight_decay=0.01, fused=True
        )
        self._images, self._labels = images_and_labels(settings)
        self._draws = torch.Generator().manual_seed(1)

    def step(self) -> float:
        """One step; its loss."""
        rows = torch.randint(IMAGES, (self._settings.batch,), generator=self._draws)
        t = torch.rand(len(rows), generator=self._draws)
        noise = torch.randn(len(rows), *self._settings.shape, generator=self._draws)
        drawn = (self._images[rows], self._labels[rows], t, noise)
        images, labels, t, noise = (value.to(self._device, non_blocking=True) for value in drawn)
        wide = t[:, None, None, None]
        self._optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            output = self._call(
                self.network, (1 - wide) * images + wide * noise, TIME_SCALE * t, labels
            )
            loss = F.mse_loss(output.float(), noise - images)
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, MAX_NORM, foreach=True)
        self._optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(self._averages, self._parameters, 1 - DECAY)
        return loss.item()

    def run(self, steps: int, on_step: Callable[[], None]) -> None:
        """``steps`` of them, with a call after each."""
        for _ in range(steps):
            self.step()
            on_step()


class OwnLoop:
    """`hddm.training.loop.fit` as `hddm train expert` calls it, without logs and checkpoints."""

    def __init__(
        self, network: nn.Module, settings: Settings, device: str, dtype: str, compiled: bool
    ):
        self.network, self._settings = awake(network), settings
        self._images, self._labels = images_and_labels(settings)
        chosen = {"prediction": "flow_prediction", "time_sampling": "uniform"}
        requested = ExpertSettings.model_validate({"objective": "flow", "steps": 1, **chosen})
        self._objective = objective_of(resolve(ExpertRecipe, requested))
        self._device, self._compiled = device, compiled
        self._precision = {"bfloat16": "bf16", "float16": "fp16"}.get(dtype, "no")
        self.waits: list[float] = []
        """Shares of its steps that it waited for their inputs, without the first of each run."""

    def run(self, steps: int, on_step: Callable[[], None]) -> None:
        """``steps`` of them, with a call after each."""

        def step_done(report: StepReport) -> None:
            if report.step > 1:
                self.waits.append(report.waited / report.seconds)
            on_step()

        self.fit(steps, [step_done])

    def fit(self, steps: int, watchers: Sequence[Watcher]) -> Fitted:
        """``steps`` of them, with calls of ``watchers`` after each."""
        requested = LoopFields[None](
            steps=steps,
            batch_size=self._settings.batch,
            optimizer="adamw",
            learning_rate=LEARNING_RATE,
            warmup=0,
            max_grad_norm=MAX_NORM,
            ema_decay=DECAY,
            device=self._device,  # type: ignore[arg-type]
            mixed_precision=self._precision,  # type: ignore[arg-type]
            compile=self._compiled,
        )
        task = Task(self.network, IMAGES, self._draw, self._loss)
        return fit(task, resolve(Recipe, requested), watchers=watchers)

    def _draw(self, rows: Tensor, noise: torch.Generator, own: slice) -> dict[str, Tensor]:
        t = self._objective.sample_times(len(rows), noise)[own]
        eps = torch.randn(len(rows), *self._settings.shape, generator=noise)[own]
        mine = rows[own]
        return {"x_0": self._images[mine], "class_labels": self._labels[mine], "t": t, "eps": eps}

    def _loss(self, network: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        conditions = {"class_labels": inputs["class_labels"]}
        return self._objective.errors(
            network, inputs["x_0"], inputs["eps"], inputs["t"], conditions
        )


def images_and_labels(settings: Settings) -> tuple[Tensor, Tensor]:
    """The same for every way."""
    draws = torch.Generator().manual_seed(0)
    images = torch.rand(IMAGES, *settings.shape, generator=draws) * 2 - 1
    return images, torch.randint(settings.classes, (IMAGES,), generator=draws)
