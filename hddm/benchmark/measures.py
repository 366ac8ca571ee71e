"""What is measured of experts and routers themselves, on validation images: error by noise, calibration."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hddm.benchmark.jobs import Job, end_with_parent, making
from hddm.data.shards import load_shard
from hddm.ensemble import Router
from hddm.experts.loading import load
from hddm.experts.records import read_router
from hddm.training.denoising import denoising
from hddm.training.router_calibration import expected_calibration_error
from hddm.training.shard_fit import conditions_of
from hddm.utils.processes import Call, Report
from hddm.utils.tensors import append_dims, generator
from hddm.velocity import VelocityField

MOST_IMAGES = 1024
"""Images that an error is a mean over, at most."""
PROBABILITY_BINS, TIME_BINS = 10, 5
LOOKS = 8
"""Noised copies of an image that a router is judged by."""
# Beside the streams of `hddm.training.router_calibration` (5) and of training (2).
_STREAM = 6


def errors_call(folder: Path, job: Job, expert: Path, validation: Path) -> Call:
    """What a worker is to do to measure one expert."""
    arguments = {"folder": folder, "job": job, "expert": expert, "validation": validation}
    return Call(errors_job, arguments, 1)


def errors_job_of(expert_hash: str, images_hash: str, trained_in: bool) -> Job:
    """The job that measures an expert of this content on these images.

    ``trained_in`` says whether its calibration is one that it was trained in.
    """
    # Of other experts what was measured stays valid.
    changes = {"trained_in": True} if trained_in else {}
    inputs = {"expert": expert_hash, "images": images_hash}
    return Job("errors", {"most_images": MOST_IMAGES, **changes}, inputs)


def errors_job(folder: Path, job: Job, expert: Path, validation: Path, report: Report) -> None:
    """Velocity error by noise level (`hddm.training.denoising`), as it is sampled and without calibration.

    A calibration that it was trained in stays: without it the network means nothing.
    """
    end_with_parent()
    with making(folder, job) as (_, result):
        field = load(expert)
        assert isinstance(field, VelocityField)
        shard = load_shard(validation)
        rows = torch.linspace(0, len(shard) - 1, min(len(shard), MOST_IMAGES)).round().long()
        given = {name: value[rows] for name, value in conditions_of(shard, field).items()}
        images, result["images"] = shard.take(rows), len(rows)
        for name in ("calibrated", "raw"):
            found = denoising(field, images, given)
            result[name] = {
                "mean": found.expert,
                "gaussian_mean": found.gaussian,
                "levels": [asdict(level) for level in found.levels],
            }
            if not job.settings.get("trained_in"):
                field.calibration = None
    report(1)


def reliability_call(folder: Path, job: Job, router: Path, validation: Sequence[Path]) -> Call:
    """What a worker is to do to judge a router."""
    arguments = {"folder": folder, "job": job, "router": router, "validation": list(validation)}
    return Call(reliability_job, arguments, 1)


def reliability_job_of(router_hash: str, images: Sequence[str]) -> Job:
    """The job that judges a router of this content by these images, a hash a shard."""
    return Job("reliability", {"looks": LOOKS}, {"router": router_hash, "images": list(images)})


def reliability_job(folder: Path, job: Job, router: Path, validation: Sequence[Path], report: Report) -> None:
    """Probabilities against outcomes, with the router's temperatures and without."""
    end_with_parent()
    with making(folder, job) as (_, result):
        network, facts = read_router(router)
        shards = [load_shard(one) for one in validation]
        images = torch.cat([shard.images for shard in shards])
        labels = torch.cat([torch.full((len(shard),), k) for k, shard in enumerate(shards)])
        result["images"] = len(images)
        result["temperatures"] = list(facts.temperatures)
        for name, temperatures in (("calibrated", facts.temperatures), ("raw", (1.0,))):
            result[name] = reliability(Router(network, facts.time_scale, temperatures), images, labels)
    report(1)


@torch.no_grad()
def reliability(
    router: Router, images: Tensor, labels: Tensor, seed: int = 0, batch_size: int = 512
) -> dict[str, Any]:
    """How often what a router says is so, on noised images at times that are spread evenly over [0, 1].

    Args:
        router: probabilities (n, K) of x_t, t.
        images: (N, C, H, W) that it was not trained on.
        labels: (N,) their shards.
        seed: of times and noise.
        batch_size: states a call.

    Returns:
        ``accuracy``, ``cross_entropy`` and ``ece``, and ``bins`` of the probabilities of all experts: their
        ``mean``, the share ``outcome`` of them whose shard it was, and their ``count``; so over all times and
        in ``time_bins``.
    """
    draws = generator(seed, _STREAM)
    rows = torch.arange(len(images)).repeat(LOOKS)
    places = torch.randperm(len(rows), generator=draws).double()
    t = (places + torch.rand(len(rows), generator=draws, dtype=torch.float64)) / len(rows)
    said = []
    for part, times in zip(rows.split(batch_size), t.split(batch_size), strict=True):
        x_0, wide = images[part], append_dims(times, images.ndim).to(images)
        eps = torch.randn(x_0.shape, generator=draws)
        said.append(router((1 - wide) * x_0 + wide * eps, times.to(images)).double())
    probabilities, truth = torch.cat(said), labels[rows]
    time_bins = []
    for k in range(TIME_BINS):
        inside = (t * TIME_BINS).long() == k
        found = _figures(probabilities[inside], truth[inside])
        time_bins.append({"from": k / TIME_BINS, "to": (k + 1) / TIME_BINS, **found})
    return {**_figures(probabilities, truth), "time_bins": time_bins}


def _figures(probabilities: Tensor, labels: Tensor) -> dict[str, Any]:
    is_so = F.one_hot(labels, probabilities.shape[1]).double().flatten()
    said = probabilities.flatten()
    place = (said * PROBABILITY_BINS).long().clamp(max=PROBABILITY_BINS - 1)
    counts = place.bincount(minlength=PROBABILITY_BINS)
    zeros = torch.zeros(PROBABILITY_BINS, dtype=torch.float64)
    sums, outcomes = zeros.index_add(0, place, said), zeros.index_add(0, place, is_so)
    return {
        "accuracy": (probabilities.argmax(1) == labels).double().mean().item(),
        "cross_entropy": F.nll_loss(probabilities.clamp(min=1e-12).log(), labels).item(),
        "ece": expected_calibration_error(probabilities, labels),
        "bins": [
            {
                "mean": float(sums[k] / counts[k]),
                "outcome": float(outcomes[k] / counts[k]),
                "count": int(counts[k]),
            }
            for k in range(PROBABILITY_BINS)
            if counts[k]
        ],
    }
