"""Measuring on few samples what many will take: memory and time are affine in their number."""

from collections.abc import Callable
from dataclasses import dataclass, field

SPENT = 6.0
"""Seconds after which nothing is measured on more samples."""
LARGE = 10.0
"""Seconds of a first call from which on a network is large, and measured on one sample alone."""


@dataclass
class Growth:
    """An amount by the number of samples that it was measured on."""

    known: dict[int, float] = field(default_factory=dict)

    def at(self, number: int) -> float:
        """The amount for ``number`` samples: on the line through the last two that are known.

        By a single one it is in proportion.
        """
        numbers = sorted(self.known)[-2:]
        last = numbers[-1]
        if number == last or len(numbers) == 1:
            return self.known[last] * number / last
        before = numbers[0]
        slope = max(0.0, (self.known[last] - self.known[before]) / (last - before))
        return self.known[last] + slope * (number - last)

    @property
    def numbers(self) -> str:
        """The numbers of samples, in words."""
        return " and ".join(map(str, sorted(self.known)[-2:]))


def measure_times(
    most: int, timed: Callable[[int], float], fits: Callable[[int], bool], is_large: bool = False
) -> Growth:
    """Time one sample, then twice as many again and again, up to ``most`` or until `SPENT` is over.

    Each number but a large network's is timed twice, and the shorter time counts. ``timed`` returns the
    seconds of a number of samples, and ``fits`` says whether there is memory for it.
    """
    found, number, spent = Growth(), 1, 0.0
    while True:
        seconds = timed(number)
        spent += seconds
        if not is_large:
            again = timed(number)
            spent += again
            seconds = min(seconds, again)
        found.known[number] = seconds
        following = min(2 * number, most)
        if number >= most or is_large or spent + 4 * seconds > SPENT or not fits(following):
            return found
        number = following
