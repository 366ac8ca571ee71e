"""Networks that share the weights of one base and differ by low-rank additions (LoRA).

The base is there once, and of every adapter its two factors. In one call of the base, a layer with weight W
gives row i of the batch, whose adapter is a,

    W x_i + b + (alpha_a/rank_a) B_a A_a x_i,

which is what the merged weight W + alpha/rank B A gives, up to rounding. Rows whose adapters have factors of
equal shapes are multiplied together, each by its own. Linear layers, convolutions and the packed projections
of `hddm.networks.layers.Attention` can be shared; `unshareable` says which weights cannot.
"""

import copy
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hddm.networks.layers import Attention
from hddm.networks.offload import Shelf, StoredNetwork, Tensors
from hddm.networks.prefetch import has_streams, keep_for

log = logging.getLogger(__name__)

Factors = Mapping[str, tuple[Tensor, Tensor]]
"""A (rank, …) and alpha/rank B (out, rank, …) by the name of the weight that they change."""


@dataclass(frozen=True)
class Adapter:
    """A low-rank change of weights: ``read(dtype)`` gives its factors, ``shapes`` theirs by name."""

    read: Callable[[torch.dtype], Factors]
    shapes: Mapping[str, tuple[Sequence[int], Sequence[int]]]

    @property
    def numel(self) -> int:
        """Numbers in all factors."""
        total = 0
        for down, up in self.shapes.values():
            total += torch.Size(down).numel() + torch.Size(up).numel()
        return total


class NotShared(Exception):
    """A call in which an adapter's part of a layer could not be added."""


def unshareable(network: nn.Module, weights: Iterable[str]) -> list[str]:
    """Those of ``weights``, by name, whose layer computes something that cannot be added to row by row."""
    return [name for name in weights if not _can_share(*_layer_of(network, name))]


def _layer_of(network: nn.Module, name: str) -> tuple[nn.Module, str]:
    owner, _, leaf = name.rpartition(".")
    return network.get_submodule(owner), leaf


def _can_share(layer: nn.Module, leaf: str) -> bool:
    if isinstance(layer, Attention):
        return leaf == "in_proj_weight"
    # A subclass with a forward of its own may use its weight in another way.
    forward = type(layer).forward
    if isinstance(layer, nn.Conv2d) and forward is nn.Conv2d.forward:
        return leaf == "weight" and layer.groups == 1 and layer.padding_mode == "zeros"
    return isinstance(layer, nn.Linear) and forward is nn.Linear.forward and leaf == "weight"


@dataclass
class _Span:
    """Rows ``start`` to ``stop`` of a call whose adapters have factors of equal shapes."""

    start: int
    stop: int
    adapters: list[int]
    """Of each row."""
    factors: list[Factors]
    """Of each row."""

    def runs(self) -> list[tuple[int, int]]:
        """First row and end of every run of rows of one adapter, counted within the span."""
        found, first = [], 0
        for row in range(1, len(self.adapters) + 1):
            if row == len(self.adapters) or self.adapters[row] != self.adapters[first]:
                found.append((first, row))
                first = row
        return found


@dataclass
class _Running:
    """The call that a thread runs: its number of rows, their adapters, and the weights added to so far."""

    rows: int
    spans: list[_Span]
    added: set[str] = field(default_factory=set)


class SharedNetwork(StoredNetwork):
    """A base network, of which every row of a call runs with an adapter of its own.

    Args:
        network: the base; it is copied, without weights.
        adapters: of the networks that share it.
        read, origin, dtype, device, shelf: as in `StoredNetwork`.
    """

    def __init__(
        self,
        network: nn.Module,
        adapters: Sequence[Adapter],
        read: Callable[[torch.dtype], Tensors],
        origin: str,
        dtype: torch.dtype,
        device: torch.device | str,
        shelf: Shelf,
    ) -> None:
        self.adapters = tuple(adapters)
        shapes = [one.shapes for one in self.adapters]
        self.kinds = tuple(map(shapes.index, shapes))
        """For each adapter the first one with factors of equal shapes."""
        super().__init__(copy.deepcopy(network), read, origin, dtype, device, shelf)
        self._loaded = dict[int, Factors]()
        self._factors_for = set[tuple[int, torch.cuda.Stream]]()
        """Adapters, and streams that their factors are kept for."""
        self._waiting = dict[tuple[int, torch.dtype], Factors]()
        self._thread = threading.local()
        self.users: list[AdaptedNetwork] = []
        names = dict[str, None]()
        for adapter in self.adapters:
            names |= dict.fromkeys(adapter.shapes)
        for name in names:
            layer, _ = _layer_of(self.network, name)
            if isinstance(layer, Attention):
                layer.addition = partial(self._add_to_projection, name)
            else:
                layer.register_forward_hook(partial(self._add_to_layer, name))

    @property
    def size(self) -> int:
        """Bytes of the base's weights and of all adapters on the device."""
        factors = sum(adapter.numel for adapter in self.adapters)
        return super().size + factors * self.placement.element_size()

    def run_rows(
        self, adapters: Sequence[int | None], *inputs: Tensor, **conditions: Tensor
    ) -> Any:
        """The output for inputs whose row i runs with ``adapters[i]``, or with the base as it is for None.

        Raises `NotShared` where a layer is not called with one row of numbers for each row of the batch.
        """
        with self.shelf.running(self):
            return self._run(adapters, *inputs, **conditions)

    def _run(self, adapters: Sequence[int | None], *inputs: Tensor, **conditions: Tensor) -> Any:
        running = _Running(len(adapters), self._spans(adapters))
        self._thread.running = running
        try:
            output = self.network(*inputs, **conditions)
        finally:
            self._thread.running = None
        for adapter in {one for one in adapters if one is not None}:
            missing = self.adapters[adapter].shapes.keys() - running.added
            if missing:
                # Its weights may have been used in another way than by a call of the layer.
                raise NotShared(f"{min(missing)!r} was not called as a layer")
        return output

    def _spans(self, adapters: Sequence[int | None]) -> list[_Span]:
        spans = list[_Span]()
        for row, adapter in enumerate(adapters):
            if adapter is None:
                continue
            factors = self.factors(adapter)
            last = spans[-1] if spans else None
            kind = self.kinds[adapter]
            if last is None or last.stop != row or self.kinds[last.adapters[0]] != kind:
                spans.append(_Span(row, row + 1, [adapter], [factors]))
                continue
            last.stop = row + 1
            last.adapters.append(adapter)
            last.factors.append(factors)
        return spans

    def factors(self, adapter: int) -> Factors:
        """The factors of an adapter on the device, read when first needed."""
        with self.shelf.lock:
            if adapter not in self._loaded:
                key = (adapter, self.dtype)
                found = self._waiting.get(key)
                if found is None:
                    found = self.adapters[adapter].read(self.dtype)
                if self.shelf.offload == "ram":
                    self._waiting[key] = found
                to, there = self.placement.device, dict[str, tuple[Tensor, Tensor]]()
                for name, (down, up) in found.items():
                    there[name] = down.to(to), up.to(to)
                self._loaded[adapter] = there
            self._keep(adapter)
            return self._loaded[adapter]

    def _keep(self, adapter: int) -> None:
        """On a GPU, keep the memory of an adapter's factors until the present stream has used them."""
        device = self.placement.device
        if not has_streams(device):
            return
        stream = torch.cuda.current_stream(device)
        if (adapter, stream) not in self._factors_for:
            self._factors_for.add((adapter, stream))
            for down, up in self._loaded[adapter].values():
                keep_for(stream, down)
                keep_for(stream, up)

    def move_to(self, shelf: Shelf) -> None:
        super().move_to(shelf)
        self._waiting.clear()

    def clear(self) -> None:
        super().clear()
        self._loaded.clear()
        self._factors_for.clear()

    def separate(self, reason: str) -> None:
        """Give every network that shares this one merged weights of its own, and say the reason."""
        sharing = [user for user in self.users if user.is_sharing]
        if sharing:
            text = f"{len(sharing)} experts of one base run with merged weights, each in the memory of a"
            log.warning("%s: %s whole network: %s", self.origin, text, reason)
        for user in sharing:
            user.separate()

    def _add_to_layer(self, name: str, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        running = self._running(name, inputs[0] if inputs else None)
        if running is None:
            return
        for span in running.spans:
            if name not in span.factors[0]:
                continue
            downs, ups = _of_rows(span, name)
            x, part = inputs[0][span.start : span.stop], output[span.start : span.stop]
            _add(part, x, layer, span, downs, ups)

    def _add_to_projection(self, name: str, x: Tensor, output: Tensor, part: slice) -> None:
        running = self._running(name, x)
        if running is None:
            return
        for span in running.spans:
            if name not in span.factors[0]:
                continue
            downs, ups = _of_rows(span, name)
            rows, of_part = slice(span.start, span.stop), [up[part] for up in ups]
            _add(output[rows], x[rows], None, span, downs, of_part)

    def _running(self, name: str, x: Tensor | None) -> _Running | None:
        """The call of this thread, in which ``name`` is now added to; None outside of one."""
        running: _Running | None = getattr(self._thread, "running", None)
        if running is None:
            return None
        if not isinstance(x, Tensor) or len(x) != running.rows:
            raise NotShared(f"{name!r} is not called with one input for each row of the batch")
        running.added.add(name)
        return running


def _of_rows(span: _Span, name: str) -> tuple[list[Tensor], list[Tensor]]:
    """A and B of each row."""
    downs, ups = [], []
    for factors in span.factors:
        down, up = factors[name]
        downs.append(down)
        ups.append(up)
    return downs, ups


def _add(
    output: Tensor,
    x: Tensor,
    layer: nn.Module | None,
    span: _Span,
    downs: Sequence[Tensor],
    ups: Sequence[Tensor],
) -> None:
    """Add B A x to ``output`` in place, for rows x (n, …) and the factors of each row."""
    dtype = downs[0].dtype
    casts = torch.is_autocast_enabled(x.device.type) or not dtype == x.dtype == output.dtype
    if casts or not output.is_contiguous():
        own = torch.zeros(output.shape, dtype=dtype, device=output.device)
        with torch.autocast(x.device.type, enabled=False):
            _add(own, x.to(dtype), layer, span, downs, ups)
        output += own.to(output.dtype)
    elif isinstance(layer, nn.Conv2d):
        _add_convolution(output, x, layer, span, downs, ups)
    else:
        _add_product(output, x, span, downs, ups)


def _add_product(
    output: Tensor, x: Tensor, span: _Span, downs: Sequence[Tensor], ups: Sequence[Tensor]
) -> None:
    """As `_add`, for x (n, …, in) and an output (n, …, out)."""
    runs = span.runs()
    # On a GPU a product for each adapter would wait for its start longer than it takes.
    if len(runs) == 1 or x.device.type == "cpu":
        add_by_runs(output, x, runs, downs, ups)
    else:
        add_at_once(output, x, downs, ups)


def add_by_runs(
    output: Tensor,
    x: Tensor,
    runs: Sequence[tuple[int, int]],
    downs: Sequence[Tensor],
    ups: Sequence[Tensor],
) -> None:
    """Add B A x to ``output`` in place, a product for each run of rows of one adapter."""
    for first, end in runs:
        into = output[first:end].view(-1, output.shape[-1])
        inner = x[first:end].reshape(-1, x.shape[-1]) @ downs[first].mT
        into.addmm_(inner, ups[first].mT)


def add_at_once(output: Tensor, x: Tensor, downs: Sequence[Tensor], ups: Sequence[Tensor]) -> None:
    """Add B A x to ``output`` in place, in one product for all rows."""
    into = output.view(len(x), -1, output.shape[-1])
    inner = torch.bmm(x.reshape(len(x), -1, x.shape[-1]), torch.stack(list(downs)).mT)
    into.baddbmm_(inner, torch.stack(list(ups)).mT)


def _add_convolution(
    output: Tensor,
    x: Tensor,
    layer: nn.Conv2d,
    span: _Span,
    downs: Sequence[Tensor],
    ups: Sequence[Tensor],
) -> None:
    """As `_add`, for x (n, in, H, W) and an output (n, out, H', W'); A is a convolution like the layer's."""
    inner = []
    for first, end in span.runs():
        rows, down = x[first:end], downs[first]
        inner.append(F.conv2d(rows, down, None, layer.stride, layer.padding, layer.dilation))
    wide = torch.stack([up.flatten(1) for up in ups])
    output.view(*output.shape[:2], -1).baddbmm_(wide, torch.cat(inner).flatten(2))


class AdaptedNetwork(nn.Module):
    """A network that is a base with one adapter, in the memory of a base that others share.

    Args:
        shared: the base with the adapters of all that share it.
        adapter: index of this network's; None for the base itself.
        merged: makes a network with the merged weights, on a dtype, a device and a shelf.
    """

    def __init__(
        self,
        shared: SharedNetwork,
        adapter: int | None,
        merged: Callable[[torch.dtype, torch.device, Shelf], StoredNetwork],
    ) -> None:
        super().__init__()
        # In a tuple, so that it is no part of every network that shares it.
        self._held: tuple[SharedNetwork, StoredNetwork | None] = (shared, None)
        self.adapter, self._merged = adapter, merged
        shared.users.append(self)

    @property
    def shared(self) -> SharedNetwork:
        return self._held[0]

    @property
    def is_sharing(self) -> bool:
        """False once it has merged weights of its own."""
        return self._held[1] is None

    @property
    def holder(self) -> StoredNetwork:
        """The network that holds its weights: shared, or its own."""
        return self._held[1] or self.shared

    @property
    def place(self) -> tuple[int, int]:
        """Order in which rows of adapters with equal shapes are side by side; the base's come first."""
        if self.adapter is None:
            return (-1, -1)
        return (self.shared.kinds[self.adapter], self.adapter)

    @property
    def network(self) -> nn.Module:
        """A network of this class and config, possibly without weights."""
        return self.holder.network

    @property
    def placement(self) -> Tensor:
        return self.holder.placement

    @property
    def dtype(self) -> torch.dtype:
        return self.holder.dtype

    @property
    def config(self) -> Any:
        return self.holder.config

    def forward(self, *inputs: Tensor, **conditions: Tensor) -> Any:
        if self.is_sharing:
            try:
                return self.shared.run_rows([self.adapter] * len(inputs[0]), *inputs, **conditions)
            except NotShared as problem:
                self.shared.separate(str(problem))
        return self.holder(*inputs, **conditions)

    def separate(self) -> None:
        """Give it merged weights of its own, read when first needed."""
        shared = self.shared
        with shared.shelf.lock:
            if not self.is_sharing:
                return
            own = self._merged(shared.dtype, shared.placement.device, shared.shelf)
            if shared.is_quantized:
                own.quantize()
            self._held = (shared, own)
            if not any(user.is_sharing for user in shared.users):
                shared.shelf.remove(shared)

    def parameters(self, recurse: bool = True) -> Any:
        """Its own merged weights, brought to the device: whoever takes them may change them."""
        self.separate()
        return self.holder.parameters(recurse)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "AdaptedNetwork":
        self.holder._apply(fn, recurse)
        return self
