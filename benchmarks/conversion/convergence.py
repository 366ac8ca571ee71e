"""How many steps of flow matching each start needs on data that its checkpoint has not seen."""

import math
import shutil
from pathlib import Path
from typing import Any

from benchmarks.conversion.cases import QUICK, Case
from benchmarks.conversion.convergence_report import lines, picture
from benchmarks.conversion.curves import marks
from benchmarks.conversion.data import read_parts, write_cifar_parts, write_digits_parts
from benchmarks.conversion.starts import SCRATCH, modulation_errors, pretrain, started
from benchmarks.conversion.training import Validation, train_flow
from benchmarks.harness import Start, as_json, check_kept, run_calls
from hddm.benchmark.plan import slug
from hddm.data.images import to_bytes, to_unit_range
from hddm.evaluation.measures import measure
from hddm.sampling import sample
from hddm.training.settings import LoopSettings
from hddm.utils.errors import HddmError
from hddm.utils.files import read_json, write_json
from hddm.utils.processes import Report
from hddm.utils.workers import Call, Workers

TUNING_SEED = 100
# Stands in a curve for what is no number.
DIVERGED = 1e9


def convergence(case: Case, start: Start, archives: Path) -> Path:
    """Pretrain, tune, train and measure; every run is kept in ``start.work`` and not done twice."""
    folder, seeds = start.work / case.name, start.seeds
    if case.name.endswith(QUICK):
        shutil.rmtree(folder, ignore_errors=True)
    # Further starts and rates change none of the old runs.
    check_kept(folder, {key: one for key, one in as_json(case).items() if key not in ("starts", "rates")})
    data = folder / "parts.safetensors"
    if not data.exists():
        _write_parts(case, data, archives)
    with Workers(start.workers) as pool:
        tuning_checkpoint = TUNING_SEED if case.reverse_tuning else 0
        checkpoints = [*range(seeds), *([TUNING_SEED] if case.reverse_tuning else [])]
        first = [_pretraining(case, data, folder, seed) for seed in checkpoints]
        tried = [(name, rate) for name in case.starts for rate in case.rates]
        # Fresh weights wait for no checkpoint.
        fresh = [(name, rate) for name, rate in tried if name.startswith(SCRATCH)]
        others = [one for one in tried if one not in fresh]
        pairs = {one: _training(case, data, folder, *one, tuning_checkpoint, tuning=True) for one in tried}
        done = run_calls(pool, [*first, *(pairs[one] for one in fresh)], "pretrain, tune from scratch")
        tuned = dict(zip(fresh, done[len(first) :], strict=True))
        tuned |= dict(zip(others, run_calls(pool, [pairs[one] for one in others], "tune"), strict=True))
        # By the last loss: one over the whole curve favours rates that fall fast and end high.
        scores = {
            name: {rate: tuned[name, rate]["losses"][-1] for rate in case.rates} for name in case.starts
        }
        rates = {name: min(each, key=lambda rate: each[rate]) for name, each in scores.items()}
        print("learning rates:", ", ".join(f"{name} {rate:g}" for name, rate in rates.items()), flush=True)
        order = [(name, seed) for seed in range(seeds) for name in case.starts]
        calls = [_training(case, data, folder, s, rates[s], seed, tuning=False) for s, seed in order]
        trained = dict(zip(order, run_calls(pool, calls, "train"), strict=True))
    runs = {name: [trained[name, seed] for seed in range(seeds)] for name in case.starts}
    content = {
        "settings": as_json(case),
        "modulation_errors": [modulation_errors(folder / f"seed_{seed}") for seed in range(seeds)],
        "tuning": {
            name: {f"{rate:g}": score for rate, score in each.items()} for name, each in scores.items()
        },
        "rates": rates,
        "runs": runs,
    }
    return start.write(f"conversion-convergence-{case.name}", lines(case, content), content, picture(runs))


def pretrain_job(data: Path, out: Path, case: Case, seed: int, report: Report) -> None:
    """A checkpoint and all that is converted from it."""
    if out.exists():
        report(_images(case.pretraining))
        return
    both = read_parts(data)
    images = (both.new if seed == TUNING_SEED else both.old).training
    pretrain(images, out, case.size, case.pretraining.model_copy(update={"seed": seed}), report)


def train_job(
    data: Path,
    checkpoint: Path,
    out: Path,
    case: Case,
    start: str,
    settings: LoopSettings,
    tuning: bool,
    report: Report,
) -> dict[str, Any]:
    """One run with its curve, written as JSON and returned; a run that is there is read."""
    if out.exists():
        report(_images(settings))
        return read_json(out)
    both = read_parts(data)
    part = both.old if tuning and case.reverse_tuning else both.new
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
            features = both.classifier.features(to_unit_range(to_bytes(images.nan_to_num(0, 1, -1))))
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
    return Call(pretrain_job, arguments, f"pretraining {seed}", _images(case.pretraining))


def _training(case: Case, data: Path, folder: Path, start: str, rate: float, seed: int, tuning: bool) -> Call:
    changes = {"learning_rate": rate, "seed": TUNING_SEED if tuning else seed}
    settings = case.training.model_copy(update=changes | ({"steps": case.tuning_steps} if tuning else {}))
    kind = "tuning" if tuning else "run"
    arguments = {
        "data": data,
        "checkpoint": folder / f"seed_{seed}",
        "out": folder / f"{kind}-{slug(start)}-{rate:g}-{seed}.json",
        "case": case,
        "start": start,
        "settings": settings,
        "tuning": tuning,
    }
    return Call(train_job, arguments, f"{start} {seed}", _images(settings))


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
