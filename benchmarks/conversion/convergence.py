"""How many steps of flow matching each start needs on data that its checkpoint has not seen."""

import math
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.conversion.cases import QUICK, Case, plain
from benchmarks.conversion.convergence_report import write_convergence
from benchmarks.conversion.curves import marks
from benchmarks.conversion.data import read_parts, write_cifar_parts, write_digits_parts
from benchmarks.conversion.report import measured_on
from benchmarks.conversion.starts import SCRATCH, modulation_errors, pretrain, started
from benchmarks.conversion.training import Validation, train_flow
from hddm.data.images import to_bytes, to_unit_range
from hddm.evaluation.distances import measure
from hddm.sampling import sample
from hddm.training.settings import LoopSettings
from hddm.utils.errors import HddmError
from hddm.utils.files import read_json, write_json
from hddm.utils.processes import Call, Workers
from hddm.utils.progress import Progress

TUNING_SEED = 100
# Stands in a curve for what is no number.
DIVERGED = 1e9


def convergence(
    case: Case, seeds: int, work: Path, results: Path, archives: Path, workers: int, command: str
) -> Path:
    """Pretrain, tune, train and measure; every run is kept in ``work`` and not done twice."""
    facts, began = measured_on(), time.perf_counter()
    folder = work / case.name
    if case.name.endswith(QUICK):
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    _same_settings(folder / "settings.json", case)
    data = folder / "parts.safetensors"
    if not data.exists():
        _write_parts(case, data, archives)
    with Workers(workers) as pool:
        tuning_checkpoint = TUNING_SEED if case.reverse_tuning else 0
        checkpoints = [*range(seeds), *([TUNING_SEED] if case.reverse_tuning else [])]
        first = [_pretraining(case, data, folder, seed) for seed in checkpoints]
        tried = [(start, rate) for start in case.starts for rate in case.rates]
        # Fresh weights wait for no checkpoint.
        fresh = [(start, rate) for start, rate in tried if start.startswith(SCRATCH)]
        others = [one for one in tried if one not in fresh]
        pairs = {one: _training(case, data, folder, *one, tuning_checkpoint, tuning=True) for one in tried}
        done = _run(pool, [*first, *(pairs[one] for one in fresh)], "pretrain, tune from scratch")
        tuned = dict(zip(fresh, done[len(first) :], strict=True))
        tuned |= dict(zip(others, _run(pool, [pairs[one] for one in others], "tune"), strict=True))
        # By the last loss: one over the whole curve favours rates that fall fast and end high.
        scores = {
            start: {rate: tuned[start, rate]["losses"][-1] for rate in case.rates} for start in case.starts
        }
        rates = {start: min(each, key=lambda rate: each[rate]) for start, each in scores.items()}
        print("learning rates:", ", ".join(f"{start} {rate:g}" for start, rate in rates.items()), flush=True)
        order = [(start, seed) for seed in range(seeds) for start in case.starts]
        calls = [_training(case, data, folder, s, rates[s], seed, tuning=False) for s, seed in order]
        trained = dict(zip(order, _run(pool, calls, "train"), strict=True))
    runs = {start: [trained[start, seed] for seed in range(seeds)] for start in case.starts}
    content = {
        "format": "1.0",
        "measured_on": facts,
        "seconds": round(time.perf_counter() - began),
        "settings": plain(case),
        "modulation_errors": [modulation_errors(folder / f"seed_{seed}") for seed in range(seeds)],
        "tuning": {
            start: {f"{rate:g}": score for rate, score in each.items()} for start, each in scores.items()
        },
        "rates": rates,
        "runs": runs,
    }
    return write_convergence(results, case.name, command, content)


def pretrain_job(data: Path, out: Path, case: Case, seed: int, report: Callable[[int], None]) -> None:
    """A checkpoint and all that is converted from it."""
    if out.exists():
        report(_images(case.pretraining))
        return
    parts = read_parts(data)
    images = (parts.new if seed == TUNING_SEED else parts.old).training
    pretrain(images, out, case.size, case.pretraining.model_copy(update={"seed": seed}), report)


def train_job(
    data: Path,
    checkpoint: Path,
    out: Path,
    case: Case,
    start: str,
    settings: LoopSettings,
    tuning: bool,
    report: Callable[[int], None],
) -> dict[str, Any]:
    """One run with its curve, written as JSON and returned; a run that is there is read."""
    if out.exists():
        report(_images(settings))
        return read_json(out)
    parts = read_parts(data)
    part = parts.old if tuning and case.reverse_tuning else parts.new
    split = len(part.held_out) // 2 if not case.reverse_tuning else 0
    fresh = part.held_out[:split] if split and tuning else part.held_out[split:]
    mixed = fresh[:: max(1, len(fresh) // case.validation_images)][: case.validation_images]
    validation = Validation(mixed, case.repeats)
    field = started(start, checkpoint, part.training, case.size, settings.seed)
    curve: dict[str, list[Any]] = {
        "steps": [],
        "losses": [],
        "by_t": [],
        "distance_steps": [],
        "distances": [],
    }
    far = set() if tuning else {round(share * settings.steps) for share in case.distances_at}

    def look(step: int) -> None:
        loss, by_t = validation.loss(field)
        curve["steps"].append(step)
        curve["losses"].append(min(loss, DIVERGED) if math.isfinite(loss) else DIVERGED)
        curve["by_t"].append(by_t)
        if step in far:
            images = sample(
                field,
                case.samples,
                settings.seed,
                case.sampling_steps,
                solver="adams-bashforth",
                batch_size=512,
            )
            features = parts.classifier.features(to_unit_range(to_bytes(images.nan_to_num(0, 1, -1))))
            found = measure(features.double().numpy(), part.features.double().numpy(), resamples=30)
            curve["distance_steps"].append(step)
            curve["distances"].append([found.value, found.half_width])

    at = sorted({*marks(settings.steps, case.first_mark), *far})
    diverged, seconds = "", 0.0
    try:
        seconds = train_flow(field, part.training, settings, at, look, report)
    except HddmError as error:
        diverged = str(error)
        curve["steps"] = at
        curve["losses"] += [DIVERGED] * (len(at) - len(curve["losses"]))
        missing = [step for step in sorted(far) if step not in curve["distance_steps"]]
        curve["distance_steps"] += missing
        curve["distances"] += [[DIVERGED, 0.0]] * len(missing)
    result = {
        "start": start,
        "rate": settings.learning_rate,
        "seed": settings.seed,
        "seconds": seconds,
        "diverged": diverged,
        **curve,
    }
    draft = out.with_suffix(".part")
    write_json(draft, result)
    draft.rename(out)
    print(f"\n{out.stem}: {curve['losses'][0]:.4f} → {curve['losses'][-1]:.4f}", flush=True)
    return result


def _pretraining(case: Case, data: Path, folder: Path, seed: int) -> Call:
    arguments = {"data": data, "out": folder / f"seed_{seed}", "case": case, "seed": seed}
    return Call(pretrain_job, arguments, _images(case.pretraining))


def _training(case: Case, data: Path, folder: Path, start: str, rate: float, seed: int, tuning: bool) -> Call:
    changes = {"learning_rate": rate, "seed": TUNING_SEED if tuning else seed}
    settings = case.training.model_copy(update=changes | ({"steps": case.tuning_steps} if tuning else {}))
    kind = "tuning" if tuning else "run"
    slug = start.replace(" ", "-").replace(",", "").replace("'", "")
    arguments = {
        "data": data,
        "checkpoint": folder / f"seed_{seed}",
        "out": folder / f"{kind}-{slug}-{rate:g}-{seed}.json",
        "case": case,
        "start": start,
        "settings": settings,
        "tuning": tuning,
    }
    return Call(train_job, arguments, _images(settings))


def _run(pool: Workers, calls: Sequence[Call], label: str) -> list[Any]:
    with Progress(sum(call.units for call in calls), label) as progress:
        return pool.run(calls, progress)


def _images(settings: LoopSettings) -> int:
    return settings.steps * settings.batch_size


def _write_parts(case: Case, data: Path, archives: Path) -> None:
    few = case.name.endswith(QUICK)
    if case.name.startswith("digits"):
        write_digits_parts(data, epochs=3 if few else 30)
    elif few:
        write_cifar_parts(data, archives, per_class=100, held_out=40, epochs=1)
    else:
        write_cifar_parts(data, archives)


def _same_settings(path: Path, case: Case) -> None:
    """Refuse to go on from runs of other settings; further starts and rates change none of the old runs."""
    wanted = plain(case)
    before = read_json(path) if path.exists() else wanted
    changed = [key for key in before if key not in ("starts", "rates") and before[key] != wanted.get(key)]
    if changed:
        raise SystemExit(
            f"{path}: the runs beside it differ in {', '.join(changed)}; delete them or pass another --work"
        )
    write_json(path, wanted)
