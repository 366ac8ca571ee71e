"""Diffusers pipeline of an ensemble: from prompts or class labels to images."""

import contextlib
import functools
import inspect
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, AutoencoderTiny, DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils import BaseOutput
from torch import Tensor, nn
from torch.nn.functional import adaptive_max_pool2d

from hddm.conditions import Labels
from hddm.editing import DEFAULT_RESAMPLING, Picture
from hddm.ensemble import Ensemble
from hddm.evaluation.expert_use import ExpertUse
from hddm.experts.compatibility import takes_text
from hddm.experts.ensemble_folders import ENSEMBLE_FILE, EnsembleRecord
from hddm.experts.expert_set import ExpertSet, carrying
from hddm.experts.loading import ensemble_of, open_ensemble, room_beside, save_ensemble, unpacked
from hddm.experts.model_index import COMPONENTS, numbered, shift_of
from hddm.experts.records import RouterRecord
from hddm.networks.offload import Offload
from hddm.networks.transformers import RouterTransformer
from hddm.networks.vae import decode, kind_of, latents_of, scale_of
from hddm.noise import Generators
from hddm.pipelines.callbacks import Callback, Callbacks
from hddm.pipelines.encoding import Encoding, repeated
from hddm.pipelines.hub import plan_upload, upload
from hddm.pipelines.inputs import (
    LOADING,
    NETWORKS,
    PARTS,
    SAVING,
    Dtype,
    Images,
    dtypes_of,
    mask_of,
    noise_from,
    pixels_of,
    read_parts,
    refuse_call_options,
    refuse_options,
)
from hddm.pipelines.stock import parts_for_loader
from hddm.running import run
from hddm.sampling import batches, plan
from hddm.solvers import OnStep
from hddm.utils.errors import HddmError, one_line
from hddm.utils.files import new_folder, restore
from hddm.velocity import Guidance, VelocityField


@dataclass
class HDDMPipelineOutput(BaseOutput):  # type: ignore[misc]
    """Images in the format of ``output_type``, and the experts that made them."""

    images: Any
    expert_use: ExpertUse


class HDDMPipeline(Encoding, Callbacks, DiffusionPipeline):  # type: ignore[misc]
    """Samples of an ensemble, decoded by a VAE if its experts are of latents.

    Args:
        experts: in the router's order.
        router: of these experts' shards, or a function as `hddm.Ensemble` takes; optional only for ``draw``.
        scheduler: its ``shift`` is that of the time grid; the solver is hddm's own (`hddm.solvers`).
        vae: decodes latents; without it only ``output_type="latent"`` is possible.
        text_encoder: encodes prompts; without it, pass embeddings.
        tokenizer: of the text encoder.
        vae_2, text_encoder_2, tokenizer_2, vae_3, text_encoder_3, tokenizer_3: of experts in other latent
            spaces, or of other text encoders, as ``facts`` numbers them.
        facts: strategy and priors; by default those that ``experts`` carry, or ``draw`` with equal shares.
        router_facts: the router's time scale; by default that which it carries, and needed with any other.

    Raises:
        HddmError: for parts that contradict each other.
    """

    _optional_components = ["router", *COMPONENTS]  # noqa: RUF012 - as diffusers has it

    def __init__(
        self,
        experts: ExpertSet,
        scheduler: FlowMatchEulerDiscreteScheduler,
        router: RouterTransformer | Callable[..., Tensor] | None = None,
        vae: AutoencoderKL | AutoencoderTiny | None = None,
        text_encoder: Any = None,
        tokenizer: Any = None,
        facts: EnsembleRecord | None = None,
        router_facts: RouterRecord | None = None,
        vae_2: AutoencoderKL | AutoencoderTiny | None = None,
        text_encoder_2: Any = None,
        tokenizer_2: Any = None,
        vae_3: AutoencoderKL | AutoencoderTiny | None = None,
        text_encoder_3: Any = None,
        tokenizer_3: Any = None,
    ) -> None:
        super().__init__()
        if isinstance(router, RouterTransformer):
            router = carrying(router, router_facts or router.record)
        self.register_modules(
            experts=carrying(experts, facts or experts.record),
            scheduler=scheduler,
            router=router,
            vae=vae,
            text_encoder=text_encoder,
            tokenizer=tokenizer,
            vae_2=vae_2,
            text_encoder_2=text_encoder_2,
            tokenizer_2=tokenizer_2,
            vae_3=vae_3,
            text_encoder_3=text_encoder_3,
            tokenizer_3=tokenizer_3,
        )
        self.max_memory: int | None = None
        self._ensemble: Ensemble | None = None
        self._made_of: tuple[Any, ...] = ()
        self._opened: Path | None = None
        self.image_processor = VaeImageProcessor()
        self.ensemble  # noqa: B018 - so that what does not fit is refused here

    @property
    def ensemble(self) -> Ensemble:
        """Velocity field of these parts, cached while they stay the same.

        Raises `HddmError` for a scheduler that does more than shift its grid, and parts that do not fit or of
        another class.
        """
        for vae in self.vaes:
            kind_of(vae)
        models = (self.experts, self.router, self.router_facts, self.experts.record)
        shift = shift_of(self.scheduler)
        if self._ensemble is None or any(a is not b for a, b in zip(models, self._made_of, strict=True)):
            self._ensemble, self._made_of = ensemble_of(self.experts, self.router), models
        self._ensemble.shift = shift
        return self._ensemble

    @property
    def vaes(self) -> list[AutoencoderKL | AutoencoderTiny]:
        """All VAEs."""
        found = (getattr(self, name) for name in COMPONENTS if name.startswith("vae"))
        return [vae for vae in found if vae is not None]

    @property
    def facts(self) -> EnsembleRecord:
        """Record of the ensemble, with the strategy and the shift that are in force."""
        chosen = {"shift": self.ensemble.shift, "strategy": self.ensemble.strategy}
        record: EnsembleRecord = self.experts.record.model_copy(update=chosen)
        return record

    @facts.setter
    def facts(self, record: EnsembleRecord) -> None:
        self.experts = carrying(self.experts, record)

    @property
    def router_facts(self) -> RouterRecord | None:
        """Record of the router, where it carries one."""
        record = getattr(self.router, "record", None)
        return record if isinstance(record, RouterRecord) else None

    @router_facts.setter
    def router_facts(self, record: RouterRecord) -> None:
        if isinstance(self.router, RouterTransformer):
            self.router = carrying(self.router, record)

    @property
    def components(self) -> dict[str, Any]:
        """All that a pipeline of the same parts is made of: ``HDDMPipeline(**pipe.components)``."""
        return {**super().components, "experts": carrying(self.experts, self.facts)}

    @classmethod
    def from_pipe(cls, pipeline: "HDDMPipeline", **changes: Any) -> "HDDMPipeline":
        """Make a pipeline of the same parts, except for ``changes`` (constructor arguments)."""
        if not isinstance(pipeline, HDDMPipeline):
            raise HddmError(f"from_pipe: a {type(pipeline).__name__} is no ensemble; convert and assemble it")
        return cls(**pipeline.components | changes)

    @classmethod
    def from_ensemble(
        cls,
        ensemble: Ensemble | VelocityField,
        vae: AutoencoderKL | AutoencoderTiny | None = None,
        text_encoder: Any = None,
        tokenizer: Any = None,
        **others: Any,
    ) -> "HDDMPipeline":
        """Make a pipeline of an ensemble in memory, or of one expert, that shares its networks and router.

        Under one seed its samples are those of `hddm.sample`. ``others`` are second and third components, as
        the class takes them. It is saved where a folder can hold its parts: networks of the classes that
        `hddm.load` reads, and hddm's own router. Raises `HddmError` for samples of unknown or several shapes,
        and for topics of experts whose network was replaced.
        """
        experts, router = unpacked(ensemble)
        of_text = [one for one in experts.experts if takes_text(one.facts)]
        if experts.topics is not None and not all(one.topic for one in of_text):
            raise HddmError(
                "prompts are routed by the experts' topics, and a network was replaced since; set "
                "ensemble.topics = None"
            )
        scheduler = FlowMatchEulerDiscreteScheduler(shift=experts.record.shift)
        return cls(experts, scheduler, router, vae, text_encoder, tokenizer, **others)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        dtype: Dtype = None,
        torch_dtype: Dtype = None,
        experts: Sequence[int] | None = None,
        offload: Offload = "none",
        max_memory: int | None = None,
        **options: Any,
    ) -> "HDDMPipeline":
        """Open the pipeline in an ensemble folder, or of the Paris release; nothing in it is run as code.

        Args:
            pretrained_model_name_or_path: the folder; nothing is downloaded.
            dtype: that networks run in, float32 by default, or a dictionary of dtypes by part, such as
                ``{"default": torch.bfloat16, "vae": torch.float32}``.
            torch_dtype: former name of ``dtype``.
            experts: indices of experts to take; by default all.
            offload: where idle experts wait; see `hddm.networks.offload`.
            max_memory: bytes on the device for all weights together.
            options: parts in place of the folder's (``vae``, ``text_encoder``, ``tokenizer``, ``router``,
                ``scheduler``), or of diffusers' loader, if they ask for what is done anyway, such as
                ``local_files_only``.

        Raises:
            HddmError: for another option or dtype, or a folder whose parts contradict each other.
        """
        given = {name: options.pop(name) for name in PARTS if name in options}
        refuse_options("from_pretrained", options, LOADING)
        if not isinstance(max_memory, int | None):
            raise HddmError(
                f"max_memory {max_memory!r}: pass the bytes for all parts together, a whole number"
            )
        dtypes = dtypes_of(dtype, torch_dtype)
        folder = Path(pretrained_model_name_or_path)
        restore(folder)
        if not folder.is_dir():
            raise HddmError(f"{folder}: no such folder; nothing is downloaded, so fetch the ensemble first")
        opened = open_ensemble(folder, dtypes["router"], experts)
        parts = {
            "router": opened.router,
            "scheduler": FlowMatchEulerDiscreteScheduler(shift=opened.facts.shift),
        }
        parts |= read_parts(folder, opened.components, dtypes, given)
        beside = [part for name, part in parts.items() if isinstance(part, nn.Module) and name != "router"]
        made = cls(opened.expert_set("cpu", dtypes["experts"], offload, max_memory, beside), **parts)
        made.max_memory = max_memory
        if experts is None and not given and (folder / ENSEMBLE_FILE).is_file():
            made._opened = folder
        return made

    @classmethod
    def extract_init_dict(cls, config_dict: Mapping[str, Any], **options: Any) -> tuple[Any, ...]:
        """Parts of ``model_index.json`` for the loader of diffusers (`hddm.pipelines.stock`)."""
        parts, *others = super().extract_init_dict(config_dict, **options)
        return parts_for_loader(parts), *others

    def to(self, *args: Any, **kwargs: Any) -> "HDDMPipeline":
        """Cast and move all parts, as in any diffusers pipeline."""
        # A `hddm.routers.Router` around a network of one's own is no module.
        router = self.router if isinstance(self.router, nn.Module) else getattr(self.router, "network", None)
        dtype = kwargs.pop("dtype", None) or next((one for one in args if isinstance(one, torch.dtype)), None)
        if dtype is not None:
            # Models of diffusers warn of any cast of their own, though there is nothing to warn of.
            parts = [router, *(getattr(self, name) for name in COMPONENTS)]
            others = [part for part in parts if isinstance(part, nn.Module)]
            for part in others:
                nn.Module.to(part, dtype)
            if self.max_memory is not None:
                self.experts.offload(self.experts.shelf.offload, room_beside(others, self.max_memory))
            nn.Module.to(self.experts, dtype)
        moved: HDDMPipeline = super().to(*(one for one in args if one is not dtype), **kwargs)
        if isinstance(router, nn.Module):
            nn.Module.to(router, self.experts.device)
        return moved

    def save_pretrained(self, save_directory: str | Path, *, overwrite: bool = False, **options: Any) -> None:
        """Write an ensemble folder, completely or not at all, with weights in the dtype that they run in.

        Args:
            save_directory: the folder.
            overwrite: replace an existing folder.
            options: of diffusers' writer, if they ask for what is done anyway, such as
                ``safe_serialization``.

        Raises:
            HddmError: where the folder exists without ``overwrite`` and is not empty, or the experts are read
                from it, and for other options.
        """
        refuse_options("save_pretrained", options, SAVING)
        folder, experts = Path(save_directory), self.experts.experts
        read_from = [path.resolve() for one in experts for path in (one.folder, one.base) if path]
        if any(one.is_relative_to(folder.resolve()) for one in read_from):
            raise HddmError(f"{folder}: these experts are read from it as they are needed; save elsewhere")
        with new_folder(folder, ENSEMBLE_FILE, overwrite, fills_empty=True) as draft:
            kinds = {}
            for name in COMPONENTS:
                if (part := getattr(self, name)) is not None:
                    part.save_pretrained(draft / name)
                    library = "diffusers" if name.startswith("vae") else "transformers"
                    kind = kind_of(part) if library == "diffusers" else type(part).__name__
                    kinds[name] = (library, kind.removesuffix("Fast"))
            save_ensemble(draft, self.experts, self.router, self.facts, kinds)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | None = None,
        commit_message: str | None = None,
        licence: str | None = None,
        picture: Path | None = None,
        results: Path | None = None,
        **options: Any,
    ) -> str:
        """Publish the ensemble with a model card, and return its address.

        Files of a folder go as they are, where nothing was changed since it was opened; else it is saved to a
        temporary one first. Arguments are those of diffusers, with ``licence`` of experts that record none,
        and for the card a ``picture`` and ``results`` (`hddm.pipelines.card.model_card`).

        Raises:
            HddmError: for other options, a hub that refuses or cannot be reached, and as `save_pretrained`.
        """
        refuse_options("push_to_hub", options, SAVING)
        with tempfile.TemporaryDirectory() as temporary:
            folder = self._opened
            if folder is None or not self._is_as_in(folder):
                folder = Path(temporary) / "ensemble"
                self.save_pretrained(folder)
            planned = plan_upload(folder, repo_id, licence, picture, results)
            for note in planned.notes:
                warnings.warn(note, UserWarning, stacklevel=2)
            return upload(planned, private, token, commit_message)

    def _is_as_in(self, folder: Path) -> bool:
        """True where parts and settings are those in ``folder``, in whatever dtype."""
        dtypes = {name: part.dtype for name in NETWORKS if (part := getattr(self, name)) is not None}
        stored = type(self).from_pretrained(folder, dtype=dtypes)
        for name in ("router", *COMPONENTS):
            ours, theirs = getattr(self, name), getattr(stored, name)
            if type(ours) is not type(theirs) or not _are_equal(ours, theirs):
                return False
        return self.facts == stored.facts and self.experts.is_as_stored()

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | Sequence[str] | None = None,
        class_labels: Labels | None = None,
        *,
        image: Images | None = None,
        strength: float | None = None,
        mask_image: Images | None = None,
        resampling_steps: int = DEFAULT_RESAMPLING,
        negative_prompt: str | Sequence[str] | None = None,
        prompt_embeds: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None,
        conditions: Mapping[str, Tensor] | None = None,
        negative_conditions: Mapping[str, Tensor] | None = None,
        num_images_per_prompt: int = 1,
        batch_size: int | None = None,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | Guidance = 1.0,
        strategy: str | None = None,
        expert: int | None = None,
        solver: str | None = None,
        router_every: int = 1,
        seed: int | None = None,
        start: int = 0,
        generator: Generators = None,
        latents: Tensor | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",),
        **options: Any,
    ) -> HDDMPipelineOutput | tuple[Any]:
        """Make images.

        Args:
            prompt: one text or several; needs a text encoder and a tokenizer.
            class_labels: one class or several, by name or by number.
            image: pictures to begin with, one for all images or one each; see `hddm.editing`. Those of Pillow
                are cropped and resized.
            strength: how much of them is new, from 0 to 1; by default 0.8, with a mask 1.
            mask_image: white where pictures are new; all else keeps its pixels.
            resampling_steps: with a mask, how often each step is taken.
            negative_prompt: with guidance, what to move away from; by default the empty prompt.
            prompt_embeds: ``encoder_hidden_states`` (batch, tokens, width) instead of prompts.
            negative_prompt_embeds: the same for the negative branch.
            conditions: further keywords of the experts' networks, each (batch, …).
            negative_conditions: the same for the negative branch.
            num_images_per_prompt: images per prompt or class.
            batch_size: prompts or classes, where one or none of them stands for all.
            height: of the images in pixels, where the networks allow another than `image_size`.
            width: likewise.
            num_inference_steps: solver steps; by default 25, or a student's own.
            guidance_scale: 1 for none, or a `hddm.velocity.Guidance`.
            strategy: instead of the ensemble's own; see `hddm.ensemble`.
            expert: use this expert only, instead of a strategy.
            solver: see `hddm.solvers`.
            router_every: ask the router only at every n-th call of the velocity.
            seed: image i is that of ``hddm.sample`` with this seed, whatever the batch.
            start: index i of the first image under ``seed``.
            generator: one for all images, or a list with one each, instead of ``seed``.
            latents: states at t = 1, (batch, C, H, W), instead of drawn ones.
            output_type: ``pil``, ``np``, ``pt`` (0 to 1) or ``latent`` (as the experts were trained).
            return_dict: return an `HDDMPipelineOutput` instead of a tuple with the images.
            callback_on_step_end: called as ``callback(pipeline, step, timestep, tensors)``, timestep being
                1000 t; what it returns replaces the tensors. It may set ``pipeline._interrupt`` to stop, and
                ``pipeline._guidance_scale``, where 1 and less is no guidance. Those of diffusers work too.
            callback_on_step_end_tensor_inputs: ``latents``, ``expert_weights`` (batch, K) of the step's last
                call of the velocity, which are only read, ``prompt_embeds``, ``negative_prompt_embeds``, or
                another condition by its keyword.
            options: of other pipelines' calls, such as ``eta``, if they ask for what is done anyway.

        Raises:
            TypeError: for an unknown keyword.
            HddmError: for an option that would change something, a condition that no expert takes or that is
                lacking, missing parts, contradictory numbers, a size that a network cannot have, and whatever
                `hddm.running.run` refuses.
        """
        refuse_call_options(options, inspect.signature(self.__call__).parameters)
        guidance = Guidance.of(guidance_scale)
        guided = guidance.by_condition
        negatives = negative_prompt or negative_conditions or negative_prompt_embeds is not None
        guidance.refuse_negative(bool(negatives))
        embeds = negative_prompt_embeds if guided else None
        negatives_of = (negative_prompt, negative_conditions) if guided else (None, None)
        encoded = self.encode(
            prompt, class_labels, negatives_of[0], guided, prompt_embeds, embeds, conditions, negatives_of[1]
        )
        asked, num = repeated(encoded, num_images_per_prompt, batch_size)
        self._begin(guidance, 0)
        how = plan(
            self.ensemble,
            steps=num_inference_steps,
            solver=solver,
            strategy=strategy,
            expert=expert,
            guidance=self._guidance,
            router_every=router_every,
            picture=functools.cache(
                lambda k: self.picture(
                    image, strength, mask_image, resampling_steps, k, self.asked_size(k, height, width)[0]
                )
            ),
        )
        self._check_output(output_type, expert)
        is_apart = expert is None and len(self.ensemble.kinds) > 1
        if is_apart and (latents is not None or output_type != "pil" or height or width):
            raise HddmError(
                "these experts make samples of several kinds, a list of pictures: take output_type='pil' "
                "and no latents, height or width, or one expert="
            )
        shape = () if is_apart else self.asked_size(expert or 0, height, width)[1]
        latents = None if latents is None else latents.to(how.dtype)
        noise = noise_from(num, shape, seed, start, generator, latents)
        how = replace(how, shape=shape or None, noise=noise)
        use, images = ExpertUse(len(self.ensemble.experts)), [None] * num
        names = callback_on_step_end_tensor_inputs
        for batch in batches(how, range(start, start + num), asked, num):
            self._begin(guidance, how.steps)
            step = self._on_step(callback_on_step_end, names, how.times, batch.conditions, use)
            size = self.asked_size(batch.kind, height, width)[0]
            with self.progress_bar(total=self._num_timesteps) as bar, self.of_size(batch.kind, size):

                def on_step(index: int, x: Tensor, bar: Any = bar, step: OnStep = step) -> Tensor:
                    bar.update()
                    return step(index, x)

                made: Any = run(how, batch, on_step, lambda: self._interrupt, use)
            if output_type != "latent":
                picture = how.picture(batch.kind)
                decoded = self.decode(made, batch.kind, None if picture is None else picture.rows(batch.rows))
                made = self.image_processor.postprocess(decoded, output_type)
            if not is_apart:
                images = made
            elif self._interrupt:
                # Images of this kind and of the next ones stay None.
                break
            else:
                for row, image_of in zip(batch.rows.tolist(), made, strict=True):
                    images[row] = image_of
        return HDDMPipelineOutput(images, use) if return_dict else (images,)

    def vae_of(self, expert: int) -> AutoencoderKL | AutoencoderTiny | None:
        """The VAE of an expert's latents; None for pixels, and where there is none."""
        number = self.experts.encoders.vaes[expert]
        return None if number < 0 else getattr(self, numbered("vae", number))

    def picture(
        self,
        image: Images | None,
        strength: float | None = None,
        mask_image: Images | None = None,
        resampling_steps: int = DEFAULT_RESAMPLING,
        expert: int = 0,
        size: tuple[int, int] | None = None,
    ) -> Picture | None:
        """What a call with these arguments begins with: ``image`` in an expert's units, encoded by its VAE.

        It has ``size`` (height, width) in pixels, by default that of the expert's images. A latent is new if
        any pixel of it is. Raises `HddmError` for a strength or mask without an image, and for pictures that
        do not fit.
        """
        if image is None:
            if strength is not None or mask_image is not None:
                raise HddmError("strength and mask_image change an image; pass one as image=")
            return None
        if strength is None:
            strength = 0.8 if mask_image is None else 1.0
        part, (size, shape) = self.vae_of(expert), self.asked_size(expert, *(size or (None, None)))
        if part is None and not self.experts.facts[expert].makes_pictures and not isinstance(image, Tensor):
            raise HddmError(
                f"image: the experts make latents {tuple(shape)} and there is no VAE to encode it; give them "
                "one (hddm assemble ENSEMBLE --vae FOLDER), or pass latents as a tensor"
            )
        pixels = pixels_of(image, shape[0] if part is None else part.config.in_channels, size)
        mask = pixel_mask = None if mask_image is None else mask_of(mask_image, image, size)
        x_0 = pixels
        if part is not None:
            with self.present(part) as vae:
                x_0 = latents_of(vae, pixels)
            if pixel_mask is not None:
                mask = adaptive_max_pool2d(pixel_mask.float(), shape[1:]) > 0
        return Picture(x_0.cpu(), strength, mask, resampling_steps, pixels, pixel_mask)

    def decode(self, latents: Tensor, expert: int = 0, picture: Picture | None = None) -> Tensor:
        """Images (N, C, H, W) in [-1, 1] of an expert's samples: decoded by its VAE, or pixels, clipped.

        Pixels that a ``picture`` keeps are its own.
        """
        if (part := self.vae_of(expert)) is None:
            images = latents.float().clamp(-1, 1)
        else:
            with self.present(part) as vae:
                images = decode(vae, latents.to(vae.device))
        return images if picture is None else picture.kept_in(images)

    @property
    def image_size(self) -> tuple[int, int]:
        """Image height and width in pixels, of the first expert where they differ."""
        return self._size_of(0)

    def _size_of(self, expert: int) -> tuple[int, int]:
        height, width = self.experts.facts[expert].sample_shape[1:]
        vae = self.vae_of(expert)
        factor = 1 if vae is None else scale_of(vae)
        return factor * height, factor * width

    def asked_size(
        self, expert: int, height: int | None, width: int | None
    ) -> tuple[tuple[int, int], tuple[int, ...]]:
        """Size of the images asked for, (height, width) in pixels, and shape of an expert's samples of it.

        Raises `HddmError` for sides that its VAE cannot have.
        """
        own, (channels, *sides) = self._size_of(expert), self.experts.facts[expert].sample_shape
        size, factor = (height or own[0], width or own[1]), own[0] // sides[0]
        if any(not isinstance(side, int) or side < 1 or side % factor for side in size):
            raise HddmError(
                f"--height {size[0]}, --width {size[1]}: are whole numbers of pixels, multiples of {factor}"
            )
        return size, (channels, size[0] // factor, size[1] // factor)

    @contextlib.contextmanager
    def of_size(self, expert: int, size: tuple[int, int]) -> Iterator[None]:
        """Open a block in which the networks take ``size`` (height, width) in pixels.

        Raises `HddmError` where they fail on it and it is not that of an expert's images.
        """
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if size == self._size_of(expert) or isinstance(error, HddmError):
                raise
            of = "×".join(map(str, self._size_of(expert)))
            raise HddmError(
                f"--height {size[0]}, --width {size[1]}: a network of images of {of} fails on it: "
                f"{one_line(error)}"
            ) from error

    def _check_output(self, output_type: str, expert: int | None) -> None:
        known = ("pil", "np", "pt", "latent")
        if output_type not in known:
            raise HddmError(f"unknown output_type {output_type!r}: choose one of {', '.join(known)}")
        for k in range(len(self.experts.facts)) if expert is None else [expert]:
            if (
                output_type != "latent"
                and self.vae_of(k) is None
                and self.experts.facts[k].space == "latents"
            ):
                raise HddmError(
                    "these experts make latents and there is no VAE: give them one (hddm assemble ENSEMBLE "
                    '--vae FOLDER), or take output_type="latent"'
                )


def _are_equal(ours: Any, theirs: Any) -> bool:
    """True for networks of equal weights, tokenizers of equal words, and two parts that are absent."""
    if not isinstance(ours, nn.Module):
        return ours is None or bool(ours.get_vocab() == theirs.get_vocab())
    weights, others = ours.state_dict(), theirs.state_dict()
    return all(torch.equal(one.cpu(), others[key]) for key, one in weights.items())
