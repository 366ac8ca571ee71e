"""Samples of a saved model, written as a folder of PNG files, or of latents."""

import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hddm.data.images import save_png, to_bytes
from hddm.ensemble_folders import ENSEMBLE_FILE
from hddm.errors import HddmError, UsageError
from hddm.expert_use import ExpertUse
from hddm.experts import EXPERT_FILE
from hddm.files import new_folder, write_json
from hddm.pipeline import HDDMPipeline
from hddm.record_names import SAMPLING_FILE
from hddm.sample_conditions import Cycles, class_names, cycled, read_cycles
from hddm.sample_settings import SampleSettings
from hddm.sample_sheets import check_absent_sheet, sheet_path, write_sheet
from hddm.sampling import sample

FORMAT = "1.2"
LATENTS_FILE = "latents.safetensors"
IMAGE = "{:05d}.png"
ROUND = 1024
"""Images that are in memory together."""


def sample_to_folder(
    source: Path,
    out: Path,
    settings: SampleSettings,
    overwrite: bool = False,
    on_batch: Callable[[int], None] | None = None,
    grid: bool = False,
) -> str | None:
    """Sample an expert, an ensemble or the Paris release into a folder.

    It holds ``00000.png`` …, counted from ``settings.start``, or ``latents.safetensors``, and
    ``sampling.json``: the settings, the time grid's shift, and how the experts were used over time. With
    ``grid`` there is a sheet of the images beside it (`hddm.sample_sheets`).

    Returns:
        What the sheet shows, None without one.

    Raises:
        HddmError: for an existing ``out``, a model that cannot be loaded, or wrong settings.
    """
    if grid and settings.output_type == "latent":
        raise UsageError("--grid: shows images, and --output-type latent makes none; drop one of the two")
    guidance, device = settings.guidance, settings.torch_device
    if (source / EXPERT_FILE).exists():
        _refuse_for_one(source, settings)
    pipeline = HDDMPipeline.from_pretrained(
        source, torch_dtype=settings.torch_dtype, offload=settings.offload, max_memory=settings.max_memory
    ).to(device)
    if settings.compile:
        pipeline.experts.compile(dynamic=True)
    _check_output(source, pipeline, settings)
    given, against = read_cycles(pipeline, settings)
    if grid:
        check_absent_sheet(out, overwrite)
    ensemble = pipeline.ensemble
    use = ExpertUse(len(ensemble.experts))
    expected = torch.zeros(len(ensemble.experts), dtype=torch.float64)
    latents = []
    with new_folder(out, SAMPLING_FILE, overwrite) as draft:
        for start in range(settings.start, settings.start + settings.num_images, ROUND):
            stop = min(start + ROUND, settings.start + settings.num_images)
            rows: dict[str, Any] = cycled(given, start, stop)
            expected += ensemble.prior_of(stop - start, rows).sum(0)
            samples = sample(
                ensemble,
                stop - start,
                settings.seed,
                settings.steps,
                settings.strategy,
                settings.solver,
                guidance,
                negative=cycled(against, start, stop) or None,
                shift=settings.shift,
                batch_size=settings.batch_size,
                start=start,
                expert=settings.expert,
                router_every=settings.router_every,
                use=use,
                on_batch=on_batch,
                **rows,
            )
            if settings.output_type == "latent":
                latents.append(samples)
            else:
                _write_images(pipeline, samples, start, settings.batch_size, draft)
        if latents:
            save_file({"latents": torch.cat(latents)}, draft / LATENTS_FILE, {"format": "pt"})
        strategy = settings.strategy or ensemble.strategy
        _warn(pipeline, settings, use, expected if strategy == "draw" else None)
        write_json(draft / SAMPLING_FILE, _record(source, settings, pipeline, use, given))
    if overwrite:
        # That of the images that were replaced would be taken for one of these.
        sheet_path(out).unlink(missing_ok=True)
    return _write_sheet(out, settings, class_names(given, ensemble.classes)) if grid else None


def _write_sheet(out: Path, settings: SampleSettings, classes: Sequence[str]) -> str:
    numbers = range(settings.start, settings.start + settings.num_images)
    cycle = classes or settings.prompts
    return write_sheet(
        out,
        [out / IMAGE.format(i) for i in numbers],
        [cycle[i % len(cycle)] for i in numbers] if cycle else (),
    )


def _write_images(pipeline: HDDMPipeline, samples: Tensor, start: int, batch_size: int, folder: Path) -> None:
    index = start
    for batch in samples.split(batch_size):
        for image in to_bytes(pipeline.decode(batch).cpu()):
            save_png(image, folder / IMAGE.format(index))
            index += 1


def _refuse_for_one(source: Path, settings: SampleSettings) -> None:
    for option in ("strategy", "expert", "max_memory"):
        value = getattr(settings, option)
        if value is not None:
            raise UsageError(
                f"--{option.replace('_', '-')} {value}: {source} is a single expert; drop the option"
            )


def _check_output(source: Path, pipeline: HDDMPipeline, settings: SampleSettings) -> None:
    facts = pipeline.experts.facts[0]
    if settings.output_type == "latent" or pipeline.vae is not None:
        return
    if facts.space == "latents" or facts.sample_shape[0] not in (1, 3):
        remedy = f"hddm assemble {source} --vae FOLDER"
        if (source / EXPERT_FILE).exists():
            remedy += " --out ENSEMBLE"
        elif not (source / ENSEMBLE_FILE).exists():
            remedy = f"put one there as {source / 'vae'}"
        raise HddmError(
            f"{source}: its samples are latents of shape {facts.sample_shape} and it has no VAE; give it one "
            f"({remedy}), or pass --output-type latent"
        )


def _warn(pipeline: HDDMPipeline, settings: SampleSettings, use: ExpertUse, expected: Tensor | None) -> None:
    own = pipeline.facts.shift
    if settings.shift is not None and settings.shift != own:
        warnings.warn(f"--shift {settings.shift:g}, and the model's own is {own:g}", stacklevel=3)
    # Of fewer images than experts nothing can be said.
    if settings.expert is None and settings.num_images >= len(pipeline.experts.facts):
        for line in use.warnings(expected):
            warnings.warn(line, stacklevel=3)


def _record(
    source: Path, settings: SampleSettings, pipeline: HDDMPipeline, use: ExpertUse, given: Cycles
) -> dict[str, object]:
    labels = given.get("class_labels")
    vae = pipeline.experts.facts[0].vae
    return {
        "format": FORMAT,
        "hddm": version("hddm-diffusion"),
        "source": str(source),
        **settings.record(),
        "strategy": None if settings.expert is not None else settings.strategy or pipeline.facts.strategy,
        "shift": pipeline.facts.shift if settings.shift is None else settings.shift,
        "model_shift": pipeline.facts.shift,
        "weights": sorted({facts.weights for facts in pipeline.experts.facts}),
        "vae": None if vae is None else vae.model_dump(mode="json"),
        "class_labels": None if labels is None else labels.tolist(),
        "class_names": list(class_names(given, pipeline.ensemble.classes)) or None,
        "expert_use": use.report(),
    }
