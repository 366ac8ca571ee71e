"""Training seeds as users write them."""

import re

from hddm.utils.errors import HddmError

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def parse_seeds(text: str, option: str = "") -> tuple[int, ...]:
    """Seeds in ``0-4``, ``5,6`` or ``0-2,7``, in that order; errors begin with ``option``.

    Raises:
        HddmError: for anything else, or a seed that comes twice.
    """
    found: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise HddmError(f"{option}{text}: {part.strip()!r} is no seed; write them as 0-4 or 5,6")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    if len(set(found)) < len(found):
        raise HddmError(f"{option}{text}: a seed comes twice; name each once")
    return tuple(found)
