"""Diffusers pipeline of an ensemble: from prompts or class labels to images."""

import copy
import functools
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils import BaseOutput
from torch import Tensor, nn

from hddm.classes import Labels
from hddm.editing import Picture
from hddm.ensemble import Ensemble
from hddm.expert_use import ExpertUse
from hddm.experts.ensemble_folders import ENSEMBLE_FILE, shift_of
from hddm.experts.ensemble_records import COMPONENTS, EnsembleRecord
from hddm.experts.expert_set import ExpertSet, carrying
from hddm.experts.loading import ensemble_of, open_ensemble, save_ensemble
from hddm.guidance import Guidance
from hddm.networks.offload import Offload
from hddm.networks.programs.permission import programs_allowed
from hddm.networks.prompts import PromptEncoders
from hddm.networks.transformers import RouterTransformer
from hddm.networks.vae import vae_class
from hddm.networks.vae_types import Vae
from hddm.noise import Generated, Generators, Latents, Noise, Seeded
from hddm.pipelines.hub import plan_upload, upload
from hddm.pipelines.inputs import Begin, Images, Pictures, repeated
from hddm.pipelines.parts import DtypeOfParts, dtypes_of, parts_for_loader, read_parts
from hddm.running import Batch, Plan, gathered, run, shape_of, state_dtype
from hddm.sampling import batches, plan
from hddm.utils.errors import HddmError, UsageError
from hddm.utils.files import new_folder, restore
from hddm.utils.hub import local
from hddm.utils.memory import Fitting

Callback = Callable[[Any, int, float, dict[str, Tensor]], Mapping[str, Tensor] | None]


@dataclass
class HDDMPipelineOutput(BaseOutput):  # type: ignore[misc]
    """Images in the format of ``output_type``, and the use of the experts."""

    images: Any
    expert_use: ExpertUse


class HDDMPipeline(Pictures, DiffusionPipeline):  # type: ignore[misc]
    """Samples of an ensemble, decoded by a VAE if its experts make latents.

    Args:
        experts: in the router's order.
        router: for these experts' shards, with its ``record``, or a function as in `hddm.Ensemble`; optional
            only for ``draw``.
        scheduler: holds the ``shift`` of the time grid; the solver is hddm's own (`hddm.solvers`).
        vae: decodes latents; without it only ``output_type="latent"`` is possible.
        text_encoder: encodes prompts; without it, pass embeddings.
        tokenizer: belongs to the text encoder.
        vae_2, text_encoder_2, tokenizer_2, vae_3, text_encoder_3, tokenizer_3: for experts of other latent
            spaces or text encoders, as ``record`` numbers them.
        record: strategy and priors; by default those of ``experts``, or ``draw`` with equal shares.

    Raises:
        HddmError: for parts that contradict each other.
    """

    _optional_components = ["router", *COMPONENTS]  # noqa: RUF012 - as diffusers has it
    _interrupt = False

    def __init__(
        self,
        experts: ExpertSet,
        scheduler: FlowMatchEulerDiscreteScheduler,
        router: RouterTransformer | Callable[..., Tensor] | None = None,
        vae: Vae | None = None,
        text_encoder: Any = None,
        tokenizer: Any = None,
        record: EnsembleRecord | None = None,
        vae_2: Vae | None = None,
        text_encoder_2: Any = None,
        tokenizer_2: Any = None,
        vae_3: Vae | None = None,
        text_encoder_3: Any = None,
        tokenizer_3: Any = None,
    ) -> None:
        super().__init__()
        components = [vae, text_encoder, tokenizer, vae_2, text_encoder_2, tokenizer_2]
        components += [vae_3, text_encoder_3, tokenizer_3]
        self.register_modules(
            experts=carrying(experts, record or experts.record),
            scheduler=scheduler,
            router=router,
            **dict(zip(COMPONENTS, components, strict=True)),
        )
        self.max_memory: int | None = None
        self._ensemble: Ensemble | None = None
        self._made_of: tuple[Any, ...] = ()
        self._replaced: Ensemble | None = None
        self.image_processor = VaeImageProcessor()
        self.ensemble  # noqa: B018 - so that what does not fit is refused here

    @property
    def ensemble(self) -> Ensemble:
        """Velocity field of these parts, cached while they stay the same.

        Raises `HddmError` for a scheduler that does more than shift its grid, and for parts that do not fit
        together.
        """
        models = (
            self.experts,
            self.router,
            getattr(self.router, "record", None),
            self.experts.record,
        )
        if self._replaced is not None:
            return self._replaced
        shift = shift_of(self.scheduler)
        if self._ensemble is None or not _are_same(models, self._made_of):
            self._ensemble, self._made_of = ensemble_of(self.experts, self.router), models
        self._ensemble.shift = shift
        return self._ensemble

    def at_size(self, height: int | None, width: int | None) -> "HDDMPipeline":
        """The same pipeline for pictures of this size in pixels, itself for None or the experts' own size.

        Raises `HddmError` as `hddm.Ensemble.at_sizes`, and for a height without a width.
        """
        if height is None and width is None:
            return self
        if height is None or width is None:
            missing = "width" if width is None else "height"
            raise HddmError(f"`{missing}`: is missing; a size is both")
        sizes, pixels = [], []
        for k in range(len(self.ensemble.experts)):
            factor = self.pixels_of(k)
            for name, side in (("height", height), ("width", width)):
                if side < 1 or side % factor:
                    low, high = side // factor * factor, (side // factor + 1) * factor
                    near = f"{high}" if low == 0 else f"{low} and {high}"
                    raise HddmError(
                        f"`{name}` {side}: the VAE makes multiples of {factor} pixels; the nearest are {near}"
                    )
            sizes.append((height // factor, width // factor))
            pixels.append(factor)
        resized = self.ensemble.at_sizes(sizes, pixels)
        return self if resized is self.ensemble else self.with_ensemble(resized)

    def with_ensemble(self, ensemble: Ensemble) -> "HDDMPipeline":
        """The same pipeline around another form of its ensemble, which makes the samples."""
        other: HDDMPipeline = copy.copy(self)
        other._replaced = ensemble
        return other

    @property
    def record(self) -> EnsembleRecord:
        """Record of the ensemble, with its present strategy and shift."""
        chosen = {"shift": self.ensemble.shift, "strategy": self.ensemble.strategy}
        record: EnsembleRecord = self.experts.record.model_copy(update=chosen)
        return record

    @property
    def components(self) -> dict[str, Any]:
        """All parts: ``HDDMPipeline(**pipe.components)`` is a pipeline that shares them."""
        return {**super().components, "experts": carrying(self.experts, self.record)}

    @classmethod
    def from_pipe(cls, pipeline: "HDDMPipeline", **changes: Any) -> "HDDMPipeline":
        """Make a pipeline of the same parts, except for ``changes`` (constructor arguments)."""
        return cls(**pipeline.components | changes)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        dtype: DtypeOfParts = None,
        torch_dtype: DtypeOfParts = None,
        experts: Sequence[int] | None = None,
        offload: Offload = "none",
        max_memory: int | None = None,
        allow_program: bool = False,
        **parts: Any,
    ) -> "HDDMPipeline":
        """Open the pipeline in an ensemble folder, or of the Paris release; nothing in it is run as code.

        Args:
            pretrained_model_name_or_path: the folder, or its name on a hub (`hddm.utils.hub`).
            dtype: dtype that networks run in, float32 by default, or a dictionary by part, such as
                ``{"default": torch.bfloat16, "vae": torch.float32}``.
            torch_dtype: old name of ``dtype``.
            experts: indices of the experts to use; by default all.
            offload: where idle experts wait; see `hddm.networks.offload`.
            max_memory: bytes on the device for all weights together.
            allow_program: as in `hddm.load`.
            parts: in place of the folder's (``vae``, ``text_encoder``, ``tokenizer``, ``router``,
                ``scheduler``).

        Raises:
            HddmError: for a folder whose parts contradict each other.
        """
        dtype = torch_dtype if dtype is None else dtype
        dtypes = dtypes_of(dtype)
        folder = local(pretrained_model_name_or_path)
        restore(folder)
        if not folder.exists():
            raise HddmError(f"{folder}: no such folder")
        with programs_allowed(allow_program):
            opened = open_ensemble(folder, dtypes["router"], experts)
        scheduler = FlowMatchEulerDiscreteScheduler(shift=opened.record.shift)
        found = {"router": opened.router, "scheduler": scheduler}
        found |= read_parts(folder, opened.components, dtype, parts)
        made = cls(opened.expert_set("cpu", dtypes["experts"], offload), **found)
        made._folder = folder
        made.limit_memory(max_memory)
        return made

    @classmethod
    def extract_init_dict(cls, config_dict: Mapping[str, Any], **options: Any) -> tuple[Any, ...]:
        """Parts of ``model_index.json`` for the loader of diffusers (`hddm.pipelines.parts`)."""
        parts, *others = super().extract_init_dict(config_dict, **options)
        return parts_for_loader(parts), *others

    def to(self, *args: Any, **kwargs: Any) -> "HDDMPipeline":
        """Cast and move all parts, as in any diffusers pipeline.

        Where experts are offloaded, VAEs and text encoders stay in main memory, and come to a device for as
        long as they run.
        """
        dtype = kwargs.pop("dtype", None)
        if dtype is None:
            dtype = next((one for one in args if isinstance(one, torch.dtype)), None)
        if dtype is not None:
            # The casts of diffusers' own models warn for no reason.
            for part in self._all_beside():
                nn.Module.to(part, dtype)
            self.limit_memory(self.max_memory)
            nn.Module.to(self.experts, dtype)
        others = [one for one in args if one is not dtype]
        device = kwargs.get("device", others[0] if others else None)
        if device is not None and self.comes_and_goes(torch.device(device)):
            self.visit(torch.device(device))
            moved = self
        else:
            if device is not None:
                self._visits = None
            # Diffusers warns that float16 fails on CPUs, where hddm's experts run in it.
            moved = super().to(*others, **{"silence_dtype_warnings": True} | kwargs)
        router = self._router_module()
        if router is not None:
            router.to(self.experts.device)
        if device is not None:
            self.limit_memory(self.max_memory)
        return moved

    def save_pretrained(self, save_directory: str | Path, *, overwrite: bool = False) -> None:
        """Write an ensemble folder, completely or not at all, with weights in the dtype that they run in.

        Args:
            save_directory: the folder.
            overwrite: replace an existing folder.

        Raises:
            HddmError: if the folder exists without ``overwrite`` and is not empty, if experts are read from
                it, and for a router that is not hddm's.
        """
        folder = Path(save_directory)
        for one in self.experts.experts:
            for path in (one.folder, one.base):
                if path and path.resolve().is_relative_to(folder.resolve()):
                    raise HddmError(
                        f"{folder}: these experts are read from it as they are needed; save elsewhere"
                    )
        with new_folder(folder, ENSEMBLE_FILE, overwrite) as draft:
            kinds = {}
            for name in COMPONENTS:
                part = getattr(self, name)
                if part is not None:
                    part.save_pretrained(draft / name)
                    library = "hddm" if isinstance(part, PromptEncoders) else "transformers"
                    kinds[name] = (library, type(part).__name__.removesuffix("Fast"))
                    if name.startswith("vae"):
                        kinds[name] = ("diffusers", vae_class(part))
            save_ensemble(draft, self.experts, self.router, self.record, kinds)

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
    ) -> str:
        """Save the ensemble, publish it with a model card, and return its address.

        Arguments are those of diffusers, and for the card ``licence``, ``picture`` and ``results`` as in
        `hddm.pipelines.hub.model_card`. To send the files of a folder as they are, use ``hddm push``.

        Raises:
            HddmError: for a hub that refuses or cannot be reached, and as `save_pretrained`.
        """
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "ensemble"
            self.save_pretrained(folder)
            planned = plan_upload(folder, repo_id, licence, picture, results)
            for note in planned.notes:
                warnings.warn(note, UserWarning, stacklevel=2)
            return upload(planned, private, token, commit_message)

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | Sequence[str] | None = None,
        class_labels: Labels | None = None,
        *,
        height: int | None = None,
        width: int | None = None,
        image: Images | None = None,
        strength: float | None = None,
        mask_image: Images | None = None,
        resampling_steps: int | None = None,
        edit_from: str | None = None,
        negative_prompt: str | Sequence[str] | None = None,
        conditions: Mapping[str, Tensor] | None = None,
        negative_conditions: Mapping[str, Tensor] | None = None,
        long_prompt: bool = False,
        clip_skip: int = 0,
        num_images_per_prompt: int = 1,
        batch_size: int | None = None,
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
    ) -> HDDMPipelineOutput | tuple[Any]:
        """Make images.

        Args:
            prompt: one text or several; needs a text encoder and a tokenizer.
            class_labels: one class or several, by name or by number.
            height: of the images in pixels, with ``width``; by default the experts' own. At another size
                experts are not calibrated, and ``draw`` alone needs no router.
            width: of the images in pixels, with ``height``.
            image: pictures to begin with, one for all images or one per image; see `hddm.editing`. Pillow
                images are cropped and resized.
            strength: how much of them is new, from 0 to 1; by default 0.8, with a mask 1.
            mask_image: white where pictures are new; all else keeps its pixels.
            resampling_steps: with a mask, repeats of each step; by default 10.
            edit_from: a prompt that describes ``image``, which is then edited to the ``prompt``; see
                `hddm.editing.edit`.
            negative_prompt: with guidance by condition, what to move away from; by default the empty prompt.
            conditions: keywords of the experts' networks, each (batch, …), such as ``encoder_hidden_states``
                (batch, tokens, width) instead of prompts.
            negative_conditions: the same for the negative branch.
            long_prompt: read prompts of more than 77 tokens in chunks instead of cutting them; see
                `hddm.networks.clip_reading`.
            clip_skip: number of CLIP's last layers to leave out.
            num_images_per_prompt: images per prompt or class.
            batch_size: number of prompts or classes, if all are the same or there are none.
            num_inference_steps: solver steps; by default 25, or a student's own.
            guidance_scale: 1 for none, or a `hddm.guidance.Guidance`.
            strategy: instead of the ensemble's own; see `hddm.strategies`.
            expert: use this expert only, instead of a strategy.
            solver: see `hddm.solvers`.
            router_every: call the router only at every n-th call of the velocity.
            seed: image i is that of ``hddm.sample`` with this seed, whatever the batch.
            start: number i of the first image under ``seed``.
            generator: one for all images, or a list with one per image, instead of ``seed``.
            latents: states at t = 1, (batch, C, H, W), instead of drawn ones.
            output_type: ``pil``, ``np``, ``pt`` (0 to 1) or ``latent`` (as the experts were trained).
            return_dict: return an `HDDMPipelineOutput` instead of a tuple with the images.
            callback_on_step_end: called as ``callback(pipeline, step, 1000 t, {"latents": x})``, with
                offloading for one expert's images after the other's; the ``latents`` that it returns replace
                x, and ``pipeline._interrupt = True`` stops the call.
            callback_on_step_end_tensor_inputs: as in diffusers, but callbacks get ``latents`` alone.

        Raises:
            HddmError: for an unknown or missing condition, missing parts, options without effect, and as
                `hddm.sampling.plan`, `hddm.sampling.batches` and `hddm.running.run`.
        """
        guidance = Guidance.of(guidance_scale)
        encoded = self.encode(
            prompt,
            class_labels,
            negative_prompt,
            guidance.by_condition,
            conditions,
            negative_conditions,
            long_prompt,
            clip_skip,
        )
        repeats, num = repeated(encoded, num_images_per_prompt, batch_size)
        self._interrupt = False
        sized = self.at_size(height, width)
        how = sized.plan(
            Begin(image, mask_image, strength, resampling_steps, edit_from, long_prompt, clip_skip),
            expert=expert,
            steps=num_inference_steps,
            solver=solver,
            strategy=strategy,
            guidance=guidance,
            router_every=router_every,
            noise=lambda: sized._noise(num, expert, seed, start, generator, latents),
        )
        of_one_kind = {"edit_from": edit_from is not None, "output_type": output_type != "pil"}
        sized.check_output(expert, output_type != "latent", of_one_kind)
        is_apart = sized.is_apart(expert)
        use = ExpertUse(len(self.ensemble.experts))
        images: Any = [None] * num

        made = []
        times = how.times

        def on_step(index: int, x: Tensor) -> Tensor:
            bar.update()
            if callback_on_step_end is None:
                return x
            outcome = callback_on_step_end(self, index, 1000 * float(times[index]), {"latents": x})
            return (outcome or {}).get("latents", x).to(x)

        fitting = Fitting("images")
        for batch in batches(how, range(start, start + num), repeats, num):
            times = how.times_of(batch)

            def part(first: int, end: int, batch: Batch = batch) -> Tensor:
                whole = end - first == len(batch.rows)
                own = batch if whole else batch.part(torch.arange(first, end))
                return run(how, own, on_step, lambda: self._interrupt, use)

            with self.progress_bar(total=how.steps) as bar:
                samples = torch.cat(fitting.run(len(batch.rows), part))
            if is_apart and self._interrupt:
                # Images of this kind and of the next ones stay None.
                break
            if output_type != "latent":
                samples = sized.images_of(how, batch, samples)
            made.append((batch, samples))
        for rows, _, found in gathered(made):
            of_kind = found
            if output_type != "latent":
                of_kind = self.image_processor.postprocess(found, output_type)
            if not is_apart:
                images = of_kind
                break
            for row, one in zip(rows.tolist(), of_kind, strict=True):
                images[row] = one
        return HDDMPipelineOutput(images, use) if return_dict else (images,)

    def _noise(
        self,
        num: int,
        expert: int | None,
        seed: int | None,
        start: int,
        generator: Generators,
        latents: Tensor | None,
    ) -> Noise:
        """Random numbers of ``num`` images; the other arguments are those of a call.

        Raises an `HddmError` for latents of another shape, and for arguments that exclude each other.
        """
        if seed is not None and generator is not None:
            raise HddmError("pass a seed or a generator, not both")
        if start and seed is None:
            raise HddmError(f"start {start} counts the images of a seed; pass one")
        self._refuse_several_kinds(expert, {"latents": latents is not None})
        shape = () if self.is_apart(expert) else shape_of(self.ensemble, expert or 0)
        if latents is not None:
            latents = latents.to(state_dtype(self.ensemble))
            if latents.shape != (num, *shape):
                needed = (num, *shape)
                raise HddmError(
                    f"latents have shape {tuple(latents.shape)}; {num} images need {needed}"
                )
        if seed is None:
            return Generated(generator, num, shape, latents)
        return Seeded(seed) if latents is None else Latents(seed, start, x=latents)

    def plan(self, begin: Begin, **how: Any) -> Plan:
        """`hddm.sampling.plan` of images that begin as in a call; ``how`` are its other arguments."""
        source = None
        if begin.edit_from is not None:
            source = self.encode(
                begin.edit_from, long_prompt=begin.long_prompt, clip_skip=begin.clip_skip
            )

        @functools.cache
        def picture(k: int) -> Picture | None:
            return self.picture(begin, k, source)

        return plan(self.ensemble, picture=picture, **how)

    def is_apart(self, expert: int | None) -> bool:
        """True if samples are of several kinds, and so cannot be one tensor."""
        return expert is None and not self.ensemble.are_alike()

    def check_output(
        self, expert: int | None, is_decoded: bool, of_one_kind: Mapping[str, object]
    ) -> None:
        """Raise an `HddmError` if samples are of several kinds or cannot be decoded, though they should.

        ``of_one_kind`` are options that need samples of one kind; those in use are true.
        """
        self._refuse_several_kinds(expert, of_one_kind)
        for k in range(len(self.experts.records)) if expert is None else [expert]:
            record = self.experts.records[k]
            if is_decoded and self.vae_of(k) is None and not record.makes_pictures:
                latent = "" if self.is_apart(expert) else ", or use `output_type` latent"
                raise HddmError(
                    f"expert {k} makes latents {record.sample_shape} and has no VAE; "
                    f"{self._adding}{latent}"
                )

    def _refuse_several_kinds(self, expert: int | None, of_one_kind: Mapping[str, object]) -> None:
        """Raise a `UsageError` for an option in use that needs samples of one kind."""
        for name, is_used in of_one_kind.items():
            if is_used and self.is_apart(expert):
                raise UsageError(
                    f"`{name}`: these experts make samples of several kinds; use one `expert`"
                )


def _are_same(parts: Sequence[object], others: Sequence[object]) -> bool:
    """True if two sequences of equal length hold the same objects."""
    return all(one is other for one, other in zip(parts, others, strict=True))
