"""Routers: the probabilities that a noised image, or a prompt, is for expert k.

`Router` asks a network that was trained on all shards. `MomentsRouter` (by the image) and `PromptRouter` (by
the prompt) need no training and no data: they have one row an expert, so that adding or removing an expert is
adding or removing a row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor

from hddm.calibration import Moments
from hddm.networks.identity import TextEncoderRecord
from hddm.utils.documents import parse_object
from hddm.utils.errors import HddmError
from hddm.utils.records import Record, parse_record
from hddm.utils.tensors import (
    parameter_dtype,
    read_header,
    read_safetensors,
    refuse_non_finite,
    refuse_other_kinds,
    to_float64,
)


class Router:
    """Probabilities p(k | x_t, t) over experts, from a network that gives logits.

        p = softmax(logits[outputs] / temperature(t))

    Leaving outputs out is exact: of a posterior over more shards it makes that over the ones kept. Experts of
    one output divide its probability by their shares.

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

        Their dtype, and that of the times that the network gets, is x_t's, float32 at least.
        """
        wide = torch.promote_types(x_t.dtype, torch.float32)
        dtype = parameter_dtype(self.network) or wide
        timestep = (to_float64(t) * self.time_scale).to(x_t.device, wide)
        logits = self.network(x_t.to(dtype), timestep).to(wide)
        if self.outputs is not None:
            logits = logits[:, self.outputs]
        logits = logits / temperature_at(t, self.temperatures).to(logits)[:, None]
        if self._parts is not None:
            logits = logits + self._parts.log().to(logits)
        return logits.softmax(1)


def temperature_at(t: Tensor, temperatures: Sequence[float]) -> Tensor:
    """Temperature (batch,) at t (batch,) in [0, 1], in float64."""
    table = torch.tensor(temperatures, dtype=torch.float64)
    if len(table) == 1:
        return table.expand(len(t))
    place = to_float64(t).cpu() * (len(table) - 1)
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
        HddmError: for no moments, moments of several shapes, another prior, or evidence that is not above 0.
    """

    def __init__(
        self,
        moments: Sequence[Moments],
        prior: Sequence[float] | None = None,
        evidence: float | None = None,
    ) -> None:
        sizes = [len(one.mean) for one in moments]
        if len(set(sizes)) != 1:
            raise HddmError(f"a router by moments needs those of images of one shape, not of {sizes} numbers")
        if evidence is not None and not 0 < evidence < torch.inf:
            raise HddmError(f"evidence must be a number above 0, not {evidence}")
        self.moments = list(moments)
        self.prior = tuple(prior or [1.0] * len(sizes))
        self.evidence = evidence
        if len(self.prior) != len(sizes) or min(self.prior) < 0 or not 0 < sum(self.prior) < torch.inf:
            raise HddmError(f"prior must be {len(sizes)} numbers, none below 0 and not all 0, not {prior}")

    def __call__(self, x_t: Tensor, t: Tensor) -> Tensor:
        """Probabilities (batch, K) for x_t (batch, …) at t (batch,), computed in float64.

        Their dtype is x_t's, float32 at least.
        """
        flat, times = to_float64(x_t.flatten(1)), to_float64(t)
        own, times = [one.to(flat) for one in self.moments], times.to(flat.device)
        logits = torch.stack([one.log_likelihood(flat, times) for one in own], 1)
        prior = torch.tensor(self.prior, dtype=flat.dtype, device=flat.device)
        if self.evidence is not None:
            directions = torch.stack([one.directions(times) for one in own], 1) @ (prior / prior.sum())
            logits /= (directions / self.evidence).clamp_min(1)[:, None]
        logits += prior.log()
        return logits.softmax(1).to(x_t.device, torch.promote_types(x_t.dtype, torch.float32))


TOPIC = "topic.safetensors"
_HEADER = "described"
MAX_DIRECTIONS = 16
SPREAD = 0.0005
"""Share of all variance that every direction of a prompt is taken to have by chance."""


class TopicRecord(Record):
    """Header of ``topic.safetensors``."""

    count: Annotated[int, Field(ge=1)]
    """Captions that the statistics are of."""
    source: str
    """The file or shard of the captions, or texts that stand for them."""
    text_encoder: TextEncoderRecord


@dataclass(frozen=True)
class Topic:
    """Statistics of the embeddings z of an expert's captions, scaled to length 1, in D numbers.

    ``count`` says of how many captions, ``mean`` (D,) is their mean, and ``factor`` (D, r) holds their r
    largest principal directions, each as long as the deviation along it.
    """

    count: int
    mean: Tensor
    factor: Tensor
    record: TopicRecord | None = None

    @classmethod
    def of(cls, embeddings: Tensor) -> "Topic":
        """Statistics of ``embeddings`` (N, D) of captions."""
        unit = torch.nn.functional.normalize(to_float64(embeddings), dim=1)
        mean = unit.mean(0)
        _, lengths, directions = torch.linalg.svd((unit - mean) / len(unit) ** 0.5, full_matrices=False)
        rank = min(MAX_DIRECTIONS, len(unit) - 1)
        return cls(len(unit), mean, directions[:rank].T * lengths[:rank])

    def save(self, folder: Path) -> None:
        """Write ``topic.safetensors`` into an expert folder, in float16: kilobytes, and no caption."""
        assert self.record is not None
        tensors = {"mean": self.mean.half(), "factor": self.factor.half().contiguous()}
        save_file(tensors, folder / TOPIC, {_HEADER: self.record.model_dump_json()})

    @classmethod
    def load(cls, folder: Path) -> "Topic | None":
        """Read the topic of an expert folder, None where there is none; `HddmError` for a broken file."""
        path = folder / TOPIC
        if not path.exists():
            return None
        remedy = "delete it and describe the expert anew"
        tensors, header = read_safetensors(path), read_header(path)[1].get(_HEADER, "{}")
        record = parse_record(parse_object(header, f"{path}: {_HEADER}"), TopicRecord, f"{path}: {_HEADER}")
        refuse_other_kinds(path, tensors, {"mean": (torch.float16, 1), "factor": (torch.float16, 2)})
        refuse_non_finite(path, tensors)
        width = record.text_encoder.width
        if len(tensors["mean"]) != width or len(tensors["factor"]) != width:
            raise HddmError(f"{path}: is not of embeddings of {width} numbers; {remedy}")
        return cls(record.count, tensors["mean"].double(), tensors["factor"].double(), record)


class PromptRouter:
    """Probabilities p(k | prompt) over experts, in closed form from the topics of their captions.

        p(k | z) proportional to p(k) exp(m_k^T S^-1 (z - m_k/2)),     S = sum_k n_k C_k / sum_k n_k + s I

    z is the prompt's embedding, scaled to length 1, and C_k the covariance of `Topic`: this is the posterior
    of Gaussians with a covariance in common (linear discriminant analysis). s is `SPREAD` of the variance of
    all captions, for prompts are worded as no caption was. Each expert is a row: adding or removing one
    leaves the others' as they are.

    Args:
        topics: of each expert's captions, None for an expert that no prompt is for.
        prior: p(k), K numbers with a positive sum.
    """

    def __init__(self, topics: Sequence[Topic | None], prior: Sequence[float]) -> None:
        self.topics = list(topics)
        known = [topic for topic in topics if topic is not None]
        self._means = torch.stack([topic.mean for topic in known])
        parts = torch.tensor([topic.count for topic in known], dtype=torch.float64)
        parts /= parts.sum()
        factor = torch.cat([part.sqrt() * one.factor for part, one in zip(parts, known, strict=True)], 1)
        apart = self._means - parts @ self._means
        total = factor.square().sum() + (parts[:, None] * apart.square()).sum()
        # Without any variance all topics are one, and any number above 0 tells nobody apart.
        spread = (SPREAD * total).clamp_min(1e-12)
        # Woodbury's identity: S^-1 m without a matrix of D by D.
        inner = torch.linalg.solve(
            spread * torch.eye(factor.shape[1], dtype=torch.float64) + factor.T @ factor, factor.T
        )
        self._directions = (self._means - self._means @ factor @ inner) / spread
        is_known = torch.tensor([topic is not None for topic in topics])
        # Where only experts without a share are described, they are equal.
        parts = torch.tensor(prior, dtype=torch.float64).clamp_min(1e-300)
        self._log_prior = torch.where(is_known, parts, 0).log()
        self._places = is_known.nonzero()[:, 0]

    def __call__(self, embeddings: Tensor) -> Tensor:
        """Probabilities (batch, K), in float64, for embeddings (batch, D) of prompts."""
        unit = torch.nn.functional.normalize(to_float64(embeddings).cpu(), dim=1)
        scores = unit @ self._directions.T - (self._means * self._directions).sum(1) / 2
        logits = self._log_prior.repeat(len(unit), 1)
        logits[:, self._places] += scores
        return logits.softmax(1)
