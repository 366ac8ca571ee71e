"""Routers, which compute each expert's probability p(k | x_t, t) of having made a state.

`Router` runs a network that was trained on all shards, and may see the sample's condition c as well: then it
is p(k | x_t, t, c). `MomentsRouter` needs no training and no data: it has
one row per expert, so that adding or removing an expert means adding or removing a row. So does
`hddm.prompt_router.PromptRouter`, which looks at the prompt. Strategies (`hddm.strategies`) decide what
becomes of the probabilities.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from hddm.calibration import Moments
from hddm.router_condition import RouterCondition
from hddm.utils.errors import HddmError
from hddm.utils.tensors import parameter_dtype, sent, to_float64

NONE: Mapping[str, Tensor] = MappingProxyType({})


class Router:
    """Probabilities p(k | x_t, t), or p(k | x_t, t, c), over experts, from the logits of a network.

        p = softmax(logits[outputs] / temperature(t))

    Leaving outputs out is exact: it conditions the posterior on the remaining shards. Experts of one output
    divide its probability by their shares. With ``trained_shares``, shares p(k) other than those of the
    training count in full:

        p(k | x_t, c) proportional to p(k) softmax_k / trained share of k's output

    Args:
        network: ``network(x_t, timestep)`` to logits (batch, outputs of the network); with a ``condition``
            also by that keyword.
        time_scale: the network is fed t × ``time_scale``.
        temperatures: at times spread evenly over [0, 1], linear between; one number holds everywhere.
        outputs: of the network, for each expert; None for all in order.
        shares: of each expert in p(k); they count where experts have one output in common.
        condition: what it sees of the samples' conditions; None for nothing.
        trained_shares: of each output in the data of its training, in any unit; None where p(k) is theirs.
    """

    def __init__(
        self,
        network: Callable[..., Tensor],
        time_scale: float = 1000.0,
        temperatures: Sequence[float] = (1.0,),
        outputs: Sequence[int] | None = None,
        shares: Sequence[float] | None = None,
        condition: RouterCondition | None = None,
        trained_shares: Sequence[float] | None = None,
    ) -> None:
        self.network = network
        self.time_scale = time_scale
        self.temperatures = tuple(temperatures)
        self.outputs = None if outputs is None else list(outputs)
        self.condition = condition
        self._parts: Tensor | None = None
        if trained_shares is not None and shares is not None:
            trained = torch.tensor(trained_shares, dtype=torch.float64)
            trained = trained if outputs is None else trained[list(outputs)]
            own = torch.tensor(shares, dtype=torch.float64)
            # A shard of no image says nothing of its share.
            self._parts = (own / trained.where(trained > 0, own)).clamp_min(1e-300)
        elif outputs is not None and len(set(outputs)) < len(outputs):
            # Experts of one output that have no share divide it all the same.
            own = torch.tensor(shares or [1.0] * len(outputs), dtype=torch.float64).clamp_min(
                1e-300
            )
            same = torch.tensor(outputs)[:, None] == torch.tensor(outputs)
            self._parts = own / (same * own).sum(1)

    def __call__(self, x_t: Tensor, t: Tensor, **conditions: Tensor) -> Tensor:
        """Probabilities (batch, K) for x_t (batch, C, H, W) on the common path at t (batch,).

        Their dtype, and the dtype of the network's times, is x_t's, float32 at least. ``conditions`` are
        those of `RouterCondition.values`; without them it is asked with the null condition.
        """
        wide = torch.promote_types(x_t.dtype, torch.float32)
        dtype = parameter_dtype(self.network) or wide
        timestep = sent(to_float64(t) * self.time_scale, x_t.device, wide)
        if self.condition is not None:
            conditions = self.condition.nulls(len(x_t), x_t.device) | conditions
        given = {name: sent(value, x_t.device) for name, value in conditions.items()}
        logits = self.network(x_t.to(dtype), timestep, **given).to(wide)
        if self.outputs is not None:
            logits = logits[:, self.outputs]
        temperature = sent(temperature_at(t, self.temperatures), logits.device, logits.dtype)
        logits = logits / temperature[:, None]
        if self._parts is not None:
            logits = logits + sent(self._parts.log(), logits.device, logits.dtype)
        return logits.softmax(1)


def answer_of(
    router: Callable[..., Tensor],
    x_t: Tensor,
    t: Tensor,
    num: int,
    conditions: Mapping[str, Tensor] = NONE,
    may_be_nan: bool = False,
) -> Tensor:
    """Any router's probabilities (batch, num) of x_t (batch, …) at t (batch,), checked, on the CPU.

    ``conditions`` are those that it sees, by its own keyword. Rows that are not finite, which states that are
    not finite lead to, pass with ``may_be_nan``.
    """
    dtype = torch.promote_types(x_t.dtype, torch.float32)
    found = router(x_t, sent(t, x_t.device, dtype), **conditions).to("cpu", dtype)
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
        self,
        moments: Sequence[Moments],
        prior: Sequence[float] | None = None,
        evidence: float | None = None,
    ) -> None:
        sizes = [len(one.mean) for one in moments]
        if len(set(sizes)) != 1:
            raise HddmError(
                f"a router by moments needs images of one shape, not of {sizes} numbers"
            )
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
            directions = torch.stack([one.directions(times) for one in own], 1) @ (
                prior / prior.sum()
            )
            logits /= (directions / self.evidence).clamp_min(1)[:, None]
        logits += prior.log()
        return logits.softmax(1).to(x_t.device, torch.promote_types(x_t.dtype, torch.float32))
