"""Routers that need no training, beside learned ones, on digits: by the image's moments, and by prompts.

python -m benchmarks.training_free_routers. Unconditional experts are routed by a learned router and by
moments; experts of templated captions by p(k | class), as counted in the shards, and by the topics of their
captions. The text encoder is a CLIP of random weights: its words differ, which is all that ten digits need.
"""

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel

from benchmarks.harness import (
    QUICKSTART,
    Digits,
    QuickOption,
    ResultsOption,
    SeedsOption,
    Start,
    WorkersOption,
    WorkOption,
    expert_call,
    main,
    router_call,
    run_calls,
    typer,
)
from hddm.benchmark.presets import load_settings
from hddm.data.encoding import encode_shards
from hddm.data.encoding_plan import EncodingSettings, plan_encoding
from hddm.data.images import load_images, save_png, to_bytes, to_unit_range
from hddm.data.partition import partition
from hddm.data.shard_records import captions_of, find_shards, read_manifest
from hddm.data.shards import load_shard
from hddm.evaluation.classifier import FEATURES, FeatureClassifier, train_classifier
from hddm.evaluation.features import FeatureExtractor
from hddm.evaluation.scores import Scorer
from hddm.experts.assembly import assemble
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.sampling import sample
from hddm.training.topics import describe_topic
from hddm.utils.processes import Workers
from hddm.utils.tensors import generator

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEMPLATES = ("a handwritten {}", "the digit {}", "{}", "a small picture of the number {}", "{} in ink")
ASKED = TEMPLATES[1]
GROWN_ASKED = {f"`{line}`": line for line in (ASKED, "the number {} in ink")}
"""Prompts for grown models: a wording that describes them, and one of known words that does not."""
TIMES = (0.02, 0.1, 0.3, 0.5, 0.7, 0.9)
STRATEGIES = ("draw", "top-1", "top-2", "full")
EXPERTS = 4
GrownOption = Annotated[
    Path | None,
    typer.Option("--grown", help="A finished hddm benchmark grow-digits, whose models to ask by prompts."),
]
CAPTION_STREAM, NOISE_STREAM = 11, 12


def write_captioned(images: Path, folder: Path) -> Path:
    """Write the digits with a caption each, as Hugging Face's image folders have them."""
    if not folder.exists():
        found = load_images(images)
        folder.mkdir(parents=True)
        rows = []
        assert found.labels is not None
        for i, (pixels, label) in enumerate(zip(found.pixels, found.labels.tolist(), strict=True)):
            save_png(pixels, folder / f"{i:05d}.png")
            which = int(torch.randint(len(TEMPLATES), (), generator=generator(0, i, CAPTION_STREAM)))
            text = TEMPLATES[which].format(WORDS[label])
            rows.append({"file_name": f"{i:05d}.png", "text": text, "label": label})
        (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def write_text_encoder(folder: Path, names: Sequence[str] = WORDS) -> Path:
    """Write a CLIP of random weights, and a tokenizer of the words of captions of ``names``."""
    if folder.exists():
        return folder
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    words = sorted({word for line in (*TEMPLATES, *names) for word in line.split() if word != "{}"})
    letters += [word for word in words if len(word) == 1 and word not in letters]
    merges, known = [], {*letters, *(f"{letter}</w>" for letter in letters)}
    for word in words:
        parts = [*word[:-1], f"{word[-1]}</w>"]
        while len(parts) > 1:
            merges.append(f"{parts[0]} {parts[1]}")
            parts = [parts[0] + parts[1], *parts[2:]]
            known.add(parts[0])
    vocabulary = {word: i for i, word in enumerate([*sorted(known), "<|startoftext|>", "<|endoftext|>"])}
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir(parents=True)
    (tokenizer / "vocab.json").write_text(json.dumps(vocabulary))
    (tokenizer / "merges.txt").write_text("\n".join(["#version: 0.2", *dict.fromkeys(merges)]) + "\n")
    special = {
        "bos_token": "<|startoftext|>",
        **dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>"),
    }
    config = {**special, "tokenizer_class": "CLIPTokenizer", "model_max_length": 16}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {
        "bos_token_id": len(vocabulary) - 2,
        "eos_token_id": len(vocabulary) - 1,
        "pad_token_id": len(vocabulary) - 1,
    }
    model = CLIPTextModel(
        CLIPTextConfig(vocab_size=len(vocabulary), max_position_embeddings=16, **sizes, **ends)
    )
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
    model.text_model.embeddings.token_embedding.weight.data.normal_() if hasattr(
        model, "text_model"
    ) else None
    model.save_pretrained(folder / "text_encoder")
    return folder


def accuracy(router: Any, images: Tensor, shards: Tensor, seed: int) -> list[float]:
    """Share of noised images whose own shard a router holds for the most probable, at each of `TIMES`."""
    found = []
    noise = torch.randn(images.shape, generator=generator(seed, NOISE_STREAM))
    for t in TIMES:
        p = router((1 - t) * images + t * noise, torch.full((len(images),), t))
        found.append(float((p.argmax(1) == shards).double().mean()))
    return found


def measure(start: Start, steps: int | None, num: int, grown: Path | None) -> Path:
    """Train what is missing, sample, score, write the result."""
    folder, preset = start.work, load_settings("digits")
    digits = Digits(folder)
    captioned = write_captioned(digits.training, folder / "captioned")
    clip = write_text_encoder(folder / "clip")
    if not (folder / "shards").exists():
        partition(captioned, folder / "shards", EXPERTS)
    if not (folder / "encoded").exists():
        encode_shards(
            plan_encoding(
                folder / "shards", EncodingSettings(), None, clip / "text_encoder", clip / "tokenizer"
            ),
            folder / "encoded",
        )
    shards = find_shards(folder / "shards")
    data = [load_shard(shard) for shard in shards]
    labels = [shard.labels for shard in data if shard.labels is not None]
    counts = torch.stack([one.bincount(minlength=10) for one in labels], 1).double()
    said = [captions_of(read_manifest(shard).images) for shard in shards]
    captions = [[list(one or ()).count(ASKED.format(word)) for one in said] for word in WORDS]
    counted = {"class prior": counts, "captions, as counted": torch.tensor(captions).double()}
    classifier = train_classifier(digits.images.normalised, digits.images.labels)
    extractor = FeatureExtractor("small classifier of the training images", FEATURES, classifier.features)
    scorer = Scorer(extractor, digits.images.pixels, digits.fresh.pixels, QUICKSTART.resamples)
    pixels = torch.cat([shard.take(torch.arange(len(shard))) for shard in data])
    owner = torch.cat([torch.full((len(shard),), k) for k, shard in enumerate(data)])
    runs = []
    with Workers(start.workers) as pool:
        for seed in range(start.seeds):
            place = folder / f"seed_{seed}"
            runs.append(
                _seed(
                    pool, preset, folder, place, seed, steps, num, scorer, classifier, counted, pixels, owner
                )
            )
    content: dict[str, Any] = {"runs": runs, "times": TIMES, "real": asdict(scorer.real())}
    lines = _lines(runs, start.seeds, num)
    if grown is not None:
        more, content["grown"] = measure_grown(folder, grown, num)
        lines += more
    return start.write("routing-training-free", lines, content)


def _seed(
    pool: Workers, preset: Any, folder: Path, place: Path, seed: int, steps: int | None, num: int,
    scorer: Scorer, classifier: FeatureClassifier, counted: dict[str, Tensor], pixels: Tensor, owner: Tensor,
) -> dict[str, Any]:  # fmt: skip
    changes = {} if steps is None else {"steps": steps}
    plain = preset.expert("flow", seed, **changes)
    text = preset.expert("flow", seed, **changes, text_conditional=True)
    calls = [expert_call(one, place / "plain" / one.name, plain) for one in find_shards(folder / "shards")]
    calls += [expert_call(one, place / "text" / one.name, text) for one in find_shards(folder / "encoded")]
    calls.append(
        router_call(folder / "shards", place / "router", preset.router(seed).model_copy(update=changes))
    )
    run_calls(pool, calls, f"seed {seed}: train")
    plains = [place / "plain" / f"shard_{k}" for k in range(EXPERTS)]
    texts = [place / "text" / f"shard_{k}" for k in range(EXPERTS)]
    parts = {name: folder / "clip" / name for name in ("text_encoder", "tokenizer")}
    begun = time.perf_counter()
    for k, expert in enumerate(texts):
        describe_topic(expert, data=folder / "shards" / f"shard_{k}", **parts)
    fit = time.perf_counter() - begun
    assemble(plains, place / "learned", place / "router", overwrite=True)
    assemble(plains, place / "moments", "moments", overwrite=True)
    assemble(texts, place / "prompts", overwrite=True, **parts)
    run: dict[str, Any] = {"fit_seconds": fit, "rows": {}}
    for name in ("learned", "moments"):
        pipe = HDDMPipeline.from_pretrained(place / name)
        pipe.set_progress_bar_config(disable=True)
        run[f"accuracy_{name}"] = accuracy(pipe.ensemble.router, pixels, owner, seed)
        for strategy in STRATEGIES:
            images = sample(pipe.ensemble, num, seed, strategy=strategy, batch_size=250)
            run["rows"][f"{name}, {strategy}"] = asdict(scorer.score(to_bytes(images)))
    pipe = HDDMPipeline.from_pretrained(place / "prompts")
    asked = torch.arange(num) % 10
    priors = {name: (table / table.sum(1, keepdim=True))[asked] for name, table in counted.items()}
    for how, wordings in (("", (ASKED,)), (", in all wordings", TEMPLATES)):
        begun = time.perf_counter()
        texts = [wordings[i // 10 % len(wordings)].format(WORDS[i % 10]) for i in range(num)]
        given = pipe.encode(texts)
        routing = time.perf_counter() - begun
        if not how:
            # The first prompts also fit the router.
            run["prior_gap"] = float((given.prior - priors["class prior"]).abs().sum(1).mean() / 2)
            run["routing_seconds"] = routing
        tables = priors if not how else {"class prior": priors["class prior"]}
        for name, prior in {**tables, "prompts": given.prior}.items():
            begun = time.perf_counter()
            images = to_bytes(
                sample(pipe.ensemble, num, seed, strategy="draw", batch_size=250, prior=prior, **given.given)
            )
            run["sampling_seconds"] = time.perf_counter() - begun
            right = classifier(to_unit_range(images)).argmax(1) == asked
            scores = {**asdict(scorer.score(images)), "label_accuracy": float(right.double().mean())}
            run["rows"][f"{name}{how}"] = scores
    return run


def measure_grown(folder: Path, run: Path, num: int) -> tuple[list[str], list[dict[str, Any]]]:
    """Ask the grown models of a finished grow-digits run by class, and by prompts after describing them."""
    names = [str(number) for number in range(10)]
    domains = list(load_settings("grow-digits").partition.classes.values())
    clip = write_text_encoder(folder / "clip_of_classes", names)
    parts = {name: clip / name for name in ("text_encoder", "tokenizer")}
    images, fresh = (load_images(run / "digits" / side) for side in ("train", "held_out"))
    classifier = train_classifier(images.normalised, images.labels)
    extractor = FeatureExtractor("small classifier of the training images", FEATURES, classifier.features)
    scorer = Scorer(extractor, images.pixels, fresh.pixels, QUICKSTART.resamples)
    asked, runs = torch.arange(num) % 10, []
    for seed in sorted(run.glob("seed_*")):
        place = folder / "grown" / seed.name
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(seed / "ensembles" / "grown-by-class" / "experts", place / "experts")
        experts = [place / "experts" / str(k) for k in range(len(domains))]
        for expert, domain in zip(experts, domains, strict=True):
            lines = [template.format(name) for template in TEMPLATES for name in domain]
            describe_topic(expert, text=", ".join(lines), **parts)
        assemble(experts, place / "prompts", **parts)
        pipe = HDDMPipeline.from_pretrained(place / "prompts")
        pipe.set_progress_bar_config(disable=True)
        rows = {}
        for name, template in {"class": None, **GROWN_ASKED}.items():
            prompts = [(template or "").format(names[label]) for label in asked.tolist()]
            found = pipe.encode(prompts) if template else pipe.encode(class_labels=asked.tolist())
            how = {"strategy": "draw", "batch_size": 250, "prior": found.prior, **found.given}
            made = sample(pipe.ensemble, num, int(seed.name[5:]), **how)
            made = to_bytes(made)
            right = classifier(to_unit_range(made)).argmax(1) == asked
            own = torch.tensor([k for label in names for k, one in enumerate(domains) if label in one])[asked]
            routed = float(found.prior.gather(1, own[:, None]).mean()) if template else 1.0
            rows[name] = {
                **asdict(scorer.score(made)),
                "label_accuracy": float(right.double().mean()),
                "right_expert": routed,
            }
        runs.append({"seed": seed.name, "rows": rows})
    lines = [
        "",
        f"Grown digits of `hddm benchmark grow-digits`, {len(runs)} seeds: experts of classes, old of 0 to 4 "
        f"and new of 5 to 9, each described by {len(TEMPLATES)} wordings of its five classes:",
        "",
        "| asked by | p(k) of the right expert | label accuracy | to training images | to held-out images |",
        "|---|---|---|---|---|",
    ]
    keys = ("right_expert", "label_accuracy", "to_training", "to_held_out")
    for name in runs[0]["rows"]:
        cells = [_mean([one["rows"][name][key] for one in runs]) for key in keys]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines, runs


def _mean(values: list[Any]) -> str:
    numbers = [value["value"] if isinstance(value, dict) else value for value in values]
    found = torch.tensor(numbers, dtype=torch.float64)
    spread = f" ± {found.std():.2f}" if len(found) > 1 else ""
    return f"{found.mean():.2f}{spread}"


def _lines(runs: list[dict[str, Any]], seeds: int, num: int) -> list[str]:
    lines = [
        "# Routers that need no training, on digits",
        f"{EXPERTS} flow experts of the digits preset a seed, {seeds} seeds, {num} samples a row; mean ± "
        "deviation over seeds. Distances are Fréchet's, on features of a classifier of the training images.",
        "",
        "| share of training images whose shard is named, at t = | " + " | ".join(map(str, TIMES)) + " |",
        "|---|" + "---|" * len(TIMES),
    ]
    for name in ("learned", "moments"):
        cells = [_mean([run[f"accuracy_{name}"][i] for run in runs]) for i in range(len(TIMES))]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "| router, strategy | to training images | to held-out images |", "|---|---|---|"]
    for name in runs[0]["rows"]:
        rows = [run["rows"][name] for run in runs]
        if "label_accuracy" not in rows[0]:
            cells = [_mean([row[key] for row in rows]) for key in ("to_training", "to_held_out")]
            lines.append(f"| {name} | {cells[0]} | {cells[1]} |")
    wordings = f"one of their {len(TEMPLATES)} wordings, and by all in turn"
    lines += ["", f"Experts of captions, asked by `{ASKED}`, {wordings}:"]
    lines += [
        "",
        "| p(k) by | label accuracy | to training images | to held-out images |",
        "|---|---|---|---|",
    ]
    keys = ("label_accuracy", "to_training", "to_held_out")
    for name in (name for name, row in runs[0]["rows"].items() if "label_accuracy" in row):
        cells = [_mean([run["rows"][name][key] for run in runs]) for key in keys]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    gap, fit = (_mean([run[key] for run in runs]) for key in ("prior_gap", "fit_seconds"))
    share = max(run["routing_seconds"] / run["sampling_seconds"] for run in runs)
    lines += [
        "",
        f"Total variation between p(k | prompt) and p(k | class): {gap}. Describing {EXPERTS} experts took "
        f"{fit} s; encoding and routing {num} prompts at most {share:.1%} of the time of their sampling.",
    ]
    return lines


def command(
    results: ResultsOption = Path(__file__).parents[1] / "results",
    work: WorkOption = Path("runs") / "training_free",
    quick: QuickOption = False,
    seeds: SeedsOption = 3,
    workers: WorkersOption = 2,
    grown: GrownOption = None,
) -> None:
    """Measure both kinds of routers."""
    start = Start(results, work, seeds, workers)
    typer.echo(measure(start, 20 if quick else None, 200 if quick else 1000, grown))


if __name__ == "__main__":
    main(lambda: typer.run(command))
