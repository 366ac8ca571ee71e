"""Samples of one model at one point of a table: how they are drawn, what they cost, and their grids."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hddm.benchmark.compute import evaluation_flop, router_flop
from hddm.benchmark.jobs import Job, Store
from hddm.benchmark.settings import SAMPLES, SamplingPoint, slug
from hddm.data.images import save_png, tiled, to_bytes
from hddm.ensemble import Ensemble
from hddm.experts.loading import load
from hddm.routers import Router
from hddm.sampling import sample
from hddm.utils.processes import Report
from hddm.utils.tensors import available_device, read_safetensors, refuse_other_kinds
from hddm.velocity import VelocityField

PIECE = 1000
"""Images of one job at most."""
BATCH = 256
_PIXELS = "samples.safetensors"

Opened = VelocityField | Ensemble


@dataclass(frozen=True)
class SampledModel:
    """A model to sample: its folder, and the hash of its content."""

    folder: Path
    hash: str
    is_single: bool
    """One network, which has neither strategy nor router."""
    trained_in: tuple[bool, ...] = ()
    """True for each expert that was trained in its calibration (`hddm.training.continuation`), which no point
    removes, since the network is valid only with it. Empty where that is true of none."""


def canonical(point: SamplingPoint, is_single: bool) -> SamplingPoint:
    """``point`` without what has no effect, so that equal samples are drawn once.

    A single model has no strategy; where none asks a router, nothing of the router counts. A guidance scale
    of 1 is no guidance by anything.
    """
    calibrated = set() if point.calibration == "none" else set(point.calibration.split("+"))
    changes: dict[str, Any] = {}
    if is_single or point.strategy == "draw":
        calibrated.discard("router")
        changes = {"strategy": "draw", "router_temperature": 1.0}
    if point.guidance_scale == 1:
        changes["guide_by"] = "condition"
    changes["calibration"] = "+".join(sorted(calibrated)) or "none"
    return point.model_copy(update=changes)


@dataclass(frozen=True)
class Piece:
    """Samples ``start`` … ``stop`` - 1 of a model at a point, with the noise of ``seed``."""

    source: SampledModel
    point: SamplingPoint
    seed: int
    start: int
    stop: int
    device: str = "auto"

    @property
    def job(self) -> Job:
        chosen = canonical(self.point, self.source.is_single)
        settings = chosen.model_dump(mode="json", exclude={"num_images"})
        # Both so that samples are still found that were drawn before guidance by a weak model was there, and
        # when there were several conversions.
        if chosen.guide_by == "condition":
            del settings["guide_by"]
        settings |= {"conversion": "exact", "seed": self.seed, "start": self.start, "stop": self.stop}
        inputs: dict[str, Any] = {"model": self.source.hash}
        if any(self.source.trained_in) and "experts" not in chosen.calibration:
            # Left out for other models, so that their earlier samples stay valid.
            inputs["trained_in"] = list(self.source.trained_in)
        return Job("samples", settings, inputs)

    @property
    def units(self) -> int:
        return self.stop - self.start

    def do(self, store: Store, report: Report) -> None:
        def make(folder: Path) -> dict[str, Any]:
            device, point = available_device(self.device), canonical(self.point, self.source.is_single)
            model = prepared(load(self.source.folder, device=device), point, self.source.trained_in)
            drawn = draw(model, point, self.seed, self.start, self.stop, report)
            tensors = {"pixels": drawn.pixels} | ({} if drawn.labels is None else {"labels": drawn.labels})
            save_file(tensors, folder / _PIXELS)
            return {
                "images": self.units,
                "expert_evaluations": drawn.expert_rows,
                "router_evaluations": drawn.router_rows,
                "flop": drawn.flop,
                "device": str(device),
            }

        store.once(self.job, make)


def pieces(source: SampledModel, point: SamplingPoint, seed: int, device: str = "auto") -> tuple[Piece, ...]:
    """All samples of a point."""
    starts = range(0, point.num_images, PIECE)
    return tuple(
        Piece(source, point, seed, start, min(start + PIECE, point.num_images), device) for start in starts
    )


def read_samples(store: Store, jobs: Sequence[Job]) -> tuple[Tensor, Tensor | None]:
    """Bytes (n, C, H, W) and perhaps labels (n,) of finished pieces."""
    found = []
    for job in jobs:
        path = store.path(job)
        found.append(read_safetensors(path / _PIXELS))
        kinds = {"pixels": (torch.uint8, 4), "labels": (torch.int64, 1)}
        refuse_other_kinds(path, found[-1], kinds, optional="labels")
    labels = [piece["labels"] for piece in found if "labels" in piece]
    return torch.cat([piece["pixels"] for piece in found]), torch.cat(labels) if labels else None


@dataclass(frozen=True)
class Drawn:
    """Samples (n, C, H, W) in bytes, their class labels, and what they cost."""

    pixels: Tensor
    labels: Tensor | None
    expert_rows: list[int]
    """States that the network of each expert was asked for."""
    router_rows: int
    flop: int
    """Operations of experts and router."""


def prepared(model: Opened, point: SamplingPoint, trained_in: Sequence[bool] = ()) -> Opened:
    """Set up ``model`` as ``point`` asks; experts that were ``trained_in`` their calibration keep it."""
    fields = model.experts if isinstance(model, Ensemble) else [model]
    for field, stays in zip(fields, trained_in or [False] * len(fields), strict=True):
        if not stays and "experts" not in point.calibration:
            field.calibration = None
            if field.weak is not None:
                field.weak.calibration = None
    if isinstance(model, Ensemble) and isinstance(model.router, Router):
        own = model.router.temperatures if "router" in point.calibration else (1.0,)
        model.router.temperatures = tuple(point.router_temperature * one for one in own)
    return model


def draw(
    model: Opened,
    point: SamplingPoint,
    seed: int,
    start: int,
    stop: int,
    report: Report = lambda images: None,
) -> Drawn:
    """Draw samples ``start`` … ``stop`` - 1 of a `prepared` model; classes take turns where it has some."""
    fields = model.experts if isinstance(model, Ensemble) else [model]
    labels = torch.arange(start, stop) % len(model.classes) if model.classes else None
    given: dict[str, Any] = {} if labels is None else {"class_labels": labels}
    router = model.router if isinstance(model, Ensemble) else None
    evaluated = [*fields, *(field.weak for field in fields if field.weak is not None)]
    networks: list[Callable[..., Tensor]] = [field.network for field in evaluated]
    networks += [router.network] if isinstance(router, Router) else []
    with _counted(networks) as counts:
        images = sample(
            model,
            stop - start,
            seed,
            point.steps,
            point.strategy if isinstance(model, Ensemble) else None,
            point.solver,
            point.guidance,
            start=start,
            batch_size=BATCH,
            on_batch=report,
            **given,
        )
    expert_rows, router_rows = counts[: len(fields)], sum(counts[len(evaluated) :])
    state = torch.zeros(1, *images.shape[1:], device=fields[0].device)
    flop = sum(n * evaluation_flop(field) for field, n in zip(evaluated, counts, strict=False) if n)
    flop += router_rows * router_flop(router, state)
    return Drawn(to_bytes(images), labels, expert_rows, router_rows, flop)


@contextmanager
def _counted(networks: Sequence[Callable[..., Tensor]]) -> Iterator[list[int]]:
    """Count the states that networks are asked for within the block."""
    counts = [0] * len(networks)

    def counting(place: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def count(network: nn.Module, arguments: tuple[Any, ...]) -> None:
            counts[place] += len(arguments[0])

        return count

    with ExitStack() as hooks:
        for place, network in enumerate(networks):
            if isinstance(network, nn.Module):
                hooks.callback(network.register_forward_pre_hook(counting(place)).remove)
        yield counts


GRID_COLUMNS = 8
ENLARGE = 4
REAL, STRIPS = "real images", "first samples by domain"
"""Names of pictures that are of no one model."""


def grid_path(folder: Path, name: str) -> Path:
    """Where the sample grid of a model lies."""
    return folder / SAMPLES / f"{slug(name)}.png"


def write_grid(pixels: Tensor, path: Path) -> None:
    """Write images (n, C, H, W) in bytes side by side, enlarged, with a thin border between them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_png(tiled(pixels, GRID_COLUMNS, ENLARGE), path)
