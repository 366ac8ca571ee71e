"""Numbers and lists in sentences."""

from collections.abc import Sequence

TO_ONE_SIZE = "hddm encode --resolution N brings those of a shard or partition to one"
"""The remedy for images of several sizes."""


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """``1 image``, ``2 images``; ``plural`` where it is not the noun with an s."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def shown(names: Sequence[str], most: int = 20) -> list[str]:
    """The first ``most`` names, and how many more there are."""
    more = [f"… and {len(names) - most} more"] if len(names) > most else []
    return [*names[:most], *more]
