"""Matrix products and attention of a training step, alone: what no network of the same size goes below."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

Recorded = list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]


class _Recording(TorchDispatchMode):
    """Keeps every call that has a count of operations in torch: products, convolutions and attention."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Recorded = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in flop_registry:
            self.calls.append((func, args, kwargs or {}))
        return result


class Products:
    """The products of one ``step``, computed again on the tensors that it computed them on.

    Everything else of a step is left out: norms, activations, sums, casts, optimiser and EMA. An attention
    gradient that is written out counts with its products alone.
    """

    def __init__(self, step: Callable[[], object]) -> None:
        # A first step makes what is made once.
        step()
        with _Recording() as recording:
            step()
        self.calls = recording.calls

    @torch.no_grad()
    def run(self, steps: int, on_step: Callable[[], None]) -> None:
        """``steps`` times, with a call after each."""
        for _ in range(steps):
            for function, args, keywords in self.calls:
                function(*args, **keywords)
            on_step()
