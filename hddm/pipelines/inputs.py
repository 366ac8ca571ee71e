"""Arguments of a pipeline's calls: options of diffusers, repeated conditions, noise."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hddm.sampling import initial_noise, uniform_draws
from hddm.utils.errors import HddmError

LOADING: Mapping[str, Collection[object]] = {
    "local_files_only": (True, False, None),
    "use_safetensors": (True, None),
    "low_cpu_mem_usage": (True, False, None),
    "trust_remote_code": (False, None),
    "variant": (None,),
    "device_map": (None,),
    "safety_checker": (None,),
}
"""Keywords of diffusers' loaders, with the values that have no effect here."""
SAVING: Mapping[str, Collection[object]] = {"safe_serialization": (True, None), "variant": (None,)}

Generators = torch.Generator | Sequence[torch.Generator] | None


def repeated(
    given: Mapping[str, Tensor], against: Mapping[str, Tensor], times: int, batch: int | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """Repeat each row of the conditions ``times`` times; also return the resulting number of images.

    A single row is expanded to the number of rows of the others, and to ``batch`` rows where given.
    """
    if times < 1 or (batch is not None and batch < 1):
        raise HddmError(f"num_images_per_prompt and batch_size start at 1, not {times} and {batch}")
    rows = {name: len(value) for name, value in given.items()}
    rows |= {f"negative {name}": len(value) for name, value in against.items()}
    rows |= {} if batch is None else {"batch_size": batch}
    batch = max(rows.values(), default=1)
    if not set(rows.values()) <= {1, batch} or batch == 0:
        raise HddmError(f"conditions have no rows, or different numbers of them: {rows}")

    def spread(value: Tensor) -> Tensor:
        value = value.expand(batch, *value.shape[1:]) if len(value) == 1 else value
        return value.repeat_interleave(times, dim=0)

    return (
        {name: spread(value) for name, value in given.items()},
        {name: spread(value) for name, value in against.items()},
        batch * times,
    )


def noise_and_draws(
    num: int,
    shape: tuple[int, ...],
    seed: int | None,
    start: int,
    generator: Generators,
    latents: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """States at t = 1 (num, *shape), and numbers in [0, 1) that pick each image's expert (num,).

    With ``seed`` both equal those of `hddm.sample`. In a list of generators, each serves one image, first
    noise, then draw; a single generator, or none, serves the whole batch in that order.
    """
    if min(seed or 0, start) < 0:
        raise HddmError(f"seed and start begin at 0, not at {seed} and {start}")
    if start and seed is None:
        raise HddmError(f"start {start} counts images under a seed; pass one")
    if seed is not None and generator is not None:
        raise HddmError("pass a seed or a generator, not both")
    if isinstance(generator, Sequence) and len(generator) != num:
        raise HddmError(f"{len(generator)} generators for {num} images: pass one each, or a single one")
    if latents is not None and latents.shape != (num, *shape):
        raise HddmError(f"latents are {tuple(latents.shape)}, and {num} images need {(num, *shape)}")
    if seed is not None:
        noise = initial_noise(seed, start, start + num, shape) if latents is None else latents
        return noise, uniform_draws(seed, start, start + num)
    if isinstance(generator, Sequence):
        pairs = [(_normal(shape, one), _uniform((), one)) for one in generator]
        noise = torch.stack([normal for normal, _ in pairs]) if latents is None else latents
        return noise, torch.stack([uniform for _, uniform in pairs])
    noise = _normal((num, *shape), generator) if latents is None else latents
    return noise, _uniform((num,), generator)


def _normal(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    return torch.randn(shape, generator=generator, device=_device(generator)).cpu()


def _uniform(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    return torch.rand(shape, generator=generator, device=_device(generator), dtype=torch.float64).cpu()


def _device(generator: torch.Generator | None) -> torch.device | None:
    return None if generator is None else generator.device


def refuse_options(call: str, options: Mapping[str, Any], harmless: Mapping[str, Collection[object]]) -> None:
    """Refuse keywords whose value would change what hddm does in one way only."""
    for name, value in options.items():
        if not any(value is one for one in harmless.get(name, ())):
            known = "; nothing but a local folder of safetensors is read or written, and no code of it runs"
            raise HddmError(f"{call}({name}={value!r}) is not supported{known}")
