"""What a command will need of memory and time, before it runs, in words (`Needs`).

Sizes of weights and of what belongs to them are counted, and exact. Those of activations, and times, are
measured on few samples and scaled, which is "about". What cannot be measured is None, with its reason.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hddm.utils.errors import size_text, sizes_apart
from hddm.utils.machine import Room
from hddm.utils.progress import duration


@dataclass(frozen=True)
class Memory:
    """Memory of one use.

    Args:
        name: of the use.
        size: bytes; None where they are not known.
        note: how they were found, or why they are not known.
        is_about: true for what was measured and scaled.
        is_passing: held for a part of the time. Of several such only the largest counts.
        is_on_host: in main memory, whatever the device.
    """

    name: str
    size: int | None
    note: str = ""
    is_about: bool = False
    is_passing: bool = False
    is_on_host: bool = False


@dataclass(frozen=True)
class Effort:
    """Work of one kind: ``calls`` of ``seconds`` each; None where these are not known, as ``note`` says."""

    name: str
    seconds: float | None
    calls: float
    unit: str
    note: str = ""

    @property
    def total(self) -> float | None:
        """Seconds of all calls."""
        return None if self.seconds is None else self.seconds * self.calls


@dataclass(frozen=True)
class Needs:
    """Memory and time that something will need.

    Args:
        what: what needs them, such as "one worker".
        memory: what holds memory.
        work: what takes time, one after the other.
        device: memory of the device; None where nobody can ask for it here: that of another machine, and of a
            device that does not tell.
        host: main memory, where the device has memory of its own; else None.
        remedies: what makes it fit, best first.
    """

    what: str
    memory: Sequence[Memory]
    work: Sequence[Effort]
    device: Room | None
    host: Room | None = None
    remedies: Sequence[str] = ()

    @property
    def on_device(self) -> int:
        """Bytes on the device, of what is known."""
        return _sum(one for one in self.memory if self._is_on_device(one))

    @property
    def on_host(self) -> int:
        """Bytes in main memory, where the device has memory of its own; else 0."""
        return _sum(one for one in self.memory if not self._is_on_device(one))

    @property
    def in_main_memory(self) -> int:
        """Bytes in main memory, whether or not that is the device's."""
        return self.on_device if self.host is None else self.on_host

    @property
    def seconds(self) -> float:
        """Seconds of all work that is known."""
        return sum(one.total or 0.0 for one in self.work)

    @property
    def fits(self) -> bool:
        """True if both places have room for what is known."""
        is_on_host = self.host is None or self.on_host <= self.host.free
        return is_on_host and (self.device is None or self.on_device <= self.device.free)

    @property
    def left(self) -> int:
        """Free bytes of the device beside what is known to need them; 0 where these are not known."""
        return 0 if self.device is None else self.device.free - self.on_device

    def _is_on_device(self, one: Memory) -> bool:
        return self.host is None or not one.is_on_host

    def lines(self) -> list[str]:
        """A heading, a line for each use of memory and each work, sums, and whether it fits."""
        rows = [f"{self.what}:"]
        places: list[tuple[str, Room | None, bool]] = [("memory", self.device, True)]
        if self.host is not None:
            places.append(("main memory", self.host, False))
        for word, room, is_device in places:
            own = [one for one in self.memory if self._is_on_device(one) == is_device]
            if own:
                rows += _memory_lines(word, own, room)
        if self.work:
            rows += self._work_lines()
        rows += self._verdict()
        return rows

    def _work_lines(self) -> list[str]:
        rows = ["  time"]
        is_whole = True
        for one in self.work:
            if one.seconds is None or one.total is None:
                is_whole = False
                rows.append(_row(one.name, "not measured", one.note))
                continue
            how = f"{one.calls:,.0f} {one.unit} × {seconds_text(one.seconds)}"
            note = f"{how}; {one.note}" if one.note else how
            rows.append(_row(one.name, f"about {seconds_text(one.total)}", note))
        if self.seconds:
            least = "about" if is_whole else "at least"
            shown = f"{least} {seconds_text(self.seconds)}"
            rows.append(_row("in all", shown, "after the start, which loads libraries and files"))
        return rows

    def _verdict(self) -> list[str]:
        if not self.fits:
            return [f"  does not fit: {', or '.join(self.remedies) or 'take a larger machine'}"]
        if self.device is None:
            return [
                "  whether it fits: not known, since the device's memory cannot be asked for here"
            ]
        if any(one.size is None for one in self.memory):
            return ["  what is known fits"]
        return ["  fits"]


def together(what: str, total: int, room: Room | None, remedy: str) -> list[str]:
    """Lines about the ``total`` memory of several processes in one ``room``, if it is known."""
    if room is None:
        return [f"{what}: about {size_text(total)}", "  how much memory is free is not known"]
    needed, there = _beside(total, room)
    rows = [f"{what}: about {needed} {there}"]
    rows.append("  fits" if total <= room.free else f"  does not fit: {remedy}")
    return rows


def _sum(memory: Iterable[Memory]) -> int:
    lasting, passing = 0, 0
    for one in memory:
        if one.is_passing:
            passing = max(passing, one.size or 0)
        else:
            lasting += one.size or 0
    return lasting + passing


def _memory_lines(word: str, memory: Sequence[Memory], room: Room | None) -> list[str]:
    rows = [f"  {word}"]
    has_passing = False
    for one in memory:
        shown = "not measured"
        if one.size is not None:
            shown = f"about {size_text(one.size)}" if one.is_about else size_text(one.size)
        # Of what is held for a while only the largest counts.
        name = f"or {one.name}" if one.is_passing and has_passing else one.name
        has_passing |= one.is_passing
        rows.append(_row(name, shown, one.note))
    least = "at least" if any(one.size is None for one in memory) else "about"
    needed, there = _beside(_sum(memory), room)
    rows.append(_row("in all", f"{least} {needed}", there))
    return rows


def _beside(needed: int, room: Room | None) -> tuple[str, str]:
    """An amount of memory, and how much is free in its ``room``, in words that show which is more."""
    if room is None:
        return size_text(needed), ""
    shown, free = sizes_apart(needed, room.free)
    return shown, f"of {size_text(room.total)} of {room.name}, of which {free} are free"


def _row(name: str, shown: str, note: str) -> str:
    return f"    {name:<22} {shown:<16} {note}".rstrip()


def seconds_text(seconds: float) -> str:
    """Format as ``0.012 s`` below 10 s, else as a `hddm.utils.progress.duration`."""
    if seconds >= 10 or not math.isfinite(seconds):
        return duration(seconds)
    return f"{seconds:.2g} s" if seconds >= 0.001 else f"{1000 * seconds:.2g} ms"
