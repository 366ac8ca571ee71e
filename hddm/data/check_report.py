"""What a check of images found, as a record and as lines of text."""

from collections.abc import Mapping, Sequence
from typing import Literal

from hddm.facts import Facts
from hddm.wording import TO_ONE_SIZE, counted

_SHOWN = 5


class BadImage(Facts):
    """An image that cannot be trained on, and why."""

    name: str
    kind: Literal["unreadable", "oversized", "corrupt"]
    reason: str


class PartReport(Facts):
    """What one shard holds, or one source of images.

    ``sizes`` are upright ("width×height") and, like ``formats`` and ``modes``, the most frequent first, of
    images that are not bad. ``transparent`` images lose their alpha channel, ``turned`` ones are turned
    upright, of ``animated`` ones the first frame is taken. ``classes`` counts the images of each class.
    ``captions`` are None where there are none, ``empty_captions`` those without a letter.
    """

    name: str
    images: int
    formats: dict[str, int]
    modes: dict[str, int]
    sizes: dict[str, int]
    transparent: int
    turned: int
    animated: int
    classes: dict[str, int]
    captions: int | None
    empty_captions: int
    bad: list[BadImage]


class DataReport(Facts):
    """What a check found.

    Images of equal pixels are groups, each in one list: ``across_split`` where they lie on several sides of
    ``split``, so that what judges a model was trained on; else ``duplicates`` within a part, ``shared``
    in several. ``split`` names the sides: folders as ``train`` and ``test``, or the training and held-out
    images of a partition; it is empty where there are none.
    """

    path: str
    kind: Literal["images", "shard", "partition"]
    parts: list[PartReport]
    duplicates: list[list[str]]
    shared: list[list[str]]
    split: list[str]
    across_split: list[list[str]]

    @property
    def num_images(self) -> int:
        """Images of all parts."""
        return sum(part.images for part in self.parts)

    @property
    def bad(self) -> list[BadImage]:
        """Bad images of all parts."""
        return [bad for part in self.parts for bad in part.bad]

    def lines(self) -> list[str]:
        """The report for a reader, with each bad or repeated file by name."""
        lines = [line for part in self.parts for line in _lines(part, self.split)]
        sizes = {size for part in self.parts for size in part.sizes}
        if len(sizes) > 1:
            lines.append(f"images of {len(sizes)} sizes, and training takes one: {TO_ONE_SIZE}")
        titles = {"equal images": self.duplicates, "equal images in several shards": self.shared}
        if self.split:
            titles[f"equal images on several sides of the split ({', '.join(self.split)})"] = (
                self.across_split
            )
        for title, groups in titles.items():
            if groups:
                lines.append(f"{title}: {len(groups)}")
                lines += [f"  {' = '.join(group)}" for group in groups]
        repeated = len(self.duplicates) + len(self.shared) + len(self.across_split)
        counts = f"{counted(self.num_images, 'image')}, {len(self.bad)} bad, {repeated} that "
        counts += "occurs more than once" if repeated == 1 else "occur more than once"
        if self.split:
            counts += f", {len(self.across_split)} on several sides of the split"
        lines.append(f"{self.path}: {counts}")
        return lines


def _lines(part: PartReport, split: Sequence[str]) -> list[str]:
    lines = [f"{part.name}: {counted(part.images, 'image')}"]
    told = {"formats": part.formats, "modes": part.modes, "sizes": part.sizes}
    lines += [f"  {title}: {_counts(counts)}" for title, counts in told.items() if counts]
    treated = {
        ("loses its transparency", "lose their transparency"): part.transparent,
        ("is turned upright", "are turned upright"): part.turned,
        ("gives its first frame", "give their first frame"): part.animated,
    }
    lines += [f"  {counted(count, *what)}" for what, count in treated.items() if count]
    if split and set(split) <= set(part.classes):
        sides = [f"{name} ({part.classes[name]})" for name in split]
        lines.append(
            f"  sides of a split: {', '.join(sides)}; training on them together learns them as classes, so "
            "name one alone"
        )
    elif part.classes:
        lines.append(f"  classes: {len(part.classes)}, {_range(list(part.classes.values()))} images each")
    if part.captions is not None:
        lines.append(f"  captions: {part.captions}, {part.empty_captions} of them empty")
    if part.bad:
        lines.append(f"  bad: {len(part.bad)}")
        lines += [f"    {bad.kind}: {bad.reason}" for bad in part.bad]
    return lines


def _counts(counts: Mapping[str, int]) -> str:
    shown = [f"{name} ({count})" for name, count in list(counts.items())[:_SHOWN]]
    more = [f"… and {len(counts) - _SHOWN} more"] if len(counts) > _SHOWN else []
    return ", ".join(shown + more)


def _range(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"
