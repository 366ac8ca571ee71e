"""Fit the weights of `hddm.reliability.ReliabilityRouter` on held-out images."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import minimize, nnls
from torch import Tensor

from hddm.condition_names import LABELS
from hddm.ensemble import Ensemble
from hddm.experts.ensemble_folders import replace_ensemble_record
from hddm.experts.ensemble_records import RELIABILITY, ReliabilityRecord, read_ensemble_record
from hddm.experts.loading import load
from hddm.experts.shard_images import evenly_spaced
from hddm.objective.checks import refuse_shared_noise
from hddm.objective.errors import noise_of
from hddm.objective.flows import velocities_of
from hddm.objective.scores import HeldOutImages
from hddm.reliability import ReliabilityRouter
from hddm.utils.errors import HddmError
from hddm.utils.progress import Progress
from hddm.utils.streams import Use
from hddm.utils.tensors import available_device

TIMES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Times at which weights are measured."""
_SUM = 1e4
"""How much more than all errors it counts that weights sum to 1."""


def best_weights(grams: Tensor, shares: Tensor | None = None) -> Tensor:
    """Weights (K,), none below 0 and of sum 1, for which the mixture has the least error.

    Without ``shares`` the error is w^T G w, G the mean of the Gram matrices, and the weights are the solution
    of that convex problem. With them, sample i is mixed by w_k p_ik, normalised, and the weights are those
    that a descent from equal ones finds.

    Args:
        grams: (n, K, K), of each sample's errors <v_k - u, v_l - u> / D.
        shares: p(k | x_t, t) of each sample (n, K), as another router gives them.

    Raises:
        HddmError: for errors that are not finite.
    """
    if not bool(grams.isfinite().all()):
        raise HddmError("an expert's velocity is not finite; hddm verify says more")
    if shares is None:
        return _of_one_domain(grams.double().mean(0))
    return _on_top_of(grams.double(), shares.double())


def _of_one_domain(gram: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(gram)
    root = (values.clamp_min(0).sqrt()[:, None] * vectors.T) / values.max().clamp_min(1e-300).sqrt()
    rows = np.vstack([root.numpy(), np.full((1, len(gram)), _SUM)])
    target = np.zeros(len(rows))
    target[-1] = _SUM
    found, _ = nnls(rows, target)
    weights = torch.from_numpy(found)
    return weights / weights.sum()


def _on_top_of(grams: Tensor, shares: Tensor) -> Tensor:
    num = shares.shape[1]
    scale = torch.einsum("nk,nkl,nl->n", shares, grams, shares).mean().clamp_min(1e-300)

    def error(logits: np.ndarray) -> tuple[float, np.ndarray]:
        free = torch.from_numpy(logits).requires_grad_()
        with torch.enable_grad():
            mixed = free.softmax(0) * shares
            mixed = mixed / mixed.sum(1, keepdim=True).clamp_min(1e-300)
            value = torch.einsum("nk,nkl,nl->n", mixed, grams, mixed).mean() / scale
            (slope,) = torch.autograd.grad(value, free)
        return value.item(), slope.numpy()

    found = minimize(error, np.zeros(num), jac=True, method="L-BFGS-B", bounds=[(-12, 12)] * num)
    return torch.from_numpy(found.x).softmax(0)


@torch.no_grad()
def measured_weights(
    model: Ensemble,
    samples: Tensor,
    conditions: Mapping[str, Tensor],
    seed: int,
    batch_size: int = 128,
    is_routed: bool = False,
) -> Tensor:
    """Weights (times, K) of an ensemble's experts at `TIMES`.

    Args:
        model: whose experts each cover all of t.
        samples: held-out data (N, …), in the units of the experts.
        conditions: of the samples, (N, …), on the model's device.
        seed: of the noise.
        batch_size: samples that are computed together.
        is_routed: whether the weights come on top of the model's router.

    Raises:
        HddmError: for experts that share t among them, and as `best_weights`.
    """
    refuse_shared_noise(model.num_domains, len(model.experts))
    if LABELS in conditions and bool((model.prior_of(len(samples), conditions) == 0).any()):
        raise HddmError(
            "experts that know different classes are not weighed: each has to denoise every image of `data`"
        )
    weights = []
    with Progress(len(TIMES) * len(samples), "weigh experts") as advance:
        for time in TIMES:
            grams, shares = [], []
            for rows in torch.arange(len(samples)).split(batch_size):
                x_0 = samples[rows]
                eps = noise_of(rows.tolist(), x_0.shape[1:], seed, Use.RELIABILITY).to(x_0)
                x_t = ((1 - time) * x_0 + time * eps).to(model.device)
                t = torch.full((len(rows),), time, dtype=torch.float64)
                given = {name: value[rows] for name, value in conditions.items()}
                grams.append(_grams(model, x_t, t, (eps - x_0), given))
                if is_routed and model.router is not None:
                    shares.append(model.under("full").weights(x_t, t, None, given))
                advance(len(rows))
            weights.append(best_weights(torch.cat(grams), torch.cat(shares) if shares else None))
    return torch.stack(weights)


def weigh_experts(
    folder: Path, data: Path, seed: int = 0, device: str = "auto", most: int = 512
) -> Tensor:
    """Measure the experts of an ensemble folder on held-out images, and keep their weights in it.

    They are the weights of a mixture where nothing else routes, else factors on the router's probabilities.
    Returns them, (times, K).

    Args:
        folder: of the ensemble, which is replaced as a whole.
        data: held-out images, as `hddm.objective.scores.HeldOutImages` reads them.
        seed: of the noise.
        device: that experts run on.
        most: images that are used, spread evenly over all.

    Raises:
        HddmError: as `measured_weights`, for images that do not fit, and for experts that are not mixed.
    """
    record = read_ensemble_record(folder)
    model = load(folder, device=available_device(device))
    assert isinstance(model, Ensemble)
    if not model.are_alike():
        raise HddmError(f"{folder}: these experts are drawn and never mixed, so nothing is weighed")
    held_out = HeldOutImages.read(data)
    held_out.check(model)
    is_routed = record.router not in (None, RELIABILITY)
    if isinstance(model.router, ReliabilityRouter):
        model.router = model.router.base
    rows = evenly_spaced(held_out.samples, most)
    conditions = {name: value[rows] for name, value in held_out.conditions(model).items()}
    weights = measured_weights(model, held_out.samples[rows], conditions, seed, is_routed=is_routed)
    rows_of_weights = tuple(tuple(row) for row in weights.tolist())
    known = ReliabilityRecord(
        times=TIMES, weights=rows_of_weights, data=held_out.hash, images=len(rows)
    )
    changes: dict[str, object] = {"reliability": known}
    if record.router is None:
        changes["router"] = RELIABILITY
    replace_ensemble_record(folder, record.model_copy(update=changes))
    return weights


def _grams(
    model: Ensemble, x_t: Tensor, t: Tensor, target: Tensor, conditions: Mapping[str, Tensor]
) -> Tensor:
    """Products of the errors of every two experts (n, K, K), per dimension."""
    errors = []
    for velocity in velocities_of(model, conditions):
        errors.append((velocity(x_t, t).cpu() - target).double().flatten(1))
    stacked = torch.stack(errors, 1)
    return torch.einsum("nkd,nld->nkl", stacked, stacked) / stacked.shape[2]
