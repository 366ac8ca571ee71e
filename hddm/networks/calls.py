"""Calls of networks that results wait for, so that several results can come out of one call.

A generator of `Calls` yields each call that its result needs, is sent the call's output, and returns the
result. `finished` runs the calls of one generator as they come. `finished_together` runs several generators
side by side, and calls that `hddm.networks.shared` can join run as one.
"""

from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hddm.networks.shared import AdaptedNetwork, NotShared


@dataclass(frozen=True)
class NetworkCall:
    """One call of a network: states ``x`` (n, …), ``timestep`` (n,) and conditions, each (n, …)."""

    network: Callable[..., Any]
    x: Tensor
    timestep: Tensor
    conditions: Mapping[str, Tensor]

    def run(self) -> Any:
        """The network's output."""
        return self.network(self.x, self.timestep, **self.conditions)

    @property
    def kind(self) -> Hashable:
        """Equal for calls that can run as one; None for a call that cannot be joined."""
        network = self.network
        if not isinstance(network, AdaptedNetwork) or not network.is_sharing:
            return None
        inputs = {"": self.x, "timestep": self.timestep, **self.conditions}
        shapes = []
        for name, value in inputs.items():
            if not isinstance(value, Tensor) or len(value) != len(self.x):
                return None
            shapes.append((name, value.shape[1:], value.dtype))
        return (id(network.shared), *sorted(shapes, key=lambda one: one[0]))


Calls = Generator[NetworkCall, Any, Tensor]
"""Yields calls, is sent their outputs, and returns a result."""


def finished(calls: Calls) -> Tensor:
    """The result of a generator, each of whose calls runs by itself."""
    try:
        call = next(calls)
        while True:
            call = calls.send(call.run())
    except StopIteration as end:
        result: Tensor = end.value
        return result


def finished_together(generators: Mapping[int, Calls]) -> dict[int, Tensor]:
    """The results of several generators, where calls of networks with one base run as one."""
    results, waiting = dict[int, Tensor](), dict[int, NetworkCall]()

    def send(key: int, output: Any) -> None:
        try:
            waiting[key] = generators[key].send(output)
        except StopIteration as end:
            results[key] = end.value

    for key in generators:
        send(key, None)
    while waiting:
        asked = dict(waiting)
        waiting.clear()
        for key, output in _outputs(asked).items():
            send(key, output)
    return results


def _outputs(calls: Mapping[int, NetworkCall]) -> dict[int, Any]:
    """The output of each call; those of one kind run as one."""
    groups = dict[Hashable, list[int]]()
    for key, call in calls.items():
        kind = call.kind
        groups.setdefault((key,) if kind is None else kind, []).append(key)
    found = dict[int, Any]()
    for keys in groups.values():
        own = [calls[key] for key in keys]
        for key, output in zip(keys, _joined(own), strict=True):
            found[key] = output
    return found


def _joined(calls: Sequence[NetworkCall]) -> list[Any]:
    """The outputs of calls of one kind, which run as one where there are several."""
    if len(calls) == 1:
        return [calls[0].run()]
    # Rows of adapters with equal shapes side by side: their products are then one.
    order = sorted(range(len(calls)), key=lambda i: calls[i].network.place)  # type: ignore[attr-defined]
    ordered = [calls[i] for i in order]
    network = ordered[0].network
    assert isinstance(network, AdaptedNetwork)
    adapters: list[int | None] = []
    for call in ordered:
        assert isinstance(call.network, AdaptedNetwork)
        adapters += [call.network.adapter] * len(call.x)
    conditions = {}
    for name in ordered[0].conditions:
        conditions[name] = torch.cat([call.conditions[name] for call in ordered])
    x = torch.cat([call.x for call in ordered])
    timestep = torch.cat([call.timestep for call in ordered])
    try:
        output = network.shared.run_rows(adapters, x, timestep, **conditions)
    except NotShared as problem:
        network.shared.separate(str(problem))
        return [call.run() for call in calls]
    parts = output.split([len(call.x) for call in ordered])
    return [parts[order.index(i)] for i in range(len(calls))]
