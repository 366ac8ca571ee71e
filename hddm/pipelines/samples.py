"""Samples of a saved model, as a folder of PNG files or of latents (`sample_to_folder`).

Conditions (class labels, prompts, tensors in a file) are cycled over the images. A sheet of all images may
lie beside the folder, which holds only samples.
"""

import functools
import json
import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, Field
from safetensors.torch import load_file, save_file
from torch import Tensor

from hddm.classes import LABELS, class_indices
from hddm.data.images import open_image, save_png, to_bytes
from hddm.data.sources.base import LARGEST_FILE
from hddm.editing import DEFAULT_RESAMPLING
from hddm.expert_use import ExpertUse
from hddm.experts.ensemble_folders import ENSEMBLE_FILE
from hddm.experts.records import EXPERT_FILE
from hddm.networks.folders import sha256_once
from hddm.networks.wrappers import missing_from
from hddm.noise import Seeded
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.pipelines.sheets import sheet_path, write_sheet
from hddm.routers import MomentsRouter, Router
from hddm.sampling import Conditions, Plan, Positive, SamplingSettings, batches, gathered, plan, run
from hddm.utils.drafts import Done, Draft, differences, discard_finished, open_draft
from hddm.utils.errors import HddmError, UsageError
from hddm.utils.files import read_json, read_whole, sha256_of, write_json
from hddm.utils.progress import Progress
from hddm.utils.records import SAMPLING_FILE, content_hash
from hddm.utils.tensors import available_device, read_safetensors
from hddm.velocity import Guidance, check_labels

FORMAT = "1.4"
LATENTS_FILE = "latents.safetensors"
IMAGE = "{:05d}.png"
ROUND = 1024
"""Images that are in memory together."""
ENOUGH = 32
"""Images from which on a router that takes one expert for all is doubted."""
NEGATIVE = "negative_"

log = logging.getLogger(__name__)


def _ordered(interval: tuple[float, float]) -> tuple[float, float]:
    if not 0 <= interval[0] <= interval[1] <= 1:
        raise ValueError("must be two t, 0 <= low <= high <= 1")
    return interval


class SampleSettings(SamplingSettings):
    """Checked options of ``hddm sample``, as recorded beside the images.

    Image i, counted from ``start``, depends on ``seed`` and i alone, not on the batch size.
    """

    num_images: Positive = 16
    seed: Annotated[int, Field(ge=0)] = 0
    start: Annotated[int, Field(ge=0)] = 0
    shift: float | None = None
    """Of the time grid; None for the model's own."""
    expert: int | None = None
    router_every: Positive = 1
    calibration: Literal["experts+router", "experts", "router", "none"] = "experts+router"
    """Calibrations that count: the experts' near t = 1, the router's temperatures, both or none. An expert
    that was trained in its own keeps it."""
    router_temperature: Annotated[float, Field(gt=0, le=1e9)] = 1.0
    """Factor on all temperatures of the router."""
    cfg_channels: int | None = None
    guidance_interval: Annotated[tuple[float, float], AfterValidator(_ordered)] = (0.0, 1.0)
    guidance_rescale: Annotated[float, Field(ge=0, le=1)] = 0.0
    class_labels: str | None = None
    """Names or numbers, comma-separated, cycled over the images."""
    prompts: tuple[str, ...] = ()
    """Cycled over the images."""
    negative_prompt: str | None = None
    conditions: Path | None = None
    """A safetensors file of conditions by keyword, and of negative ones as ``negative_<keyword>``, cycled."""
    init_image: Path | None = None
    """A picture that all images begin with."""
    strength: Annotated[float, Field(ge=0, le=1)] | None = None
    """How much of it is new; by default 0.8, with a mask 1."""
    mask: Path | None = None
    """A picture that is white where images are new."""
    resampling_steps: Positive = DEFAULT_RESAMPLING
    """How often each step is taken, with a mask."""
    height: Positive | None = None
    """Of the images in pixels; None for the model's own."""
    width: Positive | None = None
    batch_size: Positive = 64
    device: str = "auto"
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    offload: Literal["none", "ram", "disk"] = "none"
    max_memory: Positive | None = None
    """Bytes of weights on the device at most."""
    compile: bool = False
    output_type: Literal["png", "latent"] = "png"

    @property
    def numbers(self) -> range:
        """Numbers of the images."""
        return range(self.start, self.start + self.num_images)

    @property
    def guidance(self) -> Guidance:
        """Scale and other guidance options together."""
        return Guidance(
            self.guidance_scale,
            self.cfg_channels,
            self.guidance_interval,
            self.guidance_rescale,
            self.guide_by,
        )

    @property
    def how(self) -> dict[str, Any]:
        """Arguments of `hddm.sampling.plan`."""
        own = {name: getattr(self, name) for name in ("shift", "expert", "router_every")}
        return super().how | own | {"noise": Seeded(self.seed)}

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype that networks run in."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


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
    ``sampling.json``: settings, shift of the time grid, and use of the experts over time. With ``grid``, a
    sheet of the images is written beside it (`write_sheet`), and its line is returned.

    A killed run keeps its complete batches; ``resume`` goes on to the same bytes as without the kill, on the
    same machine and versions. Raises `HddmError` for an existing ``out``, an unfinished run without
    ``resume`` or of other settings, a model that cannot be loaded, wrong settings or a full disk, and
    `Stopped` for `Interrupted`.
    """
    if grid and settings.output_type == "latent":
        raise UsageError("--grid: shows images, and --output-type latent makes none; drop one of the two")
    for option in ("strength", "mask") if settings.init_image is None else ():
        if (value := getattr(settings, option)) is not None:
            raise UsageError(f"--{option} {value}: changes an --init-image; name one")
    device = available_device(settings.device)
    for option in ("strategy", "expert", "max_memory") if (source / EXPERT_FILE).exists() else ():
        if (value := getattr(settings, option)) is not None:
            name = f"--{option.replace('_', '-')}"
            raise UsageError(f"{name} {value}: {source} is a single expert; drop the option")
    pipeline = HDDMPipeline.from_pretrained(
        source, torch_dtype=settings.torch_dtype, offload=settings.offload, max_memory=settings.max_memory
    ).to(device)
    if settings.compile:
        pipeline.experts.compile(dynamic=True)
    _calibrate(pipeline, settings)
    check_output(source, pipeline, settings, grid)
    made = _Run(pipeline, settings)
    settings = settings.model_copy(update={"steps": made.how.steps, "solver": made.how.solver_name})
    record = _record(source, settings, pipeline, made.cycles.given)
    sheet, is_new = sheet_path(out), True
    if resume and not overwrite and (out / SAMPLING_FILE).is_file():
        _refuse_other(out, settings, record)
        discard_finished(out, "sampling")
        log.info("%s: is finished; there is nothing to go on with", out)
        is_new = False
    elif grid and sheet.exists() and not overwrite:
        raise HddmError(f"{sheet} exists: choose another --out, or pass --overwrite to replace it")
    else:
        identity = _identity(record)
        with open_draft(out, SAMPLING_FILE, identity, "sampling", made.kept, overwrite, resume) as draft:
            with Progress(settings.num_images * made.steps, "sample", " steps") as made.progress:
                made.write(draft)
            write_json(draft.folder / SAMPLING_FILE, record | {"expert_use": made.use.report()})
    if overwrite:
        # The sheet of the replaced images would be taken for one of these.
        sheet.unlink(missing_ok=True)
    if not grid or (sheet.exists() and not is_new):
        return None
    cycle = class_names(made.cycles.given, pipeline.ensemble.classes) or settings.prompts
    conditions = [cycle[i % len(cycle)] for i in settings.numbers] if cycle else ()
    return write_sheet(out, [out / IMAGE.format(i) for i in settings.numbers], conditions)


def _calibrate(pipeline: HDDMPipeline, settings: SampleSettings) -> None:
    """Leave out the calibrations that the settings leave out, and scale the router's temperatures."""
    ensemble = pipeline.ensemble
    for expert, facts in zip(ensemble.experts, pipeline.experts.facts, strict=True):
        if "experts" not in settings.calibration and not facts.training_calibration:
            expert.calibration = None
            if expert.weak is not None:
                expert.weak.calibration = None
    if isinstance(ensemble.router, Router):
        own = ensemble.router.temperatures if "router" in settings.calibration else (1.0,)
        ensemble.router.temperatures = tuple(settings.router_temperature * one for one in own)


def size_of(pipeline: HDDMPipeline, settings: SampleSettings, expert: int) -> tuple[int, int]:
    """Height and width in pixels of the images of an expert."""
    return pipeline.asked_size(expert, settings.height, settings.width)[0]


def planned(pipeline: HDDMPipeline, settings: SampleSettings, image: Any = None, mask: Any = None) -> Plan:
    """The plan of samples with these settings, which begin with ``image`` where ``mask`` is white."""
    shape = None
    if settings.height or settings.width:
        # Then there is one kind of samples (`check_output`).
        shape = pipeline.asked_size(settings.expert or 0, settings.height, settings.width)[1]
    return plan(
        pipeline.ensemble,
        **settings.how,
        shape=shape,
        picture=functools.cache(
            lambda k: pipeline.picture(
                image, settings.strength, mask, settings.resampling_steps, k, size_of(pipeline, settings, k)
            )
        ),
    )


class _Made(Done):
    """Images of a round, or samples of one of its batches, and the use of the experts up to there."""

    files: dict[str, str]
    use: dict[str, Any]

    def hashes(self, name: str) -> Mapping[str, str]:
        return self.files


@dataclass
class _Run:
    """A run in rounds of `ROUND` images; ``ready`` counts those that a resumed run need not make."""

    pipeline: HDDMPipeline
    settings: SampleSettings
    progress: Progress = field(init=False)
    """Of `steps` per image."""
    ready: int = 0
    has_begun: bool = False

    def __post_init__(self) -> None:
        settings, pipeline = self.settings, self.pipeline
        self.use = ExpertUse(len(pipeline.ensemble.experts))
        image, mask = (
            None if path is None else open_image(read_whole(path, LARGEST_FILE), path)
            for path in (settings.init_image, settings.mask)
        )
        self.how = planned(pipeline, settings, image, mask)
        self.cycles = read_cycles(pipeline, settings)

    @property
    def steps(self) -> int:
        """Steps of an image: those of the solver, and one to decode and write it."""
        return len(self.how.times)

    def kept(self) -> str:
        """Say what an interrupted run leaves, and how to go on."""
        return f"{self.ready} of {self.settings.num_images} images are kept, and --resume goes on"

    def write(self, draft: Draft) -> None:
        """Fill the draft's folder, but for the record."""
        settings, numbers, ensemble = self.settings, self.settings.numbers, self.pipeline.ensemble
        expected = torch.zeros(len(ensemble.experts), dtype=torch.float64)
        names = []
        for start in numbers[::ROUND]:
            stop = min(start + ROUND, numbers.stop)
            asked = self.cycles.cycled(range(start, stop))
            expected += ensemble.prior_of(stop - start, asked.given, asked.prior).sum(0)
            names.append(name := f"{start:05d}-{stop - 1:05d}")
            if done := draft.done(name, _Made):
                self.use.load(done.use)
                self.ready += stop - start
                self.progress.skip((stop - start) * self.steps)
            else:
                draft.drop(name)
                parts = self._samples(draft, name, range(start, stop), asked)
                self._add(draft, name, self._save(draft, name, parts))
            draft.drop_below(name)
        if settings.output_type == "latent":
            latents = [load_file(draft.parts / f"{name}.safetensors")["latents"] for name in names]
            save_file({"latents": torch.cat(latents)}, draft.folder / LATENTS_FILE, {"format": "pt"})
        _warn(self.pipeline, settings, self.use, expected)

    def _samples(
        self, draft: Draft, name: str, numbers: range, asked: Conditions
    ) -> list[tuple[Tensor, int, Tensor]]:
        """Samples of these numbers, by kind: their numbers, an expert of the kind, and samples (n, C, H, W).

        Complete batches are kept in the draft.
        """

        def count(index: int, x: Tensor) -> Tensor:
            self.progress(len(x))
            return x

        found, settings = [], self.settings
        for place, batch in enumerate(batches(self.how, numbers, asked, settings.batch_size)):
            kept = f"{name}/{place:05d}"
            path = draft.parts / f"{kept}.safetensors"
            if done := draft.done(kept, _Made):
                self.use.load(done.use)
                self.progress.skip(len(batch.rows) * (self.steps - 1))
                samples = load_file(path)["samples"]
            else:
                draft.drop(kept)
                if self.ready and not self.has_begun:
                    log.info("%d of %d images are there; the rest follows", self.ready, settings.num_images)
                self.has_begun = True
                with self.pipeline.of_size(batch.kind, size_of(self.pipeline, settings, batch.kind)):
                    samples = run(self.how, batch, count, use=self.use).cpu()
                path.parent.mkdir(exist_ok=True)
                save_file({"samples": samples.contiguous()}, path)
                self._add(draft, kept, [path])
            self.ready += len(batch.rows)
            found.append((batch, samples))
        return [(numbers.start + rows, kind, samples) for rows, kind, samples in gathered(found)]

    def _save(self, draft: Draft, name: str, parts: Sequence[tuple[Tensor, int, Tensor]]) -> list[Path]:
        """Write the samples of a round, and return the files."""
        if self.settings.output_type == "latent":
            path = draft.parts / f"{name}.safetensors"
            save_file({"latents": parts[0][2]}, path)
            self.progress(len(parts[0][2]))
            return [path]
        paths = []
        for numbers, expert, samples in parts:
            decoded = (
                self.pipeline.decode(one, expert, self.how.picture(expert)).cpu()
                for one in samples.split(self.settings.batch_size)
            )
            images = (one for batch in decoded for one in to_bytes(batch))
            for number, image in zip(numbers.tolist(), images, strict=True):
                paths.append(draft.folder / IMAGE.format(number))
                save_png(image, paths[-1])
                self.progress(1)
        return paths

    def _add(self, draft: Draft, name: str, paths: Sequence[Path]) -> None:
        files = {path.relative_to(draft.root).as_posix(): sha256_of(path) for path in paths}
        draft.add(name, _Made(files=files, use=self.use.values()))


def check_output(source: Path, pipeline: HDDMPipeline, settings: SampleSettings, grid: bool = False) -> None:
    """Raise an `HddmError` where these experts make no pictures, or not those that are asked for."""
    num, is_apart = len(pipeline.experts.facts), settings.expert is None and len(pipeline.ensemble.kinds) > 1
    if is_apart:
        names = ("init_image", "height", "width")
        given = [f"--{name.replace('_', '-')}" for name in names if getattr(settings, name) is not None]
        given += ["--output-type latent"] * (settings.output_type == "latent") + ["--grid"] * grid
        if given:
            raise UsageError(
                f"{given[0]}: these experts make samples of several kinds; drop it or use --expert"
            )
    if settings.expert is not None and not 0 <= settings.expert < num:
        raise UsageError(f"--expert {settings.expert}: there are 0 … {num - 1}")
    for k in range(num) if settings.expert is None else [settings.expert]:
        facts = pipeline.experts.facts[k]
        if settings.output_type == "latent" or pipeline.vae_of(k) is not None or facts.makes_pictures:
            continue
        remedy = f"hddm assemble {source} --vae FOLDER"
        if (source / EXPERT_FILE).exists():
            remedy += " --out ENSEMBLE"
        elif not (source / ENSEMBLE_FILE).exists():
            remedy = f"put one there as {source / 'vae'}"
        raise HddmError(
            f"{source}: its samples are latents of shape {facts.sample_shape} and it has no VAE; give it one "
            f"({remedy}){'' if is_apart else ', or pass --output-type latent'}"
        )


def _warn(pipeline: HDDMPipeline, settings: SampleSettings, use: ExpertUse, expected: Tensor) -> None:
    own = pipeline.facts.shift
    if settings.shift is not None and settings.shift != own:
        warnings.warn(f"--shift {settings.shift:g}, and the model's own is {own:g}", stacklevel=3)
    # Fewer images than experts say nothing, and a picture may be one expert's.
    is_told = settings.expert is None and settings.init_image is None
    if is_told and settings.num_images >= len(pipeline.experts.facts):
        is_drawn = (settings.strategy or pipeline.ensemble.strategy) == "draw"
        is_learned = not (is_drawn or isinstance(pipeline.ensemble.router, MomentsRouter))
        is_doubted = is_learned and settings.num_images >= ENOUGH
        for line in use.warnings(expected, pipeline.ensemble.domains, is_doubted):
            warnings.warn(line, stacklevel=3)


def _record(
    source: Path, settings: SampleSettings, pipeline: HDDMPipeline, given: Mapping[str, Tensor]
) -> dict[str, Any]:
    labels = given.get("class_labels")
    # One for all; where experts differ, each one's.
    vaes = [None if one.vae is None else one.vae.model_dump(mode="json") for one in pipeline.experts.facts]
    return {
        "format": FORMAT,
        "hddm": version("hddm-diffusion"),
        "source": str(source),
        "source_sha256": content_hash(source, sha256_once),
        **settings.model_dump(mode="json"),
        **{
            f"{name}_sha256": sha256_of(path)
            for name in ("conditions", "init_image", "mask")
            if (path := getattr(settings, name)) is not None
        },
        "device": str(available_device(settings.device)),
        "strategy": None if settings.expert is not None else settings.strategy or pipeline.facts.strategy,
        "shift": pipeline.facts.shift if settings.shift is None else settings.shift,
        "model_shift": pipeline.facts.shift,
        "weights": sorted({facts.weights for facts in pipeline.experts.facts}),
        "vae": vaes[0] if all(one == vaes[0] for one in vaes) else vaes,
        "class_labels": None if labels is None else labels.tolist(),
        "class_names": list(class_names(given, pipeline.ensemble.classes)) or None,
    }


_FREE = {"format", "hddm", "offload", "max_memory", "expert_use"}
"""Keys of the record that decide no image."""
_HASHED = {"source", "conditions", "init_image", "mask", "model_shift", "weights", "vae", "class_names"}
"""Keys of the record for which a hash stands, of the source or of the conditions."""


def _identity(record: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in a record that decide the images."""
    return {key: value for key, value in record.items() if key not in _FREE | _HASHED}


def _refuse_other(out: Path, settings: SampleSettings, record: Mapping[str, Any]) -> None:
    """Refuse to resume what is finished with other settings, or lacks an image."""
    now = json.loads(json.dumps(_identity(record)))
    if lines := differences(_identity(read_json(out / SAMPLING_FILE)), now):
        raise HddmError(
            f"{out}: holds samples of other options; choose another --out, or pass --overwrite to replace it",
            lines,
        )
    is_latent = settings.output_type == "latent"
    names = [LATENTS_FILE] if is_latent else [IMAGE.format(number) for number in settings.numbers]
    if missing := [name for name in names if not (out / name).is_file()]:
        raise HddmError(f"{out}: lacks {missing[0]}; --overwrite makes all images anew")


def read_cycles(pipeline: HDDMPipeline, settings: SampleSettings) -> Conditions:
    """Conditions with one row per distinct value, which the images take in turn.

    Raises `HddmError` for conditions that cannot be read or encoded, or that have two sources.
    """
    guided = settings.guidance.by_condition
    if settings.negative_prompt is not None and not guided:
        raise UsageError("--negative-prompt: needs a --guidance-scale other than 1, and --guide-by condition")
    if settings.prompts and not any(facts.conditions for facts in pipeline.experts.facts):
        raise UsageError("--prompt: the model is unconditional; drop the option")
    if settings.prompts and not all(map(pipeline.can_read, pipeline.readers)):
        raise UsageError(
            "--prompt: this model has no text encoder and tokenizer; give it both (hddm assemble MODEL "
            "--text-encoder FOLDER --tokenizer FOLDER; in Paris as text_encoder/ and tokenizer/), "
            "or pass the encoded text by --conditions"
        )
    labels = None
    if settings.class_labels is not None:
        if not pipeline.ensemble.classes:
            raise UsageError(
                f"--class-labels {settings.class_labels}: the model is unconditional; drop the option"
            )
        try:
            named = [part.strip() for part in settings.class_labels.split(",")]
            labels = class_indices(named, pipeline.ensemble.classes)
        except HddmError as error:
            raise UsageError(f"--class-labels: {error}") from error
    found = pipeline.encode(
        settings.prompts or None, labels, settings.negative_prompt, guided and bool(settings.prompts)
    )
    given, against = found.given, found.negative
    if settings.conditions is not None:
        for name, value in _file(settings.conditions).items():
            branch, key = given, name
            if name.startswith(NEGATIVE):
                branch, key = against, name.removeprefix(NEGATIVE)
            if key in branch:
                raise UsageError(f"{settings.conditions}: {name} is given by another option too; drop one")
            if branch is against and settings.guidance.by_weak:
                raise UsageError(f"{settings.conditions}: {name} is of --guide-by condition; drop it")
            if branch is given or guided:
                branch[key] = value
        try:
            # A prompt that names no class has a label beyond them.
            check_labels(given if found.prior is None else {}, pipeline.ensemble.classes)
        except HddmError as error:
            raise HddmError(f"--conditions {settings.conditions}: {error.message}") from error
    if found.prior is not None and settings.expert is None:
        num = len(found.prior)
        rows = found.cycled(range(num))
        asked = (pipeline.ensemble.prior_of(num, rows.given, rows.prior) > 0).any(0).nonzero()[:, 0].tolist()
        for k in set(range(len(pipeline.experts.facts))) - set(asked):
            warnings.warn(f"expert {k}: no prompt is for it (p = 0)", stacklevel=2)
    else:
        domains, one = pipeline.ensemble.domains, settings.expert
        asked = [k for k, domain in enumerate(domains) if one is None or domain == domains[one]]
    _refuse_missing(pipeline, given, asked)
    takes_text = any("encoder_hidden_states" in facts.conditions for facts in pipeline.experts.facts)
    if takes_text and "encoder_hidden_states" not in given:
        warnings.warn("no --prompt: the experts make what no text stands for", stacklevel=2)
    return found


def class_names(given: Mapping[str, Tensor], classes: Sequence[str]) -> tuple[str, ...]:
    """Names of the labels among ``given``, or numbers without a name; empty without labels."""
    labels = given[LABELS].tolist() if LABELS in given else []
    return tuple(classes[k] if 0 <= k < len(classes) else str(k) for k in labels)


def _refuse_missing(pipeline: HDDMPipeline, given: Mapping[str, Tensor], asked: Sequence[int]) -> None:
    options = {"encoder_hidden_states": "--prompt", "class_labels": "--class-labels"}
    for index in asked:
        expert = pipeline.ensemble.experts[index]
        names = pipeline.ensemble.names_of(index)
        held = {name for name, here in names.items() if here in given}
        for name in missing_from({*held, *expert.null_conditions}, expert.conditions or ()):
            option = f"{options[name]} or --conditions" if name in options else "--conditions"
            raise UsageError(f"{option}: the experts need {name} and have no empty default; pass it")


def _file(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise UsageError(f"--conditions {path}: no such file")
    tensors = read_safetensors(path)
    empty = [name for name, value in tensors.items() if value.ndim == 0 or not len(value)]
    for name, value in tensors.items():
        if name.removeprefix(NEGATIVE) == LABELS and value.ndim != 1:
            raise HddmError(
                f"--conditions {path}: {name} is {tuple(value.shape)}, and must be one label per image"
            )
    if empty or not tensors:
        raise HddmError(f"--conditions {path}: holds no rows of {empty or 'anything'}")
    return tensors
