"""Needs in words, memory of this machine, and what operations hold."""

import os

import pytest
import torch

from hddm.utils.errors import size_text
from hddm.utils.machine import LiveBytes, Room, main_memory, resident_bytes, room_on
from hddm.utils.needs import Effort, Memory, Needs, seconds_text, together
from hddm.utils.scaling import Growth, measure_times

ROOM = Room("main memory", 1000, 800)


def needs(*memory: Memory, work: tuple[Effort, ...] = (), host: Room | None = None) -> Needs:
    return Needs("a thing", memory, work, ROOM, host, ["pass less"])


def test_of_what_passes_only_the_largest_counts() -> None:
    found = needs(
        Memory("a", 500), Memory("b", 200, is_passing=True), Memory("c", 300, is_passing=True)
    )
    assert found.on_device == 800
    assert found.fits
    assert found.lines()[-1] == "  fits"
    assert not needs(Memory("a", 500), Memory("c", 301, is_passing=True)).fits


def test_what_does_not_fit_names_a_remedy() -> None:
    assert needs(Memory("a", 801)).lines()[-1] == "  does not fit: pass less"


def test_main_memory_counts_apart_where_the_device_has_its_own() -> None:
    host = Room("main memory", 100, 50)
    memory = (Memory("a", 700), Memory("b", 51, is_on_host=True))
    assert needs(*memory, host=host).on_device == 700
    assert not needs(*memory, host=host).fits
    assert needs(Memory("a", 700), Memory("b", 50, is_on_host=True), host=host).fits
    assert needs(*memory).on_device == 751


def test_what_is_not_known_is_no_zero() -> None:
    work = (Effort("w", None, 3, "calls", "far away"), Effort("v", 20.0, 3, "calls"))
    found = needs(Memory("a", None, "hidden"), Memory("b", 5), work=work)
    said = "\n".join(found.lines())
    assert "a                      not measured     hidden" in said
    assert "w                      not measured     far away" in said
    assert "at least 60 s" in said
    assert "at least 0 kB" in said
    assert said.endswith("what is known fits")


def test_what_is_needed_and_what_is_free_look_different_where_one_is_larger() -> None:
    room = Room("main memory", 2_000_000_000, 1_200_000_000)
    found = Needs("a thing", [Memory("a", 1_200_000_100)], (), room, None, ["pass less"])
    (line,) = [line for line in found.lines() if "in all" in line]
    assert "about 1.2000001 GB" in line
    assert "of which 1.2000000 GB are free" in line
    (line, _) = together("all", 1_200_000_100, room, "fewer of them")
    assert line.startswith("all: about 1.2000001 GB of 2.00 GB")
    assert line.endswith("of which 1.2000000 GB are free")


def test_processes_share_one_memory() -> None:
    assert together("all", 801, ROOM, "fewer of them")[-1] == "  does not fit: fewer of them"
    assert together("all", 800, ROOM, "fewer of them")[-1] == "  fits"


def test_main_memory_is_the_device_s_own_or_the_host_s() -> None:
    memory = (Memory("a", 700), Memory("b", 51, is_on_host=True))
    assert needs(*memory).in_main_memory == 751
    assert needs(*memory, host=ROOM).in_main_memory == 51


def test_amounts_are_written_briefly() -> None:
    sizes = [size_text(one) for one in (999, 123_456, 4_560_000, 7_890_000_000)]
    assert sizes == ["1 kB", "123 kB", "4.6 MB", "7.89 GB"]
    times = [seconds_text(one) for one in (0.000012, 0.0123, 9.9, 600)]
    assert times == ["0.012 ms", "0.012 s", "9.9 s", "10 min"]


def test_memory_of_this_machine_holds_this_process() -> None:
    room = main_memory()
    assert 0 < resident_bytes() < room.free <= room.total
    own = room_on(torch.device("cpu"))
    assert own is not None
    assert own.total == room.total
    assert room.total <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_live_bytes_are_those_of_tensors_that_are_made_and_not_yet_freed() -> None:
    given = torch.zeros(1000)
    with LiveBytes() as live:
        a = given + 1
        b = (a * 2).view(10, 100).t()
        del a
        c = torch.cat([b.flatten(), given])
        c.add_(1)
        d = given.view(10, 100)
    # a and b; then b, its flat copy and c; views and changes in place take nothing.
    assert live.peak() == 4 * (1000 + 1000 + 2000)
    assert live.peak([c]) == 4 * 2000
    assert live.peak([b, c]) == 4 * 1000
    assert d.shape == (10, 100)


def test_live_bytes_follow_the_backward_pass() -> None:
    weight = torch.ones(100, 100, requires_grad=True)
    with LiveBytes() as live:
        (torch.ones(50, 100) @ weight).square().sum().backward()
    assert weight.grad is not None
    assert live.peak() >= weight.grad.nbytes
    assert live.peak() - live.peak([weight.grad]) <= weight.grad.nbytes


@pytest.mark.parametrize(("known", "at", "expected"), [({1: 5.0}, 4, 20), ({1: 5, 2: 7}, 4, 11)])
def test_amounts_are_affine_in_the_number_of_samples(
    known: dict[int, float], at: int, expected: float
) -> None:
    assert Growth(known).at(at) == expected


def test_a_falling_amount_is_not_carried_on_below_zero() -> None:
    assert Growth({1: 5.0, 2: 1.0}).at(100) == 1.0


def test_times_are_measured_up_to_the_batch_or_until_enough_time_is_spent() -> None:
    called: list[int] = []

    def timed(number: int) -> float:
        called.append(number)
        return 0.05 * number

    assert sorted(measure_times(12, timed, lambda number: True).known) == [1, 2, 4, 8, 12]
    assert sorted(measure_times(12, timed, lambda number: number <= 3).known) == [1, 2]
    called.clear()
    measure_times(1000, timed, lambda number: True)
    assert sum(0.05 * number for number in called) < 10
    called.clear()
    measure_times(12, timed, lambda number: True, is_large=True)
    assert called == [1]
