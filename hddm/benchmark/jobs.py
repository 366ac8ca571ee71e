"""The pieces of a comparison that run in worker processes. Each takes and returns plain values."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hddm.benchmark.conversions import sample_ddim, variant
from hddm.data.images import to_bytes
from hddm.data.open_shard import open_shard
from hddm.ensemble import Ensemble
from hddm.load import load
from hddm.routing import Router, Strategy, sparse_weights
from hddm.sampling import sample
from hddm.training.expert import ExpertSettings, train_expert
from hddm.training.router import RouterSettings, train_router
from hddm.workers import Report

BATCH = 512


@dataclass(frozen=True)
class ExpertUse:
    """What a router said at one time, on average over samples.

    ``probabilities`` and ``weights`` (K,) are the router's and, after the strategy, the mixture's;
    ``largest`` is the mean of the largest probability: 1/K knows nothing, 1 is certain.
    """

    t: float
    probabilities: list[float]
    weights: list[float]
    largest: float


@dataclass(frozen=True)
class Sampled:
    """Images (n, C, H, W) in uint8, and how the router used the experts on the way.

    ``use`` has an entry a solver step, and none where no router ran.
    """

    pixels: Tensor
    use: list[ExpertUse]
    evaluations: float
    """Expert evaluations a step and image, on average."""


def train_expert_job(shard: Path, out: Path, settings: ExpertSettings, report: Report) -> list[float]:
    """Losses of an expert trained on ``shard``."""
    return train_expert(shard, out, settings, on_step=lambda step, loss: report(settings.batch_size))


def train_router_job(shards: Path, out: Path, settings: RouterSettings, report: Report) -> list[float]:
    """Losses of a router trained on all ``shards``."""
    return train_router(shards, out, settings, on_step=lambda step, loss: report(settings.batch_size))


def sample_job(
    source: Path,
    num: int,
    seed: int,
    steps: int,
    solver: str,
    report: Report,
    strategy: str | None = None,
) -> Sampled:
    """Samples of an expert or ensemble folder."""
    model = load(source)
    seen: list[tuple[float, Tensor, Tensor]] = []
    if isinstance(model, Ensemble) and isinstance(model.router, Router):
        parsed = Strategy.parse(strategy or model.strategy)
        if parsed.kind != "draw":
            model.router = _Watched(model.router, parsed, seen)
    images = sample(model, num, seed, steps, strategy, solver, batch_size=BATCH, on_batch=report)
    return Sampled(to_bytes(images), _mean_use(seen), _evaluations(seen))


def convert_job(
    source: Path,
    shards: list[Path],
    exact: bool,
    treatment: str,
    num: int,
    seed: int,
    steps: int,
    solver: str,
    report: Report,
) -> Sampled:
    """Samples of a DDPM ensemble whose experts are converted in another way, by ``draw``."""
    ensemble = load(source)
    assert isinstance(ensemble, Ensemble)
    for k, shard in enumerate(shards):
        images = open_shard(shard).images
        ensemble.experts[k] = variant(ensemble.experts[k], exact, treatment, images)
    images = sample(ensemble, num, seed, steps, "draw", solver, batch_size=BATCH, on_batch=report)
    return Sampled(to_bytes(images), [], 1.0)


def ddim_job(source: Path, num: int, seed: int, steps: int, report: Report) -> Sampled:
    """Samples of a DDPM ensemble under its own sampler."""
    ensemble = load(source)
    assert isinstance(ensemble, Ensemble)
    return Sampled(to_bytes(sample_ddim(ensemble, num, seed, steps, BATCH, report)), [], 1.0)


class _Watched:
    """A router that notes what it said."""

    def __init__(self, router: Router, strategy: Strategy, seen: list[tuple[float, Tensor, Tensor]]) -> None:
        self._router, self._strategy, self._seen = router, strategy, seen

    def __call__(self, x_t: Tensor, t: Tensor) -> Tensor:
        probabilities = self._router(x_t, t)
        weights = sparse_weights(probabilities, self._strategy)
        self._seen.append((float(t[0]), probabilities, weights))
        return probabilities


def _evaluations(seen: list[tuple[float, Tensor, Tensor]]) -> float:
    if not seen:
        return 1.0
    return torch.cat([weights for _, _, weights in seen]).gt(0).float().sum(1).mean().item()


def _mean_use(
    seen: list[tuple[float, Tensor, Tensor]],
) -> list[ExpertUse]:
    times = sorted({t for t, _, _ in seen}, reverse=True)
    use = []
    for time in times:
        probabilities = torch.cat([p for t, p, _ in seen if t == time])
        weights = torch.cat([w for t, _, w in seen if t == time])
        largest = probabilities.max(1).values.mean().item()
        use.append(ExpertUse(time, probabilities.mean(0).tolist(), weights.mean(0).tolist(), largest))
    return use
