"""Attacks without end on what hddm reads: ``python -m tests.soak --minutes 10 --seed 0``.

Files of every kind are spoiled and read. An attack draws from a seed, which is printed, and keeps what
surprised it in a folder: the spoiled artefact, and a note of how. Exit code 1 if anything did.
"""

import argparse
import contextlib
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from hddm.utils.errors import HddmError
from tests.hostile import address_space
from tests.mutations import spoil
from tests.readers import Kind, kinds

SECONDS = 30
"""Longest reading of a small file."""
MEMORY = 2 * 2**30
"""Most address space that reading one may take."""
LONGEST = 20_000
"""Characters of the longest error, with its details."""


class Hang(BaseException):
    """A reading took too long; no `Exception`, since handlers of those must not keep it."""


@dataclass
class Findings:
    """What an attack did, and the surprises by where they were raised."""

    tried: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    surprises: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        lines = [
            f"{kind}: {n}" + (f", {self.refused[kind]} refused" if self.refused[kind] else "")
            for kind, n in sorted(self.tried.items())
        ]
        lines += [f"SURPRISE ({n} times) {what}" for what, n in self.surprises.most_common()]
        return "\n".join([*lines, f"{self.tried.total()} in all, {len(self.surprises)} surprises"])


def attack_reading(
    root: Path,
    keep: Path,
    seed: int,
    goes_on: Callable[[int], bool],
    only: str = "",
    quick: bool = False,
) -> Findings:
    """Spoil one file after another of valid artefacts, made in ``root``, and read them.

    ``only`` and ``quick`` choose kinds, as in `tests.readers.kinds`; ``goes_on`` is asked by number.
    A reading ends well or with an `HddmError` of one line; all else is a surprise, kept in ``keep``.
    """
    found, rng = Findings(), random.Random(seed)
    chosen = kinds(root / "valid", quick, only)
    weights = [kind.weight for kind in chosen]
    number = 0
    while goes_on(number):
        number += 1
        (kind,) = rng.choices(chosen, weights)
        _attack(kind, random.Random(rng.randrange(2**62)), kind.place, keep, found)
    return found


def _attack(kind: Kind, rng: random.Random, place: Path, keep: Path, found: Findings) -> None:
    weights = [1 / (1 + len(content)) ** 0.3 for content in kind.files.values()]
    name = rng.choices(list(kind.files), weights)[0]
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(kind.folder, place, symlinks=True)
    (place / name).write_bytes(spoil(name, kind.files[name], rng))
    if rng.random() < 0.8:
        kind.seal(place, name)
    how, report = _read(kind, place)
    found.tried[kind.name] += 1
    found.refused[kind.name] += how == "refused"
    if how in ("read", "refused"):
        return
    what = f"{kind.name}: {how}"
    found.surprises[what] += 1
    if found.surprises[what] == 1:
        kept = _kept(place, keep, kind.name, f"{name}\n{how}\n\n{report}")
        print(f"SURPRISE {what}, kept in {kept}", flush=True)


def _kept(place: Path, keep: Path, name: str, how: str) -> Path:
    kept = keep / f"{name}-{len(list(keep.glob('*')))}"
    kept.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(place, kept / "artefact", symlinks=True)
    (kept / "how.txt").write_text(how, "utf-8", "backslashreplace")
    return kept


def _read(kind: Kind, place: Path) -> tuple[str, str]:
    """How reading an artefact ended: ``read``, ``refused``, or what it was instead; and a report."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with warnings.catch_warnings(), _limited():
            warnings.simplefilter("ignore")
            kind.read(place)
    except HddmError as error:
        told = str(error)
        if (
            "\n" in error.message
            or len(told) > LONGEST
            or (not told.isascii() and not _is_writable(told))
        ):
            return f"an error of {len(told)} characters, or of several lines", told[:1000]
        how, report = "refused", told
    except (Exception, Hang) as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if "/hddm/" in frame.filename] or frames
        where = f"{Path(own[-1].filename).name}:{own[-1].lineno} {own[-1].name}"
        return f"{type(error).__name__} at {where}", traceback.format_exc()
    else:
        how, report = "read", ""
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return (how, report) if grown < 2**20 else (f"{grown} KB of memory", report)


def _is_writable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """End a reading that takes too long or too much."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        with address_space(MEMORY):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def main(arguments: Sequence[str] | None = None) -> int:
    """Attack for some minutes, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument(
        "--seed", type=int, default=None, help="default: by the clock; it is printed"
    )
    parser.add_argument("--only", default="", help="kinds of artefacts with this in their name")
    parser.add_argument("--keep", type=Path, default=Path("soak"), help="folder for what fails")
    given = parser.parse_args(arguments)
    seed = int(time.time()) if given.seed is None else given.seed
    print(f"seed {seed}, {given.minutes:g} minutes", flush=True)
    end: list[float] = []

    def goes_on(number: int) -> bool:
        # The clock starts when the valid artefacts are made.
        end[:] = end or [time.monotonic() + 60 * given.minutes]
        return time.monotonic() < end[0]

    with tempfile.TemporaryDirectory() as root:
        found = attack_reading(Path(root), given.keep, seed, goes_on, given.only)
    print(found, flush=True)
    return int(bool(found.surprises))


if __name__ == "__main__":
    sys.exit(main())
