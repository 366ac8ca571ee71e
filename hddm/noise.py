"""Random numbers of samples: initial noise, the number that draws an expert, fresh noise for inpainting.

`Seeded` noise of sample i depends on (seed, i) alone. `Generated` noise comes from the caller's generators,
in the order in which diffusers' pipelines draw it. `Latents` are states that the caller provides.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hddm.utils.streams import DRAW, FRESH, NOISE, generator, stream

Shape = tuple[int, ...]
Generators = torch.Generator | Sequence[torch.Generator] | None


@dataclass(frozen=True)
class Seeded:
    """Noise of sample i by (seed, i) alone, whatever the batch; `HddmError` for a seed below 0."""

    seed: int = 0

    def __post_init__(self) -> None:
        stream(self.seed, NOISE)

    def initial(self, numbers: Sequence[int], shape: Shape, use: int = NOISE) -> Tensor:
        """States ``(n, *shape)`` at t = 1 of the samples ``numbers``, in float32, of a ``use``."""
        streams = self.streams(use, numbers)
        return torch.stack([torch.randn(shape, generator=one) for one in streams])

    def draws(self, numbers: Sequence[int]) -> Tensor:
        """Numbers (n,) in [0, 1) by which experts are drawn, in float64."""
        streams = self.streams(DRAW, numbers)
        return torch.stack([torch.rand((), generator=one, dtype=torch.float64) for one in streams])

    def fresh(self, numbers: Sequence[int], shape: Shape) -> Callable[[], Tensor]:
        """A function that returns new noise ``(n, *shape)`` at every call, in float32."""
        streams = self.streams(FRESH, numbers)
        return lambda: torch.stack([torch.randn(shape, generator=one) for one in streams])

    def streams(self, use: int, numbers: Sequence[int]) -> list[torch.Generator]:
        """The generators of the samples ``numbers`` for a ``use``."""
        return [generator(self.seed, use, i) for i in numbers]


@dataclass(frozen=True)
class OfSeveralSeeds(Seeded):
    """Noise of samples of several seeds: sample r is sample i under the seed of ``pairs[r]``, (seed, i)."""

    pairs: Sequence[tuple[int, int]] = field(kw_only=True)

    def streams(self, use: int, numbers: Sequence[int]) -> list[torch.Generator]:
        pairs = [self.pairs[row] for row in numbers]
        return [generator(seed, use, i) for seed, i in pairs]


class Generated:
    """Noise of samples 0 … ``num`` - 1 from a caller's generators, which go on from call to call.

    In a list each generator serves one sample, first its noise, then the draw of its expert. A single
    generator, or torch's own, serves all samples in that order.

    Args:
        generators: one for all, a list of ``num``, or None for torch's own.
        num: number of samples.
        shape: of the initial noise that is drawn before the experts are; () where they decide its shape.
        latents: ``(num, *shape)``, in place of initial noise.
    """

    def __init__(
        self, generators: Generators, num: int, shape: Shape, latents: Tensor | None = None
    ) -> None:
        self._generators, self._num, self._shape, self._latents = generators, num, shape, latents

    @functools.cached_property
    def _first(self) -> tuple[Tensor, Tensor]:
        """Initial noise, and the draws of experts, which are drawn when the first of them is needed.

        So a call that is refused leaves the caller's generators as they were.
        """
        generators, num, shape, latents = self._generators, self._num, self._shape, self._latents
        if isinstance(generators, Sequence):
            x, draws = [], []
            for one in generators:
                x.append(_normal(shape, one))
                draws.append(_uniform((), one))
            return torch.stack(x) if latents is None else latents, torch.stack(draws)
        noise = _normal((num, *shape), generators) if latents is None else latents
        return noise, _uniform((num,), generators)

    def initial(self, numbers: Sequence[int], shape: Shape) -> Tensor:
        noise, _ = self._first
        if noise.shape[1:] == shape:
            return noise[list(numbers)]
        return torch.stack([_normal(shape, self._of(i)) for i in numbers])

    def _of(self, number: int) -> torch.Generator | None:
        return (
            self._generators[number] if isinstance(self._generators, Sequence) else self._generators
        )

    def draws(self, numbers: Sequence[int]) -> Tensor:
        _, draws = self._first
        return draws[list(numbers)]

    def fresh(self, numbers: Sequence[int], shape: Shape) -> Callable[[], Tensor]:
        if isinstance(self._generators, Sequence):
            return lambda: torch.stack([_normal(shape, self._of(i)) for i in numbers])
        one = self._generators
        return lambda: _normal((len(numbers), *shape), one)


@dataclass(frozen=True)
class Latents(Seeded):
    """States x (n, …) of samples ``start`` … ``start`` + n - 1 at the first time; all else by the seed."""

    x: Tensor = field(kw_only=True)
    start: int = 0

    def initial(self, numbers: Sequence[int], shape: Shape, use: int = NOISE) -> Tensor:
        return self.x[[i - self.start for i in numbers]]


Noise = Seeded | Generated
"""Random numbers of samples, on the CPU; the methods of `Seeded` say which."""


def _normal(shape: Shape, one: torch.Generator | None) -> Tensor:
    return torch.randn(shape, generator=one, device=getattr(one, "device", None)).cpu()


def _uniform(shape: Shape, one: torch.Generator | None) -> Tensor:
    return torch.rand(
        shape, generator=one, device=getattr(one, "device", None), dtype=torch.float64
    ).cpu()
