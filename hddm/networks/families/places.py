"""Places of text and patches on three axes (text, row, column), as rotary embeddings of each head.

A network makes a table of so many places on each axis, whose size no tensor shows: it is bounded here.
"""

from collections.abc import Sequence
from typing import Any

from hddm.networks.families.family import Config, count

_MOST = 2**16
"""Places on one axis."""
_LARGEST = 2**22
"""Numbers of the tables of all axes; those of Z-Image have 98,304."""


def _three(config: Config, key: str) -> tuple[int, ...]:
    """Three whole numbers of a config, each 1 or more; none where it has something else there."""
    values: Any = config.get(key)
    is_list = isinstance(values, Sequence) and len(values) == 3
    if not is_list or not all(isinstance(one, int) and one >= 1 for one in values):
        return ()
    return tuple(values)


def problems_of_places(
    config: Config, width: str, heads: str, shares: str, lengths: str, least: int
) -> list[str]:
    """What a config says of places that a network cannot have, in words.

    Args:
        config: of the network.
        width: key of its width.
        heads: key of its number of heads.
        shares: key of the numbers of a head that stand for each axis.
        lengths: key of the places on each axis.
        least: places that a text needs on the first one.
    """
    whole, parts = count(config, width) or 0, count(config, heads) or 0
    if parts < 1 or whole < 1 or whole % parts:
        return [f"{width} is {whole}, and is divided by {heads}, {parts}"]
    found = []
    axes, places = _three(config, shares), _three(config, lengths)
    if any(one % 2 for one in axes) or sum(axes) != whole // parts:
        text = f"is three even numbers that sum to {width} / {heads}, {whole // parts}"
        found.append(f"{shares} is {str(config.get(shares))[:40]}, and {text}")
    if not places or max(places) > _MOST or places[0] < least:
        text = f"is three numbers of at most {_MOST}, the first of at least {least}"
        found.append(f"{lengths} is {str(config.get(lengths))[:40]}, and {text}")
    numbers = sum(axis * place for axis, place in zip(axes, places, strict=False))
    if numbers > _LARGEST:
        found.append(f"{shares} and {lengths} ask for {numbers:,} numbers, of {_LARGEST:,} at most")
    return found
