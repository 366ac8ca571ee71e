"""Weights that know each expert's errors: a router by noise level, alone or on top of another router.

Experts of one domain that were trained with different objectives are good at different noise levels, and
their errors are correlated. At time t the mix sum over k of w_k v_k, with weights that sum to 1, has the mean
squared error w^T G w, where

    G_kl = E <v_k - u, v_l - u> / D,    u = eps - x_0,

so the best weights are those of a convex problem with as many unknowns as experts. They are measured on
held-out images at a few times (`hddm.objective.reliability`), and linear in t between.

On top of a router they are factors: w_k(t) p(k | x_t, t), normalised.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hddm.router_condition import RouterCondition
from hddm.utils.errors import HddmError
from hddm.utils.tensors import sent, to_float64


class ReliabilityRouter:
    """Weights w_k(t) of experts, or w_k(t) p(k | x_t, t) normalised, on top of another router.

    Args:
        times: increasing, in [0, 1].
        weights: a row of K numbers for each time, none below 0, each row with a positive sum.
        base: the other router, ``base(x_t, t)`` to probabilities (batch, K); None for none. What it sees of
            the samples' conditions is passed on to it.

    Raises:
        HddmError: for other times or weights.
    """

    def __init__(
        self,
        times: Sequence[float],
        weights: Sequence[Sequence[float]],
        base: Callable[..., Tensor] | None = None,
    ) -> None:
        self.times = torch.tensor(list(times), dtype=torch.float64)
        self.weights = torch.tensor([list(row) for row in weights], dtype=torch.float64)
        self.base = base
        self.condition: RouterCondition | None = getattr(base, "condition", None)
        is_rising = (
            bool((self.times.diff() > 0).all()) and 0 <= self.times[0] <= self.times[-1] <= 1
        )
        fits = self.weights.ndim == 2 and len(self.weights) == len(self.times)
        if not fits or not is_rising or bool((self.weights < 0).any()):
            raise HddmError(
                "weights of a router by reliability need a row of numbers >= 0 per time"
            )
        if not bool((self.weights.sum(1) > 0).all()):
            raise HddmError("weights of a router by reliability: a row is 0; it needs one above 0")

    def factors(self, t: Tensor) -> Tensor:
        """w_k(t), (batch, K), each row summing to 1, for t (batch,), in float64 on the CPU."""
        rows = self.weights / self.weights.sum(1, keepdim=True)
        if len(self.times) == 1:
            return rows.expand(len(t), -1)
        at = to_float64(t).cpu().clamp(self.times[0], self.times[-1])
        above = torch.searchsorted(self.times, at).clamp(1, len(self.times) - 1)
        low, high = self.times[above - 1], self.times[above]
        share = ((at - low) / (high - low))[:, None]
        return (1 - share) * rows[above - 1] + share * rows[above]

    def __call__(self, x_t: Tensor, t: Tensor, **conditions: Tensor) -> Tensor:
        """Probabilities (batch, K) for x_t (batch, …) at t (batch,)."""
        dtype = torch.promote_types(x_t.dtype, torch.float32)
        factors = sent(self.factors(t), x_t.device, dtype)
        if self.base is None:
            return factors
        routed = self.base(x_t, t, **conditions).to(factors)
        product = factors * routed
        # Where all that the router leaves has no weight, the router alone decides.
        total = product.sum(1, keepdim=True)
        is_known = total > 0
        # Masked before the division: an inf in the row not taken would make its gradient nan.
        return torch.where(is_known, product / torch.where(is_known, total, 1), routed)
