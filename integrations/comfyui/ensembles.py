"""An ensemble or expert of hddm as a model of ComfyUI's, with its own prompts and its own VAE.

This node needs hddm with all its requirements; they are imported when it runs.
"""

import hashlib
import itertools
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hddm.choice import Choice, pick_experts
from hddm.noise import Seeded
from hddm.utils.errors import HddmError, one_line, sizes_apart
from hddm.utils.streams import NUMBERS

from .mixing import BEGIN, ROWS
from .widgets import strategy_widget

logger = logging.getLogger(__name__)

_ROUNDING = 1e-6
"""Of times, which ComfyUI multiplies by 1000."""
PREFIX = "hddm_"
"""Of conditions, among those that ComfyUI hands to a model."""
PRIOR = f"{PREFIX}prior"


class LoadEnsemble:
    """Load a folder that hddm made, as model, text encoder and VAE."""

    CATEGORY: ClassVar[str] = "hddm"
    RETURN_TYPES: ClassVar[tuple[str, ...]] = ("MODEL", "CLIP", "VAE", "LATENT")
    FUNCTION: ClassVar[str] = "load"
    DESCRIPTION: ClassVar[str] = (
        "An ensemble or expert folder of hddm. CLIP Text Encode reads its prompts, or the names of its "
        "classes; the latent is an empty one of its size. The router runs inside the model."
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Inputs and widgets, as ComfyUI asks for them."""
        return {
            "required": {
                "folder": (
                    "STRING",
                    {"default": "", "tooltip": "Of an ensemble or expert, on ComfyUI's machine."},
                ),
                "strategy": strategy_widget(),
                "expert": (
                    "INT",
                    {
                        "default": -1,
                        "min": -1,
                        "max": 1000,
                        "tooltip": "Number of one expert that makes all pictures; -1 for the strategy.",
                    },
                ),
                "batch_size": (
                    "INT",
                    {"default": 1, "min": 1, "max": 1000, "tooltip": "Pictures of the latent."},
                ),
            }
        }

    @classmethod
    def IS_CHANGED(cls, folder: str = "", **unused: Any) -> str:
        """A text that is another one after the files of ``folder`` were written again."""
        return _fingerprint_of(folder)

    def load(
        self, folder: str, strategy: str, expert: int, batch_size: int
    ) -> tuple[Any, "PromptReader", "Decoder", dict[str, Tensor]]:
        """The model, its prompts, its VAE, and an empty latent."""
        place = _place_of(folder)
        if strategy.strip() and expert >= 0:
            raise HddmError(
                f"strategy {strategy!r} and expert {expert}: one expert alone has no strategy; choose one of "
                "the two"
            )
        try:
            from hddm.ensemble import Ensemble
            from hddm.pipelines.pipeline import HDDMPipeline
        except ImportError as error:
            raise HddmError(
                f"Load hddm Ensemble needs the packages that hddm requires, and {error.name} is missing; in "
                "a checkout of hddm, see what pip would change: pip install --dry-run ."
            ) from error

        def ensemble_of(pipe: HDDMPipeline) -> Ensemble:
            return pipe.ensemble.under(strategy.strip()) if strategy.strip() else pipe.ensemble

        def again() -> Ensemble:
            return ensemble_of(HDDMPipeline.from_pretrained(place))

        pipe = HDDMPipeline.from_pretrained(place)
        ensemble = ensemble_of(pipe)
        if expert >= len(ensemble.experts):
            raise HddmError(
                f"expert {expert}: the experts of {folder} are 0 to {len(ensemble.experts) - 1}"
            )
        shape = ensemble.experts[max(expert, 0)].sample_shape
        if shape is None or (expert < 0 and not ensemble.are_alike()):
            raise HddmError(
                f"{folder}: its experts make samples of several kinds; choose one by its number"
            )
        network = EnsembleNetwork(ensemble, None if expert < 0 else expert, again)
        latent = {"samples": torch.zeros(batch_size, *shape)}
        return (
            _patcher(network, shape[0], _space_of(pipe, max(expert, 0))),
            PromptReader(pipe),
            Decoder(pipe, max(expert, 0)),
            latent,
        )


def _space_of(pipe: Any, expert: int) -> str:
    """A name of an expert's latents by its VAE, so that no others are mixed with them."""
    vae = pipe.experts.records[expert].vae
    return "Pixels" if vae is None else f"LatentsOf{vae.fingerprint[:8]}"


def _named_by(folder: str) -> Path | None:
    """The place that a text names, pasted with quotes perhaps, as file managers copy it."""
    text = folder.strip().strip("'\"").strip()
    return Path(text).expanduser() if text else None


def _fingerprint_of(folder: str) -> str:
    """Hash of the names, sizes and times of all files in a folder; of nothing if it is not there."""
    place, found = _named_by(folder), hashlib.sha256()
    if place is None:
        return found.hexdigest()
    for parent, folders, names in os.walk(place):
        folders.sort()
        for name in sorted(names):
            path = Path(parent, name)
            facts = path.stat() if path.exists() else path.lstat()
            line = f"{path.relative_to(place)} {facts.st_size} {facts.st_mtime_ns}\n"
            found.update(line.encode(errors="surrogateescape"))
    return found.hexdigest()


def _place_of(folder: str) -> Path:
    """The folder that a text names.

    Raises:
        HddmError: if there is none.
    """
    place = _named_by(folder)
    if place is None or not place.is_dir():
        raise HddmError(
            f"folder {folder!r}: there is no such folder on ComfyUI's machine; give the whole path of an "
            "ensemble or expert folder"
        )
    return place


class EnsembleNetwork(nn.Module):
    """The velocity of an ensemble, called as ComfyUI calls the network of a flow model.

    Each picture of a batch keeps its expert under ``draw`` and after a commit. A mix that asks for some
    pictures of its batch alone names them in ``transformer_options`` (`ROWS`).

    Args:
        ensemble: experts and router.
        expert: number of one that makes all pictures; None for the ensemble's strategy.
        again: opens the same ensemble once more, for a copy of this network.
    """

    dtype = torch.float32

    def __init__(
        self, ensemble: Any, expert: int | None, again: Callable[[], Any] | None = None
    ) -> None:
        super().__init__()
        self.ensemble, self.expert, self._again = ensemble, expert, again
        if expert is None:
            # A router of reliability is around another one.
            routers = [ensemble.router, getattr(ensemble.router, "base", None)]
            networks = [getattr(one, "network", one) for one in routers]
            modules = [one.network for one in ensemble.experts] + networks
        else:
            modules = [ensemble.experts[expert].network]
        # ComfyUI moves what is registered here between its devices.
        self.parts = nn.ModuleList([one for one in modules if isinstance(one, nn.Module)])
        self._seed = 0
        self._kept = dict[int, int]()
        self._prompt = dict[str, Tensor]()
        self._planned = dict[int, Tensor]()
        """Weights (K,) by the picture of the batch, for the step that runs."""
        self._planned_at = math.nan

    def __deepcopy__(self, memo: dict[int, Any]) -> "EnsembleNetwork":
        """The same with weights and choices of its own, for a mix that has this ensemble twice."""
        assert self._again is not None
        return EnsembleNetwork(self._again(), self.expert, self._again)

    @property
    def size(self) -> int:
        """Bytes of all weights on a device. ComfyUI counts none of those that are not there yet."""
        from hddm.networks.offload import holder_of, size_of

        holders, others = set(), 0
        for part in self.parts:
            holder = holder_of(part)
            if holder is None:
                others += size_of(part)
            else:
                # Experts of one base share its weights.
                holders.add(holder)
        return others + sum(one.size for one in holders)

    def bring(self) -> None:
        """Bring the weights to the device now; otherwise each network's come when it is first asked."""
        for part in self.parts:
            # Asking a network of hddm for its parameters brings them.
            part.parameters()

    def begin_sampling(self, seed: int) -> None:
        """A new sampling."""
        self._seed = seed % NUMBERS
        self._kept.clear()
        self._prompt.clear()
        self._planned.clear()

    def plan(
        self, prompt: Mapping[str, Tensor] | None, x: Tensor, t: Tensor, pictures: Sequence[int]
    ) -> None:
        """Choose the experts of ``pictures`` for states x at t, whatever branches are asked, in any order.

        ``prompt`` has the conditions of the positive branch; None where that is not asked for, and then those
        of the step before count.
        """
        if prompt is not None:
            self._prompt = dict(prompt)
        given = {}
        for name, value in self._prompt.items():
            given[name] = value.repeat(-(-len(x) // len(value)), *[1] * (value.ndim - 1))[: len(x)]
        prior = given.pop(PRIOR, None)
        own = {name.removeprefix(PREFIX): value.to(x.device) for name, value in given.items()}
        known = None if prior is None else prior.cpu()
        times = t.double().clamp(0, 1).cpu().expand(len(x))
        weights = self._weights_of(x, times, own, known, pictures)
        self._planned = dict(zip(pictures, weights, strict=True))
        self._planned_at = float(times[0])

    def forward(
        self,
        x: Tensor,
        timesteps: Tensor,
        context: Any = None,
        control: Any = None,
        transformer_options: Mapping[str, Any] | None = None,
        **given: Tensor,
    ) -> Tensor:
        """Velocity (batch, C, H, W) at ``timesteps``, which are t times 1000."""
        from hddm.guidance import Guidance

        if control is not None:
            raise HddmError("an ensemble of hddm takes no ControlNet")
        conditions = {
            name.removeprefix(PREFIX): one for name, one in given.items() if name != PRIOR
        }
        times = (timesteps.double() / 1000).clamp(0, 1).cpu()
        options = transformer_options or {}
        branches = options.get("cond_or_uncond", [0])
        size = len(x) // len(branches)
        pictures = options.get(ROWS, range(size))
        is_now = abs(self._planned_at - float(times[0])) < _ROUNDING
        if not is_now or not all(number in self._planned for number in pictures):
            rows = slice(0, size)
            own = {name: value[rows] for name, value in given.items()}
            self.plan(own, x[rows], times[rows], pictures)
        weights = torch.stack([self._planned[number] for number in pictures])
        choice = Choice(weights.repeat(len(branches), 1))
        inputs = self.ensemble.inputs_by_expert(x, choice, Guidance(1.0), {}, conditions)
        velocity: Tensor = self.ensemble.mix(x, times, choice, inputs)
        return velocity

    def _weights_of(
        self,
        x: Tensor,
        t: Tensor,
        conditions: Mapping[str, Tensor],
        prior: Tensor | None,
        pictures: Sequence[int],
    ) -> Tensor:
        """Weights (batch, K) of the experts for these ``pictures`` of a batch, by the strategy."""
        ensemble, expert = self.ensemble, self.expert
        if expert is not None or len(ensemble.experts) == 1:
            one = torch.full((len(x),), expert or 0)
            found: Tensor = ensemble.weights(x, t, one, conditions)
            return found
        commits_at = ensemble.commits_at
        is_drawn = ensemble.strategy == "draw" or (commits_at is not None and t[0] <= commits_at)
        if not is_drawn:
            mixing = ensemble if commits_at is None else ensemble.under("full")
            found = mixing.weights(x, t, None, conditions, prior)
            return found
        if any(number not in self._kept for number in pictures):
            if commits_at is None:
                shares = ensemble.begun(x, 1.0, conditions, prior)
            else:
                shares = ensemble.under("full").weights(x, t, None, conditions, prior)
            drawn = pick_experts(shares.double().cpu(), Seeded(self._seed).draws(pictures)).tolist()
            logger.info("hddm: pictures %s are made by experts %s", list(pictures), drawn)
            self._kept.update(zip(pictures, drawn, strict=True))
        kept = torch.tensor([self._kept[number] for number in pictures])
        found = ensemble.weights(x, t, kept, conditions)
        return found


class PromptReader:
    """What CLIP Text Encode needs of a text encoder."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe

    def tokenize(self, text: str, **options: Any) -> str:
        """The text as it is."""
        return text

    def encode_from_tokens_scheduled(self, tokens: str, **options: Any) -> list[list[Any]]:
        """The conditioning of a prompt; the empty one is no condition."""
        facts: dict[str, Any] = {"pooled_output": None, "hddm": {}}
        is_asked = bool(tokens.strip())
        records = self._pipe.experts.records
        if is_asked and not any(one.takes_text or one.takes_classes for one in records):
            raise HddmError(
                f"prompt {one_line(tokens, 60)!r}: this model takes no prompts; leave the text empty, and "
                "cfg at 1"
            )
        # Experts without a text get the empty one by themselves.
        if is_asked or self._pipe.takes_prompts:
            found = self._pipe.encode(prompt=tokens)
            conditions = dict(found.given)
            if found.prior is not None:
                conditions["prior"] = found.prior
            facts["hddm"] = conditions
        return [[torch.zeros(1, 1, 1), facts]]


class Decoder:
    """What VAE Decode and VAE Encode need."""

    def __init__(self, pipe: Any, expert: int) -> None:
        self._pipe, self._expert = pipe, expert

    def decode(self, latents: Tensor) -> Tensor:
        """Pictures (batch, H, W, 3) in [0, 1]."""
        pixels: Tensor = self._pipe.decode(latents, self._expert).float().cpu()
        shown = ((pixels + 1) / 2).clamp(0, 1).movedim(1, -1)
        return shown.expand(*shown.shape[:-1], 3) if shown.shape[-1] == 1 else shown

    def decode_tiled(self, latents: Tensor, **unused: Any) -> Tensor:
        """The same: the VAE takes large pictures in tiles by itself."""
        return self.decode(latents)

    def encode(self, pixels: Tensor) -> Tensor:
        """Latents of pictures (batch, H, W, 3) in [0, 1]."""
        from hddm.networks.vae import latents_of

        images = pixels[..., :3].movedim(-1, 1) * 2 - 1
        vae = self._pipe.vae_of(self._expert)
        if vae is not None:
            return latents_of(vae, images)
        if self._pipe.ensemble.experts[self._expert].sample_shape[0] == 1:
            # Grey as Pillow has it, which hddm reads pictures with.
            weights = torch.tensor([0.299, 0.587, 0.114]).to(images).reshape(1, 3, 1, 1)
            return (weights * images).sum(1, keepdim=True)
        return images


def check_room(needed: int, there: int, device: Any) -> None:
    """Raise an `HddmError` if ``device`` has fewer bytes free than an ensemble needs there."""
    if needed > there:
        wanted, free = sizes_apart(needed, there)
        raise HddmError(
            f"Load hddm Ensemble: its networks need {wanted} on {device}, as a whole, and {free} are free; "
            "choose one expert by its number, close what else uses that memory, start ComfyUI with --cpu, or "
            "let hddm serve run the ensemble elsewhere and use hddm Server"
        )


def _patcher(network: EnsembleNetwork, channels: int, space: str) -> Any:
    import comfy.conds
    import comfy.latent_formats
    import comfy.model_base
    import comfy.model_management
    import comfy.model_patcher
    import comfy.supported_models_base
    from comfy.patcher_extension import WrappersMP

    samples = type(space, (comfy.latent_formats.LatentFormat,), {"latent_channels": channels})

    class WholePatcher(comfy.model_patcher.ModelPatcher):  # type: ignore[misc]
        """Loads all or nothing: ComfyUI loads parts of its own kinds of layers alone."""

        def partially_load(
            self, device_to: Any, extra_memory: float = 0, *args: Any, **kwargs: Any
        ) -> Any:
            is_cpu = comfy.model_management.is_device_cpu(device_to)
            if not is_cpu:
                missing = self.model_size() - self.loaded_size()
                there = int(comfy.model_management.get_free_memory(device_to))
                check_room(missing, there, device_to)
            loaded = super().partially_load(device_to, math.inf, *args, **kwargs)
            if not is_cpu:
                self.model.diffusion_model.bring()
            return loaded

        def partially_unload(self, device_to: Any, memory_to_free: float = 0, **unused: Any) -> int:
            # ComfyUI unloads the whole where this frees too little.
            return 0

    class PromptCondition(comfy.conds.CONDRegular):  # type: ignore[misc]
        """A condition of the positive branch, by which experts are chosen."""

    class Config(comfy.supported_models_base.BASE):  # type: ignore[misc]
        unet_extra_config: ClassVar[dict[str, Any]] = {}
        sampling_settings: ClassVar[dict[str, Any]] = {"shift": network.ensemble.shift}
        latent_format = samples

    class EnsembleModel(comfy.model_base.BaseModel):  # type: ignore[misc]
        def extra_conds(self, **given: Any) -> dict[str, Any]:
            if "hddm" not in given:
                raise HddmError(
                    "an ensemble of hddm gets a prompt of another text encoder; connect the CLIP of Load "
                    "hddm Ensemble to the CLIP Text Encode of this model"
                )
            is_prompt = given.get("prompt_type") != "negative"
            kind = PromptCondition if is_prompt else comfy.conds.CONDRegular
            found = {}
            for name, value in given["hddm"].items():
                found[PREFIX + name] = kind(value.to(given["device"]))
            return found

    config = Config({"dtype": torch.float32})
    flow = comfy.model_base.ModelType.FLOW
    model = EnsembleModel(config, flow, unet_model=lambda **unused: network)
    patcher = WholePatcher(
        model,
        comfy.model_management.get_torch_device(),
        comfy.model_management.unet_offload_device(),
        network.size,
    )

    def begin(executor: Any, *args: Any, **kwargs: Any) -> Any:
        # The seed is in the sampler's extra arguments, the third.
        network.begin_sampling(args[2].get("seed") or 0)
        return executor(*args, **kwargs)

    def choose(
        executor: Any,
        model: Any,
        conds: Any,
        x_in: Tensor,
        timestep: Tensor,
        options: dict[str, Any],
    ) -> Any:
        found = None
        for cond in itertools.chain.from_iterable(one for one in conds if one is not None):
            given = cond["model_conds"]
            if any(isinstance(value, PromptCondition) for value in given.values()):
                own = {name: one.cond for name, one in given.items() if name.startswith(PREFIX)}
                found = own if found is None else found
        pictures = options.get("transformer_options", {}).get(ROWS, range(len(x_in)))
        # A copy of this model in a mix has a network of its own.
        model.diffusion_model.plan(found, x_in, timestep, pictures)
        return executor(model, conds, x_in, timestep, options)

    patcher.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, BEGIN, begin)
    patcher.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, BEGIN, choose)
    return patcher
