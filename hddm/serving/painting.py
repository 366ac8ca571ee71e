"""Images while they form, and which expert painted what: the work behind the page of ``hddm play``.

A `Panel` holds the images of one model with settings of ``hddm sample``, so `Panel.commands` make the same
images. `paint` makes the images of several panels.
"""

import functools
import io
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hddm.data.images import save_png, to_bytes
from hddm.expert_use import ExpertUse
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.pipelines.samples import planned, read_cycles
from hddm.running import Batch, Plan, run
from hddm.sampling import batches, plan
from hddm.settings import SampleSettings
from hddm.solvers import OnStep
from hddm.utils.errors import HddmError, one_line
from hddm.utils.records import EXPERT_FILE
from hddm.utils.tensors import available_device, dtype_on

Edit = Mapping[str, Any]
_LEAST, _PART = 0.1, 4
"""Least seconds between previews, and least ratio to the time of one, so that a VAE slows a run little."""
_PREVIEW = 256
"""Approximate side of a preview in pixels, since the browser gets all images again at every change."""


class Opened:
    """A model to play with: an ensemble or expert folder, or the Paris release.

    Raises `HddmError` as `HDDMPipeline.from_pretrained`, and for latents without a VAE.
    """

    def __init__(self, source: Path, settings: SampleSettings) -> None:
        self.source, self._settings = source, settings
        self.pipeline = self._pipeline(None)
        self.pipeline.check_output(None, True, {})
        self.is_alone = (source / EXPERT_FILE).exists()
        if self.is_alone:
            folders = [source.resolve()]
        else:
            folders = [Path(name) for name in self.pipeline.experts.record.names]
        names = [f"expert {one.name}" if one.name.isdecimal() else one.name for one in folders]
        self.names: list[str] = []
        """Names of the experts, all different."""
        for k, one in enumerate(names):
            self.names.append(one if names.count(one) == 1 else f"{one} ({k})")
        self.domains = self.pipeline.ensemble.domains
        self.leads = {self.names[k]: k for k in sorted({*self.domains})}
        """The first expert of each domain, by name."""
        self._without = functools.lru_cache(1)(self._pipeline)

    def _pipeline(self, experts: tuple[int, ...] | None) -> HDDMPipeline:
        device = available_device(self._settings.device)
        dtype = dtype_on(device, self._settings.dtype)
        made = HDDMPipeline.from_pretrained(self.source, dtype=dtype, experts=experts)
        made.set_progress_bar_config(disable=True)
        made.experts.prepare(self._settings)
        return made.to(device)

    def panel(
        self,
        title: str,
        settings: SampleSettings,
        expert: int | None = None,
        without: int | None = None,
    ) -> "Panel":
        """A panel of the whole model, of one ``expert``, or of all experts but those of one's domain.

        Without some experts, the weights of the others are renormalised.
        """
        pipeline, names = self.pipeline, self.names
        if without is not None:
            rest = [k for k, domain in enumerate(self.domains) if domain != self.domains[without]]
            pipeline, names = self._without(tuple(rest)), [names[k] for k in rest]
        expert = None if self.is_alone else expert
        if expert is not None or pipeline.ensemble.num_domains == 1:
            # Nothing is left for a strategy to choose among.
            settings = settings.model_copy(update={"strategy": None, "expert": expert})
        return Panel(title, self.source, pipeline, names, settings, without)


@dataclass
class Painted:
    """An image, perhaps unfinished: pixels (C, H, W) in uint8, and the experts' weights (K,) of each step."""

    number: int
    pixels: Tensor | None = None
    weights: list[Tensor] = field(default_factory=list)
    is_done: bool = False
    png: bytes = b""
    """PNG file of the pixels."""

    @property
    def shares(self) -> list[float]:
        """Mean weights over the steps so far (K,); empty before the first."""
        return torch.stack(self.weights).double().mean(0).tolist() if self.weights else []


@dataclass
class Panel:
    """A model, its settings and its images; ``without`` is the expert that was removed."""

    title: str
    source: Path
    pipeline: HDDMPipeline
    names: Sequence[str]
    settings: SampleSettings
    without: int | None = None
    error: str = ""

    def __post_init__(self) -> None:
        self.images = [Painted(number) for number in self.settings.numbers]
        self.steps = plan(self.pipeline.ensemble, steps=self.settings.steps).steps

    @property
    def commands(self) -> list[str]:
        """Command lines that make the same images; options with default values are left out."""
        source, name, lines = self.source, self.title.replace(" ", "-"), []
        if self.without is not None:
            change = ["hddm", "assemble", str(source), "--remove", str(self.without)]
            source = Path(f"{source.name}-{name}")
            lines.append(shlex.join([*change, "--out", str(source)]))
        words = ["hddm", "sample", str(source), "--out", f"samples-{name}"]
        own = plan(self.pipeline.ensemble)
        defaults = {"steps": own.steps, "solver": own.solver_name}
        for key, known in SampleSettings.model_fields.items():
            value = getattr(self.settings, key)
            if value not in (known.default, defaults.get(key)):
                option = "--prompt" if key == "prompts" else f"--{key.replace('_', '-')}"
                for one in value if isinstance(value, tuple) else [value]:
                    words += [option, str(one)]
        return [*lines, shlex.join(words)]

    def show(self, image: Painted, pixels: Tensor) -> None:
        """Show an image: its PNG file has its number, the settings and the command lines as text in it."""
        texts = {"settings": self.settings.model_dump_json(), "command": "\n".join(self.commands)}
        file = io.BytesIO()
        save_png(pixels, file, {"number": str(image.number), **texts})
        image.pixels, image.png = pixels, file.getvalue()

    def paint(self, edit: Edit, stopped: threading.Event, show: Callable[[], object]) -> None:
        """Make the images; calls ``show`` when they change, and raises `HddmError` as ``hddm sample``."""
        settings = self.settings
        self.pipeline = pipeline = self.pipeline.at_size(settings.height, settings.width)
        how = planned(pipeline, settings, edit.get("image"), edit.get("mask_image"))
        self.steps = how.steps
        requested = read_cycles(pipeline, settings).cycled(settings.numbers)
        for batch in batches(how, settings.numbers, requested, settings.batch_size):
            use = ExpertUse(len(how.model.experts))
            run(how, batch, self._watched(how, batch, use, show), stopped.is_set, use)
            if stopped.is_set():
                return

    def _watched(
        self, how: Plan, batch: Batch, use: ExpertUse, show: Callable[[], object]
    ) -> OnStep:
        """An ``on_step`` that keeps the weights of each step, the images, and previews if there is time."""
        images, times = (
            [self.images[row] for row in batch.rows.tolist()],
            how.times_of(batch).tolist(),
        )
        before: Tensor | None = None
        due = 0.0

        def watch(step: int, x: Tensor) -> Tensor:
            nonlocal before, due
            began, is_last = time.monotonic(), step == self.steps - 1
            for image, weights in zip(images, use.last, strict=True):
                image.weights.append(weights)
            if is_last or (before is not None and began >= due):
                x_0 = x
                if not is_last and before is not None:
                    x_0 = preview(before, x, times[step], times[step + 1])
                pixels = to_bytes(self.pipeline.images_of(how, batch, x_0)).cpu()
                part = 1 if is_last else max(1, pixels.shape[-1] // _PREVIEW)
                for image, own in zip(images, pixels[..., ::part, ::part], strict=True):
                    self.show(image, own)
                    image.is_done = is_last
                show()
                now = time.monotonic()
                due = now + max(_LEAST, _PART * (now - began))
            before = x
            return x

        return watch


def preview(x: Tensor, following: Tensor, t: float, then: float) -> Tensor:
    """x_0 of a straight path through the states x at t and ``following`` at ``then`` < t; runs no network.

    v = (x_t - x_then) / (t - then),   x_0 = x_then - then v
    """
    return following - then * (x - following) / (t - then)


def paint(panels: Sequence[Panel], edit: Edit, stopped: threading.Event) -> Iterator[None]:
    """Paint all panels in a thread; yields after changes, as often as the caller iterates.

    ``edit`` has a starting picture and its mask, as ``image`` and ``mask_image`` of a pipeline's call. An
    error of one panel is kept in its ``error``, and the others go on. All end a step after ``stopped``.
    """
    changed = threading.Event()

    def work() -> None:
        for panel in panels:
            try:
                if not stopped.is_set():
                    panel.paint(edit, stopped, changed.set)
            except HddmError as error:
                panel.error = " ".join([error.message, *error.details])
            except Exception as error:  # the page goes on after any error
                panel.error = f"unexpected {type(error).__name__}: {one_line(error)}"
            changed.set()

    thread = threading.Thread(target=work, daemon=True, name="paints")
    thread.start()
    try:
        while thread.is_alive():
            if changed.wait(0.2):
                changed.clear()
                yield
    finally:
        # The caller may stop before the end.
        stopped.set()
        thread.join()
