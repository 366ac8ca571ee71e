"""``python -m benchmarks.routing.conditions``: what a router gains from seeing the condition.

Held-out images are noised, and their shard is guessed four ways: from the condition alone, by p(k | class)
from counts or by the topics of captions (`hddm describe`); by a router that sees no condition; by that one,
corrected by the first; and by a router that sees the condition (`hddm train router --condition`). Data:
digits by class, digits with captions, and pictures with names (``--pictures``, a folder of CATEGORY/*.png
with ``captions.csv``), whose shards are groups of categories; the digits' are clusters.

The text encoder has random weights and reads letters: two captions of other letters are unrelated, whatever
they mean.
"""

import csv
import json
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn import functional as F

from benchmarks.harness import (
    RESULTS,
    ResultsOption,
    SeedsOption,
    Start,
    WorkOption,
    main,
    run_once,
)
from hddm.data.shard_records import HELD_OUT, find_shards
from hddm.data.shards import Samples, Shard, join_samples, open_shard
from hddm.experts.record_folders import read_router
from hddm.experts.topics import topic_of
from hddm.networks.text_encoder import embed, read_text_encoder
from hddm.networks.tokenizer import read_tokenizer
from hddm.prompt_router import PromptRouter
from hddm.routers import given_condition
from hddm.training.router_accuracy import BINS
from hddm.training.router_conditions import conditions_of
from hddm.training.router_temperatures import noised_logits
from hddm.velocity import TIME_SCALE
from hddm_cli.data import write_random_clip

RECIPE = "--batch-size 64 --ema-decay 0.99"
DEVICE = "--device cpu --threads 1"
SHARDS, HELD_OUT_SHARE, NOISED = 4, "0.2", 8192
TOKENS = 40
ALONE = "condition alone"
BLIND = "router without condition"
CORRECTED = "the same, corrected"
SEEING = "router that sees the condition"
GROUPS = (
    "activities,objects,symbols",
    "animals-and-nature,food-and-drink",
    "component,people-and-body,smileys-and-emotion",
    "flags,travel-and-places",
)
Scores = dict[str, list[float]]

PicturesOption = Annotated[
    Path | None, typer.Option(help="Folder of CATEGORY/*.png and captions.csv.")
]


@dataclass(frozen=True)
class Question:
    """Shards in a folder whose images have a condition, and how routers are trained on them."""

    name: str
    folder: Path
    condition: str
    options: str


def run(
    results: ResultsOption = RESULTS,
    work: WorkOption = Path("runs/conditions"),
    seeds: SeedsOption = 2,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a router.")] = 500,
    pictures: PicturesOption = None,
) -> None:
    """Compare what is known of an image's shard with its condition and without."""
    start = Start(results, work, seeds=seeds)
    work.mkdir(parents=True, exist_ok=True)
    lines = [
        "# Routers that see the condition",
        f"Held-out images of {SHARDS} shards, noised at times spread evenly over [0, 1] ({NOISED:,} states). "
        f"Mean and standard deviation of {seeds} seeds of the router's training, {steps} steps each, without "
        "temperatures. The text encoder is a CLIP of random weights that reads letters.",
        "",
    ]
    content: dict[str, Any] = {"threads": torch.get_num_threads(), "steps": steps, "data": {}}
    for question in _questions(work, pictures):
        figures = _measured(question, work, seeds, steps)
        content["data"][question.name] = figures
        lines += _table(question, figures)
        print("\n".join(lines[-14:]), flush=True)
    typer.echo(start.write("routing-conditions", lines, content))


def _questions(work: Path, pictures: Path | None) -> list[Question]:
    digits, captioned = work / "digits", work / "captioned"
    run_once(digits, ["data", "digits"])
    run_once(captioned, f"data captions {digits / 'train'}".split())
    rest = f"--shards {SHARDS} --held-out {HELD_OUT_SHARE}"
    run_once(work / "by-class", f"partition {digits / 'train'} {rest}".split())
    run_once(work / "caption-images", f"partition {captioned} {rest}".split())
    texts = f"--text-encoder {captioned / 'text_encoder'} --tokenizer {captioned / 'tokenizer'}"
    run_once(work / "captions", f"encode {work / 'caption-images'} {texts}".split())
    found = [
        Question("digits by class", work / "by-class", "class", "--size tiny"),
        Question("digits by captions", work / "captions", "text", "--size tiny"),
    ]
    if pictures is None:
        return found
    named = work / "pictures"
    if not named.exists():
        _write_pictures(pictures, named)
    texts = f"--text-encoder {named / 'text_encoder'} --tokenizer {named / 'tokenizer'}"
    groups = " ".join(f"--classes g{k}={group}" for k, group in enumerate(GROUPS))
    images, encoded = work / "categories-images", work / "categories"
    run_once(images, f"partition {named} {groups} --held-out {HELD_OUT_SHARE}".split())
    run_once(encoded, f"encode {images} {texts} --resolution 16".split())
    title = "pictures by names, shards of categories"
    return [*found, Question(title, encoded, "text", "--size 2x32/4")]


def _write_pictures(source: Path, out: Path) -> None:
    """The pictures with their names, and a text encoder of random weights for letters and digits."""
    out.mkdir(parents=True)
    lines = []
    with (source / "captions.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            path = source.parent / row["file"]
            name = f"{path.parent.name}-{path.name}"
            shutil.copy(path, out / name)
            line = {"file_name": name, "text": row["name"], "label": path.parent.name}
            lines.append(json.dumps(line) + "\n")
    (out / "metadata.jsonl").write_text("".join(lines))
    write_random_clip(out, "abcdefghijklmnopqrstuvwxyz0123456789", TOKENS)


def _measured(question: Question, work: Path, seeds: int, steps: int) -> dict[str, Any]:
    """Accuracy and cross-entropy in bins of t, and of noise alone, of each way and seed."""
    shards = [open_shard(folder) for folder in find_shards(question.folder)]
    fresh = [open_shard(one.folder.parent / HELD_OUT / one.folder.name) for one in shards]
    store = join_samples([one.stored for one in fresh])
    rows = torch.arange(len(store))
    labels = store.shard_of(rows)
    prior = torch.tensor([len(one) for one in shards], dtype=torch.float64)
    prior /= prior.sum()
    alone = _by_counts(shards, fresh)
    if question.condition == "text":
        alone = _by_topics(question.folder, shards, fresh, prior)
    figures: dict[str, Any] = {
        "images": len(store),
        "shards": [len(one) for one in shards],
        ALONE: {"at_noise": _scores(alone.clamp_min(1e-6).log(), labels)},
        "ways": {},
    }
    for seed in range(seeds):
        networks = {}
        for name, option in (("blind", ""), ("seeing", f"--condition {question.condition}")):
            out = work / f"{question.folder.name}-{name}-{seed}"
            words = f"train router {question.folder} {question.options} --steps {steps}"
            run_once(out, f"{words} --seed {seed} {RECIPE} {DEVICE} {option}".split())
            networks[name] = read_router(out)[0]
        ways = _ways(question, networks, (store, labels), (shards, fresh), (prior, alone))
        for way, scores in ways.items():
            figures["ways"].setdefault(way, []).append(scores)
    return figures


def _ways(
    question: Question,
    networks: Mapping[str, Any],
    images: tuple[Samples, Tensor],
    shards: tuple[Sequence[Shard], Sequence[Shard]],
    known: tuple[Tensor, Tensor],
) -> dict[str, dict[str, Any]]:
    """Scores of the routers of one seed, by way."""
    store, labels = images
    x_0, (prior, alone) = store.take(torch.arange(len(store)), None, None), known
    classes = conditions_of(shards[0], "class").classes if question.condition == "class" else ()
    name: Any = question.condition
    sees = conditions_of(shards[1], name, classes)
    blind = noised_logits(networks["blind"], x_0, labels, 0, NOISED)
    seeing = noised_logits(networks["seeing"], x_0, labels, 0, NOISED, given=sees.take)
    corrected = given_condition(blind.logits.softmax(1), prior, alone[blind.image])
    noise = torch.randn(x_0.shape, generator=torch.Generator().manual_seed(0))
    one = torch.full((len(noise),), TIME_SCALE)
    with torch.no_grad():
        of_noise = networks["blind"](noise, one).double()
        seen = networks["seeing"](noise, one, **sees.take(torch.arange(len(noise)))).double()
    of_both = given_condition(of_noise.softmax(1), prior, alone)
    found = {
        BLIND: (blind.logits, of_noise),
        CORRECTED: (corrected.clamp_min(1e-6).log(), of_both.clamp_min(1e-6).log()),
        SEEING: (seeing.logits, seen),
    }
    place = (blind.t * BINS).long().clamp(max=BINS - 1)
    scores: dict[str, dict[str, Any]] = {}
    for way, (logits, at_noise) in found.items():
        by_noise = []
        for k in range(BINS):
            by_noise.append(_scores(logits[place == k], blind.labels[place == k]))
        scores[way] = {
            "all": _scores(logits, blind.labels),
            "by_noise": by_noise,
            "at_noise": _scores(at_noise, labels),
        }
    return scores


def _scores(logits: Tensor, labels: Tensor) -> dict[str, float]:
    return {
        "accuracy": (logits.argmax(1) == labels).double().mean().item(),
        "cross_entropy": F.cross_entropy(logits.double(), labels).item(),
    }


def _by_counts(shards: Sequence[Shard], fresh: Sequence[Shard]) -> Tensor:
    """p(k | class) (n, K) of held-out images, from counts of training images; uniform without classes."""
    if any(one.labels is None for one in (*shards, *fresh)):
        return torch.full((sum(map(len, fresh)), len(shards)), 1 / len(shards)).double()
    own = conditions_of(shards, "class")
    places = join_samples([one.stored for one in shards]).shard_of(torch.arange(len(own.labels)))
    shares = own.class_shares(places, len(shards))
    assert shares is not None
    return shares[conditions_of(fresh, "class", own.classes).labels]


def _by_topics(
    folder: Path, shards: Sequence[Shard], fresh: Sequence[Shard], prior: Tensor
) -> Tensor:
    """p(k | prompt) (n, K) of held-out captions, by the topics of the shards' captions."""
    home = folder.parent / ("captioned" if folder.name == "captions" else "pictures")
    encoder, words = read_text_encoder(home / "text_encoder"), read_tokenizer(home / "tokenizer")

    def pooled(shard: Shard) -> Tensor:
        assert shard.captions is not None
        texts, parts = list(shard.captions), []
        for start in range(0, len(texts), 64):
            parts.append(embed(encoder, words, texts[start : start + 64], warns=False).pooled)
        return torch.cat(parts)

    router = PromptRouter([topic_of(pooled(one)) for one in shards], prior.tolist())
    return torch.cat([router(pooled(one)) for one in fresh])


def _table(question: Question, figures: Mapping[str, Any]) -> list[str]:
    """Lines of one table."""
    alone = figures[ALONE]["at_noise"]
    source = "p(k \\| class) by counts" if question.condition == "class" else "topics of captions"
    sizes = ", ".join(map(str, figures["shards"]))
    lines = [
        f"## {question.name}",
        "",
        f"Shards of {sizes} training images, {figures['images']} held out.",
        "",
        "| way | accuracy at t = 1 | cross-entropy at t = 1 | accuracy, all t | cross-entropy, all t | "
        + " | ".join(f"t {k / BINS:.1f}–{(k + 1) / BINS:.1f}" for k in range(0, BINS, 2))
        + " |",
        "|---|" + "---|" * (4 + BINS // 2),
        f"| {source} | {alone['accuracy']:.3f} | {alone['cross_entropy']:.3f} |"
        + " |" * (2 + BINS // 2),
    ]
    for way, runs in figures["ways"].items():
        cells = [
            _cell(runs, lambda one: one["at_noise"]["accuracy"]),
            _cell(runs, lambda one: one["at_noise"]["cross_entropy"]),
            _cell(runs, lambda one: one["all"]["accuracy"]),
            _cell(runs, lambda one: one["all"]["cross_entropy"]),
        ]
        for k in range(0, BINS, 2):
            cells.append(_cell(runs, lambda one, k=k: one["by_noise"][k]["cross_entropy"]))
        lines.append(f"| {way} | " + " | ".join(cells) + " |")
    return [*lines, "", "The last columns are cross-entropies in nats by noise level.", ""]


def _cell(runs: Sequence[Mapping[str, Any]], value: Callable[[Any], float]) -> str:
    values = [value(one) for one in runs]
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.3f} ± {spread:.3f}"


if __name__ == "__main__":
    main(lambda: typer.run(run))
