"""Captions and labels out of rows that others wrote, with nothing guessed."""

from collections.abc import Collection, Sequence
from pathlib import Path

from hddm.errors import HddmError, did_you_mean

CAPTION_COLUMNS = ("text", "caption")
LARGEST_LABEL = 99_999
"""Classes are listed by name, so that a stray number could ask for any amount of memory."""


def choose_column(
    columns: Collection[str], asked: str | None, usual: Sequence[str], option: str, origin: Path
) -> str | None:
    """The column that is ``asked`` for, else the one of the ``usual`` names that there is, else None.

    Raises:
        HddmError: where ``asked`` is none of ``columns``, or several have usual names.
    """
    if asked is not None:
        if asked not in columns:
            known = ", ".join(sorted(columns)) or "none"
            hint = did_you_mean(asked, columns)
            raise HddmError(f"{option} {asked}: {origin} has no such column (has {known}){hint}")
        return asked
    found = [name for name in usual if name in columns]
    if len(found) > 1:
        raise HddmError(f"{origin}: has columns {' and '.join(found)}; choose one with {option}")
    return found[0] if found else None


def as_captions(values: Sequence[object], names: Sequence[str], origin: Path) -> tuple[str, ...]:
    """Captions of the images ``names``.

    Raises:
        HddmError: for the first that is missing or no text.
    """
    for value, name in zip(values, names, strict=True):
        if not isinstance(value, str):
            raise HddmError(
                f"{origin}: {name} has caption {_shown(value)}; write one, or an empty text for none"
            )
    return tuple(str(value) for value in values)


def as_labels(
    values: Sequence[object], names: Sequence[str], origin: Path
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Labels (N,) and class names: sorted names, or "0" … for numbers, up to the largest of them.

    Raises:
        HddmError: for a missing label, one that is neither a text nor a number from 0 to `LARGEST_LABEL`, and
            for texts among numbers; the message names the image.
    """
    numbers = isinstance(values[0], int)
    for value, name in zip(values, names, strict=True):
        if numbers and isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST_LABEL:
            continue
        if not numbers and isinstance(value, str):
            continue
        kind = f"a number from 0 to {LARGEST_LABEL}" if numbers else "a text, or a number for all images"
        raise HddmError(
            f"{origin}: {name} has label {_shown(value)}; give each image {kind}, or none a label"
        )
    if numbers:
        labels = tuple(int(str(value)) for value in values)
        return labels, tuple(map(str, range(max(labels) + 1)))
    classes = tuple(sorted({str(value) for value in values}))
    number = {name: index for index, name in enumerate(classes)}
    return tuple(number[str(value)] for value in values), classes


def _shown(value: object) -> str:
    text = "none" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
