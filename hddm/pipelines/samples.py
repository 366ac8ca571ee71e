"""Samples of a saved model, as a folder of PNG files or of latents (`sample_to_folder`).

Conditions (class labels, prompts, tensors in a file) are cycled over the images. The folder holds samples
only; a sheet of all images may lie beside it (`write_sheet`).
"""

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hddm.classes import class_indices
from hddm.condition_names import EMBEDDED_GUIDANCE, LABELS, TEXT
from hddm.conditions import Conditions
from hddm.data.images import open_image, save_png, to_bytes
from hddm.data.sources.base import LARGEST_FILE
from hddm.expert_use import ExpertUse
from hddm.experts.ensemble_records import COMPONENTS, unnumbered
from hddm.networks.programs.permission import opens_programs
from hddm.noise import Seeded
from hddm.pipelines.inputs import Begin
from hddm.pipelines.picture_texts import PictureTexts
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.pipelines.sample_records import (
    FORMAT,
    IMAGE,
    LATENTS_FILE,
    identity_of,
    lines_of,
    record_of,
    refuse_other_samples,
)
from hddm.pipelines.sheets import sheet_path, write_sheet
from hddm.routers import MomentsRouter
from hddm.running import Batch, Plan, run
from hddm.sampling import batches, drawn_from
from hddm.settings import SampleSettings, keywords
from hddm.utils.errors import HddmError, UsageError, errors_as
from hddm.utils.files import read_whole, sha256_of, sha256_once, write_json
from hddm.utils.memory import Fitting
from hddm.utils.progress import Progress
from hddm.utils.records import SAMPLING_FILE, model_hash
from hddm.utils.tensors import (
    AUTO,
    available_device,
    dtype_on,
    read_safetensors,
    report_choice,
)
from hddm.utils.work import Draft, open_draft

ROUND = 1024
"""Images whose experts are drawn together, so that each expert gets large batches."""
ENOUGH = 32
"""Number of images from which on a router is doubted if it uses one expert for all."""
NEGATIVE = "negative_"

log = logging.getLogger(__name__)


@opens_programs
@keywords
def sample_to_folder(
    source: Path,
    out: Path,
    settings: SampleSettings,
    overwrite: bool = False,
    grid: bool = False,
    resume: bool = False,
) -> str | None:
    """Sample an expert, an ensemble or the Paris release into a folder.

    It holds ``00000.png`` …, counted from ``settings.start``, or ``latents.safetensors``, and
    ``sampling.json``: settings, shift of the time grid and the time at which networks begin, use of the
    experts over time, and which expert made which image. With ``grid``, a sheet of the images is written
    beside it (`write_sheet`), and a line about it is returned.

    A killed run keeps its complete batches; ``resume`` continues it to the same bytes, on the same machine
    and versions. Raises `HddmError` for an existing ``out``, an unfinished run without ``resume`` or with
    other settings, a model that cannot be loaded, wrong settings or a full disk, and `Stopped` for
    `Interrupted`.
    """
    pipeline, how, settings = opened(source, settings, grid)
    run = SamplingRun(source, pipeline, settings, how)
    _say_unused(settings)
    _say_guided_twice(pipeline, settings, run.cycles)
    settings = settings.model_copy(update=_what_runs(settings, how))
    record = record_of(source, settings, pipeline, how, run.cycles.given)
    sheet, identity = sheet_path(out), identity_of(record)
    is_finished = resume and not overwrite and (out / SAMPLING_FILE).is_file()
    if is_finished:
        refuse_other_samples(out, settings, identity)
        Draft(out, "sampling").discard_finished()
        log.info("%s: is finished; nothing is left to do", out)
    elif grid and sheet.exists() and not overwrite:
        raise HddmError(
            f"{sheet} exists: choose another `out`, or pass `overwrite=True` to replace it"
        )
    else:
        # The format decides how the parts of a draft are laid out.
        begun = identity | {"format": FORMAT}
        with open_draft(
            out, SAMPLING_FILE, begun, "sampling", run.kept, overwrite, resume
        ) as draft:
            run.write(draft)
            outcome = {"expert_use": run.report(), "batch_ran": run.fitting.most}
            write_json(draft.whole / SAMPLING_FILE, record | outcome)
    if overwrite:
        # The sheet of the replaced images would be taken for a sheet of these.
        sheet.unlink(missing_ok=True)
    if not grid or (is_finished and sheet.exists()):
        return None
    paths = [out / IMAGE.format(i) for i in settings.numbers]
    return write_sheet(out, paths, record if settings.metadata else None)


def opened(
    source: Path, settings: SampleSettings, grid: bool = False
) -> tuple[HDDMPipeline, Plan, SampleSettings]:
    """Open what `sample_to_folder` samples; return it, its plan, and the settings with the dtype that runs.

    Raises `HddmError` for a model that cannot be loaded, and wrong settings.
    """
    pipeline, settings = read_model(source, settings, grid)
    pipeline, how = planned_on_device(pipeline, settings, grid)
    return pipeline, how, settings


def read_model(
    source: Path, settings: SampleSettings, grid: bool = False
) -> tuple[HDDMPipeline, SampleSettings]:
    """The first half of `opened`: the pipeline in main memory, and the settings with the dtype that runs.

    Without VAEs, where none will run: for latents that begin as noise.
    """
    is_latent, device = settings.output_type == "latent", available_device(settings.device)
    if grid and is_latent:
        raise UsageError("`grid`: there is no sheet of latents; drop it, or `output_type` latent")
    dtype = dtype_on(device, settings.dtype)
    named = str(dtype).removeprefix("torch.")
    if settings.dtype == AUTO:
        report_choice("dtype", named, device)
    settings = settings.model_copy(update={"dtype": named})
    without: dict[str, Any] = {}
    # The VAE says how many pixels a size in latents has.
    if is_latent and settings.init_image is None and settings.height is settings.width is None:
        without = dict.fromkeys(name for name in COMPONENTS if unnumbered(name) == "vae")
    return (
        HDDMPipeline.from_pretrained(source, dtype=dtype, offload=settings.offload, **without),
        settings,
    )


def planned_on_device(
    pipeline: HDDMPipeline, settings: SampleSettings, grid: bool = False
) -> tuple[HDDMPipeline, Plan]:
    """The second half of `opened`: the pipeline on its device, and its plan."""
    is_latent = settings.output_type == "latent"
    pipeline.to(available_device(settings.device)).experts.prepare(settings)
    # Only now, since quantized experts take less.
    pipeline.limit_memory(settings.max_memory)
    image, mask = _opened(settings.init_image), _opened(settings.mask)
    with errors_as(UsageError):
        pipeline = pipeline.at_size(settings.height, settings.width)
        how = planned(pipeline, settings, image, mask)
    of_one_kind = {"init_image": settings.init_image, "output_type": is_latent, "grid": grid}
    pipeline.check_output(settings.expert, not is_latent, of_one_kind)
    return pipeline, how


def _opened(path: Path | None) -> Any:
    """The picture in a file; None without one."""
    return None if path is None else open_image(read_whole(path, LARGEST_FILE), path)


def planned(
    pipeline: HDDMPipeline, settings: SampleSettings, image: Any = None, mask: Any = None
) -> Plan:
    """The plan of samples with these settings, which begin with ``image`` where ``mask`` is white."""
    begin = Begin(
        image,
        mask,
        settings.strength,
        settings.resampling_steps,
        settings.edit_from,
        settings.long_prompt,
        settings.clip_skip,
    )
    return pipeline.plan(
        begin,
        expert=settings.expert,
        **settings.arguments,
        native=settings.native,
        noise=Seeded(settings.seed),
    )


def _what_runs(settings: SampleSettings, how: Plan) -> dict[str, Any]:
    """Settings that were left open or that others decide, as they are used."""
    picture = how.picture(settings.expert or 0)
    return {
        "steps": how.grid_steps,
        "solver": how.solver_name,
        "shift": how.shift,
        "strength": None if picture is None else picture.strength,
        "resampling_steps": None if picture is None or picture.mask is None else picture.repeats,
    }


def _say_unused(settings: SampleSettings) -> None:
    """Warn of prompts and classes that no image is for.

    Not where ``start`` is above 0: such a run may be a part of a longer one.
    """
    for name, number in (("prompt", len(settings.prompts)), ("class_labels", len(settings.labels))):
        if settings.start == 0 and number > settings.num_images:
            text = f"the last {number - settings.num_images} of {number} make no image"
            warnings.warn(
                f"`{name}`: {text}, as `num_images` is {settings.num_images}", stacklevel=3
            )


def _called(pipeline: HDDMPipeline, expert: int) -> str:
    """What a message calls an expert: by its number and name, if there are several."""
    members = pipeline.record.experts
    if len(members) == 1:
        return "the expert"
    return f"expert {expert} ({members[expert].name or 'unnamed'})"


def _say_guided_twice(pipeline: HDDMPipeline, settings: SampleSettings, cycles: Conditions) -> None:
    """Warn of experts that take the scale of their guidance as a condition, and are guided besides."""
    guidance = settings.guidance
    if not guidance.by_condition or EMBEDDED_GUIDANCE in cycles.given:
        return
    for k, expert in enumerate(pipeline.ensemble.experts):
        own = expert.null_conditions.get(EMBEDDED_GUIDANCE)
        if own is not None and settings.expert in (None, k):
            warnings.warn(
                f"`guidance_scale` {guidance.scale:g}: {_called(pipeline, k)} is guided already, by its "
                f"condition {EMBEDDED_GUIDANCE} of {float(own):g}, which a file of `conditions` changes; "
                "this guides it once more, at twice the calls",
                stacklevel=3,
            )


class SamplingRun:
    """A run, batch by batch; `ready` counts the finished images."""

    def __init__(
        self, source: Path, pipeline: HDDMPipeline, settings: SampleSettings, how: Plan
    ) -> None:
        self.pipeline, self.settings, self.how = pipeline, settings, how
        self.texts = _texts(source, pipeline, settings, how) if settings.metadata else None
        self.cycles = read_cycles(pipeline, settings)
        self.use = ExpertUse(len(pipeline.ensemble.experts))
        self.expected = torch.zeros(len(pipeline.ensemble.experts), dtype=torch.float64)
        """Images that each expert should get by p(k | conditions) (K,)."""
        self.makers: dict[int, int] = {}
        """The expert that made each image, by number; of a pair by noise the first, and none of a mixture."""
        self.ready = 0
        self.fitting = Fitting("images", settings.batch_size)

    def kept(self) -> str:
        """Say what an interrupted run leaves, and how to continue."""
        return (
            f"{self.ready} of {self.settings.num_images} images are kept, and `resume=True` goes on"
        )

    def report(self) -> dict[str, Any]:
        """Use of the experts, and which of them made which image."""
        found = self.use.report()
        if len(self.makers) == self.settings.num_images and self.pipeline.ensemble.num_domains > 1:
            found["names"] = [member.label for member in self.pipeline.record.experts]
            found["made_by"] = lines_of(self.makers)
        return found

    def write(self, draft: Draft) -> None:
        """Fill the draft's folder, except for the record."""
        numbers: list[int] = []
        paths: list[Path] = []
        is_continued = False
        # Per image: the solver's steps, and one to decode and write it.
        steps = self.how.steps + 1
        with Progress(self.settings.num_images * steps, "sample") as progress:
            for name, batch in self.batches():
                part = draft.parts / name
                done = draft.done(part)
                if done is not None:
                    self.use.tally = torch.tensor(done["use"], dtype=torch.float64)
                    makers = done["makers"]
                    progress.skip(len(batch.rows) * steps)
                else:
                    if self.ready and not is_continued:
                        total = self.settings.num_images
                        log.info("%d of %d images are there; the rest follows", self.ready, total)
                    is_continued = True
                    files = {}
                    for path in self._made(draft, name, batch, progress):
                        files[path.relative_to(draft.folder).as_posix()] = sha256_of(path)
                    makers = self._makers()
                    # The use of the experts up to the end of this batch.
                    draft.finish(part, {"use": self.use.tally.tolist(), "makers": makers}, files)
                self.makers |= dict(zip(batch.numbers, makers, strict=False))
                self.ready += len(batch.rows)
                numbers += batch.numbers
                paths.append(draft.parts / f"{name}.safetensors")
        if self.settings.output_type == "latent":
            latents = torch.cat([load_file(path)["latents"] for path in paths])
            ordered = latents[torch.tensor(numbers).argsort()]
            save_file({"latents": ordered}, draft.whole / LATENTS_FILE, {"format": "pt"})
        self._warn()

    def batches(self) -> Iterator[tuple[str, Batch]]:
        """All batches, each with the name of its part of the draft."""
        numbers = self.settings.numbers
        for start in numbers[::ROUND]:
            own = range(start, min(start + ROUND, numbers.stop))
            conditions = self.cycles.cycled(own)
            if self.how.expert is None:
                size = self.settings.batch_size
                self.expected += drawn_from(self.how, own, conditions, size).sum(0)
            found = batches(self.how, own, conditions, self.settings.batch_size)
            for place, batch in enumerate(found):
                yield f"{start:05d}-{place:05d}", batch

    def _made(self, draft: Draft, name: str, batch: Batch, progress: Progress) -> list[Path]:
        """Sample a batch, write its images or latents, and return the files."""
        samples, kept = self._sampled(batch, progress)
        self.use.kept = kept
        if self.settings.output_type == "latent":
            paths = [draft.parts / f"{name}.safetensors"]
            save_file({"latents": samples.cpu().contiguous()}, paths[0])
        else:
            images = to_bytes(self.pipeline.images_of(self.how, batch, samples).cpu())
            makers = dict(zip(batch.numbers, self._makers(), strict=False))
            paths = [draft.whole / IMAGE.format(number) for number in batch.numbers]
            for number, image, path in zip(batch.numbers, images, paths, strict=True):
                save_png(image, path, self._texts_of(number, image, makers.get(number)))
        progress(len(batch.rows))
        return paths

    def _sampled(self, batch: Batch, progress: Progress) -> tuple[Tensor, Tensor | None]:
        """Samples of a batch, and the expert of each where each has one; in parts where memory is short."""

        def make(first: int, end: int) -> tuple[Tensor, Tensor | None]:
            whole = (first, end) == (0, len(batch.rows))
            part = batch if whole else batch.part(torch.arange(first, end))
            before, counted = self.use.tally.clone(), 0

            def count(index: int, x: Tensor) -> Tensor:
                nonlocal counted
                counted += len(x)
                progress(len(x))
                return x

            try:
                found = run(self.how, part, count, use=self.use)
            except (RuntimeError, MemoryError):
                # What an attempt counted before it failed is counted again.
                self.use.tally = before
                progress.skip(-counted)
                raise
            return found, self.use.kept

        made = self.fitting.run(len(batch.rows), make)
        experts = [one for _, one in made if one is not None]
        samples = torch.cat([found for found, _ in made])
        return samples, torch.cat(experts) if experts else None

    def _texts_of(self, number: int, image: Tensor, maker: int | None) -> dict[str, str]:
        """Texts in the file of an image (C, H, W); none without metadata."""
        if self.texts is None:
            return {}
        name = None
        if maker is not None and self.pipeline.ensemble.num_domains > 1:
            name = self.pipeline.record.experts[maker].label
        return self.texts.of(number, image.shape[1:], name)

    def _makers(self) -> list[int]:
        """The expert of each image of the last batch, of a pair by noise the first; empty for mixtures."""
        if self.use.kept is None:
            return []
        first = torch.tensor(self.pipeline.ensemble.domains)
        found: list[int] = first[self.use.kept].tolist()
        return found

    def _warn(self) -> None:
        settings, ensemble, own = self.settings, self.pipeline.ensemble, self.pipeline.record.shift
        if settings.shift is not None and settings.shift != own:
            warnings.warn(
                f"`shift` {settings.shift:g}, and the model's own is {own:g}", stacklevel=3
            )
        if settings.expert is not None:
            return
        if self.cycles.prior is not None:
            for k in (self.expected == 0).nonzero()[:, 0].tolist():
                if ensemble.parts[k].topic is None:
                    continue
                who = _called(self.pipeline, k)
                text = f"{who} made no image: no prompt fits its description"
                warnings.warn(text, stacklevel=3)
        # Fewer images than experts show nothing, and a picture may belong to one expert.
        if settings.init_image is None and settings.num_images >= len(ensemble.experts):
            is_drawn = (settings.strategy or ensemble.strategy) == "draw"
            is_learned = not (is_drawn or isinstance(ensemble.router, MomentsRouter))
            is_doubted = is_learned and settings.num_images >= ENOUGH
            for line in self.use.warnings(self.expected, ensemble.domains, is_doubted):
                warnings.warn(line, stacklevel=3)


def _texts(
    source: Path, pipeline: HDDMPipeline, settings: SampleSettings, how: Plan
) -> PictureTexts:
    """What all pictures of a run have in common."""
    strategy = settings.strategy or pipeline.record.strategy
    is_one = settings.expert is not None or pipeline.ensemble.num_domains == 1
    return PictureTexts(
        model=source.absolute().name,
        model_sha256=model_hash(source, sha256_once),
        seed=settings.seed,
        steps=how.grid_steps,
        solver=how.solver_name,
        strategy=None if is_one else strategy,
        guidance=settings.guidance,
        prompts=settings.prompts,
        labels=settings.labels,
        negative_prompt=settings.negative_prompt,
        clip_skip=settings.clip_skip,
        long_prompt=settings.long_prompt,
    )


def read_cycles(pipeline: HDDMPipeline, settings: SampleSettings) -> Conditions:
    """Conditions with one row per distinct value, which the images take in turn.

    Raises `HddmError` for conditions that cannot be read or encoded, or that have two sources.
    """
    path = settings.conditions
    classes = pipeline.ensemble.classes
    tensors = {} if path is None else read_safetensors(path)
    if LABELS in tensors:
        with errors_as(HddmError, f"`conditions` {path}"):
            tensors[LABELS] = class_indices(tensors[LABELS], classes)
    against = {}
    for name in [*tensors]:
        if name.startswith(NEGATIVE):
            against[name.removeprefix(NEGATIVE)] = tensors.pop(name)
    labels = None
    if settings.labels:
        with errors_as(UsageError, f"`class_labels` {settings.class_labels}"):
            labels = class_indices(settings.labels, classes)
    with errors_as(UsageError):
        found = pipeline.encode(
            settings.prompts or None,
            labels,
            settings.negative_prompt,
            settings.guidance.by_condition,
            conditions=tensors,
            negative_conditions=against,
            long_prompt=settings.long_prompt,
            clip_skip=settings.clip_skip,
        )
    has_empty_text = any(TEXT in one.null_conditions for one in pipeline.ensemble.experts)
    if has_empty_text and not {TEXT, LABELS} & found.given.keys():
        warnings.warn("no `prompt`: the experts use their empty text", stacklevel=2)
    return found
