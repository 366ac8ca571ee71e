"""Train once, sample every row, score it; rows that are there are not sampled again."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Digits, Start, as_json, check_kept, expert_call, plain, router_call, run_calls
from benchmarks.routing.jobs import Data, Sampled, knots_job, sample_job
from benchmarks.routing.picture import draw_picture
from benchmarks.routing.report import lines
from benchmarks.routing.settings import (
    CALIBRATED,
    CLASSES,
    FLOW,
    HELD_OUT_ROUTER,
    LONG_ROUTER,
    WHOLE_ROUTER,
    Settings,
)
from hddm.benchmark.settings import slug
from hddm.data.images import to_unit_range
from hddm.data.shard_records import find_shards
from hddm.evaluation.classifier import FEATURES, FeatureClassifier, train_classifier
from hddm.evaluation.features import FeatureExtractor
from hddm.evaluation.scores import Scorer
from hddm.experts.records import FORMAT, ROUTER_FILE, RouterRecord
from hddm.utils.files import read_json, write_json
from hddm.utils.processes import Call, Workers
from hddm.utils.records import read_record


def measure_routing(settings: Settings, start: Start) -> Path:
    """The whole benchmark; returns the Markdown file."""
    folder = start.work / settings.name
    check_kept(folder, settings.kept(), growing=("rows",))
    digits = Digits(folder)
    shards, images, fresh = (
        digits.shards("shards", settings.quickstart.partition.shards),
        digits.images,
        digits.fresh,
    )
    assert images.labels is not None
    classifier = train_classifier(images.normalised, images.labels)
    # The one that the quickstart chooses; it also says what digit an image is.
    extractor = FeatureExtractor("small classifier of the training images", FEATURES, classifier.features)
    scorer = Scorer(extractor, images.pixels, fresh.pixels, settings.quickstart.resamples)
    runs, data = [], Data.of(shards)
    with Workers(start.workers) as pool:
        for seed in range(start.seeds):
            place = folder / f"seed_{seed}"
            _train(pool, settings, shards, place, seed)
            rows = _sample(pool, start.workers, settings, data, place, seed, scorer, classifier)
            knots = _knots(pool, settings, shards, place, seed)
            calibrations = {
                name: read_record(place / name / ROUTER_FILE, RouterRecord, FORMAT).model_dump(
                    mode="json", include={"temperatures", "calibration"}
                )
                for name in CALIBRATED
            }
            runs.append({"seed": seed, "rows": rows, "knots": knots, "calibrations": calibrations})
    content = {
        "settings": as_json(settings),
        "real": asdict(scorer.real()),
        "real_accuracy": _accuracy(classifier, fresh.pixels, fresh.labels),
        "runs": runs,
    }
    picture = draw_picture(settings, runs)
    return start.write(f"routing-{settings.name}", lines(settings, content), content, picture)


def _train(pool: Workers, settings: Settings, shards: Path, place: Path, seed: int) -> None:
    chosen, calls = settings.quickstart, []
    for kind in (FLOW, CLASSES):
        own = chosen.expert("flow", seed, class_conditional=kind == CLASSES)
        for k, shard in enumerate(find_shards(shards)):
            calls.append(expert_call(shard, place / kind / str(k), own))
    router = chosen.router(seed)
    changes: dict[str, dict[str, Any]] = {
        HELD_OUT_ROUTER: {"calibrate": True},
        LONG_ROUTER: {"calibrate": True, "steps": router.steps * settings.long_factor},
        WHOLE_ROUTER: {},
    }
    for name in sorted({row.router for row in settings.rows().values()}):
        calls.append(router_call(shards, place / name, router.model_copy(update=changes[name])))
    run_calls(pool, calls, f"seed {seed}: train")


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
    rows, point = settings.rows(), settings.point
    paths = {name: place / "rows" / f"{slug(name)}.json" for name in rows}
    (place / "rows").mkdir(exist_ok=True)
    names = [name for name, path in paths.items() if not path.exists()]
    for batch in (names[first : first + at_once] for first in range(0, len(names), at_once)):
        common = {"place": place, "data": data, "point": point, "seed": seed}
        calls = [Call(sample_job, {**common, "row": rows[name]}, point.num_images) for name in batch]
        sampled: list[Sampled] = run_calls(pool, calls, f"seed {seed}: {', '.join(batch)}")
        for name, one in zip(batch, sampled, strict=True):
            found = {
                **asdict(scorer.score(one.pixels)),
                "experts_a_step": one.experts_a_step,
                "mflop_a_step": one.mflop_a_step,
                "label_accuracy": _accuracy(classifier, one.pixels, one.labels),
            }
            write_json(paths[name], plain(found))
    return {name: read_json(path) for name, path in paths.items()}


def _knots(
    pool: Workers, settings: Settings, shards: Path, place: Path, seed: int
) -> dict[str, dict[int, Any]]:
    """Calibrations of both routers with each number of temperatures."""
    common = {"shards": shards, "knots": settings.knots, "seed": seed}
    calls = [Call(knots_job, {**common, "router": place / name}, len(settings.knots)) for name in CALIBRATED]
    return dict(zip(CALIBRATED, run_calls(pool, calls, f"seed {seed}: knots"), strict=True))


@torch.no_grad()
def _accuracy(
    classifier: FeatureClassifier, pixels: torch.Tensor, labels: torch.Tensor | None
) -> float | None:
    """Share of images that the classifier takes for what they were asked to be."""
    if labels is None:
        return None
    right = classifier(to_unit_range(pixels)).argmax(1) == labels
    return float(right.double().mean())
