"""Pictures of what a network draws while it is trained: the same noise every time, raw and averaged weights.

They change nothing in the training: every module's mode, torch's generators, gradients and what was compiled
are afterwards as they were.
"""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from hddm.data.images import save_png, tiled, to_bytes
from hddm.data.shards import Shard
from hddm.sampling import initial_noise, integrate, time_grid
from hddm.training.loop import StepReport
from hddm.velocity import VelocityField

IMAGES, COLUMNS = 16, 4
STEPS = 30
"""Euler steps a picture, on the model's own time grid."""
SEED = 0
"""Of the noise: that of ``hddm sample --seed 0``."""
LATENT_RANGE = 3.0
"""Latents, whose variance is about 1, are shown from minus to plus this."""
_SMALLEST = 64

log = logging.getLogger(__name__)


class Pictures:
    """A grid of samples for each set of weights, as PNG under ``folder``.

    Class-conditional networks draw one class after the other, text-conditional ones the first captions of the
    shard, others with what stands for no condition. Latents are not decoded: their first three channels are
    shown as colours.

    Args:
        field: the network in training as a velocity field.
        shard: what it is trained on.
        conditions: names of the conditions that it is trained with.
        folder: where pictures go.
    """

    def __init__(self, field: VelocityField, shard: Shard, conditions: set[str], folder: Path) -> None:
        self._field, self._folder = field, folder
        self._space, self._shape = shard.space, shard.shape
        self._conditions: dict[str, Tensor] = {}
        num = IMAGES
        if "encoder_hidden_states" in conditions and shard.texts is not None:
            num = min(IMAGES, len(shard))
            self._conditions["encoder_hidden_states"] = shard.texts.take(torch.arange(num))
        if "class_labels" in conditions:
            self._conditions["class_labels"] = torch.arange(num) % len(shard.classes)
        self._num = num

    def draw(self, report: StepReport) -> dict[str, Tensor]:
        """Grids (C, H, W) in bytes, by "raw" and "ema", which are then files too.

        Returns:
            Nothing where the training is to stop, within one solver step; then nothing is written.

        Raises:
            OSError: where they cannot be written.
            HddmError: for samples that are not finite.
        """
        state, grids = report.state, {}
        with undisturbed(state.network):
            for name, weights in (("raw", contextlib.nullcontext()), ("ema", state.averaged())):
                with weights:
                    grids[name] = self._grid(report)
                if report.should_stop():
                    log.info("step %d: told to stop, so its pictures are left out", report.step)
                    return {}
        self._folder.mkdir(parents=True, exist_ok=True)
        for name, grid in grids.items():
            path = self._folder / f"step_{report.step:08d}_{name}.png"
            # Under its own name a picture is whole.
            draft = path.with_name(f".{path.name}")
            save_png(grid, draft)
            os.replace(draft, path)
        return grids

    def _grid(self, report: StepReport) -> Tensor:
        field = self._field
        dtype = torch.promote_types(field.dtype, torch.float32)
        x = integrate(
            field,
            initial_noise(SEED, 0, self._num, self._shape).to(field.device, dtype),
            time_grid(STEPS, field.shift),
            conditions={name: value.to(field.device) for name, value in self._conditions.items()},
            is_interrupted=report.should_stop,
        )
        return grid_of(shown(x.cpu(), self._space))


@contextlib.contextmanager
def undisturbed(network: nn.Module) -> Iterator[None]:
    """Within the block ``network`` is in evaluation mode and not compiled; afterwards all is as it was."""
    modes = {module: module.training for module in network.modules()}
    # Other shapes and modes would compile anew, and too many of them fall back to what rounds otherwise.
    compiled = network._compiled_call_impl
    device = next(network.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            network.eval()
            network._compiled_call_impl = None
            yield
        finally:
            network._compiled_call_impl = compiled
            for module, mode in modes.items():
                module.training = mode


def shown(x: Tensor, space: str) -> Tensor:
    """Samples (N, C, H, W) in model space as bytes (N, 1 or 3, H, W): pixels, or three channels of latents.

    Raises:
        HddmError: for NaN or Inf.
    """
    if space == "latents":
        x = x / LATENT_RANGE
    return to_bytes(x[:, :3] if x.shape[1] >= 3 else x[:, :1])


def grid_of(images: Tensor) -> Tensor:
    """Images (N, C, H, W) in bytes side by side (C, H', W'), small ones enlarged, with a border."""
    return tiled(images, COLUMNS, max(1, _SMALLEST // images.shape[-1]))
