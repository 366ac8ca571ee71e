"""Which experts run for which sample: from probabilities to sparse weights, by a `Strategy`."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hddm.errors import HddmError
from hddm.strategies import Strategy as Strategy
from hddm.tensors import parameter_dtype, to_float64


def sparse_weights(probabilities: Tensor, strategy: Strategy) -> Tensor:
    """Weights (batch, K), each row summing to 1, from ``probabilities`` (batch, K).

    Raises:
        HddmError: for ``draw``, which does not depend on probabilities, or a k above K.
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
        case _:
            raise HddmError("strategy 'draw' picks experts by index, not from probabilities")
    kept = torch.zeros_like(probabilities).scatter(1, order, ranked * chosen)
    return kept / kept.sum(1, keepdim=True)


class Router:
    """Probabilities p(k | x_t, t) over experts, from a network that gives logits.

        p = softmax(logits[outputs] / temperature(t))

    Leaving outputs out is exact: of a posterior over more shards it makes that over the ones kept.

    Args:
        network: ``network(x_t, timestep)`` to logits (batch, outputs of the network).
        time_scale: the network is fed t × ``time_scale``.
        temperatures: at times spread evenly over [0, 1], linear between; one number holds everywhere.
        outputs: of the network, for each expert; None for all in order.
    """

    def __init__(
        self,
        network: Callable[..., Tensor],
        time_scale: float = 1000.0,
        temperatures: Sequence[float] = (1.0,),
        outputs: Sequence[int] | None = None,
    ) -> None:
        self.network = network
        self.time_scale = time_scale
        self.temperatures = tuple(temperatures)
        self.outputs = None if outputs is None else list(outputs)

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
        return (logits / temperature_at(t, self.temperatures).to(logits)[:, None]).softmax(1)


def temperature_at(t: Tensor, temperatures: Sequence[float]) -> Tensor:
    """Temperature (batch,) at t (batch,) in [0, 1], in float64."""
    table = torch.tensor(temperatures, dtype=torch.float64)
    if len(table) == 1:
        return table.expand(len(t))
    place = to_float64(t).cpu() * (len(table) - 1)
    left = place.floor().clamp(0, len(table) - 2)
    return torch.lerp(table[left.long()], table[left.long() + 1], place - left)
