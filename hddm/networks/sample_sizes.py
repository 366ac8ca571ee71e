"""Heights and widths of samples that a network takes, besides the one that it was trained on."""

from dataclasses import dataclass

from hddm.utils.errors import HddmError

Size = tuple[int, int]
"""Height and width."""
LARGEST_SIDE = 4096
"""Of a sample. A UNet has no tensor that would bound what its config declares."""


@dataclass(frozen=True)
class SampleSizes:
    """Which heights and widths a network takes.

    Args:
        multiple: both sides are multiples of this.
        most: the largest side.
        is_square: both sides are equal.
    """

    multiple: int = 1
    most: int = LARGEST_SIDE
    is_square: bool = False

    def nearest(self, size: Size) -> tuple[Size, ...]:
        """The size itself, if the network takes it; else the nearest smaller and larger one that it takes."""
        if self.is_square and size[0] != size[1]:
            side = min(size)
            return self.nearest((side, side)) if self._down(side) != side else ((side, side),)
        lower = (self._down(size[0]), self._down(size[1]))
        if lower == size:
            return (size,)
        upper = (self._up(size[0]), self._up(size[1]))
        return (lower,) if lower == upper else (lower, upper)

    def check(self, size: Size, pixels: int = 1) -> None:
        """Raise an `HddmError` with the nearest sizes, for one that the network does not take.

        Messages speak of pictures, which have ``pixels`` to one side of a sample's.
        """
        found = self.nearest(size)
        if found == (size,):
            return
        words = " and ".join(words_of(one, pixels) for one in found)
        unit = self.multiple * pixels
        rule = f"multiples of {unit}" if unit > 1 else "any size"
        square = "squares of " if self.is_square else ""
        raise HddmError(
            f"a size of {words_of(size, pixels)} is not one that the network takes ({square}{rule}, at most "
            f"{self.most * pixels}); the nearest are {words}"
        )

    def _down(self, side: int) -> int:
        bounded = min(max(side, self.multiple), self.most)
        return bounded // self.multiple * self.multiple

    def _up(self, side: int) -> int:
        above = -(-max(side, 1) // self.multiple) * self.multiple
        return min(above, self.most // self.multiple * self.multiple)


def words_of(size: Size, pixels: int) -> str:
    """Width and height, as pictures are named."""
    height, width = size
    return f"{width * pixels}×{height * pixels}"
