"""Images while they form, and which expert painted what: the work behind the page of ``hddm play``.

A `Panel` is what one model is asked for, with settings as ``hddm sample`` has them, so that its
`Panel.commands` make the same images. `paint` makes those of several panels.
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
from hddm.pipelines.samples import SampleSettings, planned, read_cycles
from hddm.sampling import batches, plan, run
from hddm.utils.errors import HddmError, one_line
from hddm.utils.records import EXPERT_FILE
from hddm.utils.tensors import available_device

Edit = Mapping[str, Any]
_LEAST, _PART = 0.1, 4
"""Seconds between previews at least, and as many times what one takes, so that a VAE slows no run by much."""
_PREVIEW = 256
"""Pixels of a preview's side, about, since all that is shown goes to the browser at every change."""


class Opened:
    """A model to play with: an ensemble or expert folder, or the Paris release.

    Raises `HddmError` as `HDDMPipeline.from_pretrained`, and for latents without a VAE.
    """

    def __init__(self, source: Path, settings: SampleSettings) -> None:
        self.source, self._settings = source, settings
        self.pipeline = self._pipeline(None)
        self.pipeline.check_output(planned(self.pipeline, settings), True, {})
        self.is_alone = (source / EXPERT_FILE).exists()
        folders = [source.resolve()] if self.is_alone else map(Path, self.pipeline.experts.record.names)
        names = [f"expert {one.name}" if one.name.isdecimal() else one.name for one in folders]
        self.names = [one if names.count(one) == 1 else f"{one} ({k})" for k, one in enumerate(names)]
        """Names of the experts, no two alike."""
        self.domains = self.pipeline.ensemble.domains
        self.leads = {self.names[k]: k for k in sorted({*self.domains})}
        """The first expert of each domain, by name."""
        self._without = functools.lru_cache(1)(self._pipeline)

    def _pipeline(self, experts: tuple[int, ...] | None) -> HDDMPipeline:
        device, dtype = available_device(self._settings.device), self._settings.torch_dtype
        made = HDDMPipeline.from_pretrained(self.source, torch_dtype=dtype, experts=experts).to(device)
        made.set_progress_bar_config(disable=True)
        return made

    def panel(
        self, title: str, settings: SampleSettings, expert: int | None = None, without: int | None = None
    ) -> "Panel":
        """A panel of the whole, of one expert, or of all but one, with renormalised weights.

        Experts that share the domain of ``without`` go with it.
        """
        if self.is_alone or expert is not None:
            # An expert's folder has no other, and is asked without its number.
            expert = None if self.is_alone else expert
            settings = settings.model_copy(update={"strategy": None, "expert": expert})
        pipeline, names = self.pipeline, self.names
        if without is not None:
            rest = [k for k, domain in enumerate(self.domains) if domain != self.domains[without]]
            pipeline, names = self._without(tuple(rest)), [names[k] for k in rest]
        return Panel(title, self.source, pipeline, names, settings, without)


@dataclass
class Painted:
    """An image as far as it is: pixels (C, H, W) in uint8, and the experts' weights (K,) of each step."""

    number: int
    pixels: Tensor | None = None
    weights: list[Tensor] = field(default_factory=list)
    is_done: bool = False
    file: tuple[Tensor, bytes] | None = None
    """Pixels, and the PNG file of them."""

    @property
    def shares(self) -> list[float]:
        """Mean weights over the steps so far (K,); empty before the first."""
        return torch.stack(self.weights).double().mean(0).tolist() if self.weights else []


@dataclass
class Panel:
    """A model, what it is asked for, and its images; ``without`` is the expert that was taken out."""

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
        """Command lines that make the same images; what they leave out is the default."""
        source, name, lines = self.source, self.title.replace(" ", "-"), []
        if self.without is not None:
            change = ["hddm", "assemble", str(source), "--remove", str(self.without)]
            source = Path(f"{source.name}-{name}")
            lines.append(shlex.join([*change, "--out", str(source)]))
        words = ["hddm", "sample", str(source), "--out", f"samples-{name}"]
        for key, known in SampleSettings.model_fields.items():
            if (value := getattr(self.settings, key)) != known.default:
                option = "--prompt" if key == "prompts" else f"--{key.replace('_', '-')}"
                for one in value if isinstance(value, tuple) else [value]:
                    words += [option, str(one)]
        return [*lines, shlex.join(words)]

    def png(self, image: Painted) -> bytes:
        """A PNG file of an image, with its number, the settings and the command lines as text in it."""
        assert image.pixels is not None
        # The page asks again whenever another image has changed.
        if image.file is None or image.file[0] is not image.pixels:
            texts = {"settings": self.settings.model_dump_json(), "command": "\n".join(self.commands)}
            save_png(image.pixels, file := io.BytesIO(), {"number": str(image.number), **texts})
            image.file = image.pixels, file.getvalue()
        return image.file[1]

    def paint(self, edit: Edit, stopped: threading.Event, show: Callable[[], object]) -> None:
        """Make the images, ``show`` being called as they change; raises `HddmError` as ``hddm sample``."""
        settings, pipeline = self.settings, self.pipeline
        how = planned(pipeline, settings, edit.get("image"), edit.get("mask_image"))
        self.steps = len(how.times) - 1
        asked = read_cycles(pipeline, settings).cycled(settings.numbers)
        for batch in batches(how, settings.numbers, asked, settings.batch_size):
            use, pixels = ExpertUse(len(how.model.experts)), functools.partial(pipeline.images_of, how, batch)
            images = [self.images[row] for row in batch.rows.tolist()]
            run(how, batch, _Watch(images, how.times.tolist(), pixels, use, show), stopped.is_set, use)
            if stopped.is_set():
                return


@dataclass
class _Watch:
    """An ``on_step`` that keeps the weights of each step, the images, and where there is time a preview."""

    images: Sequence[Painted]
    times: Sequence[float]
    pixels: Callable[[Tensor], Tensor]
    use: ExpertUse
    show: Callable[[], object]
    before: Tensor | None = None
    due: float = 0.0

    def __call__(self, step: int, x: Tensor) -> Tensor:
        began, is_last = time.monotonic(), step == len(self.times) - 2
        for image, weights in zip(self.images, self.use.last, strict=True):
            image.weights.append(weights)
        if is_last or (self.before is not None and began >= self.due):
            t, then = self.times[step : step + 2]
            x_0 = x if is_last or self.before is None else preview(self.before, x, t, then)
            pixels = to_bytes(self.pixels(x_0)).cpu()
            part = 1 if is_last else max(1, pixels.shape[-1] // _PREVIEW)
            for image, own in zip(self.images, pixels[..., ::part, ::part], strict=True):
                image.pixels, image.is_done = own, is_last
            self.show()
            now = time.monotonic()
            self.due = now + max(_LEAST, _PART * (now - began))
        self.before = x
        return x


def preview(x: Tensor, following: Tensor, t: float, then: float) -> Tensor:
    """x_0 of a path that goes on straight, by its states x at t and ``following`` at ``then`` < t.

        v = (x_t - x_then) / (t - then),   x_0 = x_then - then v

    No network is asked for it.
    """
    return following - then * (x - following) / (t - then)


def paint(panels: Sequence[Panel], edit: Edit, stopped: threading.Event) -> Iterator[None]:
    """Paint all panels in a thread; yields after changes, as often as the caller comes for them.

    ``edit`` has a starting picture and its mask, as ``image`` and ``mask_image`` of a pipeline's call. What
    one panel refuses is its ``error``, and the others go on. All end a step after ``stopped`` is set.
    """
    changed = threading.Event()

    def work() -> None:
        for panel in panels:
            try:
                if not stopped.is_set():
                    panel.paint(edit, stopped, changed.set)
            except HddmError as error:
                panel.error = " ".join([error.message, *error.details])
            except Exception as error:  # the page lives on, whatever it is
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
        # The caller may leave before the end.
        stopped.set()
        thread.join()
