"""Experts and a router as one velocity field.

    v(x, t) = sum_k w_k(x, t) v_k(x, t)

With w_k = p(k | x_t), the posterior of the shard, this is exactly the velocity of the whole data
(DDM, arXiv:2501.05450, section 3.2), whatever each expert was trained to predict. A strategy
(`hddm.routing`) sets small weights to 0, and experts of weight 0 do not run.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from hddm.errors import HddmError
from hddm.routing import Strategy, sparse_weights
from hddm.velocity import VelocityField, check_conditions, check_times


class Ensemble:
    """Velocity field of ``experts`` mixed by ``router``.

    Args:
        experts: velocity fields on the common path, one a shard.
        router: ``router(x_t, t)`` to probabilities (batch, K). Only ``draw`` does without.
        strategy: see `hddm.routing`; can be set later.
        prior: K shard sizes or probabilities that ``draw`` draws from; None for equal ones.

    Raises:
        HddmError: for no experts, an unknown strategy, a k above K, or a prior that is not K
            non-negative numbers with a positive sum.
    """

    def __init__(
        self,
        experts: Sequence[VelocityField],
        router: Callable[[Tensor, Tensor], Tensor] | None = None,
        strategy: str = "nucleus-0.9",
        prior: Sequence[float] | Tensor | None = None,
    ) -> None:
        if not experts:
            raise HddmError("an ensemble needs at least one expert")
        self.experts = list(experts)
        self.router = router
        self.prior = _normalised(prior, len(self.experts))
        self.strategy = strategy

    @property
    def strategy(self) -> str:
        """Name of the strategy in force."""
        return self._name

    @strategy.setter
    def strategy(self, name: str) -> None:
        parsed = Strategy.parse(name)
        parsed.check(len(self.experts))
        self._name, self._strategy = name, parsed

    @property
    def sample_shape(self) -> tuple[int, ...] | None:
        """Shape (C, H, W) of a sample, None where no expert tells."""
        return next((e.sample_shape for e in self.experts if e.sample_shape is not None), None)

    @property
    def device(self) -> torch.device:
        """Where the first expert is; all experts are taken to be there."""
        return self.experts[0].device

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, empty where no expert has any."""
        return next((e.classes for e in self.experts if e.classes), ())

    def velocity(
        self,
        x_t: Tensor,
        t: Tensor,
        guidance_scale: float = 1.0,
        negative: Mapping[str, Tensor] | None = None,
        expert: Tensor | None = None,
        **conditions: Tensor,
    ) -> Tensor:
        """Velocity of the mixture.

        An expert sees the samples that need it and no others.

        Args:
            x_t: (batch, …).
            t: (batch,) in [0, 1].
            guidance_scale: applied by each expert, before mixing; 1 for none.
            negative: conditions of the negative branch.
            conditions: keywords of the experts' networks; each expert gets those that it declares.
            expert: (batch,) indices of the one expert for each sample, instead of the strategy.

        Raises:
            HddmError: as `VelocityField.velocity`; for a strategy that needs a router where there is
                none; for ``draw`` without ``expert``; for a condition that no expert declares.
        """
        times = check_times(x_t, t)
        check_conditions(x_t, {**conditions, **(negative or {})})
        weights = self.weights(x_t, times, expert)
        given = self._shared_out(conditions)
        against = self._shared_out(negative or {})
        mixed = torch.zeros_like(x_t, dtype=torch.promote_types(x_t.dtype, torch.float32))
        for index, field in enumerate(self.experts):
            rows = weights[:, index].nonzero()[:, 0]
            if not len(rows):
                continue
            v = field.velocity(
                x_t[rows].to(mixed.dtype),
                times[rows.to(times.device)],
                # An expert without conditions has nothing to be guided by, and takes part as it is.
                guidance_scale if given[index] or not conditions else 1.0,
                {key: value[rows] for key, value in against[index].items()} or None,
                **{key: value[rows] for key, value in given[index].items()},
            )
            share = weights[rows, index].view(-1, *[1] * (x_t.ndim - 1))
            mixed.index_add_(0, rows, share.to(mixed) * v)
        return mixed.to(x_t.dtype)

    def weights(self, x_t: Tensor, t: Tensor, expert: Tensor | None = None) -> Tensor:
        """Weights (batch, K) of the experts at x_t (batch, …) and t (batch,), by the strategy."""
        if expert is not None:
            if expert.shape != (len(x_t),) or not ((expert >= 0) & (expert < len(self.experts))).all():
                raise HddmError(
                    f"expert= takes an index in 0 … {len(self.experts) - 1} for each of {len(x_t)} states, "
                    f"not {expert.tolist()}"
                )
            return torch.nn.functional.one_hot(expert.long(), len(self.experts)).to(x_t.device, torch.float32)
        if self._strategy.kind == "draw":
            raise HddmError(
                "strategy 'draw' keeps one expert a sample: pass expert= indices, or use hddm.sample, "
                "which draws them"
            )
        if len(self.experts) == 1:
            return torch.ones(len(x_t), 1, device=x_t.device)
        if self.router is None:
            raise HddmError(f"strategy {self.strategy!r} needs a router; only 'draw' does without")
        state_dtype = torch.promote_types(x_t.dtype, torch.float32)
        probabilities = self.router(x_t, t.to(x_t.device, state_dtype)).to(state_dtype)
        if probabilities.shape != (len(x_t), len(self.experts)):
            raise HddmError(
                f"the router gave {tuple(probabilities.shape)} probabilities for {len(x_t)} states and "
                f"{len(self.experts)} experts"
            )
        # Logits passed for probabilities would mix into something that looks like a velocity.
        if not ((probabilities >= 0).all() and ((probabilities.sum(1) - 1).abs() < 1e-2).all()):
            raise HddmError("the router's rows are no probabilities (non-negative, sum 1); apply a softmax?")
        return sparse_weights(probabilities, self._strategy)

    def _shared_out(self, conditions: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        shares = [
            {k: v for k, v in conditions.items() if e.conditions is None or k in e.conditions}
            for e in self.experts
        ]
        for name in conditions:
            if not any(name in share for share in shares):
                raise HddmError(f"no expert of this ensemble takes a condition {name!r}")
        return shares


def _normalised(prior: Sequence[float] | Tensor | None, num_experts: int) -> Tensor:
    if prior is None:
        return torch.full((num_experts,), 1 / num_experts, dtype=torch.float64)
    values = torch.as_tensor(prior, dtype=torch.float64)
    if values.shape != (num_experts,) or not (values >= 0).all() or not 0 < values.sum() < torch.inf:
        raise HddmError(f"prior must be {num_experts} non-negative numbers with a positive sum, not {prior}")
    return values / values.sum()
