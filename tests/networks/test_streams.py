"""Weights that come on a stream of their own: who waits for them, how long their memory is kept, and pinning.

The streams are noted instead of used, since no GPU is needed to see who is told to wait for whom.
"""

import contextlib
import logging
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hddm.experts.expert_set import ExpertSet
from hddm.networks import prefetch
from hddm.networks.offload import Offload, Shelf
from hddm.networks.prefetch import blocks, copied
from hddm.utils.memory import Fitting
from tests.ensemble_files import Scales, flow_expert

MEGABYTE = 2**20


class Streams:
    """Streams of a device by name, of which each thread has a present one, and what they are told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, str]] = []
        """Stream, what it is told, and of which event or for how many tensors."""
        self.kept: dict[str, set[int]] = {}
        """By stream, the tensors whose memory is kept for it."""
        self._thread = threading.local()
        self._events = 0

    def present(self, device: object = None) -> "Stream":
        return Stream(getattr(self._thread, "name", "main"), self)

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        name = stream if isinstance(stream, str) else stream.name
        before = self.present().name
        self._thread.name = name
        yield
        self._thread.name = before

    def event(self) -> "Event":
        self._events += 1
        return Event(f"event {self._events}", self)


class Event:
    def __init__(self, name: str, streams: Streams) -> None:
        self.name, self.streams = name, streams

    def synchronize(self) -> None:
        self.streams.told.append(("the host", "waits", self.name))


class Stream:
    def __init__(self, name: str, streams: Streams) -> None:
        self.name, self.streams = name, streams

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def record_event(self) -> Event:
        event = self.streams.event()
        self.streams.told.append((self.name, "records", event.name))
        return event

    def wait_event(self, event: Event) -> None:
        self.streams.told.append((self.name, "waits", event.name))


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """The CPU as a device with streams."""
    found = Streams()
    for module in ("prefetch", "offload", "shared"):
        monkeypatch.setattr(f"hddm.networks.{module}.has_streams", lambda device: True)
    monkeypatch.setattr(torch.cuda, "current_stream", found.present)
    monkeypatch.setattr(torch.cuda, "stream", found.on)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(prefetch, "_copying", lambda device: Stream("copies", found))
    monkeypatch.setattr(prefetch, "pinned_block", lambda size: torch.empty(size, dtype=torch.uint8))

    def record_stream(value: Tensor, stream: Stream) -> None:
        found.kept.setdefault(stream.name, set()).add(value.data_ptr())

    monkeypatch.setattr(Tensor, "record_stream", record_stream)
    return found


def _held(offload: Offload, num: int = 2, room: int = 2) -> ExpertSet:
    experts = [Scales().expert(k) for k in range(num)]
    size = ExpertSet(experts).stored[0].size
    return ExpertSet(experts, shelf=Shelf(offload, None if offload == "none" else room * size))


def _inputs() -> tuple[Tensor, Tensor]:
    return torch.zeros(1, 3, 4, 4), torch.zeros(1)


@pytest.mark.parametrize("offload", ["none", "ram", "disk"])
@pytest.mark.parametrize("how", ["called", "brought ahead", "parameters"])
def test_every_stream_waits_once_for_the_copies_of_weights_that_it_uses(
    offload: Offload, how: str, streams: Streams
) -> None:
    """Also where another stream waited before, and the weights are there by its account."""
    held = _held(offload)
    network = held.stored[0]
    if how == "brought ahead" and offload != "none":
        held.shelf.expect_step(held.stored[::-1])
        held.stored[1](*_inputs())
    for name in ("first", "second", "first"):
        with streams.on(name):
            if how == "parameters":
                assert list(network.parameters())
            else:
                network(*_inputs())
    (copied_at,) = {
        event for name, what, event in streams.told if name == "first" and what == "waits"
    }
    assert ("copies", "records", copied_at) in streams.told
    for name in ("first", "second"):
        assert streams.told.count((name, "waits", copied_at)) == 1
        assert streams.kept[name] >= {one.data_ptr() for one in network.network.parameters()}
        is_used = streams.told.index((name, "waits", copied_at))
        assert is_used > streams.told.index(("copies", "records", copied_at))


def test_weights_that_take_the_memory_of_others_wait_for_all_streams_that_used_these(
    streams: Streams,
) -> None:
    held = _held("ram", num=3)
    first, second, third = held.stored
    for name in ("first", "second"):
        with streams.on(name):
            first(*_inputs())
    # The second runs, and the third takes the place of the first meanwhile.
    held.shelf.expect_step([second, third])
    used = [event for name, what, event in streams.told if name != "copies" and what == "records"]
    second(*_inputs())
    assert held.shelf.is_present(third)
    third(*_inputs())
    waited = [event for name, what, event in streams.told if name == "the host"]
    assert len(used) == 2
    assert waited == used


def test_weights_that_come_one_after_the_other_for_lack_of_memory_are_waited_for_too(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = _held("disk")
    first, second = held.stored
    held.shelf.expect_step([first, second])
    fetch = second.fetch

    def fetched() -> Any:
        if streams.present().name == "copies":
            raise torch.OutOfMemoryError("no memory is left")
        return fetch()

    monkeypatch.setattr(second, "fetch", fetched)
    first(*_inputs())
    with streams.on("another"):
        second(*_inputs())
    with streams.on("third"):
        second(*_inputs())
    (copied_at,) = [
        event for name, what, event in streams.told if (name, what) == ("third", "waits")
    ]
    assert ("another", "records", copied_at) in streams.told


def test_weights_in_main_memory_are_pinned_once_also_after_a_time_on_the_cpu(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that goes to the CPU and back takes its weights from the same memory."""
    scales = Scales()
    sizes: list[int] = []

    def block(size: int) -> Tensor:
        sizes.append(size)
        return torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr(prefetch, "pinned_block", block)
    is_gpu = [False]
    for module in ("prefetch", "offload"):
        monkeypatch.setattr(f"hddm.networks.{module}.has_streams", lambda device: is_gpu[0])
    held = ExpertSet([scales.expert(0)], shelf=Shelf("ram"))
    (network,) = held.stored
    expected = network(*_inputs())
    assert sizes == []
    is_gpu[0] = True
    for _ in range(3):
        held.shelf.forget(network)
        assert torch.equal(network(*_inputs())[0], expected[0])
        held.shelf.forget(network)
        is_gpu[0] = False
        network(*_inputs())
        is_gpu[0] = True
    assert len(sizes) == 1
    assert scales.reads == [0]
    # All copies are made from the pinned ones, and the others are gone.
    assert scales.held() == 0
    begins = {one.untyped_storage().data_ptr() for one in network.tensors().values()}
    assert len(begins) == 1
    held.to(torch.float64)
    network.tensors()
    assert len(sizes) == 2


@pytest.mark.parametrize("offload", ["ram", "disk"])
def test_where_main_memory_cannot_be_pinned_ordinary_memory_serves(
    offload: Offload,
    streams: Streams,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is no lack of the GPU's memory: batches stay as large, experts come ahead, and one line says so."""

    def fails(*_: object, **options: object) -> Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(prefetch, "pinned_block", fails)
    monkeypatch.setattr(Tensor, "pin_memory", fails)
    prefetch._say_unpinned.cache_clear()
    held, plain = _held(offload), flow_expert(0).network
    held.shelf.expect_step(held.stored)
    fitting = Fitting("images")
    with caplog.at_level(logging.WARNING):
        (found,) = fitting.run(8, lambda start, end: held.stored[0](*_inputs())[0])
        held.stored[1](*_inputs())
    assert torch.equal(found, plain(*_inputs())[0])
    assert fitting.most is None
    assert held.shelf._brings_ahead
    (line,) = caplog.messages
    assert line.startswith("main memory cannot be pinned (CUDA error: out of memory): weights are")
    assert torch.equal(copied(torch.arange(3), torch.device("cpu")), torch.arange(3))


def _wasted(sizes: dict[str, int]) -> float:
    found = blocks(sizes)
    listed = [name for _, names in found for name in names]
    assert sorted(listed) == sorted(sizes)
    for size, names in found:
        assert size & (size - 1) == 0
        assert size >= sum(sizes[name] for name in names)
    return sum(size for size, _ in found) / max(sum(sizes.values()), 1) - 1


def test_pinned_memory_of_a_network_is_hardly_more_than_its_weights() -> None:
    """Each in a block of its own, a power of two, matrices of 3072 × 3072 in two bytes would waste 78 %."""
    blocks_of_flux = {f"{k}": 2 * 3072**2 for k in range(57 * 12)} | {
        f"b{k}": 2 * 3072 for k in range(57 * 12)
    }
    assert _wasted(blocks_of_flux) < 0.02
    dice = random.Random(0)
    for _ in range(50):
        least = dice.choice([100, 10_000, MEGABYTE])
        sizes = {
            str(k): dice.randrange(least, 20 * MEGABYTE) for k in range(dice.randrange(50, 300))
        }
        assert _wasted(sizes) < 0.05
    for tiny in ({}, {"a": 0}, {"a": 1, "b": 0, "c": 65}, {"a": MEGABYTE}):
        _wasted(tiny)
    assert blocks({"a": MEGABYTE}) == [(MEGABYTE, ["a"])]


def test_tensors_of_every_dtype_and_shape_are_pinned_as_they_are(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {
        "scalar": torch.tensor(3.0, dtype=torch.float64),
        "odd": torch.arange(7, dtype=torch.int8),
        "empty": torch.zeros(0, 3),
        "half": torch.randn(3, 5).bfloat16(),
        "turned": torch.randn(4, 6).T,
    }
    found = prefetch.pinned(given)
    assert [*found] == [*given]
    for name, value in given.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        assert torch.equal(found[name], value)
