"""What can be requested of each verb: one record per verb, whose fields are its options.

A field is declared once, with its bounds and choices; the text below it describes it in Python and on the
command line. The settings of trainings are in `hddm.training.settings`. Nothing here imports torch.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from hddm.utils.errors import HddmError, choose
from hddm.utils.records import Record, Seed

Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class Shown:
    """How a field is shown in help: the word for its value, and the topic that it stands under."""

    word: str | None = None
    topic: str | None = None


READ = "read"
"""Marks a path that must exist, which the command line checks before it imports anything."""
InputPath = Annotated[Path, READ]


class Described(Record):
    """A record whose fields are described by the texts below them."""

    model_config = ConfigDict(use_attribute_docstrings=True, defer_build=True)


def parse_strategy(name: str) -> tuple[str, float]:
    """Kind and value of ``top-2``, ``full``, ``threshold-0.1``, ``nucleus-0.9``, ``commit-0.8``, ``draw``.

    Raises:
        HddmError: for another name, a k below 1 or an x outside (0, 1].
    """
    kind, _, value = name.partition("-")
    if name in ("full", "draw"):
        return kind, 0.0
    if kind == "top" and value.isdecimal() and int(value) >= 1:
        return kind, int(value)
    if kind in ("threshold", "nucleus", "commit"):
        try:
            share = float(value)
        except ValueError:
            share = float("nan")
        if 0 < share <= 1:
            return kind, share
    raise HddmError(
        f"unknown strategy {name!r}: choose commit-X, threshold-X or nucleus-X (0 < X <= 1), top-K "
        "(K = 1, 2, …), full, or draw"
    )


def _checked(parse: Callable[[Any], object]) -> AfterValidator:
    return AfterValidator(lambda value: (parse(value), value)[1])


StrategyName = Annotated[str, _checked(parse_strategy)]
"""Name of a strategy (`hddm.ensemble`)."""


def _check_device(name: str) -> None:
    if re.fullmatch(r"(auto|cpu|cuda|mps|xpu)(:\d+)?", name) is None:
        raise HddmError(choose(name, ("auto", "cpu", "cuda", "cuda:1", "mps")))


Device = Annotated[str, _checked(_check_device)]
Dtype = Literal["float32", "bfloat16", "float16", "float64"]

_UNITS = {"": 1, "B": 1} | {
    unit: size
    for power, letter in enumerate("KMG", 1)
    for unit, size in ((letter, 1000**power), (f"{letter}B", 1000**power), (f"{letter}IB", 1024**power))
}


def parse_size(text: Any) -> Any:
    """Bytes in ``6GB``, ``500 MB`` or ``1.5GiB``; `HddmError` for any other text. A number stays as it is."""
    if not isinstance(text, str):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS or not float(match[1]):
        raise HddmError("is not an amount of memory; write it as 6GB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _check_interval(interval: tuple[float, float]) -> None:
    if not 0 <= interval[0] <= interval[1] <= 1:
        raise HddmError("must be two t, 0 <= low <= high <= 1")


class SamplingSettings(Described):
    """How samples are drawn, as ``hddm sample``, a request to a service and a benchmark state it."""

    steps: Positive | None = None
    """Solver steps. Default: 25, or a distilled student's own."""
    strategy: StrategyName | None = None
    """Strategy: draw, commit-X, full, top-K, threshold-X or nucleus-X. Default: the ensemble's."""
    solver: Literal["euler", "heun", "adams-bashforth", "adams-moulton"] | None = None
    """ODE solver. Default: adams-moulton; euler for a distilled student."""
    guidance_scale: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Guidance scale; 1 is no guidance."""
    guide_by: Literal["condition", "weak"] = "condition"
    """Guide away from the unconditional prediction or from each expert's weak model."""


class SampleSettings(SamplingSettings):
    """Options of ``hddm sample``, as recorded beside the images.

    Image i, counted from ``start``, depends on ``seed`` and i alone, not on the batch size.
    """

    num_images: Positive = 16
    """Number of images."""
    seed: Seed = 0
    """Seed of all random numbers."""
    start: Seed = 0
    """Number of the first image, to continue or to split work."""
    prompts: tuple[str, ...] = ()
    """Text prompt; several are cycled over the images."""
    negative_prompt: str | None = None
    """Text that guidance moves away from. Default: no text."""
    class_labels: str | None = None
    """Class names or numbers, separated by commas and cycled over the images."""
    conditions: InputPath | None = None
    """Safetensors file of conditions by name or negative_NAME, cycled over the images."""
    init_image: InputPath | None = None
    """Image to edit; it is cropped and resized to the output size."""
    strength: Share | None = None
    """Amount of change to --init-image. Default: 0.8; 1 with --mask."""
    mask: InputPath | None = None
    """Mask image, white where --init-image is replaced."""
    resampling_steps: Positive = 10
    """Repeats of each step with --mask."""
    expert: Annotated[int, Field(ge=0)] | None = None
    """Index of an expert to use alone, without the router."""
    router_every: Positive = 1
    """Network calls per call of the router."""
    calibration: Literal["experts+router", "experts", "router", "none"] = "experts+router"
    """Calibrations to use, for comparisons."""
    router_temperature: Annotated[float, Field(gt=0, le=1e9)] = 1.0
    """Factor on the temperatures of the router, for comparisons."""
    shift: float | None = None
    """Shift of the time grid; 1 is even. Default: the model's own."""
    cfg_channels: Positive | None = None
    """Number of channels to guide, such as 3 for DiT. Default: all."""
    guidance_interval: Annotated[tuple[float, float], _checked(_check_interval), Shown("LOW HIGH")] = (
        0.0,
        1.0,
    )
    """Noise levels t that are guided."""
    guidance_rescale: Share = 0.0
    """Strength of rescaling to the unguided standard deviation, 0 to 1."""
    height: Positive | None = None
    """Image height. Default: the model's own."""
    width: Positive | None = None
    """Image width. Default: the model's own."""
    batch_size: Positive = 64
    """Images computed together; it affects rounding only."""
    device: Device = "auto"
    """Device: auto, cpu, cuda, cuda:1 or mps."""
    dtype: Dtype = "float32"
    """Number format that the networks compute in."""
    offload: Literal["none", "ram", "disk"] = "none"
    """Place of idle experts: on the device (none), in memory or on disk."""
    max_memory: Annotated[int, Field(ge=1), BeforeValidator(parse_size)] | None = None
    """Limit of weights on the device with --offload, such as 6GB. Default: no limit."""
    compile: bool = False
    """Compile the experts; the first steps then take minutes."""
    output_type: Literal["png", "latent"] = "png"
    """PNG images, or the experts' output as latents."""

    @property
    def numbers(self) -> range:
        """Numbers of the images."""
        return range(self.start, self.start + self.num_images)
