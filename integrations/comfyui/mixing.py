"""The nodes that mix models, and what they refuse before anything is sampled.

ComfyUI itself is imported where models are mixed (`mixed_sampling`), so that this module can be checked
without it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from hddm.strategies import Strategy
from hddm.utils.errors import HddmError

from .levels import Levels
from .weights import WeightCurve, check_sum, levels_of

MIX, DRAW, COMMIT = "mix", "draw", "commit"
WAYS = [MIX, DRAW, COMMIT]
CONTEXT = "context_handler"
GUIDANCE_CHANGES = (
    "sampler_cfg_function",
    "sampler_pre_cfg_function",
    "sampler_post_cfg_function",
    "sampler_calc_cond_batch_function",
    "denoise_mask_function",
    CONTEXT,
)
"""Options of a model that act on the sampler, of which a mix has one."""
SAMPLER_WRAPPERS = ("outer_sample", "prepare_sampling", "sampler_sample", "predict_noise")
KEY = "hddm"
"""Of this pack's wrappers and additional models in a patcher of ComfyUI's."""
BEGIN = "begin_sampling"
"""The method of an ensemble's network that begins a sampling, and the key of the wrappers that call it."""
ROWS = "hddm_pictures"
"""Of the numbers of the pictures of a batch that a mix asks for, in ``transformer_options``."""


@dataclass(frozen=True)
class ModelToMix:
    """A model and its part in a mix."""

    model: Any
    weight: WeightCurve
    cfg: float = 0.0
    """Guidance scale of its own; 0 for the sampler's."""
    positive: Any = None
    """Conditioning of its own; None for the sampler's."""
    negative: Any = None
    mask: Tensor | None = None
    """(batch, H, W), where it works; None for everywhere that masks leave free."""


def strategy_of(way: str, commit_at: float) -> Strategy:
    """The strategy of hddm that a ``way`` is: ``full``, ``draw`` or ``commit-x``."""
    if way == COMMIT:
        return Strategy.parse(f"commit-{commit_at:g}")
    return Strategy(DRAW if way == DRAW else "full")


def check(models: Sequence[ModelToMix], strategy: Strategy) -> None:
    """Raise an `HddmError` for models that do not go together, or not in this way."""
    check_sum([one.weight for one in models])
    has_mask = any(one.mask is not None for one in models)
    if strategy.kind == DRAW and not all(one.weight.is_constant for one in models):
        raise HddmError("way 'draw': a weight is a model's share of the pictures, one number each")
    if strategy.keeps_one and has_mask:
        raise HddmError(
            f"way {strategy.kind!r} gives a picture to one model; masks need the way 'mix'"
        )
    _check_places(models)
    for k, one in enumerate(models, 1):
        _check_conditioning(one, k)
        Levels(one.model.get_model_object("model_sampling"), f"model {k}")
        _check_alone(one.model, k)
        _check_latents(models[0].model, one.model, k)


def _check_places(models: Sequence[ModelToMix]) -> None:
    """Refuse masks that leave a part of the picture without a model, at some noise level."""
    sizes = [one.mask.shape[-2:] for one in models if one.mask is not None]
    if not sizes:
        return
    # Batches of masks are repeated, each by itself, so that any of these meet.
    batch = math.lcm(*(len(_masks_of(one.mask)) for one in models if one.mask is not None))
    maps = maps_of(models, batch, sizes[0], "cpu")
    assert maps is not None
    for level in levels_of([one.weight for one in models]):
        at = torch.tensor([level])
        weights = torch.stack([one.weight.at(at) for one in models]).reshape(-1, 1, 1, 1, 1)
        is_empty = (weights * maps).sum(0) <= 0
        if bool(is_empty.any()):
            share = float(is_empty.float().mean())
            raise HddmError(
                f"masks: at noise level {level:g}, no model has a weight in {max(share, 0.01):.0%} of the "
                "picture; give the models that work there a weight at every level, or leave out a mask"
            )


def _masks_of(mask: Tensor) -> Tensor:
    return mask.reshape(-1, 1, *mask.shape[-2:])


def maps_of(
    models: Sequence[ModelToMix], batch: int, size: Sequence[int], device: Any
) -> Tensor | None:
    """Where each model works, (K, batch, 1, H, W) in [0, 1] at a ``size`` (H, W); None without masks."""
    masks = list[Tensor | None]()
    for one in models:
        if one.mask is None:
            masks.append(None)
            continue
        mask = _masks_of(one.mask).to(device, torch.float32)
        mask = torch.nn.functional.interpolate(mask, tuple(size), mode="bilinear").clamp(0, 1)
        repeats = -(-batch // len(mask))
        masks.append(mask.repeat(repeats, 1, 1, 1)[:batch])
    given = [mask for mask in masks if mask is not None]
    if not given:
        return None
    free = (1 - torch.stack(given).sum(0)).clamp(0, 1)
    return torch.stack([free if mask is None else mask for mask in masks])


def maps_beside(models: Sequence[ModelToMix], noise: Tensor) -> Tensor | None:
    """Masks (K, batch, 1, …) beside latents ``noise``; None if no model has one.

    Raises:
        HddmError: if a model has a mask and latents are no pictures (batch, C, H, W) and no videos
            (batch, C, frames, H, W), or videos with more than one mask.
    """
    counts = [len(_masks_of(one.mask)) for one in models if one.mask is not None]
    if counts and noise.ndim not in (4, 5):
        raise HddmError(
            f"masks: these latents have {noise.ndim} axes, so they are no pictures, and a mask has no "
            "place in them; leave out the masks"
        )
    if noise.ndim == 5 and any(count > 1 for count in counts):
        raise HddmError(
            f"masks: a model has {max(counts)} masks, and latents are a video; give one mask, which counts "
            "for every frame"
        )
    size = noise.shape[-2:]
    maps = maps_of(models, len(noise), size, noise.device)
    if maps is None:
        return None
    return maps.reshape(len(models), len(noise), 1, *[1] * (noise.ndim - 4), *size)


def _check_conditioning(one: ModelToMix, k: int) -> None:
    if one.positive is None and one.negative is not None:
        raise HddmError(f"model {k}: has a negative of its own, and needs a positive as well")
    if one.positive is not None and one.negative is None and one.cfg != 1:
        raise HddmError(
            f"model {k}: has a positive of its own; connect its negative as well, or set its cfg to 1"
        )


def _check_alone(model: Any, k: int) -> None:
    """Refuse a mix of mixes, and changes of the sampler in other models than the first."""
    wrapped = []
    for kind in SAMPLER_WRAPPERS:
        found = model.wrappers.get(kind, {})
        if any(listed for key, listed in found.items() if key != BEGIN):
            wrapped.append(kind)
    if any(KEY in kinds for kinds in model.wrappers.values()):
        raise HddmError(
            f"model {k}: is a mix already; connect its models to one node, with One More Model to Mix"
        )
    changes = [name for name in GUIDANCE_CHANGES if model.model_options.get(name)]
    if CONTEXT in changes:
        raise HddmError(f"model {k}: has context windows, which a mix of models does not support")
    if k > 1 and (changes or wrapped):
        raise HddmError(
            f"model {k}: a node in front of it changes how the sampler works ({(changes + wrapped)[0]}), and "
            "a mix has one sampler; put that node behind Mix Models"
        )


def _check_latents(first: Any, other: Any, k: int) -> None:
    mine, theirs = _latents_of(first), _latents_of(other)
    if mine != theirs:
        raise HddmError(
            f"model 1 has latents {_words(mine)}, and model {k} {_words(theirs)}; only models of one latent "
            "format can be mixed"
        )


def _latents_of(model: Any) -> dict[str, Any]:
    found = model.model.latent_format
    facts = {"name": type(found).__name__, "channels": found.latent_channels}
    for fact in ("scale_factor", "shift_factor"):
        facts[fact] = getattr(found, fact, None)
    return facts


def _words(facts: Mapping[str, Any]) -> str:
    scale = facts["scale_factor"]
    shown = f"{scale:g}" if isinstance(scale, float) else str(scale)
    return f"{facts['name']} ({facts['channels']} channels, scale {shown})"


_WEIGHT_TIP = (
    "How much of the velocity is this model's: one number, or LEVEL: WEIGHT pairs such as '0.7: 1, 0.4: 0', "
    "with straight lines between. Level 1 is noise, 0 the finished picture. The weights of all models are "
    "scaled to a sum of 1."
)
_CFG_TIP = "Guidance scale of this model alone. 0: the sampler's."
_MASK_TIP = "Where this model works. Models without a mask share what the masks leave free."
_POSITIVE_TIP = (
    "For a model with another text encoder: the prompt, encoded for it. Unconnected: the sampler's."
)


def _weight() -> tuple[str, dict[str, Any]]:
    return "STRING", {"default": "1", "tooltip": _WEIGHT_TIP}


def _cfg() -> tuple[str, dict[str, Any]]:
    bounds = {"default": 0.0, "min": 0.0, "max": 100.0, "step": 0.1, "round": 0.01}
    return "FLOAT", {**bounds, "tooltip": _CFG_TIP}


def _conditioning(tip: str) -> tuple[str, dict[str, Any]]:
    return "CONDITIONING", {"tooltip": tip}


class MixModels:
    """Mix the velocities of two or more models; the result samples like model 1, in any sampler node."""

    CATEGORY: ClassVar[str] = "hddm"
    RETURN_TYPES: ClassVar[tuple[str, ...]] = ("MODEL",)
    FUNCTION: ClassVar[str] = "mix"
    DESCRIPTION: ClassVar[str] = (
        "Runs several models of one latent format, which may predict noise, v or a flow, and mixes their "
        "velocities at equal noise levels. Samplers and schedulers see the noise levels of model 1."
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Inputs and widgets, as ComfyUI asks for them."""
        mask = ("MASK", {"tooltip": _MASK_TIP})
        positive = _conditioning(_POSITIVE_TIP)
        return {
            "required": {
                "model_1": ("MODEL", {"tooltip": "Its noise levels are those of the mix."}),
                "model_2": ("MODEL", {"tooltip": "Another model of the same latent format."}),
                "weight_1": _weight(),
                "weight_2": _weight(),
                "way": (
                    WAYS,
                    {
                        "default": MIX,
                        "tooltip": "mix: velocities are mixed at every step. draw: each picture of a "
                        "batch is made by one model, drawn by the weights. commit: mixed above commit_at, "
                        "where each picture draws one model that finishes it.",
                    },
                ),
                "commit_at": (
                    "FLOAT",
                    {
                        "default": 0.5,
                        "min": 0.01,
                        "max": 1.0,
                        "step": 0.01,
                        "tooltip": "Only for the way 'commit': the noise level at which a picture draws its "
                        "model.",
                    },
                ),
                "cfg_1": _cfg(),
                "cfg_2": _cfg(),
            },
            "optional": {
                "positive_2": positive,
                "negative_2": positive,
                "mask_1": mask,
                "mask_2": mask,
                "more_models": (
                    "HDDM_MODELS",
                    {"tooltip": "Further models, from One More Model to Mix."},
                ),
            },
        }

    def mix(
        self,
        model_1: Any,
        model_2: Any,
        weight_1: str,
        weight_2: str,
        way: str,
        commit_at: float,
        cfg_1: float,
        cfg_2: float,
        positive_2: Any = None,
        negative_2: Any = None,
        mask_1: Tensor | None = None,
        mask_2: Tensor | None = None,
        more_models: Sequence[ModelToMix] = (),
    ) -> tuple[Any]:
        """The mix, as a model."""
        first = ModelToMix(model_1, WeightCurve.parse(weight_1, "weight_1"), cfg_1, mask=mask_1)
        second = ModelToMix(model_2, WeightCurve.parse(weight_2, "weight_2"), cfg_2)
        second = replace(second, positive=positive_2, negative=negative_2, mask=mask_2)
        models = [first, second, *more_models]
        strategy = strategy_of(way, commit_at)
        check(models, strategy)
        from .mixed_sampling import mixed

        return (mixed(models, strategy),)


class OneMoreModel:
    """A further model for `MixModels`; several form a chain."""

    CATEGORY: ClassVar[str] = "hddm"
    RETURN_TYPES: ClassVar[tuple[str, ...]] = ("HDDM_MODELS",)
    RETURN_NAMES: ClassVar[tuple[str, ...]] = ("more_models",)
    FUNCTION: ClassVar[str] = "add"
    DESCRIPTION: ClassVar[str] = "A third or further model for Mix Models; several form a chain."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Inputs and widgets, as ComfyUI asks for them."""
        return {
            "required": {
                "model": ("MODEL", {"tooltip": "A model of the same latent format."}),
                "weight": _weight(),
                "cfg": _cfg(),
            },
            "optional": {
                "positive": _conditioning(_POSITIVE_TIP),
                "negative": _conditioning(_POSITIVE_TIP),
                "mask": ("MASK", {"tooltip": _MASK_TIP}),
                "more_models": ("HDDM_MODELS", {"tooltip": "The models before this one."}),
            },
        }

    def add(
        self,
        model: Any,
        weight: str,
        cfg: float,
        positive: Any = None,
        negative: Any = None,
        mask: Tensor | None = None,
        more_models: Sequence[ModelToMix] = (),
    ) -> tuple[list[ModelToMix]]:
        """The chain with this model at its end."""
        curve = WeightCurve.parse(weight, "weight")
        return ([*more_models, ModelToMix(model, curve, cfg, positive, negative, mask)],)
