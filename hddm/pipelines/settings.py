"""How to sample a folder: every option of ``hddm sample``, checked, as it is recorded beside the images."""

from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, Field

from hddm.ensemble import Strategy
from hddm.utils.errors import HddmError, UsageError
from hddm.utils.records import Record
from hddm.utils.tensors import available_device
from hddm.velocity import Guidance

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
Positive = Annotated[int, Field(ge=1)]


def _known_strategy(name: str) -> str:
    Strategy.parse(name)
    return name


def _ordered(interval: tuple[float, float]) -> tuple[float, float]:
    if not 0 <= interval[0] <= interval[1] <= 1:
        raise ValueError("must be two t, 0 <= low <= high <= 1")
    return interval


class SampleSettings(Record):
    """See ``hddm sample --help``. Image i depends on ``seed`` and i, from ``start`` on, and on no batch."""

    num_images: Positive = 16
    seed: Annotated[int, Field(ge=0)] = 0
    start: Annotated[int, Field(ge=0)] = 0
    steps: Positive = 50
    solver: str = "euler"
    shift: float | None = None
    """Of the time grid; None for the model's own."""
    strategy: Annotated[str, AfterValidator(_known_strategy)] | None = None
    expert: int | None = None
    router_every: Positive = 1
    guidance_scale: float = 1.0
    cfg_channels: int | None = None
    guidance_interval: Annotated[tuple[float, float], AfterValidator(_ordered)] = (0.0, 1.0)
    guidance_rescale: Annotated[float, Field(ge=0, le=1)] = 0.0
    class_labels: str | None = None
    """Names or numbers, comma-separated, cycled over the images."""
    prompts: tuple[str, ...] = ()
    """Cycled over the images."""
    negative_prompt: str | None = None
    conditions: Path | None = None
    """A safetensors file of conditions by keyword, and of negative ones as ``negative_<keyword>``, cycled."""
    batch_size: Positive = 64
    device: str = "auto"
    dtype: str = "float32"
    offload: Literal["none", "ram", "disk"] = "none"
    max_memory: Positive | None = None
    """Bytes of weights on the device at most."""
    compile: bool = False
    output_type: Literal["png", "latent"] = "png"

    @property
    def guidance(self) -> Guidance:
        """Scale and the rest as one.

        Raises:
            HddmError: for numbers outside their ranges, and for others than the scale where it is 1.
        """
        found = Guidance(
            self.guidance_scale, self.cfg_channels, self.guidance_interval, self.guidance_rescale
        )
        if found.scale == 1.0 and found != Guidance(1.0):
            raise UsageError(
                "--cfg-channels, --guidance-interval and --guidance-rescale need a --guidance-scale that is "
                "not 1"
            )
        return found

    @property
    def torch_dtype(self) -> torch.dtype:
        """That networks run in; raises `HddmError` for an unknown one."""
        if self.dtype not in DTYPES:
            raise HddmError(f"--dtype {self.dtype}: choose one of {', '.join(DTYPES)}")
        return DTYPES[self.dtype]

    @property
    def torch_device(self) -> torch.device:
        """Where networks run; raises `HddmError` for one that is not there."""
        return available_device(self.device)

    def record(self) -> dict[str, Any]:
        """Plain values for the record beside the images, with the device that ``auto`` comes to."""
        return self.model_dump(mode="json") | {"device": str(self.torch_device)}
