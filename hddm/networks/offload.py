"""Networks that lie on disk or in main memory until they are called.

The first call of a `StoredNetwork` brings its weights to the device. Several share a `Shelf`, which evicts
the least recently used one when its budget is full:

    none   weights stay on the device
    ram    weights stay in main memory and leave the device
    disk   weights are read again, mapped from their file

Weights of the stored dtype on the CPU are mapped: their pages are read as they are touched. Quantized weights
are made from these one by one, so that no more than one is there in full.

Where it is known which networks run next (`expect_step`, `expect_batches`) and there is room, the next one is
brought while the present one computes (`hddm.networks.prefetch`).
"""

import contextlib
import itertools
import logging
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hddm.networks.families import Family
from hddm.networks.prefetch import (
    Arrival,
    Fetched,
    Presence,
    copied,
    fetched_here,
    has_streams,
    pinned,
)
from hddm.networks.wrappers import family_behind
from hddm.settings import INT8_IN_FLOAT64
from hddm.utils.errors import HddmError, UsageError, optional, sizes_apart
from hddm.utils.machine import bytes_of
from hddm.utils.memory import free_memory, is_out_of_memory, release
from hddm.utils.tensors import synchronize

Offload = Literal["none", "ram", "disk"]
Tensors = Mapping[str, Tensor]
log = logging.getLogger(__name__)


class Shelf:
    """Room on the device for the weights of several networks.

    ``max_memory`` limits the bytes of all weights on the device, of which ``beside`` take their part first:
    models that stay there. By default, unless ``offload`` is none, there is room for the largest network, or
    for the two largest where an expert runs ``together`` with its weak model; on a GPU with enough free
    memory, for one more, which is brought ahead. Raises `HddmError` if the others leave no room, and
    `UsageError` for a limit without offload.
    """

    def __init__(
        self,
        offload: Offload = "none",
        max_memory: int | None = None,
        beside: Iterable[nn.Module] = (),
    ) -> None:
        self.offload = offload
        self._limit = None if max_memory is None else _room_beside(beside, max_memory)
        if offload == "none" and max_memory is not None:
            raise UsageError("`max_memory` needs `offload` ram or disk")
        self.together = 1
        self._networks: list[StoredNetwork] = []
        self._present: OrderedDict[StoredNetwork, int] = OrderedDict()
        self._arriving: dict[StoredNetwork, Arrival] = {}
        self._presences: dict[StoredNetwork, Presence] = {}
        """Which streams use those that are present."""
        self._has_room_for_next: bool | None = None
        """Whether the device holds one network more than runs; None before the first one is there, and where
        the device does not tell.
        """
        self._brings_ahead = offload != "none"
        self._in_step: Sequence[StoredNetwork] = ()
        self._in_batches: Sequence[StoredNetwork] = ()
        self.lock = threading.RLock()

    def add(self, network: "StoredNetwork") -> None:
        """Register a network; `HddmError` refuses one larger than the budget."""
        self._refuse_larger(network)
        self._networks.append(network)

    def remove(self, network: "StoredNetwork") -> None:
        """Forget ``network``, and that it was registered."""
        with self.lock:
            self.forget(network)
            self._networks.remove(network)

    def has_room_for(self, network: "StoredNetwork") -> bool:
        """True where `add` takes ``network``."""
        return self._limit is None or network.size <= self._limit

    @property
    def budget(self) -> int | None:
        """Limit of the bytes of these networks on the device, None for no limit."""
        if self.offload == "none" or self._limit is not None:
            return self._limit
        most = self.together + bool(self._has_room_for_next)
        return sum(self._sizes[-most:])

    @property
    def _sizes(self) -> list[int]:
        """Bytes of the networks, the largest last."""
        return sorted(network.size for network in self._networks)

    @contextlib.contextmanager
    def running(self, network: "StoredNetwork") -> Iterator[None]:
        """Hold the weights of ``network`` on its device; raises as `bring`."""
        if self.offload == "none":
            self.bring(network)
            yield
            return
        # Another sampling thread must not evict the network that runs here.
        with self.lock:
            self.bring(network)
            presence = self._presences[network]
            self._bring_next()
            yield
            presence.end()

    @property
    def total(self) -> int:
        """Bytes of these networks, wherever they are."""
        return sum(network.size for network in self._networks)

    def bring(self, network: "StoredNetwork") -> None:
        """Bring the weights of ``network`` to its device; raises as `add`, and for unreadable weights."""
        with self.lock:
            self._in_step = _after(network, self._in_step)
            self._in_batches = _after(network, self._in_batches)
            if network in self._present:
                self._present.move_to_end(network)
            else:
                self._fetch(network)
            self._presences[network].begin(network.on_device)

    def _fetch(self, network: "StoredNetwork") -> None:
        if network not in self._arriving:
            self._refuse_larger(network)
            self.look_for_room()
            self._evict_for(network, [*self._present, *self._arriving])
        tensors, copied_at = self._arrived(network)
        network.place(tensors)
        self._present[network] = network.size
        self._presences[network] = Presence(network.placement.device, copied_at)

    def expect_step(self, networks: Sequence["StoredNetwork"]) -> None:
        """Say which networks the present step runs, in this order."""
        with self.lock:
            self._in_step = networks
            self._forget_unexpected()

    def expect_batches(self, networks: Sequence["StoredNetwork"]) -> None:
        """Say which networks the next batches of samples run, in this order."""
        with self.lock:
            self._in_batches = networks
            self._forget_unexpected()

    def _forget_unexpected(self) -> None:
        """Drop what a run that ended early had brought ahead."""
        for network in list(self._arriving):
            if network not in self._in_step and network not in self._in_batches:
                self.forget(network)

    def forget(self, network: "StoredNetwork") -> None:
        """Remove ``network`` from the device, if it is there or on its way."""
        with self.lock:
            arrival = self._arriving.pop(network, None)
            if arrival is not None:
                arrival.discard()
            if self._present.pop(network, None) is not None:
                self._presences.pop(network)
                network.clear()

    def make_room(self, size: int, device: torch.device) -> None:
        """Let networks leave until a model of ``size`` bytes fits that comes for a while.

        Does nothing where the device does not tell how much memory is free.
        """
        if self.offload == "none" or free_memory(device) is None:
            return
        with self.lock:
            synchronize(device)
            for network in [*self._arriving, *self._present]:
                free = free_memory(device)
                # It computes, too.
                if free is not None and free >= 1.25 * size:
                    break
                self.forget(network)

    def is_present(self, network: "StoredNetwork") -> bool:
        """True if the weights of ``network`` are on its device, or on their way to it."""
        return network in self._present or network in self._arriving

    def look_for_room(self) -> None:
        """Find out whether the device has room for a network that is brought ahead.

        The `budget` depends on it. The first `bring` asks, when experts alone are not there yet.
        """
        if self.offload == "none" or self._has_room_for_next is not None or not self._networks:
            return
        free = free_memory(self._networks[0].placement.device)
        if free is not None:
            # One that runs, one that comes, and as much again for what they compute.
            needed = (self.together + 2) * self._sizes[-1]
            self._has_room_for_next = free >= needed

    def _evict_for(
        self, network: "StoredNetwork", may_leave: Iterable["StoredNetwork"]
    ) -> list[torch.cuda.Event]:
        """Make room for ``network``; on a GPU, returns the ends of the runs of those that left."""
        limit, ends = self._most, list[torch.cuda.Event]()
        for one in may_leave:
            if self._taken() + network.size <= limit:
                break
            if one in self._presences:
                ends += self._presences[one].ends()
            self.forget(one)
        return ends

    @property
    def _most(self) -> float:
        """The budget as a number."""
        budget = self.budget
        return math.inf if budget is None else budget

    def _taken(self) -> int:
        return sum(self._present.values()) + sum(one.size for one in self._arriving)

    def _bring_next(self) -> None:
        """Begin to bring the next network that is expected, unless what runs before it had to leave."""
        if not self._brings_ahead:
            return
        order = list(self._present)
        running = order[-self.together :]
        kept = set(running)
        following = None
        for network in itertools.chain(self._in_step, self._in_batches):
            if not self.is_present(network):
                following = network
                break
            kept.add(network)
        if following is None:
            return
        may_leave = [one for one in order if one not in kept]
        freed = sum(self._present[one] for one in may_leave)
        if self._taken() - freed + following.size > self._most:
            return
        self._arriving[following] = following.arrival(self._evict_for(following, may_leave))

    def _arrived(self, network: "StoredNetwork") -> Fetched:
        """The tensors of ``network`` on its device."""
        device = network.placement.device
        arrival = self._arriving.pop(network, None)
        if arrival is None:
            if has_streams(device):
                return network.arrival().wait()
            return fetched_here(network.fetch, device)
        try:
            return arrival.wait()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        log.warning(
            "experts come one after the other: there is no room to bring the next one ahead"
        )
        self._has_room_for_next = self._brings_ahead = False
        for one in list(self._present):
            self.forget(one)
        release()
        return fetched_here(network.fetch, device)

    def _refuse_larger(self, network: "StoredNetwork") -> None:
        if self._limit is not None and not self.has_room_for(network):
            taken, left = sizes_apart(network.size, self._limit)
            text = f"its weights take {taken}, and `max_memory` leaves {left} for experts"
            raise HddmError(f"{network.origin}: {text}; raise it, or use a smaller dtype")


def _after(network: "StoredNetwork", order: Sequence["StoredNetwork"]) -> Sequence["StoredNetwork"]:
    """What comes after ``network`` in an order; all of it where it is not there."""
    if network not in order:
        return order
    return order[order.index(network) + 1 :]


def size_of(model: nn.Module) -> int:
    """Bytes of a model's weights."""
    return bytes_of(model.parameters())


def _room_beside(models: Iterable[nn.Module], max_memory: int) -> int:
    """Bytes of ``max_memory`` left for experts beside ``models``; `HddmError` where none are."""
    taken = sum(map(size_of, models))
    if taken >= max_memory:
        needed, allowed = sizes_apart(taken, max_memory)
        alone = f"router, VAE and text encoder alone take {needed}"
        raise HddmError(f"`max_memory` of {allowed}: {alone}; allow more")
    return max_memory - taken


class StoredNetwork(nn.Module):
    """A network whose weights are brought to the device when it is called.

    Args:
        network: on the meta device, except for constants that no file holds.
        read: returns checked tensors by name, in a given dtype.
        origin: name in errors.
        dtype, device: where and how it runs, until `to` changes them.
        shelf: decides how long weights stay.
    """

    placement: Tensor

    def __init__(
        self,
        network: nn.Module,
        read: Callable[[torch.dtype], Tensors],
        origin: str,
        dtype: torch.dtype,
        device: torch.device | str,
        shelf: Shelf,
    ) -> None:
        super().__init__()
        # Empty, with the weights' device and dtype: moving the module moves this.
        self.register_buffer(
            "placement", torch.empty(0, dtype=dtype, device=device), persistent=False
        )
        # In a tuple, so that moving this module does not move it.
        self._network = (network,)
        self._read = read
        self._shapes = {name: tensor.shape for name, tensor in network.state_dict().items()}
        self._in_int8 = frozenset[str]()
        self._constants = {name: b for name, b in network.named_buffers() if not b.is_meta}
        self._host: Tensors | None = None
        """With offload ram, the weights in main memory; for a GPU they are pinned there, and stay so."""
        self._was_pinned = False
        self.origin = origin
        self.shelf = shelf
        shelf.add(self)

    @property
    def network(self) -> nn.Module:
        """The network itself, possibly without weights."""
        return self._network[0]

    @property
    def holder(self) -> "StoredNetwork":
        """Where its weights are: here; of a network that shares those of another, there."""
        return self

    @property
    def dtype(self) -> torch.dtype:
        return self.placement.dtype

    @property
    def config(self) -> Any:
        return self.network.config

    @property
    def size(self) -> int:
        """Bytes of the weights on the device."""
        width, total = self.placement.element_size(), 0
        for name, shape in self._shapes.items():
            if name in self._in_int8:
                total += shape.numel() + (width + 1) * shape[0]
            else:
                total += width * shape.numel()
        return total

    @property
    def full_size(self) -> int:
        """Bytes of the weights without quantization."""
        width, total = self.placement.element_size(), 0
        for shape in self._shapes.values():
            total += width * shape.numel()
        return total

    def quantize(self) -> None:
        """Hold the weights of linear layers in int8, with one scale per output, from the next call on.

        The layers compute in the network's dtype. Raises `HddmError` without torchao, and in float64.
        """
        optional("torchao", "`quantize`", "quantize")
        _refuse_float64(self.dtype)
        self.shelf.forget(self)
        # Attention of torch holds three linear layers in one weight.
        names = {name for name in self._shapes if name.endswith("in_proj_weight")}
        family = family_behind(self.network)
        exact = Family.exact_layers if family is None else family.exact_layers
        for name, module in self.network.named_modules():
            if isinstance(module, nn.Linear) and not re.fullmatch(rf"(model\.)?({exact})", name):
                names.add(f"{name}.weight")
        self._in_int8 = frozenset(names)

    @property
    def is_quantized(self) -> bool:
        return bool(self._in_int8)

    def forward(self, *inputs: Tensor, **conditions: Tensor) -> Any:
        with self.shelf.running(self):
            return self.network(*inputs, **conditions)

    def move_to(self, shelf: Shelf) -> None:
        """Move to another shelf, where this network is already registered."""
        self.shelf.forget(self)
        self._drop_host()
        self.shelf = shelf

    def tensors(self) -> Tensors:
        """Weights by name in main memory, in the dtype that the network runs in."""
        if self._host is None:
            tensors = self._read(self.placement.dtype)
            if self.shelf.offload != "ram":
                return tensors
            self._host = tensors
        if not self._was_pinned and has_streams(self.placement.device):
            # Once, as every copy to the GPU is made from pinned memory.
            self._host, self._was_pinned = pinned(self._host), True
        return self._host

    def _drop_host(self) -> None:
        self._host, self._was_pinned = None, False

    def on_device(self) -> Iterator[Tensor]:
        """All tensors that a call of the network uses."""
        yield from self.network.parameters()
        yield from self.network.buffers()

    def arrival(self, after: Sequence[torch.cuda.Event] = ()) -> Arrival:
        """Begin to fetch all tensors that the network needs, in a thread, ``after`` these computations."""
        return Arrival(self.fetch, self.placement.device, after)

    def fetch(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors that the network needs, one after the other, on its device."""
        to, dtype = self.placement.device, self.placement.dtype
        constants = {}
        for name, value in self._constants.items():
            constants[name] = value.to(dtype) if value.is_floating_point() else value
        for name, value in {**self.tensors(), **constants}.items():
            there = copied(value, to)
            yield name, _int8(there) if name in self._in_int8 else there

    def place(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Put tensors into the network."""
        for name, value in tensors:
            owner, _, leaf = name.rpartition(".")
            module = self.network.get_submodule(owner)
            if leaf in module._parameters:
                module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
            else:
                module._buffers[leaf] = value

    def clear(self) -> None:
        """Free the tensors on the device."""
        tensors = itertools.chain(self.network.named_parameters(), self.network.named_buffers())
        kinds = [(name, value.shape, value.dtype) for name, value in tensors]
        for name, shape, dtype in kinds:
            self.place([(name, torch.empty(shape, dtype=dtype, device="meta"))])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "StoredNetwork":
        moved = fn(self.placement)
        if (moved.dtype, moved.device) != (self.placement.dtype, self.placement.device):
            if self.is_quantized:
                _refuse_float64(moved.dtype)
            self.shelf.forget(self)
            if moved.dtype != self.placement.dtype:
                self._drop_host()
            self.placement = moved
        return self

    def parameters(self, recurse: bool = True) -> Any:
        """Weights, brought to the device."""
        self.shelf.bring(self)
        return self.network.parameters(recurse)


def _refuse_float64(dtype: torch.dtype) -> None:
    """Refuse what settings of commands refuse, for networks in memory that are changed later."""
    if dtype == torch.float64:
        raise UsageError(INT8_IN_FLOAT64)


def _int8(weight: Tensor) -> Tensor:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    outputs, inputs = weight.shape
    layer = nn.Linear(inputs, outputs, bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    quantize_(layer, Int8WeightOnlyConfig())
    return layer.weight


def holder_of(network: object) -> StoredNetwork | None:
    """The network whose weights come and go for ``network``; None for one that holds its own."""
    return getattr(network, "holder", None)


def in_best_order(networks: Mapping[int, object]) -> list[int]:
    """Keys of the networks to run, those on the device first, so that none of them is brought again."""

    def is_absent(key: int) -> bool:
        holder = holder_of(networks[key])
        return holder is not None and not holder.shelf.is_present(holder)

    return sorted(networks, key=is_absent)


def expect_step(networks: Iterable[object]) -> None:
    """Tell what holds their weights that the present step runs these ``networks``, in this order."""
    for shelf, holders in _by_shelf(networks):
        shelf.expect_step(holders)


def expect_batches(networks: Iterable[object]) -> None:
    """Tell what holds their weights that the next batches run these ``networks``, in this order."""
    for shelf, holders in _by_shelf(networks):
        shelf.expect_batches(holders)


def _by_shelf(networks: Iterable[object]) -> list[tuple[Shelf, list[StoredNetwork]]]:
    """Shelves whose networks come and go, with those that hold weights of ``networks``, each once."""
    found = dict[Shelf, list[StoredNetwork]]()
    for holder in dict.fromkeys(map(holder_of, networks)):
        if holder is not None and holder.shelf.offload != "none":
            found.setdefault(holder.shelf, []).append(holder)
    return list(found.items())


def is_offloaded(networks: Iterable[object]) -> bool:
    """True if weights of any of ``networks`` leave the device while it does not run."""
    holders = map(holder_of, networks)
    return any(one is not None and one.shelf.offload != "none" for one in holders)
