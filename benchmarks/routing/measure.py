"""Train once, sample every row, score it; rows that are there are not sampled again."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.conversion.report import finite, measured_on
from benchmarks.routing.jobs import Data, Sampled, expert_job, knots_job, router_job, sample_job
from benchmarks.routing.report import write_routing
from benchmarks.routing.settings import (
    CALIBRATED,
    CLASSES,
    FLOW,
    HELD_OUT_ROUTER,
    LONG_ROUTER,
    WHOLE_ROUTER,
    Settings,
    as_json,
    check_kept,
)
from hddm.benchmark.data import write_digits
from hddm.benchmark.samples import slug
from hddm.data.images import load_images, to_unit_range
from hddm.data.partition import partition
from hddm.data.shard_records import find_shards
from hddm.evaluation.classifier import FEATURES, FeatureClassifier, train_classifier
from hddm.evaluation.features import FeatureExtractor
from hddm.evaluation.scores import Scorer
from hddm.experts.records import FORMAT, ROUTER_FILE, RouterRecord
from hddm.utils.files import read_json, write_json
from hddm.utils.processes import Call, Workers
from hddm.utils.progress import Progress
from hddm.utils.records import read_record


def measure_routing(
    settings: Settings, seeds: int, work: Path, results: Path, workers: int, command: str
) -> Path:
    """The whole benchmark; returns the Markdown file."""
    facts = measured_on()
    folder, chosen = work / settings.name, settings.quickstart
    check_kept(folder, settings)
    shards = folder / "shards"
    training, held_out = write_digits(folder / "digits")
    if not shards.exists():
        partition(training, shards, chosen.num_shards)
    images, fresh = load_images(training), load_images(held_out)
    assert images.labels is not None
    classifier = train_classifier(images.normalised, images.labels)
    # The one that the quickstart chooses; it also says what digit an image is.
    extractor = FeatureExtractor("small classifier of the training images", FEATURES, classifier.features)
    scorer = Scorer(extractor, images.pixels, fresh.pixels, chosen.resamples)
    runs, data = [], Data.of(shards)
    with Workers(workers) as pool:
        for seed in range(seeds):
            place = folder / f"seed_{seed}"
            _train(pool, settings, shards, place, seed)
            rows = _sample(pool, workers, settings, data, place, seed, scorer, classifier)
            knots = _knots(pool, settings, shards, place, seed)
            calibrations = {
                name: read_record(place / name / ROUTER_FILE, RouterRecord, FORMAT).model_dump(
                    mode="json", include={"temperatures", "calibration"}
                )
                for name in CALIBRATED
            }
            runs.append({"seed": seed, "rows": rows, "knots": knots, "calibrations": calibrations})
    content = {
        "format": "1.0",
        "measured_on": facts,
        "settings": as_json(settings),
        "real": asdict(scorer.real()),
        "real_accuracy": _accuracy(classifier, fresh.pixels, fresh.labels),
        "runs": runs,
    }
    return write_routing(results, settings, command, content)


def _train(pool: Workers, settings: Settings, shards: Path, place: Path, seed: int) -> None:
    chosen = settings.quickstart
    calls = []
    for kind in (FLOW, CLASSES):
        own = chosen.expert("flow", seed).model_copy(update={"class_conditional": kind == CLASSES})
        for k, shard in enumerate(find_shards(shards)):
            arguments: dict[str, Any] = {"shard": shard, "out": place / kind / str(k), "settings": own}
            calls.append(Call(expert_job, arguments, chosen.steps))
    router = chosen.router(seed)
    long = router.steps * settings.long_factor
    changes: dict[str, dict[str, Any]] = {
        HELD_OUT_ROUTER: {"calibrate": True},
        LONG_ROUTER: {"calibrate": True, "steps": long},
        WHOLE_ROUTER: {},
    }
    for name in sorted({row.router for row in settings.rows().values()}):
        own_router = router.model_copy(update=changes[name])
        arguments = {"shards": shards, "out": place / name, "settings": own_router}
        calls.append(Call(router_job, arguments, own_router.steps))
    with Progress(sum(call.units for call in calls), f"seed {seed}: train") as progress:
        pool.run(calls, progress)


def _sample(
    pool: Workers,
    at_once: int,
    settings: Settings,
    data: Data,
    place: Path,
    seed: int,
    scorer: Scorer,
    classifier: FeatureClassifier,
) -> dict[str, Any]:
    chosen, kept = settings.quickstart, place / "rows"
    kept.mkdir(exist_ok=True)
    calls = {}
    for name, row in settings.rows().items():
        if (kept / f"{slug(name)}.json").exists():
            continue
        arguments = {"place": place, "data": data, "row": row, "seed": seed}
        arguments |= {"num": chosen.num_images_per_strategy, "steps": chosen.sampling_steps}
        arguments |= {"solver": chosen.strategy_solver}
        calls[name] = Call(sample_job, arguments, chosen.num_images_per_strategy)
    with Progress(sum(call.units for call in calls.values()), f"seed {seed}: sample") as progress:
        names = list(calls)
        for batch in (names[start : start + at_once] for start in range(0, len(names), at_once)):
            sampled: list[Sampled] = pool.run([calls[name] for name in batch], progress)
            for name, one in zip(batch, sampled, strict=True):
                found = {
                    **asdict(scorer.score(one.pixels)),
                    "experts_a_step": one.experts_a_step,
                    "mflop_a_step": one.mflop_a_step,
                    "label_accuracy": _accuracy(classifier, one.pixels, one.labels),
                }
                write_json(kept / f"{slug(name)}.json", finite(found))
    return {name: read_json(kept / f"{slug(name)}.json") for name in settings.rows()}


def _knots(
    pool: Workers, settings: Settings, shards: Path, place: Path, seed: int
) -> dict[str, dict[int, Any]]:
    """Calibrations of both routers with each number of temperatures."""
    calls = [
        Call(
            knots_job,
            {"shards": shards, "router": place / name, "knots": settings.knots, "seed": seed},
            len(settings.knots),
        )
        for name in CALIBRATED
    ]
    with Progress(sum(call.units for call in calls), f"seed {seed}: knots") as progress:
        return dict(zip(CALIBRATED, pool.run(calls, progress), strict=True))


@torch.no_grad()
def _accuracy(
    classifier: FeatureClassifier, pixels: torch.Tensor, labels: torch.Tensor | None
) -> float | None:
    """Share of images that the classifier takes for what they were asked to be."""
    if labels is None:
        return None
    right = classifier(to_unit_range(pixels)).argmax(1) == labels
    return float(right.double().mean())
