"""Strategies: which experts run for a sample, and with which weights.

For probabilities p of one sample over K experts:

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

Torch is imported where weights are computed, since commands print their help without it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hddm.utils.errors import HddmError

if TYPE_CHECKING:
    from torch import Tensor


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
        kind, _, value = name.partition("-")
        if name in ("full", "draw"):
            return cls(kind)
        if kind == "top" and value.isdecimal() and int(value) >= 1:
            return cls(kind, int(value))
        if kind in ("threshold", "nucleus", "commit"):
            try:
                share = float(value)
            except ValueError:
                share = float("nan")
            if 0 < share <= 1:
                return cls(kind, share)
        raise HddmError(
            f"unknown strategy {name!r}: choose commit-X, threshold-X or nucleus-X (0 < X <= 1), top-K "
            "(K = 1, 2, …), full, or draw"
        )

    @property
    def keeps_one(self) -> bool:
        """True if a sample has one expert to the end, from the beginning or from some t on."""
        return self.kind in ("draw", "commit")

    @property
    def has_fixed_number(self) -> bool:
        """True if as many experts run for one sample as for any other."""
        return self.kind in ("full", "top", "draw")

    def check(self, num_experts: int) -> None:
        """Refuse a k above the number of experts."""
        if self.kind == "top" and self.value > num_experts:
            raise HddmError(
                f"`strategy` top-{self.value:g} needs {self.value:g} experts and there are {num_experts}"
            )

    def weights(self, probabilities: "Tensor") -> "Tensor":
        """Weights (batch, K), each row summing to 1, from ``probabilities`` (batch, K).

        Raises:
            HddmError: for a k above K, and for ``draw`` and ``commit-x``, which choose one expert by its
                index.
        """
        import torch

        self.check(probabilities.shape[1])
        if self.kind == "full":
            return probabilities / probabilities.sum(1, keepdim=True)
        # A stable sort breaks ties in favour of the lower index.
        ranked, order = probabilities.sort(dim=1, descending=True, stable=True)
        rank = torch.arange(ranked.shape[1], device=ranked.device)
        match self.kind:
            case "top":
                chosen = (rank < self.value).expand_as(ranked)
            case "threshold":
                chosen = (ranked >= self.value) | (rank == 0)
            case "nucleus":
                # An expert belongs to the set while those before it have not reached the share.
                before = ranked.cumsum(1).roll(1, dims=1)
                chosen = (before < self.value) | (rank == 0)
            case other:
                raise HddmError(
                    f"strategy {other} chooses one expert per sample, and has no weights"
                )
        kept = torch.zeros_like(probabilities).scatter(1, order, ranked * chosen)
        return kept / kept.sum(1, keepdim=True)


def void_since(num_experts: int, num_domains: int) -> str:
    """Why no strategy has an effect on these experts; empty where one has."""
    if num_domains > 1:
        return ""
    if num_experts > 1:
        return "the noise level chooses the expert"
    return "there is one expert"


def refuse_void(strategy: str, num_experts: int, num_domains: int) -> None:
    """Raise an `HddmError` for a ``strategy`` that has no effect on these experts."""
    reason = void_since(num_experts, num_domains)
    if reason:
        raise HddmError(f"`strategy` {strategy}: has no effect, since {reason}; drop it")


def refuse_unrouted(strategy: str, is_resized: bool = False) -> None:
    """Raise an `HddmError` for a ``strategy`` of experts without a router, unless it needs none.

    ``is_resized`` is true where there is one, for samples of another size.
    """
    if strategy == "draw":
        return
    why = "(hddm assemble --router moments of shards, or --router reliability without them)"
    if is_resized:
        why = "and this one sees samples of its own size alone"
    raise HddmError(f"strategy {strategy!r} needs a router {why}; 'draw' does not")
