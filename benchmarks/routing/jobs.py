"""What runs in worker processes: sampling a row, trying numbers of knots."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.routing.settings import CLASSES, FLOW, Row
from hddm.benchmark.compute import evaluation_flop, router_flop
from hddm.benchmark.settings import SamplingPoint
from hddm.data.images import to_bytes
from hddm.data.shard_records import find_shards
from hddm.data.shards import load_shard
from hddm.ensemble import Ensemble, Part
from hddm.expert_use import ExpertUse
from hddm.experts.loading import load
from hddm.experts.records import read_router
from hddm.routers import Router
from hddm.sampling import sample
from hddm.training.router import calibrate_router, held_out
from hddm.utils.processes import Report
from hddm.utils.tensors import generator
from hddm.velocity import VelocityField

# Beside the streams of the library, which go up to 5.
LABEL_STREAM = 8
BATCH = 512


@dataclass(frozen=True)
class Data:
    """The labels of all training images in an order of no meaning, and images of each class (classes, K)."""

    labels: Tensor
    class_images: Tensor

    @classmethod
    def of(cls, shards: Path) -> "Data":
        """Read a partition of labelled images."""
        each = [load_shard(folder).labels for folder in find_shards(shards)]
        labels = [one for one in each if one is not None]
        together = torch.cat(labels)
        classes = int(together.max()) + 1
        counts = torch.stack([one.bincount(minlength=classes) for one in labels], dim=1)
        return cls(together[torch.randperm(len(together), generator=generator(0, LABEL_STREAM))], counts)


@dataclass(frozen=True)
class Sampled:
    """Images (n, C, H, W) in bytes, what was asked for, and what it cost."""

    pixels: Tensor
    labels: Tensor | None
    experts_a_step: float
    mflop_a_step: float


def sample_job(place: Path, data: Data, row: Row, point: SamplingPoint, seed: int, report: Report) -> Sampled:
    """Samples of one row from the models of one training seed, by the solver of ``point``."""
    num, steps = point.num_images, point.steps
    network, record = read_router(place / row.router)
    temperatures = record.temperatures if row.calibrated else (1.0,)
    experts = [load(place / row.experts / str(k)) for k in range(len(record.shard_images))]
    fields = [expert for expert in experts if isinstance(expert, VelocityField)]
    prior = torch.tensor(record.shard_images).double()
    # As common as in the data, so that the distance judges images and not labels.
    labels = data.labels[:num] if row.experts == CLASSES else None
    conditions: dict[str, Any] = {} if labels is None else {"class_labels": labels}
    router = Router(network, record.time_scale, temperatures)
    of_class = data.class_images.tolist() if row.class_prior else []
    parts = [
        Part(field, class_shares={str(label): counts[k] for label, counts in enumerate(of_class)})
        for k, field in enumerate(fields)
    ]
    ensemble = Ensemble(parts, router, row.strategy, prior)
    use = ExpertUse(len(fields))
    with warnings.catch_warnings():
        # That p(k) ignores the labels is what one row is about.
        warnings.filterwarnings("ignore", message="draw picks experts by the prior alone")
        images = sample(
            ensemble,
            num,
            seed,
            steps,
            solver=point.solver,
            batch_size=BATCH,
            router_every=row.router_every,
            use=use,
            on_batch=report,
            **conditions,
        )
    # Of experts without classes, whose table costs nothing.
    plain = load(place / FLOW / "0")
    assert isinstance(plain, VelocityField)
    plain.calibration = None
    expert_cost = evaluation_flop(plain) / 1e6
    router_cost = router_flop(router, images[:1]) / 1e6
    asked = 0 if row.strategy == "draw" else -(-steps // row.router_every) / steps
    return Sampled(
        to_bytes(images),
        labels,
        use.experts_a_sample,
        use.experts_a_sample * expert_cost + asked * router_cost,
    )


def knots_job(
    shards: Path, router: Path, knots: Sequence[int], seed: int, report: Report
) -> dict[int, dict[str, Any]]:
    """Records of calibrations with each number of knots, on the images that the router was not trained on."""
    network, trained = read_router(router)
    data = [load_shard(folder) for folder in find_shards(shards)]
    kept = [held_out(shard) for shard in data]
    images = torch.cat([shard.images[rows] for shard, rows in zip(data, kept, strict=True)])
    labels = torch.cat([torch.full((int(rows.sum()),), k) for k, rows in enumerate(kept)])
    found = {}
    for number in knots:
        temperatures, record = calibrate_router(network, trained.time_scale, images, labels, seed, number)
        found[number] = {**record, "temperatures": temperatures, "held_out_images": len(images)}
        report(1)
    return found
