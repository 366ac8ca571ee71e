"""Native DDPM, native flow, converted DDPM and a mix of the two, on digits."""

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import DDIMScheduler
from torch import Tensor

from benchmarks.conversion.ablation_report import write_ablation
from benchmarks.conversion.report import measured_on
from benchmarks.conversion.starts import DDPM_LINEAR
from hddm.benchmark.data import write_digits
from hddm.benchmark.samples import slug
from hddm.calibration import FILE_NAME as CALIBRATION
from hddm.checkpoints.convert import write
from hddm.checkpoints.plan import Conversion, plan
from hddm.data.images import load_images, to_bytes
from hddm.data.partition import partition
from hddm.ensemble import Ensemble
from hddm.evaluation.features import choose_extractor
from hddm.evaluation.scores import Scorer
from hddm.experts.assembly import assemble
from hddm.experts.loading import load
from hddm.sampling import draw_experts, initial_noise, sample
from hddm.schedules import from_diffusers
from hddm.training.calibrate import recalibrate
from hddm.training.expert import train_expert
from hddm.training.settings import ExpertSettings
from hddm.utils.files import read_json, write_json
from hddm.utils.processes import Call, Workers
from hddm.utils.progress import Progress
from hddm.utils.records import EXPERT_FILE

SHARDS = 2
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
    """Of the ablation. ``sampling_steps`` are those of every row; 50 is the default of `hddm.sample`."""

    training: ExpertSettings
    sampling_steps: int
    images: int
    calibration_images: int
    resamples: int = 100
    name: str = "ablation"


FULL = Settings(
    training=ExpertSettings(
        objective="ddpm", steps=1600, batch_size=64, learning_rate=4e-3, ema_decay=0.99, size="small"
    ),
    sampling_steps=50,
    images=1437,
    calibration_images=512,
)
QUICK = Settings(
    training=ExpertSettings(objective="ddpm", steps=20, batch_size=16, learning_rate=4e-3, size="tiny"),
    sampling_steps=3,
    images=80,
    calibration_images=32,
    resamples=5,
    name="ablation-quick",
)


def measure_ablation(
    settings: Settings, seeds: int, work: Path, results: Path, workers: int, command: str
) -> Path:
    """Train, convert, sample and score; scores of each seed are written as soon as they are there."""
    facts, began = measured_on(), time.perf_counter()
    folder = work / settings.name
    folder.mkdir(parents=True, exist_ok=True)
    training, held_out = write_digits(folder / "digits")
    partition(training, folder / "shards", SHARDS, overwrite=True)
    images, fresh = load_images(training), load_images(held_out)
    extractor = choose_extractor(images, min(len(images), len(fresh), settings.images))
    scorer = Scorer(extractor, images.pixels, fresh.pixels, settings.resamples)
    runs = []
    with Workers(workers) as pool:
        for seed in range(seeds):
            place = folder / f"seed_{seed}"
            _train(pool, settings, folder / "shards", place, seed)
            sampled = _sample(pool, settings, place, seed)
            rows = {name: asdict(scorer.score(pixels)) for name, pixels in sampled.items()}
            runs.append({"seed": seed, "rows": rows})
            write_json(folder / f"scores-{seed}.json", rows)
            found = ", ".join(f"{name} {row['to_training']['value']:.2f}" for name, row in rows.items())
            print(f"seed {seed}: {found}", flush=True)
    content = {
        "format": "1.0",
        "measured_on": facts,
        "seconds": round(time.perf_counter() - began),
        "settings": {**asdict(settings), "training": settings.training.model_dump(mode="json")},
        "real": asdict(scorer.real()),
        "runs": runs,
    }
    return write_ablation(results, settings.name, command, content)


def expert_job(
    shard: Path,
    place: Path,
    k: int,
    settings: Settings,
    objective: str,
    seed: int,
    report: Callable[[int], None],
) -> None:
    """Train one expert; convert and calibrate it where it is a DDPM."""
    native = place / objective / str(k)
    own = settings.training.model_copy(update={"objective": objective, "seed": seed})
    schedule = from_diffusers(DDPM_LINEAR) if objective == DDPM else None
    train_expert(shard, native, own, schedule, overwrite=True, on_step=lambda step, loss: report(1))
    if objective != DDPM:
        return
    write(plan(native, Conversion()), place / BARE / str(k), overwrite=True)
    # A checkpoint from elsewhere brings no calibration along.
    (place / BARE / str(k) / CALIBRATION).unlink(missing_ok=True)
    record = place / BARE / str(k) / EXPERT_FILE
    write_json(record, read_json(record) | {"calibration_sha256": None})
    for kind, data in ((DATA, shard), (FREE, None)):
        copy = place / kind / str(k)
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(place / BARE / str(k), copy)
        recalibrate(copy, data, seed, settings.calibration_images)


def sample_job(
    source: Path, num: int, seed: int, steps: int, spacing: str | None, report: Callable[[int], None]
) -> Tensor:
    """Images in bytes: by DDIM with ``spacing``, else by the defaults of `hddm.sample`."""
    model = load(source)
    assert isinstance(model, Ensemble)
    if spacing is None:
        return to_bytes(sample(model, num, seed, steps, batch_size=512, on_batch=report))
    return to_bytes(ddim_samples(model, num, seed, steps, spacing, on_batch=report))


@torch.no_grad()
def ddim_samples(
    ensemble: Ensemble,
    num: int,
    seed: int,
    steps: int,
    spacing: str,
    batch_size: int = 512,
    on_batch: Callable[[int], None] | None = None,
) -> Tensor:
    """Samples (num, C, H, W) by diffusers' own DDIM, eta 0, from the noise and experts of `hddm.sample`."""
    assert ensemble.sample_shape is not None
    batches = []
    for start in range(0, num, batch_size):
        stop = min(start + batch_size, num)
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
        if on_batch is not None:
            on_batch(stop - start)
    return torch.cat(batches)


def _train(pool: Workers, settings: Settings, shards: Path, place: Path, seed: int) -> None:
    calls = []
    for objective in (DDPM, FLOW):
        for k in range(SHARDS):
            arguments: dict[str, Any] = {"shard": shards / f"shard_{k}", "place": place, "k": k}
            arguments |= {"settings": settings, "objective": objective, "seed": seed}
            calls.append(Call(expert_job, arguments, settings.training.steps))
    with Progress(sum(call.units for call in calls), f"seed {seed}: train") as progress:
        pool.run(calls, progress)


def _sample(pool: Workers, settings: Settings, place: Path, seed: int) -> dict[str, Tensor]:
    calls = {}
    for name, (kinds, spacing) in ROWS.items():
        source = place / "ensembles" / slug(name)
        assemble([place / kind / str(k) for k, kind in enumerate(kinds)], source, overwrite=True)
        arguments = {"source": source, "num": settings.images, "seed": seed, "spacing": spacing}
        calls[name] = Call(sample_job, arguments | {"steps": settings.sampling_steps}, settings.images)
    with Progress(sum(call.units for call in calls.values()), f"seed {seed}: sample") as progress:
        return dict(zip(calls, pool.run(list(calls.values()), progress), strict=True))
