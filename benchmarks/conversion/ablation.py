"""Native DDPM, native flow, converted DDPM and a mix of the two, on digits."""

import shutil
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import DDIMScheduler
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.conversion.starts import DDPM_LINEAR
from benchmarks.harness import DDPM_ON_DIGITS, SHORT_DDPM, Digits, Start, as_json, flat, run_calls
from benchmarks.reports import COLOURS, SCORES, SIDES, Runs, about_scores, distance_gaps, score_cells, table
from hddm.benchmark.plan import slug
from hddm.calibration import FILE_NAME as CALIBRATION
from hddm.checkpoints.convert import write
from hddm.checkpoints.plan import Conversion, plan
from hddm.data.images import to_bytes
from hddm.ensemble import Ensemble
from hddm.experts.assembly import assemble
from hddm.experts.loading import load
from hddm.noise import initial_noise
from hddm.sampling import draw_experts, sample
from hddm.schedules import from_diffusers
from hddm.training.calibrate import recalibrate
from hddm.training.expert import train_expert
from hddm.training.settings import ExpertSettings
from hddm.utils.files import write_json
from hddm.utils.processes import Call, Report, Workers
from hddm.utils.records import write_manifest

SHARDS, BATCH = 2, 512
DDPM, FLOW, DATA, FREE, BARE = "ddpm", "flow", "converted-data", "converted-free", "converted-bare"
# Which folder of experts each row draws from, a shard each, and the spacing of DDIM where it samples.
ROWS: Mapping[str, tuple[tuple[str, str], str | None]] = {
    "native DDPM, DDIM as configured": ((DDPM, DDPM), "leading"),
    "native DDPM, DDIM with trailing steps": ((DDPM, DDPM), "trailing"),
    "native flow": ((FLOW, FLOW), None),
    "converted DDPM, not calibrated": ((BARE, BARE), None),
    "converted DDPM, calibrated on its own samples": ((FREE, FREE), None),
    "converted DDPM, calibrated on data": ((DATA, DATA), None),
    "mixed, converted DDPM in shard 0": ((DATA, FLOW), None),
    "mixed, converted DDPM in shard 1": ((FLOW, DATA), None),
}


@dataclass(frozen=True)
class Settings:
    """Of the ablation. ``sampling_steps`` are those of every row."""

    training: ExpertSettings
    sampling_steps: int
    images: int
    calibration_images: int
    resamples: int = 100
    name: str = "ablation"


FULL = Settings(
    training=DDPM_ON_DIGITS,
    sampling_steps=50,
    images=1437,
    calibration_images=512,
)
QUICK = Settings(
    training=SHORT_DDPM,
    sampling_steps=3,
    images=80,
    calibration_images=32,
    resamples=5,
    name="ablation-quick",
)


def measure_ablation(settings: Settings, start: Start) -> Path:
    """Train, convert, sample and score; scores of each seed are written as soon as they are there."""
    folder = start.work / settings.name
    digits, runs = Digits(folder), []
    shards = digits.shards("shards", SHARDS)
    scorer = digits.scorer(settings.images, settings.resamples)
    with Workers(start.workers) as pool:
        for seed in range(start.seeds):
            place = folder / f"seed_{seed}"
            run_calls(pool, _trainings(settings, shards, place, seed), f"seed {seed}: train")
            calls = _samplings(settings, place, seed)
            sampled = run_calls(pool, list(calls.values()), f"seed {seed}: sample")
            rows = {name: flat(scorer.score(one)) for name, one in zip(calls, sampled, strict=True)}
            runs.append({"seed": seed, "rows": rows})
            write_json(folder / f"scores-{seed}.json", rows)
    content = {"settings": as_json(settings), "real": digits.real(scorer), "runs": runs}
    return start.write(f"conversion-{settings.name}", lines(settings, content), content, _picture(runs))


def _trainings(settings: Settings, shards: Path, place: Path, seed: int) -> list[Call]:
    common = {"place": place, "settings": settings, "seed": seed}
    return [
        Call(
            expert_job,
            {**common, "shard": shards / f"shard_{k}", "k": k, "objective": objective},
            settings.training.steps,
        )
        for objective in (DDPM, FLOW)
        for k in range(SHARDS)
    ]


def _samplings(settings: Settings, place: Path, seed: int) -> dict[str, Call]:
    calls = {}
    for name, (kinds, spacing) in ROWS.items():
        source = place / "ensembles" / slug(name)
        assemble([place / kind / str(k) for k, kind in enumerate(kinds)], source, overwrite=True)
        arguments = {"source": source, "num": settings.images, "seed": seed, "spacing": spacing}
        calls[name] = Call(sample_job, arguments | {"steps": settings.sampling_steps}, settings.images)
    return calls


def expert_job(
    shard: Path,
    place: Path,
    k: int,
    settings: Settings,
    objective: str,
    seed: int,
    report: Report,
) -> None:
    """Train one expert; convert and calibrate it where it is a DDPM."""
    native = place / objective / str(k)
    own = settings.training.model_copy(update={"objective": objective, "seed": seed})
    schedule = from_diffusers(DDPM_LINEAR) if objective == DDPM else None
    train_expert(shard, native, own, schedule, overwrite=True, on_step=lambda *_: report(1))
    if objective != DDPM:
        return
    bare = place / BARE / str(k)
    write(plan(native, Conversion()), bare, overwrite=True)
    # A checkpoint from elsewhere brings no calibration along.
    (bare / CALIBRATION).unlink(missing_ok=True)
    write_manifest(bare)
    for kind, data in ((DATA, shard), (FREE, None)):
        copy = place / kind / str(k)
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(bare, copy)
        recalibrate(copy, data, seed, settings.calibration_images)


def sample_job(source: Path, num: int, seed: int, steps: int, spacing: str | None, report: Report) -> Tensor:
    """Images in bytes: by DDIM with ``spacing``, else by Euler steps of `hddm.sample`."""
    model = load(source)
    assert isinstance(model, Ensemble)
    if spacing is None:
        return to_bytes(sample(model, num, seed, steps, solver="euler", batch_size=BATCH, on_batch=report))
    return to_bytes(ddim_samples(model, num, seed, steps, spacing, report))


@torch.no_grad()
def ddim_samples(
    ensemble: Ensemble,
    num: int,
    seed: int,
    steps: int,
    spacing: str,
    report: Report,
) -> Tensor:
    """Samples (num, C, H, W) by diffusers' own DDIM, eta 0, from the noise and experts of `hddm.sample`."""
    assert ensemble.sample_shape is not None
    batches = []
    for start in range(0, num, BATCH):
        stop = min(start + BATCH, num)
        expert = draw_experts(ensemble.prior, seed, start, stop)
        x = initial_noise(seed, start, stop, ensemble.sample_shape)
        for k, field in enumerate(ensemble.experts):
            rows = (expert == k).nonzero()[:, 0]
            scheduler = DDIMScheduler.from_config(DDPM_LINEAR, timestep_spacing=spacing)
            scheduler.set_timesteps(steps)
            y = x[rows] * scheduler.init_noise_sigma
            for timestep in scheduler.timesteps:
                eps = field.network(y, timestep.float().expand(len(y)))
                y = scheduler.step(eps, timestep, y, eta=0.0).prev_sample
            x[rows] = y
        batches.append(x)
        report(stop - start)
    return torch.cat(batches)


def lines(settings: Settings, content: Mapping[str, Any]) -> list[str]:
    """The report, its title first."""
    runs, training = content["runs"], settings.training
    return [
        "# Native and converted experts on digits",
        "Two shards of scikit-learn's digits, an expert each, drawn by shard size and kept. Every expert: "
        f"`{training.size}`, {training.steps:,} steps at batch {training.batch_size}, "
        f"{training.learning_rate:g}; DDPM on linear betas 1e-4 … 0.02, 1,000 steps. The DDPM is sampled "
        "by diffusers' DDIMScheduler (eta 0, clip_sample on, as the config says; its default spacing "
        '"leading", and "trailing"), or goes through `hddm convert`, is calibrated on its shard or on '
        f"{settings.calibration_images} samples of its own (`hddm calibrate` without --data), and is "
        f"sampled by `hddm.sample` with its defaults. {settings.sampling_steps} steps and "
        f"{settings.images:,} images everywhere.",
        "",
        about_scores(content["real"], runs),
        "",
        *table(["samples of", *SCORES], [[row, *score_cells(runs, row)] for row in ROWS]),
        "",
        # Every calibrated conversion against every native sampling of the same DDPM, paired by seed.
        *(
            f"- {converted}, against {native}: {distance_gaps(runs, converted, native)}"
            for converted in ROWS
            if converted.startswith("converted DDPM, calibrated")
            for native in ROWS
            if native.startswith("native DDPM, DDIM")
        ),
    ]


def _picture(runs: Runs) -> Figure:
    names = list(runs[0]["rows"])
    canvas = Figure(figsize=(9, 0.42 * len(names) + 1.2), layout="constrained")
    panels = canvas.subplots(1, 2, sharey=True)
    for panel, (side, label) in zip(panels, SIDES.items(), strict=True):
        for place, name in enumerate(names):
            values = [run["rows"][name][side]["value"] for run in runs]
            panel.barh(place, statistics.fmean(values), color=COLOURS[2], height=0.6)
            panel.plot(values, [place] * len(values), "o", color=COLOURS[0], markersize=4)
        panel.set_yticks(range(len(names)), names, fontsize=8)
        panel.set_xlabel(f"Fréchet distance {label}", fontsize=8)
        panel.tick_params(axis="x", labelsize=8)
    panels[0].invert_yaxis()
    return canvas
