"""Experts that are brought while another computes: which, when, and what becomes of errors."""

import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import hddm
from hddm.ensemble import Ensemble
from hddm.experts.expert_set import ExpertSet
from hddm.networks.offload import Offload, Shelf
from hddm.utils.errors import HddmError
from tests.cases import in_parts
from tests.ensemble_files import Scales

STEPS, PATIENCE = 4, 60


class Overlaps(Scales):
    """Experts whose calls do not end before so many experts have been read, all but one ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead: list[int] = []
        """Experts that were read by another thread than the one that samples."""
        self.calls: list[int] = []
        self.read_by: Sequence[int] = ()
        """For each call of a network, the experts that are read before it ends."""
        self.fails: Callable[[int], None] = lambda seed: None
        self._changed = threading.Condition()

    def on_read(self, seed: int) -> None:
        with self._changed:
            super().on_read(seed)
            if threading.current_thread() is not threading.main_thread():
                self.ahead.append(seed)
            self._changed.notify_all()
        self.fails(seed)

    def held_set(
        self, num: int, room: int, mode: Offload = "disk", parts: Sequence[Sequence[float]] = ()
    ) -> ExpertSet:
        """So many experts, for parts of the noise, with room for ``room`` of them."""
        experts = [self.expert(k, parts[k] if parts else (0, 1)) for k in range(num)]
        size = ExpertSet(experts).stored[0].size
        held = ExpertSet(experts, shelf=Shelf(mode, room * size))
        for k, network in enumerate(held.stored):
            network.network.register_forward_pre_hook(lambda *_, k=k: self._call(k))
        return held

    def _call(self, k: int) -> None:
        self.calls.append(k)
        if len(self.calls) > len(self.read_by):
            return
        needed = self.read_by[len(self.calls) - 1]
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.reads) >= needed, PATIENCE)


def _mixed(held: ExpertSet, strategy: str = "full") -> Ensemble:
    num = len(held.stored)
    return Ensemble(held.fields(), lambda x, t: torch.full((len(x), num), 1 / num), strategy)


def _samples(model: Ensemble, num: int = 16) -> Tensor:
    return hddm.sample(model, num, 3, STEPS, solver="euler")


def _plain(num: int, strategy: str, parts: Sequence[Sequence[float]] = ()) -> Tensor:
    """Samples of the same experts, all of which stay, in the batches that offloaded ones have."""
    experts = [Scales().expert(k, parts[k] if parts else (0, 1)) for k in range(num)]
    return _samples(_mixed(ExpertSet(experts, shelf=Shelf("ram")), strategy))


def test_under_draw_the_next_expert_is_read_during_the_first_call_of_the_present_one() -> None:
    overlaps = Overlaps()
    held = overlaps.held_set(3, room=2)
    # Expert 0 is read before its first call. Its call waits for 1, and the first call of 1 for 2.
    overlaps.read_by = [2] * STEPS + [3] * STEPS
    found = _samples(_mixed(held, "draw"))
    assert overlaps.calls == [0] * STEPS + [1] * STEPS + [2] * STEPS
    assert overlaps.reads == [0, 1, 2]
    assert overlaps.ahead == [1, 2]
    assert overlaps.most <= 2 * held.stored[0].size
    assert torch.equal(found, _plain(3, "draw"))


def test_a_step_of_several_experts_visits_each_once_and_reads_the_next_meanwhile() -> None:
    overlaps = Overlaps()
    held = overlaps.held_set(4, room=2)
    # Two are left of each step, and run first in the next. Of these the second makes way for a third.
    overlaps.read_by = [2, 3, 4, 4, 4, 5, 6, 6, 6, 7, 8, 8, 8, 9, 10, 10]
    found = _samples(_mixed(held))
    assert overlaps.calls == [0, 1, 2, 3, 2, 3, 0, 1] * 2
    assert overlaps.reads == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert overlaps.ahead == overlaps.reads[1:]
    assert overlaps.most <= 2 * held.stored[0].size
    assert torch.equal(found, _plain(4, "full"))


def test_of_experts_for_parts_of_t_the_one_for_less_noise_comes_during_the_other() -> None:
    overlaps = Overlaps()
    parts = [(0, 0.5), (0.5, 1), (0, 0.5), (0.5, 1)]
    held = overlaps.held_set(4, room=2, parts=parts)
    model = Ensemble(in_parts(held.fields(), [0, 0, 1, 1]), strategy="draw")
    # 1 0 of the first domain, then 3 2 of the second; three of four steps begin at 0.5 or above.
    overlaps.read_by = [2, 2, 2, 3, 4, 4, 4, 4]
    _samples(model)
    assert overlaps.calls == [1, 1, 1, 0, 3, 3, 3, 2]
    assert overlaps.reads == [1, 0, 3, 2]
    assert overlaps.ahead == [0, 3, 2]


@pytest.mark.parametrize("strategy", ["draw", "full"])
def test_where_there_is_room_for_one_nothing_comes_ahead(strategy: str) -> None:
    overlaps = Overlaps()
    held = overlaps.held_set(3, room=1)
    _samples(_mixed(held, strategy))
    assert set(overlaps.reads) == {0, 1, 2}
    assert overlaps.ahead == []
    assert overlaps.most == held.stored[0].size


def test_an_error_in_what_comes_ahead_is_raised_where_it_is_needed() -> None:
    overlaps = Overlaps()
    held = overlaps.held_set(3, room=2)

    def fails(seed: int) -> None:
        if seed == 1:
            raise HddmError("experts/1: has changed since it was opened")

    overlaps.fails = fails
    overlaps.read_by = [2]
    with pytest.raises(HddmError, match="experts/1: has changed"):
        _samples(_mixed(held, "draw"))
    # All calls of the first expert were made.
    assert overlaps.calls == [0] * STEPS


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_where_memory_ends_experts_come_one_after_the_other(
    error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    overlaps = Overlaps()
    held = overlaps.held_set(3, room=2)

    def fails(seed: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise error("no memory is left")

    overlaps.fails = fails
    found = _samples(_mixed(held, "draw"))
    assert torch.equal(found, _plain(3, "draw"))
    assert overlaps.ahead == [1]
    assert caplog.text.count("no room to bring the next one ahead") == 1


def test_what_is_on_its_way_is_dropped_with_its_dtype() -> None:
    overlaps = Overlaps()
    held = overlaps.held_set(2, room=2)
    shelf = held.shelf
    shelf.expect_step(held.stored)
    with shelf.running(held.stored[0]):
        assert shelf.is_present(held.stored[1])
    held.to(torch.float64)
    assert not any(map(shelf.is_present, held.stored))
    shelf.bring(held.stored[1])
    assert overlaps.reads == [0, 1, 1]
