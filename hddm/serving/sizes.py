"""Which sizes of pictures a service makes: the experts' own, and others within bounds.

Sizes are (height, width) in pixels here, and ``WIDTHxHEIGHT`` in requests, as OpenAI's API writes them.
"""

import math
from dataclasses import dataclass
from typing import Any

from hddm.networks.sample_sizes import SampleSizes, Size
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.serving.refusals import Refusal

USUAL = 2
"""Largest number of pixels by default, in those of the experts' own size."""


def written(size: Size) -> str:
    """``WIDTHxHEIGHT``."""
    height, width = size
    return f"{width}x{height}"


@dataclass(frozen=True)
class ServedSizes:
    """Sizes of pictures that may be requested.

    Args:
        own: the experts' own size, of the first one if they differ; always allowed.
        others: which others all experts make, in pixels; None for none.
        most: pixels of the largest.
    """

    own: Size
    others: SampleSizes | None
    most: int

    @classmethod
    def of(cls, pipeline: HDDMPipeline, most: int | None) -> "ServedSizes":
        """Those of an ensemble; ``most`` is by default `USUAL` times the pixels of its own size."""
        own = pipeline.image_size
        return cls(own, _sizes_of_all(pipeline), most or USUAL * math.prod(own))

    def read(self, size: str) -> Size | None:
        """The size of a request, None for ``auto``; a `Refusal` with the nearest ones for another."""
        if size == "auto":
            return None
        width, height = map(int, size.split("x"))
        wanted = (height, width)
        if wanted == self.own:
            return wanted
        if self.others is None:
            raise self._refusal(wanted, f"this ensemble makes {written(self.own)}")
        near = self.others.nearest(wanted)
        if math.prod(wanted) > self.most:
            raise self._refusal(
                wanted,
                f"this service makes at most {self.most} pixels, as {self._words(self._below(wanted))}",
            )
        if near != (wanted,):
            shape = "squares" if self.others.is_square else "pictures"
            rule = f"sides that are multiples of {self.others.multiple}, at most {self.others.most}"
            fitting = [one for one in near if math.prod(one) <= self.most] or [self.own]
            raise self._refusal(
                wanted,
                f"this ensemble makes {shape} with {rule}; the nearest are {self._words(fitting)}",
            )
        return wanted

    @property
    def described(self) -> dict[str, Any]:
        """The same in an answer."""
        found: dict[str, Any] = {"default": written(self.own)}
        if self.others is not None:
            found["multiple_of"] = self.others.multiple
            found["max_side"] = self.others.most
            found["max_pixels"] = max(self.most, math.prod(self.own))
            found["square"] = self.others.is_square
        return found

    def _below(self, wanted: Size) -> list[Size]:
        """A size of about the shape of ``wanted`` that is small enough, or the experts' own."""
        assert self.others is not None
        ratio = math.sqrt(self.most / math.prod(wanted))
        smaller = (int(wanted[0] * ratio), int(wanted[1] * ratio))
        found = self.others.nearest(smaller)[0]
        return [found] if math.prod(found) <= self.most else [self.own]

    def _words(self, sizes: list[Size]) -> str:
        return " and ".join(map(written, sizes))

    def _refusal(self, wanted: Size, text: str) -> Refusal:
        return Refusal(400, f"size is '{written(wanted)}', and {text}; or pass auto", "size")


def _sizes_of_all(pipeline: HDDMPipeline) -> SampleSizes | None:
    """Sizes in pixels that all experts make; None where one makes its own alone."""
    multiple, most, is_square = 1, math.inf, False
    for k, one in enumerate(pipeline.ensemble.experts):
        pixels = pipeline.pixels_of(k)
        for field in (one, one.weak):
            if field is None:
                continue
            sizes = SampleSizes() if field.resizing is None else field.resizing.sizes
            if sizes is None:
                return None
            multiple = math.lcm(multiple, sizes.multiple * pixels)
            most = min(most, sizes.most * pixels)
            is_square = is_square or sizes.is_square
    return SampleSizes(multiple, int(most) // multiple * multiple, is_square)
