"""A router by prompts: `PromptRouter` compares a prompt with the `Topic` of each expert's captions."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from hddm.topic_records import HEADER, TOPIC, TopicRecord, read_topic_record
from hddm.utils.errors import HddmError
from hddm.utils.tensors import (
    read_safetensors,
    refuse_non_finite,
    refuse_other_kinds,
    to_float64,
)

SPREAD = 0.01
"""Share of the captions' variance around the means of their clusters that each direction is taken to have."""
RIDGE = 1e-6
FLOOR = 0.1
"""Experts whose probability for a prompt is below this share of the largest one get none of it."""


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
        save_file(tensors, folder / TOPIC, {HEADER: self.record.model_dump_json()})

    @classmethod
    def load(cls, folder: Path) -> "Topic | None":
        """Read the topic of an expert folder, None where there is none; `HddmError` for a broken file."""
        path, record = folder / TOPIC, read_topic_record(folder)
        if record is None:
            return None
        tensors = read_safetensors(path)
        refuse_other_kinds(
            path, tensors, {"means": (torch.float16, 2), "parts": (torch.float16, 1)}
        )
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

    def __init__(
        self, topics: Sequence[Topic | None], prior: Sequence[float], ridge: float = RIDGE
    ) -> None:
        self.topics = list(topics)
        self._slopes, self._offsets = _regression(
            tuple(one for one in topics if one is not None), ridge
        )
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
        own = torch.arange(len(topics)).repeat_interleave(
            torch.tensor([len(one.parts) for one in topics])
        )
        centre = parts @ means
        apart = means - centre
        # Without any variance all topics are one, and any number above 0 will do.
        unit = (parts @ apart.square().sum(1) + variance.mean()).clamp_min(1e-12).sqrt()
        apart, spread = apart / unit, SPREAD * variance / unit**2
        _, lengths, directions = torch.linalg.svd(
            parts.sqrt()[:, None] * apart, full_matrices=False
        )
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
