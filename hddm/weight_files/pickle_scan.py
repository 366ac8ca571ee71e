"""A rehearsal of pickles: what one would import, call and load is accounted for before torch reads it."""

import pickletools
from collections.abc import Iterator
from typing import IO, Any

from hddm.weight_files.kinds import one_line
from hddm.weight_files.pickle_machine import ALLOWED, Machine, RefusedPickleError

MOST_OPCODES = 600_000
"""Of one pickle. A checkpoint of thousands of tensors with its optimiser's state has 200,000."""
_MOST_NAMES = 1000


def refused_globals(stream: IO[bytes]) -> set[str]:
    """The names off the fixed list that the next pickle of ``stream`` imports, as ``module.name``.

    Raises:
        RefusedPickleError: for a broken pickle.
    """
    found: set[str] = set()
    texts = ["?", "?"]
    for opcode, value, _ in _opcodes(stream):
        if len(found) == _MOST_NAMES:
            break
        if opcode == "STACK_GLOBAL":
            # The two names may come from anywhere; the last strings are those of every ordinary pickle.
            found.add(" ".join(texts))
        elif opcode in ("GLOBAL", "INST") and (opcode == "INST" or value not in ALLOWED):
            found.add(value)
        elif isinstance(value, str):
            texts = [texts[1], value]
    return {name.replace(" ", ".") for name in found}


def rehearse(stream: IO[bytes], storages: dict[str, int]) -> Any:
    """The next pickle of ``stream`` with stand-ins; adds the bytes of each storage it loads to ``storages``.

    Raises:
        RefusedPickleError: at the first opcode, call or persistent id that weights do not need.
    """
    machine = Machine(storages)
    try:
        for opcode, value, position in _opcodes(stream):
            if opcode == "STOP":
                return machine.result()
            machine.step(opcode, value, position)
    except (IndexError, KeyError) as error:
        raise RefusedPickleError(f"is a broken pickle ({type(error).__name__} at byte {position})") from error
    raise RefusedPickleError("is a broken pickle (without an end)")


def _opcodes(stream: IO[bytes]) -> Iterator[tuple[str, Any, int | None]]:
    try:
        for number, (opcode, value, position) in enumerate(pickletools.genops(stream)):
            if number == MOST_OPCODES:
                raise RefusedPickleError(f"has more than {MOST_OPCODES} opcodes, which weights never need")
            yield opcode.name, value, position
    except RefusedPickleError:
        raise
    # genops raises ValueError, and what codecs and integers raise on broken arguments.
    except Exception as error:
        raise RefusedPickleError(f"is a broken pickle ({one_line(error)})") from error
