"""Strategies, which choose the experts that run, and routers, which compute each expert's probability.

`Router` runs a network that was trained on all shards. `MomentsRouter` (by the image) and `PromptRouter` (by
the prompt) need no training and no data: they have one row per expert, so that adding or removing an expert
means adding or removing a row.

Strategies, for probabilities p of one sample over K experts:

    full          weights p
    top-k         the k most probable (ties to the lower index), k in 1 … K
    threshold-x   every expert with p >= x, the most probable one if there is none
    nucleus-x     the smallest set of the most probable whose sum reaches x
    draw          one expert per sample, drawn once from the prior and kept to the end of sampling
    commit-x      weights p above t = x; at x each sample draws one expert from p and keeps it

The weights of the chosen experts are renormalised to sum to 1.

``commit-x`` is as exact as ``full``: a state x_s of the mixture with an expert drawn from p(k | x_s) is a
draw of (k, x_s), and expert k alone carries it on to its own data. Below x one expert runs per sample, and
the router does not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor

from hddm.calibration import Moments
from hddm.networks.identity import TextEncoderRecord
from hddm.settings import parse_strategy
from hddm.utils.errors import HddmError
from hddm.utils.records import Record, parse_record
from hddm.utils.tensors import (
    parameter_dtype,
    read_header,
    read_safetensors,
    refuse_non_finite,
    refuse_other_kinds,
    sent,
    to_float64,
)


@dataclass(frozen=True)
class Strategy:
    """A parsed strategy; ``value`` is k or x, and unused by the others."""

    kind: str
    value: float = 0.0

    @classmethod
    def parse(cls, name: str) -> "Strategy":
        """Read ``top-2``, ``full``, ``threshold-0.1``, ``nucleus-0.9``, ``commit-0.8`` or ``draw``.

        Raises:
            HddmError: for another name, a k below 1 or an x outside (0, 1].
        """
        return cls(*parse_strategy(name))

    def check(self, num_experts: int) -> None:
        """Refuse a k above the number of experts."""
        if self.kind == "top" and self.value > num_experts:
            raise HddmError(f"top-{self.value:g} needs {self.value:g} experts and there are {num_experts}")


def sparse_weights(probabilities: Tensor, strategy: Strategy) -> Tensor:
    """Weights (batch, K), each row summing to 1, from ``probabilities`` (batch, K).

    Raises:
        HddmError: for a k above K, and for ``draw`` and ``commit-x``, which choose one expert by its index.
    """
    strategy.check(probabilities.shape[1])
    if strategy.kind == "full":
        return probabilities / probabilities.sum(1, keepdim=True)
    # A stable sort breaks ties in favour of the lower index.
    ranked, order = probabilities.sort(dim=1, descending=True, stable=True)
    rank = torch.arange(ranked.shape[1], device=ranked.device)
    match strategy.kind:
        case "top":
            chosen = (rank < strategy.value).expand_as(ranked)
        case "threshold":
            chosen = (ranked >= strategy.value) | (rank == 0)
        case "nucleus":
            # An expert belongs to the set while those before it have not reached the share.
            before = ranked.cumsum(1).roll(1, dims=1)
            chosen = (before < strategy.value) | (rank == 0)
        case other:
            raise HddmError(f"strategy {other} chooses one expert per sample, and has no weights")
    kept = torch.zeros_like(probabilities).scatter(1, order, ranked * chosen)
    return kept / kept.sum(1, keepdim=True)


class Choice:
    """Which experts run for which samples: ``weights`` (batch, K) on the CPU, grouped once by expert."""

    def __init__(self, weights: Tensor) -> None:
        self.weights = weights
        used = weights != 0
        self.rows = {k: used[:, k].nonzero()[:, 0] for k in used.any(0).nonzero()[:, 0].tolist()}
        """Indices of an expert's samples, by expert."""
        self._parts: dict[int, tuple[Tensor | None, Tensor]] | None = None

    @classmethod
    def of(cls, expert: Tensor, num_experts: int) -> "Choice":
        """The choice of one expert for each sample, ``expert`` (batch,) on the CPU."""
        return cls(torch.nn.functional.one_hot(expert.long(), num_experts).float())

    def parts(self, device: torch.device) -> dict[int, tuple[Tensor | None, Tensor]]:
        """Rows (None for all) and weights of each expert on ``device``, sent there once."""
        if self._parts is None:
            self._parts = {
                k: (
                    None if len(rows) == len(self.weights) else sent(rows, device),
                    sent(self.weights[rows, k], device),
                )
                for k, rows in self.rows.items()
            }
        return self._parts


class Router:
    """Probabilities p(k | x_t, t) over experts, from the logits of a network.

        p = softmax(logits[outputs] / temperature(t))

    Leaving outputs out is exact: it conditions the posterior on the remaining shards. Experts of one output
    divide its probability by their shares.

    Args:
        network: ``network(x_t, timestep)`` to logits (batch, outputs of the network).
        time_scale: the network is fed t × ``time_scale``.
        temperatures: at times spread evenly over [0, 1], linear between; one number holds everywhere.
        outputs: of the network, for each expert; None for all in order.
        shares: of each expert in p(k); they count where experts have one output in common.
    """

    def __init__(
        self,
        network: Callable[..., Tensor],
        time_scale: float = 1000.0,
        temperatures: Sequence[float] = (1.0,),
        outputs: Sequence[int] | None = None,
        shares: Sequence[float] | None = None,
    ) -> None:
        self.network = network
        self.time_scale = time_scale
        self.temperatures = tuple(temperatures)
        self.outputs = None if outputs is None else list(outputs)
        self._parts: Tensor | None = None
        if outputs is not None and len(set(outputs)) < len(outputs):
            # Experts of one output that have no share divide it all the same.
            own = torch.tensor(shares or [1.0] * len(outputs), dtype=torch.float64).clamp_min(1e-300)
            same = torch.tensor(outputs)[:, None] == torch.tensor(outputs)
            self._parts = own / (same * own).sum(1)

    def __call__(self, x_t: Tensor, t: Tensor) -> Tensor:
        """Probabilities (batch, K) for x_t (batch, C, H, W) on the common path at t (batch,).

        Their dtype, and the dtype of the network's times, is x_t's, float32 at least.
        """
        wide = torch.promote_types(x_t.dtype, torch.float32)
        dtype = parameter_dtype(self.network) or wide
        timestep = sent(to_float64(t) * self.time_scale, x_t.device, wide)
        logits = self.network(x_t.to(dtype), timestep).to(wide)
        if self.outputs is not None:
            logits = logits[:, self.outputs]
        temperature = sent(temperature_at(t, self.temperatures), logits.device, logits.dtype)
        logits = logits / temperature[:, None]
        if self._parts is not None:
            logits = logits + sent(self._parts.log(), logits.device, logits.dtype)
        return logits.softmax(1)


def answer_of(
    router: Callable[[Tensor, Tensor], Tensor], x_t: Tensor, t: Tensor, num: int, may_be_nan: bool = False
) -> Tensor:
    """Any router's probabilities (batch, num) of x_t (batch, …) at t (batch,), checked, on the CPU.

    Rows that are not finite, which states that are not finite lead to, pass with ``may_be_nan``.
    """
    dtype = torch.promote_types(x_t.dtype, torch.float32)
    found = router(x_t, sent(t, x_t.device, dtype)).to("cpu", dtype)
    rows = found[found.isfinite().all(-1)] if may_be_nan else found
    # Logits passed for probabilities would mix into something that looks like a velocity.
    are_probabilities = (rows >= 0).all() and ((rows.sum(-1) - 1).abs() < 1e-2).all()
    if found.shape != (len(x_t), num) or not are_probabilities:
        raise HddmError(
            f"the router gave {tuple(found.shape)}, which are not {(len(x_t), num)} probabilities, rows of "
            "sum 1; apply a softmax?"
        )
    return found


def given_condition(probabilities: Tensor, prior: Tensor, shares: Tensor) -> Tensor:
    """p(k | x_t, c) = p(k | x_t) p(k | c) / p(k), normalised, (batch, K).

    From p(k | x_t) (batch, K), p(k) = ``prior`` (K,) and p(k | c) = ``shares`` (batch, K).
    """
    # A shard of no size has no images of any class.
    product = probabilities * torch.where(prior > 0, shares / prior, 0).to(probabilities)
    total = product.sum(1, keepdim=True)
    # The router may set every shard of a class to 0; the requested class decides.
    return torch.where(total > 0, product / total, shares.to(probabilities))


def temperature_at(t: Tensor, temperatures: Sequence[float]) -> Tensor:
    """Temperature (batch,) at t (batch,) in [0, 1], in float64."""
    table = torch.tensor(temperatures, dtype=torch.float64)
    if len(table) == 1:
        return table.expand(len(t))
    place = to_float64(t) * (len(table) - 1)
    table = sent(table, place.device)
    left = place.floor().clamp(0, len(table) - 2)
    return torch.lerp(table[left.long()], table[left.long() + 1], place - left)


class MomentsRouter:
    """Probabilities p(k | x_t, t) over experts, in closed form from the moments of their data.

        p(k | x_t) proportional to p(k) N(x_t; (1 - t) m_k, (1 - t)² C_k + t² I)^(1/T)

    With T = 1 this is the exact posterior of Gaussian data. Other data are less sure, since the directions
    that a Gaussian counts as independent evidence are not. There are D(t) of them whose variance exceeds the
    noise's (`hddm.calibration.Moments.directions`), on average over experts, and

        T(t) = max(1, D(t) / evidence).

    Args:
        moments: of each expert's data, in order; all of images of one shape.
        prior: p(k), K numbers with a positive sum; None for equal ones.
        evidence: directions that count in full; None for all, so that T = 1.

    Raises:
        HddmError: for no moments, or moments of several shapes.
    """

    def __init__(
        self, moments: Sequence[Moments], prior: Sequence[float] | None = None, evidence: float | None = None
    ) -> None:
        sizes = [len(one.mean) for one in moments]
        if len(set(sizes)) != 1:
            raise HddmError(f"a router by moments needs images of one shape, not of {sizes} numbers")
        self.moments = list(moments)
        # Means of classes may be many, and do not count here.
        self._own = [replace(one, class_means=None) for one in moments]
        self.prior = tuple(prior or [1.0] * len(sizes))
        self.evidence = evidence

    def __call__(self, x_t: Tensor, t: Tensor) -> Tensor:
        """Probabilities (batch, K) for x_t (batch, …) at t (batch,), computed in float64.

        Their dtype is x_t's, float32 at least.
        """
        flat, times = to_float64(x_t.flatten(1)), to_float64(t)
        own, times = [one.to(flat) for one in self._own], sent(times, flat.device)
        logits = torch.stack([one.log_likelihood(flat, times) for one in own], 1)
        prior = sent(torch.tensor(self.prior, dtype=flat.dtype), flat.device)
        if self.evidence is not None:
            directions = torch.stack([one.directions(times) for one in own], 1) @ (prior / prior.sum())
            logits /= (directions / self.evidence).clamp_min(1)[:, None]
        logits += prior.log()
        return logits.softmax(1).to(x_t.device, torch.promote_types(x_t.dtype, torch.float32))


TOPIC = "topic.safetensors"
_HEADER = "described"
SPREAD = 0.01
"""Share of the captions' variance around the means of their clusters that each direction is taken to have."""
RIDGE = 1e-6
FLOOR = 0.1
"""Experts whose probability for a prompt is below this share of the largest one get none of it."""


class TopicRecord(Record):
    """Header of ``topic.safetensors``."""

    count: Annotated[int, Field(ge=1)]
    """Captions that the statistics are of."""
    source: str
    """The file or shard of the captions, or texts that stand for them."""
    variance: Annotated[float, Field(ge=0)]
    """Mean squared distance of the captions' embeddings from the means of their clusters."""
    text_encoder: TextEncoderRecord


@dataclass(frozen=True, eq=False)
class Topic:
    """Clusters of the embeddings z of an expert's captions, scaled to length 1, in D numbers.

    ``means`` (r, D) are the means of r clusters (`hddm.experts.topics`), ``parts`` (r,) the clusters'
    shares of the captions, and ``variance`` is the mean squared distance of z from the mean of its cluster.
    """

    means: Tensor
    parts: Tensor
    variance: float
    record: TopicRecord | None = None

    def save(self, folder: Path) -> None:
        """Write ``topic.safetensors`` into an expert folder, in float16: kilobytes, and no caption."""
        assert self.record is not None
        tensors = {"means": self.means.half(), "parts": self.parts.half()}
        save_file(tensors, folder / TOPIC, {_HEADER: self.record.model_dump_json()})

    @classmethod
    def load(cls, folder: Path) -> "Topic | None":
        """Read the topic of an expert folder, None where there is none; `HddmError` for a broken file."""
        path = folder / TOPIC
        if not path.exists():
            return None
        tensors, header = read_safetensors(path), read_header(path)[1].get(_HEADER, "{}")
        record = parse_record(header.encode(), TopicRecord, f"{path}: {_HEADER}")
        refuse_other_kinds(path, tensors, {"means": (torch.float16, 2), "parts": (torch.float16, 1)})
        refuse_non_finite(path, tensors)
        means, parts = tensors["means"].double(), tensors["parts"].double()
        if means.shape[1] != record.text_encoder.width or not len(parts) or not (parts > 0).all():
            raise HddmError(f"{path}: is not what was written; delete it and run hddm describe")
        return cls(means, parts / parts.sum(), record.variance, record)


class PromptRouter:
    """Probabilities p(k | prompt) over experts, by logistic regression on the topics of their captions.

        q(z) = softmax(W z + b),     p(k | z) proportional to p(k) q_k(z), or 0 where q_k < `FLOOR` max q

    z is the prompt's embedding, scaled to length 1, then centred and divided by its deviation. W and b
    minimise the mean, over experts k and over their clusters j by their parts, of

        log sum_i exp((W_i - W_k) m_kj + b_i - b_k + s_k ‖W_i - W_k‖²/2)  +  ridge ‖W‖²/2

    where m_kj is a cluster's mean and s_k is `SPREAD` of the topic's variance: a bound of the cross-entropy
    where clusters are Gaussian (arXiv:1909.12220). So a caption that several experts have goes to each as
    often as it is theirs, and wordings as no caption has them go to the nearest topic. The maximum of q is
    over experts with p(k) > 0. Each expert is a row: adding or removing one leaves the topics of others as
    they are.

    Args:
        topics: of each expert's captions, None for an expert that no prompt is for.
        prior: p(k), K numbers with a positive sum.
        ridge: weight of ‖W‖²; the smaller, the surer is the router of topics that lie apart.
    """

    def __init__(self, topics: Sequence[Topic | None], prior: Sequence[float], ridge: float = RIDGE) -> None:
        self.topics = list(topics)
        self._slopes, self._offsets = _regression(tuple(one for one in topics if one is not None), ridge)
        self._is_known = torch.tensor([topic is not None for topic in topics])
        shares = torch.tensor(prior, dtype=torch.float64)[self._is_known]
        # Where only experts without a share are described, they are equal.
        self._prior = shares if shares.any() else torch.ones_like(shares)

    def __call__(self, embeddings: Tensor) -> Tensor:
        """Probabilities (batch, K), in float64, for embeddings (batch, D) of prompts."""
        unit = torch.nn.functional.normalize(to_float64(embeddings).cpu(), dim=1)
        known = (unit @ self._slopes.T + self._offsets).softmax(1)
        known = known * (self._prior > 0)
        known = known * (known >= FLOOR * known.amax(1, keepdim=True))
        found = torch.zeros(len(unit), len(self.topics), dtype=torch.float64)
        found[:, self._is_known] = known * self._prior
        return found / found.sum(1, keepdim=True)


@lru_cache(maxsize=16)
def _regression(topics: tuple[Topic, ...], ridge: float) -> tuple[Tensor, Tensor]:
    """W (K, D) and b (K,) for embeddings as they are; see `PromptRouter`."""
    with torch.inference_mode(False), torch.enable_grad():
        means = torch.cat([topic.means for topic in topics])
        parts = torch.cat([topic.parts for topic in topics]) / len(topics)
        variance = torch.tensor([topic.variance for topic in topics], dtype=torch.float64)
        own = torch.arange(len(topics)).repeat_interleave(torch.tensor([len(one.parts) for one in topics]))
        centre = parts @ means
        apart = means - centre
        # Without any variance all topics are one, and any number above 0 will do.
        unit = (parts @ apart.square().sum(1) + variance.mean()).clamp_min(1e-12).sqrt()
        apart, spread = apart / unit, SPREAD * variance / unit**2
        _, lengths, directions = torch.linalg.svd(parts.sqrt()[:, None] * apart, full_matrices=False)
        points = apart @ directions.T
        # The search is far shorter where the means vary alike in all directions.
        steps = (lengths.square() + 1e-4).rsqrt()
        taken = torch.zeros(len(topics), len(steps), dtype=torch.float64, requires_grad=True)
        offsets = torch.zeros(len(topics), dtype=torch.float64, requires_grad=True)
        search = torch.optim.LBFGS(
            [taken, offsets],
            max_iter=200,
            tolerance_grad=1e-8,
            tolerance_change=1e-14,
            history_size=20,
            line_search_fn="strong_wolfe",
        )

        def loss() -> Tensor:
            search.zero_grad()
            slopes = taken * steps
            logits = points @ slopes.T + offsets
            between = (slopes[:, None] - slopes).square().sum(2) * spread[:, None] / 2
            margins = logits - logits.gather(1, own[:, None]) + between[own]
            value: Tensor = parts @ margins.logsumexp(1) + ridge / 2 * slopes.square().sum()
            value.backward()
            return value

        search.step(loss)
    found = (taken.detach() * steps) @ directions / unit
    return found, offsets.detach() - found @ centre
