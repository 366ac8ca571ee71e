"""How often the networks of an ensemble run for samples, counted on the way that these take.

`hddm.running.run` integrates them with networks that count their samples and return zeros, so that steps,
solver, strategy, guidance, noise ranges and pictures decide here as they do in earnest. A router counts too,
and what it answers cannot be known: where the strategy makes the number of experts depend on that, there are
a least and a greatest count.
"""

import copy
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from hddm.ensemble import Ensemble
from hddm.running import Batch, Plan, run
from hddm.strategies import Strategy

WALKED = 32
"""Samples that are walked of those that run the same; the others count like these."""


class Network(NamedTuple):
    """A network of an ensemble: that of an expert, or of its weak model."""

    expert: int
    is_weak: bool = False


ROUTER = Network(-1)


@dataclass
class Calls:
    """Samples that went through each network, each of them once per call."""

    samples: dict[Network, float] = field(default_factory=dict)
    largest: dict[Network, int] = field(default_factory=dict)
    """Most samples of one call of each network; guidance doubles them."""

    def add(self, network: Network, number: int) -> None:
        """Count a call."""
        self.samples[network] = self.samples.get(network, 0.0) + number
        self.largest[network] = max(self.largest.get(network, 0), number)

    def add_beside(self, other: "Calls", factor: float) -> None:
        """Count the calls of ``factor`` times as many samples of the same batch."""
        for network, number in other.samples.items():
            self.samples[network] = self.samples.get(network, 0.0) + number * factor
            most = round(other.largest[network] * factor)
            self.largest[network] = self.largest.get(network, 0) + most

    def add_after(self, other: "Calls") -> None:
        """Count the calls of another batch."""
        for network, number in other.samples.items():
            self.samples[network] = self.samples.get(network, 0.0) + number
            most = max(self.largest.get(network, 0), other.largest[network])
            self.largest[network] = most

    @property
    def of_experts(self) -> int:
        """Samples that went through networks of experts."""
        return round(sum(number for one, number in self.samples.items() if one != ROUTER))

    @property
    def of_router(self) -> int:
        """Samples that went through the router."""
        return round(self.samples.get(ROUTER, 0.0))

    @property
    def networks(self) -> list[Network]:
        """The networks of experts that run, in the experts' order."""
        return sorted(one for one in self.samples if one != ROUTER)


class _Counting:
    """In place of a network: counts the samples of its calls, and returns zeros."""

    def __init__(self, network: Network, calls: Calls) -> None:
        self._network, self._calls = network, calls

    def __call__(self, x: Tensor, timestep: Tensor, **conditions: Tensor) -> Tensor:
        self._calls.add(self._network, len(x))
        return torch.zeros_like(x)


class _CountingRouter:
    """In place of a router: finds the first ``number`` of ``domains`` equally probable, and no other."""

    def __init__(self, model: Ensemble, number: int, calls: Calls) -> None:
        self._probabilities = torch.zeros(len(model.experts))
        self._probabilities[sorted(set(model.domains))[:number]] = 1 / number
        self._calls = calls
        self.condition = model.router_condition

    def __call__(self, x: Tensor, t: Tensor, **conditions: Tensor) -> Tensor:
        self._calls.add(ROUTER, len(x))
        return self._probabilities.expand(len(x), -1)


def count_calls(plan: Plan, batches: Iterable[Batch]) -> tuple[Calls, Calls]:
    """Count what samples run: the least and the greatest that the router's answers may lead to.

    Both are the same unless the strategy is ``nucleus-x`` or ``threshold-x``. Of samples that run the same,
    one is walked, or the first `WALKED` where experts are mixed, since each may then end with another expert.
    """
    model = plan.model
    listed = list(batches)
    is_fixed = plan.expert is not None or _has_fixed_number(model)
    most = _most_spread(model)
    greatest = _count(plan, listed, most)
    return (greatest if is_fixed else _count(plan, listed, 1)), greatest


def _has_fixed_number(model: Ensemble) -> bool:
    strategy = Strategy.parse(model.strategy)
    return model.num_domains == 1 or strategy.has_fixed_number or strategy.keeps_one


def _most_spread(model: Ensemble) -> int:
    """Number of equally probable domains of which the strategy keeps the most."""
    strategy, domains = Strategy.parse(model.strategy), model.num_domains
    if _has_fixed_number(model):
        return domains
    kept = {}
    for number in range(1, domains + 1):
        probabilities = torch.zeros(1, domains)
        probabilities[:, :number] = 1 / number
        kept[number] = int((strategy.weights(probabilities) > 0).sum())
    return max(kept, key=kept.__getitem__)


def _count(plan: Plan, batches: Iterable[Batch], probable: int) -> Calls:
    found = Calls()
    walked = dict[Hashable, tuple[Calls, int]]()
    for batch in batches:
        of_batch = Calls()
        for key, rows in _alike(plan.model, batch).items():
            if key not in walked:
                first = rows[: 1 if batch.expert is not None else WALKED]
                walked[key] = _walk(plan, batch.part(first), probable), len(first)
            calls, number = walked[key]
            of_batch.add_beside(calls, len(rows) / number)
        found.add_after(of_batch)
    return found


def _alike(model: Ensemble, batch: Batch) -> Mapping[Hashable, Tensor]:
    """Rows of a batch that run the same: of one expert, or of one p(k | condition) where they are mixed."""
    if batch.expert is not None:
        keys = batch.expert.tolist()
    else:
        shares = model.shares_of(len(batch.rows), batch.conditions.given, batch.conditions.prior)
        if shares is None:
            return {None: torch.arange(len(batch.rows))}
        keys = [tuple(row) for row in shares.tolist()]
    found: dict[Hashable, list[int]] = {}
    for row, key in enumerate(keys):
        found.setdefault(key, []).append(row)
    return {key: torch.tensor(rows) for key, rows in found.items()}


def possible_experts(model: Ensemble, batches: Iterable[Batch]) -> list[int]:
    """The experts that a router may choose for these samples: all that their conditions allow."""
    allowed = torch.zeros(len(model.experts), dtype=torch.bool)
    for batch in batches:
        given, prior = batch.conditions.given, batch.conditions.prior
        shares = model.shares_of(len(batch.rows), given, prior)
        allowed |= torch.ones_like(allowed) if shares is None else (shares > 0).any(0)
    # Those of a domain take turns.
    domains = torch.tensor(model.domains)
    chosen = domains[allowed].unique()
    return torch.isin(domains, chosen).nonzero()[:, 0].tolist()


def _walk(plan: Plan, batch: Batch, probable: int) -> Calls:
    """Count the calls of one batch, with a router that finds so many domains ``probable``."""
    calls, model = Calls(), plan.model
    other = copy.copy(model)
    parts = []
    for k, part in enumerate(model.parts):
        one = copy.copy(part.field)
        one.network = _Counting(Network(k), calls)
        if one.weak is not None:
            one.weak = copy.copy(one.weak)
            one.weak.network = _Counting(Network(k, True), calls)
        parts.append(replace(part, field=one))
    other.parts = tuple(parts)
    other.experts = [part.field for part in parts]
    if model.router is not None:
        other.router = _CountingRouter(model, probable, calls)
    conditions = batch.conditions.map(lambda value: value.cpu())
    run(replace(plan, model=other), replace(batch, conditions=conditions))
    return calls
