"""Sampling with several models inside ComfyUI's samplers.

The mix is a clone of model 1 that carries four of ComfyUI's wrappers. ``outer_sample`` prepares the other
models for the sampler's conditionings, or for their own, and registers what they need to be loaded.
``prepare_sampling``, which loads all models, gets the memory that the most demanding of them works in.
``sampler_sample`` encodes those conditionings, as the sampler did for model 1. ``calc_cond_batch``, which
every sampler calls for denoised pictures, asks each model at its own noise level and mixes velocities.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import comfy.model_patcher
import comfy.sampler_helpers
import comfy.samplers
import torch
from comfy.patcher_extension import WrappersMP
from torch import Tensor

from hddm.choice import Choice, pick_experts
from hddm.noise import Seeded
from hddm.strategies import Strategy
from hddm.utils.errors import HddmError
from hddm.utils.streams import NUMBERS

from .conditionings import Conds, check_width, has_hooks, percents_of, rows_of, with_own_controls
from .copies import has_same_weights, with_own_weights
from .levels import Levels, denoised_of
from .mixing import BEGIN, KEY, ROWS, ModelToMix, maps_beside

logger = logging.getLogger(__name__)

CONTROLS = "hddm_controls"


def mixed(models: Sequence[ModelToMix], strategy: Strategy) -> Any:
    """A clone of the first model that samples as the mix of all."""
    host = models[0].model.clone()
    loaded, sharing = [host], dict[int, Any]()
    added = []
    for k, one in enumerate(models[1:], 1):
        patcher = one.model.clone()
        # A network that keeps who makes which picture is one for each part of the mix.
        is_shared = not hasattr(patcher.model.diffusion_model, BEGIN)
        if is_shared and any(has_same_weights(patcher, other) for other in loaded):
            sharing[k] = patcher
            continue
        if any(patcher.is_clone(other) for other in loaded):
            patcher = with_own_weights(patcher, loaded, k + 1)
        loaded.append(patcher)
        added.append(patcher)
    host.set_additional_models(KEY, added)
    mix = Mix(models, strategy, sharing, host)
    host.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, KEY, mix.outer_sample)
    host.add_wrapper_with_key(WrappersMP.PREPARE_SAMPLING, KEY, mix.prepare_sampling)
    host.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, KEY, mix.sampler_sample)
    host.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, KEY, mix.calc_cond_batch)
    if any(one.cfg for one in models):
        # A sampler with cfg 1 would not ask for the negative, which models with another cfg need.
        host.model_options["disable_cfg1_optimization"] = True
    return host


@dataclass
class Guest:
    """A model other than the first, for one sampling."""

    patcher: Any
    conds: Conds
    options: dict[str, Any]


class Mix:
    """What a mix decides, and the state of the sampling that runs."""

    def __init__(
        self,
        models: Sequence[ModelToMix],
        strategy: Strategy,
        sharing: Mapping[int, Any],
        host: Any,
    ) -> None:
        self.models = [ModelToMix(None, *_settings(one)) for one in models]
        self.strategy = strategy
        self._sharing = dict(sharing)
        # Not its `patches_uuid`, which a hook on a conditioning changes for good.
        self._patches = {key: list(listed) for key, listed in host.patches.items()}
        self._changes = _network_changes(host.model_options)
        self._guests = dict[int, Guest]()
        self._run: MixRun | None = None

    def outer_sample(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare the other models, and let the sampler load them with the first."""
        guider = executor.class_obj
        host = guider.model_patcher
        if not _are_same(host.patches, self._patches):
            raise HddmError(
                "a node behind Mix Models changes weights, which would reach model 1 alone; put LoRA loaders "
                "in front of Mix Models, one for each model"
            )
        given = [*guider.original_conds.values(), *(one.positive or () for one in self.models)]
        if any(has_hooks(listed) for listed in given):
            raise HddmError(
                "a conditioning has hooks (Set CLIP Hooks, Cond Set Hooks), which a mix of models does not "
                "support; load its LoRA in front of Mix Models instead"
            )
        added = iter(host.get_additional_models_with_key(KEY))
        try:
            for k in range(1, len(self.models)):
                patcher = self._sharing[k] if k in self._sharing else next(added)
                self._guests[k] = self._prepared(k, patcher, guider)
            controls = []
            for guest in self._guests.values():
                found, _ = comfy.sampler_helpers.get_additional_models(
                    guest.conds, guest.patcher.model_dtype()
                )
                controls += found
                controls += comfy.sampler_helpers.get_additional_models_from_model_options(
                    guest.options
                )
            host.set_additional_models(CONTROLS, controls)
            return executor(*args, **kwargs)
        finally:
            host.remove_additional_models(CONTROLS)
            for guest in self._guests.values():
                comfy.sampler_helpers.cleanup_models(guest.conds, [])
                guest.patcher.cleanup()
                guest.patcher.restore_hook_patches()
                comfy.samplers.cast_to_load_options(
                    guest.options, device=guest.patcher.offload_device
                )
            self._guests.clear()

    def prepare_sampling(
        self,
        executor: Any,
        host: Any,
        noise_shape: Sequence[int],
        conds: Conds,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Load all models, and keep free what the most demanding of them works in with its ControlNets."""
        own = _work_of(host, noise_shape, conds)
        most = own
        for guest in self._guests.values():
            needed = _work_of(guest.patcher, noise_shape, guest.conds)
            most = max(most[0], needed[0]), max(most[1], needed[1])
        more = most[0] - own[0], most[1] - own[1]
        with _asking_for_more(host.model, noise_shape[0], more):
            return executor(host, noise_shape, conds, *args, **kwargs)

    def _prepared(self, k: int, patcher: Any, guider: Any) -> Guest:
        """Conditionings and options of model ``k``, as the sampler has them for the first model."""
        own, asked = self.models[k], guider.original_conds
        given = dict(asked)
        if own.positive is not None:
            others = set(asked) - {"positive", "negative"}
            if others:
                raise HddmError(
                    f"model {k + 1} has conditionings of its own, and this sampler asks for "
                    f"{', '.join(sorted(others))} as well; use one with positive and negative alone"
                )
            given["positive"] = comfy.sampler_helpers.convert_cond(own.positive)
            # Without a negative of its own its cfg is 1, and no negative is asked for.
            negative = own.positive if own.negative is None else own.negative
            if "negative" in given:
                given["negative"] = comfy.sampler_helpers.convert_cond(negative)
        conds, controls = Conds(), dict[int, Any]()
        for name, listed in given.items():
            conds[name] = [with_own_controls(cond, controls) for cond in listed]
        check_width(patcher, conds, k + 1)
        comfy.samplers.preprocess_conds_hooks(conds)
        options = comfy.model_patcher.create_model_options_clone(patcher.model_options)
        comfy.sampler_helpers.prepare_model_patcher(patcher, conds, options)
        comfy.samplers.filter_registered_hooks_on_conds(conds, options)
        return Guest(patcher, conds, options)

    def sampler_sample(
        self,
        executor: Any,
        guider: Any,
        sigmas: Tensor,
        extra_args: dict[str, Any],
        callback: Any,
        noise: Tensor,
        latent_image: Tensor | None = None,
        denoise_mask: Tensor | None = None,
        disable_pbar: bool = False,
    ) -> Any:
        """Encode the conditionings of the other models, and sample."""
        self._check_guider(guider)
        host = guider.inner_model
        levels = [Levels(host.model_sampling, "model 1")]
        device, seed = noise.device, extra_args.get("seed")
        for k, guest in sorted(self._guests.items()):
            model = guest.patcher.model
            guest.patcher.pre_run()
            network = model.diffusion_model
            if hasattr(network, BEGIN):
                getattr(network, BEGIN)(seed or 0)
            own = Levels(model.model_sampling, f"model {k + 1}")
            with percents_of(host.model_sampling, levels[0], model.model_sampling, own):
                guest.conds = comfy.samplers.process_conds(
                    model, noise, guest.conds, device, latent_image, denoise_mask, seed
                )
            reached = own.sigmas(levels[0].times(sigmas).clamp(max=own.limits[1])).to(sigmas)
            guest.options.setdefault("transformer_options", {})["sample_sigmas"] = reached
            comfy.samplers.cast_to_load_options(
                guest.options, device=device, dtype=guest.patcher.model_dtype()
            )
            levels.append(own)
        host.current_patcher = guider.model_patcher
        self._run = MixRun(self, guider, levels, self._guests, noise, (seed or 0) % NUMBERS)
        try:
            return executor(
                guider,
                sigmas,
                extra_args,
                callback,
                noise,
                latent_image,
                denoise_mask,
                disable_pbar,
            )
        finally:
            self._run = None

    def _check_guider(self, guider: Any) -> None:
        if not any(one.cfg for one in self.models):
            return
        is_plain = type(guider).predict_noise is comfy.samplers.CFGGuider.predict_noise
        if not is_plain or "negative" not in guider.conds or guider.cfg == 0:
            raise HddmError(
                "a model of the mix has a cfg of its own, which needs a sampler with positive, negative and "
                "one cfg above 0, such as KSampler; or set cfg_1 and cfg_2 to 0"
            )

    def calc_cond_batch(
        self,
        executor: Any,
        model: Any,
        conds: Sequence[Any],
        x_in: Tensor,
        timestep: Tensor,
        model_options: dict[str, Any],
    ) -> list[Tensor]:
        """Denoised pictures of the mix, one for each of ``conds``."""
        if self._run is None:
            raise HddmError(
                "a mix of models was asked outside of a sampler; this node works with single models alone"
            )

        if _network_changes(model_options) != self._changes:
            raise HddmError(
                "a node behind Mix Models changes the network (attention patches, as of FreeU, PAG or "
                "IPAdapter), which would reach model 1 alone; put it in front of Mix Models, once for each "
                "model"
            )

        def ask_first(conds: Sequence[Any], x: Tensor, sigma: Tensor, rows: Tensor | None) -> Any:
            return executor(model, conds, x, sigma, _of_pictures(model_options, rows))

        return self._run.denoised(ask_first, conds, x_in, timestep)


def _work_of(patcher: Any, noise_shape: Sequence[int], conds: Conds) -> tuple[float, float]:
    """Bytes that a model works in with its ControlNets: where there is room, and at least."""
    dtype = patcher.model_dtype()
    _, controls = comfy.sampler_helpers.get_additional_models(conds, dtype)
    much, least = comfy.sampler_helpers.estimate_memory(patcher, noise_shape, conds)
    return much + controls, least + controls


@contextlib.contextmanager
def _asking_for_more(model: Any, batch: int, more: tuple[float, float]) -> Iterator[None]:
    """Let ``model`` ask for ``more`` bytes: where there is room, and at least."""
    by_itself, given = model.memory_required, vars(model).get("memory_required")

    def memory_required(input_shape: Sequence[int], *args: Any, **kwargs: Any) -> float:
        # Where there is room ComfyUI counts both branches of guidance, as one batch.
        added = more[0] if input_shape[0] > batch else more[1]
        return float(by_itself(input_shape, *args, **kwargs)) + added

    model.memory_required = memory_required
    try:
        yield
    finally:
        if given is None:
            del model.memory_required
        else:
            model.memory_required = given


def _are_same(patches: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    """True if both have the same patches of weights, as objects: their tensors are not compared."""
    if patches.keys() != known.keys():
        return False
    for key, listed in patches.items():
        if [id(one) for one in listed] != [id(one) for one in known[key]]:
            return False
    return True


def _network_changes(options: Mapping[str, Any]) -> list[tuple[str, int]]:
    """What options change inside of a network, by place and object."""
    found = [("model_function_wrapper", id(options.get("model_function_wrapper")))]
    inner = options.get("transformer_options", {})
    for kind in ("patches", "patches_replace"):
        for place, listed in inner.get(kind, {}).items():
            each = listed.items() if isinstance(listed, Mapping) else enumerate(listed)
            for number, function in each:
                found.append((f"{kind} {place} {number}", id(function)))
    return sorted(found)


def _settings(one: ModelToMix) -> tuple[Any, ...]:
    return one.weight, one.cfg, one.positive, one.negative, one.mask


class MixRun:
    """One sampling of a mix."""

    def __init__(
        self,
        mix: Mix,
        guider: Any,
        levels: Sequence[Levels],
        guests: Mapping[int, Guest],
        noise: Tensor,
        seed: int,
    ) -> None:
        self._models, self._strategy = mix.models, mix.strategy
        self._guider, self._levels, self._guests = guider, levels, guests
        self._maps = maps_beside(mix.models, noise)
        self._kept: Tensor | None = None
        if mix.strategy.keeps_one:
            at = torch.tensor([mix.strategy.value])
            draws = Seeded(seed).draws(range(len(noise)))
            kept = pick_experts(self._shares(at)[0], draws)
            self._kept = Choice.of(kept, len(mix.models)).weights.double()
            logger.info("hddm: the pictures are made by models %s", (kept + 1).tolist())

    def _shares(self, t: Tensor) -> Tensor:
        """Weights (batch, K) of the models at noise levels t (batch,), scaled to a sum of 1."""
        weights = torch.stack([one.weight.at(t) for one in self._models], 1)
        return weights / weights.sum(1, keepdim=True)

    def _weights(self, t: Tensor) -> Tensor:
        shares = self._shares(t)
        if self._kept is None:
            return shares
        if self._strategy.kind == "draw":
            return self._kept
        return torch.where((t > self._strategy.value)[:, None], shares, self._kept)

    def denoised(
        self,
        ask_first: Callable[..., Any],
        conds: Sequence[Any],
        x_in: Tensor,
        timestep: Tensor,
    ) -> list[Tensor]:
        """Denoised pictures of the mix for states ``x_in`` (batch, …) of model 1 at its ``timestep``."""
        names = [self._name_of(cond) for cond in conds]
        self._check_branches(names)
        t = self._levels[0].times(timestep.reshape(-1)).expand(len(x_in))
        x = self._levels[0].common(x_in, t)
        choice = Choice(self._weights(t))
        maps = self._weight_maps(choice.weights, x)
        found = [torch.zeros_like(x) for _ in conds]
        for k, rows in sorted(choice.rows.items()):
            here = rows.to(x.device)
            velocities = self._velocities(k, ask_first, conds, names, x, t, rows)
            for i, velocity in enumerate(self._guided(k, names, velocities)):
                if velocity is None:
                    continue
                if maps is None:
                    weight = choice.weights[rows, k].to(velocity)
                    weight = weight.reshape(-1, *[1] * (x.ndim - 1))
                else:
                    weight = maps[k]
                found[i].index_add_(0, here, weight * velocity)
        self._guider.inner_model.current_patcher = self._guider.model_patcher
        pictures = []
        for name, velocity in zip(names, found, strict=True):
            # The sampler ignores the picture of a branch that it did not ask for.
            picture = velocity if name is None else denoised_of(x, t, velocity)
            pictures.append(picture.to(x_in.dtype))
        return pictures

    def _check_branches(self, names: Sequence[str | None]) -> None:
        asked = {"positive", "negative"} & set(names)
        if len(asked) == 1 and any(one.cfg for one in self._models):
            raise HddmError(
                "a node behind Mix Models asks for the positive and the negative apart, and a model of the "
                "mix has a cfg of its own, which needs both; set cfg_1 and cfg_2 to 0, or leave out that node"
            )

    def _name_of(self, cond: Any) -> str | None:
        if cond is None:
            return None
        for name, known in self._guider.conds.items():
            if known is cond:
                return str(name)
        raise HddmError(
            "a node changes the conditionings while it samples (context windows, or regions of its own), "
            "which a mix of models does not support"
        )

    def _velocities(
        self,
        k: int,
        ask_first: Callable[..., Any],
        conds: Sequence[Any],
        names: Sequence[str | None],
        x: Tensor,
        t: Tensor,
        rows: Tensor,
    ) -> list[Tensor | None]:
        """Velocities (n, …) of model ``k`` for the pictures ``rows`` (n,) of a batch, one for each cond."""
        wanted = [name if self._is_asked(k, name) else None for name in names]
        own: list[Any] = []
        for name, cond in zip(wanted, conds, strict=True):
            if name is None:
                own.append(None)
            else:
                own.append(cond if k == 0 else self._guests[k].conds[name])
        is_part = len(rows) < len(x)
        few = rows_of(own, rows, len(x)) if is_part else None
        if few is not None:
            own, here, times = few, x[rows.to(x.device)], t[rows]
        else:
            here, times = x, t
        matched = self._levels[k].matched(here, times)
        asked = None if few is None else rows
        if k == 0:
            pictures = ask_first(own, matched.x, matched.sigma, asked)
        else:
            guest = self._guests[k]
            guest.patcher.model.current_patcher = guest.patcher
            options = _of_pictures(guest.options, asked)
            pictures = comfy.samplers.calc_cond_batch(
                guest.patcher.model, own, matched.x, matched.sigma, options
            )
        velocities: list[Tensor | None] = []
        for name, picture in zip(wanted, pictures, strict=True):
            if name is None:
                velocities.append(None)
                continue
            velocity = matched.velocity(picture.to(here.dtype))
            if is_part and few is None:
                velocity = velocity[rows.to(x.device)]
            velocities.append(velocity)
        return velocities

    def _is_asked(self, k: int, name: str | None) -> bool:
        """False for a branch that the sampler does not ask for, or that cfg 1 makes void."""
        return name is not None and not (name == "negative" and self._models[k].cfg == 1)

    def _guided(
        self, k: int, names: Sequence[str | None], velocities: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Velocities that the sampler's cfg s turns into those of the model's own scale c.

        With n' = n and p' = n + (c/s)(p - n), the sampler's n' + s (p' - n') is n + c (p - n).
        """
        own = self._models[k].cfg
        if not own or "positive" not in names or "negative" not in names:
            return list(velocities)
        positive, negative = names.index("positive"), names.index("negative")
        p = velocities[positive]
        assert p is not None
        n = p if velocities[negative] is None else velocities[negative]
        assert n is not None
        found = list(velocities)
        found[positive], found[negative] = n + own / self._guider.cfg * (p - n), n
        return found

    def _weight_maps(self, weights: Tensor, x: Tensor) -> Tensor | None:
        """Weights (K, batch, 1, …) by place; None without masks."""
        if self._maps is None:
            return None
        by_level = weights.T.reshape(len(self._models), -1, *[1] * (x.ndim - 1)).to(x)
        found = by_level * self._maps.to(x)
        total = found.sum(0)
        if not bool((total > 0).all()):
            raise HddmError(
                "masks: at this size of latents there are places where no model has a weight; let the masks "
                "meet, or leave one model without a mask"
            )
        return found / total


def _of_pictures(options: dict[str, Any], rows: Tensor | None) -> dict[str, Any]:
    """Options that say which pictures of the batch are asked for; None for all."""
    if rows is None:
        return options
    to_network = {**options.get("transformer_options", {}), ROWS: rows.tolist()}
    return {**options, "transformer_options": to_network}
