"""The story of ``hddm quickstart``: an old model, new images, and one ensemble that makes both.

Somebody has a DDPM model of the digits 0 to 4, a plain diffusers pipeline; images of 5 to 9 come. If it is
fine-tuned on them, it forgets. If it joins experts of them instead, it stays the same, and together they make
all ten digits.

``story.txt`` has one paragraph per chapter: a title, then independent command lines, each with its time in
seconds on one core. They run in OUT, two at a time; lines that begin with # are functions here. The output of
a step appears only when it is complete, so the same command continues after a kill at any moment.
``story.json`` records the commands, and how many seconds each took.
"""

import base64
import contextlib
import io
import os
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.resources import files
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from PIL import Image
from torch.nn import functional as F

from hddm.benchmark.data import write_digits
from hddm.benchmark.jobs import end_with_parent, machine, stoppable
from hddm.benchmark.report import REPORT_FILE
from hddm.benchmark.results import number
from hddm.data.images import load_images
from hddm.evaluation.classifier import load_classifier
from hddm.evaluation.compare import markdown_table
from hddm.utils import files as disk
from hddm.utils.errors import HddmError, counted
from hddm.utils.processes import Call, Report, Workers, interruptible
from hddm.utils.progress import Progress, duration
from hddm.utils.tensors import read_safetensors
from hddm_cli.quickstart import STORY_FILE

FORMAT = "1.0"
LENGTHS = {"old": 1500, "new": 600, "router": 2000, "images": 600}
"""Training steps of the old model, of each new expert and of the router; images that a model makes."""
LAST_OLD = 4
STRIP, CHECKED = 20, 64
"""Samples shown of each model; samples of the old one compared with those it makes in the ensemble."""
WORKERS = 2
"""Steps at a time."""
_CLASSIFIER, _COMPARISON = "classifier.safetensors", "comparison.md"
_RECIPE = "--batch-size 32 --learning-rate 2e-3 --ema-decay 0.99 --checkpoint-every 200"
_SCORING = f"--reference digits/train --held-out digits/held_out --features {_CLASSIFIER}"


@dataclass(frozen=True)
class Step:
    """A command line, or a comment, and about how many ``seconds`` it takes on one core."""

    command: str
    seconds: float

    @property
    def made(self) -> str:
        """The path that it writes last."""
        words = self.command.split()
        if words[1] == "calibrate":
            return f"{words[2]}/calibration.safetensors"
        out = words[words.index("--out" if "--out" in words else ">") + 1]
        return f"{out}.grid.png" if words[1] == "sample" else out


@dataclass(frozen=True)
class Chapter:
    """Steps that do not need each other."""

    title: str
    steps: Sequence[Step]

    @property
    def seconds(self) -> float:
        """Time of them all, about."""
        each = [step.seconds for step in self.steps]
        return max(max(each), sum(each) / WORKERS)


def story_of(seeds: int, lengths: Mapping[str, int]) -> list[Chapter]:
    """Return all chapters: what is done once, trainings and samples of each seed, and the end."""
    first, each, last = (files("hddm_cli") / "story.txt").read_text(encoding="utf-8").split("---\n")
    known = {"recipe": _RECIPE, "scoring": _SCORING, "twice": 2 * lengths["new"], **lengths}
    few = min(CHECKED, lengths["images"])
    given = ({"seed": k, "at": _place(k), "by": f" --seed {k}" if k else ""} for k in range(seeds))
    text = "\n".join([first, *(each.format(few=few, **known, **one) for one in given), last])
    story = []
    for title, *lines in (chapter.split("\n") for chapter in text.strip().split("\n\n")):
        steps = [
            Step(command, float(seconds)) for seconds, _, command in (line.partition(" ") for line in lines)
        ]
        story.append(Chapter(title, steps))
    return story


def _place(seed: int) -> str:
    return f"seed_{seed}/" if seed else ""


def tell(out: Path, overwrite: bool = False, seeds: int = 1, lengths: Mapping[str, int] = LENGTHS) -> str:
    """Run or continue the story in ``out``; return its sentence and table, "" if it was finished before.

    ``overwrite`` starts again. If an earlier start had more ``seeds``, its number is used.

    Raises:
        HddmError: for a folder with other files or of another version, and whatever the commands raise.
        Stopped: after a signal; finished steps are kept.
    """
    with disk.alone(out), stoppable(out):
        record = _begin(out, story_of(1, lengths), overwrite)
        is_there = all((out / name).is_file() for name in (REPORT_FILE, _COMPARISON))
        if record["date"] and record["seeds"] >= seeds and is_there:
            told = f"{out}: was finished on {record['date']}; pass --overwrite to start again"
            print(told, file=sys.stderr, flush=True)
            return ""
        record |= {"seeds": max(seeds, record["seeds"]), "date": ""}
        _keep(out, record)
        (out / _COMPARISON).unlink(missing_ok=True)
        story = story_of(record["seeds"], lengths)
        _run(story, out, record)
        record["date"] = date.today().isoformat()
        said = conclude(out, story, record)
        _keep(out, record)
    return said


def _begin(out: Path, story: Sequence[Chapter], overwrite: bool) -> dict[str, Any]:
    """Return the record of the story in ``out``, a new one if there is none or with ``overwrite``."""
    commands = [step.command for chapter in story for step in chapter.steps]
    new: dict[str, Any] = {"format": FORMAT, "commands": commands, "seeds": 0, "seconds": {}, "date": ""}
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        record = disk.read_json(out / STORY_FILE) if (out / STORY_FILE).is_file() else {}
        if record.get("commands") == commands:
            return new | record
        other = "the quickstart of another version; pass --overwrite, or" if record else "other files;"
        raise HddmError(f"{out}: holds {other} choose another --out")
    disk.check_absent(out, STORY_FILE, overwrite=True)
    out.mkdir(parents=True, exist_ok=True)
    # If killed while files go, what is left is of no story.
    _keep(out, new | {"commands": []})
    for path in out.iterdir():
        if path.name != STORY_FILE:
            disk.remove(path)
    _keep(out, new)
    return new


def _keep(out: Path, record: Mapping[str, Any]) -> None:
    disk.write_whole(out / STORY_FILE, lambda draft: disk.write_json(draft, record))


def _run(story: Sequence[Chapter], out: Path, record: dict[str, Any]) -> None:
    """Print the plan and do what is left, with progress of the whole; keep the seconds of each step."""
    is_left = {step: not (out / step.made).exists() for chapter in story for step in chapter.steps}
    found = [Chapter(one.title, [step for step in one.steps if is_left[step]]) for one in story]
    left, is_resumed = [chapter for chapter in found if chapter.steps], bool(record["seconds"])
    seconds, steps = sum(chapter.seconds for chapter in left), counted(sum(is_left.values()), "step")
    plan = f"{out}: {steps} to run, about {duration(seconds)} on two idle cores"
    print(plan, *(f"- {chapter.title}" for chapter in left), sep="\n", file=sys.stderr, flush=True)

    def now() -> list[str]:
        return [f"now {' and '.join(workers.running)}"]

    def start(call: Call) -> None:
        progress.say(f"  {' '.join(call.arguments['words'])}")

    def end(call: Call, result: tuple[float, str]) -> None:
        seconds, said = result
        record["seconds"][call.arguments["step"].command] = seconds
        _keep(out, record)
        progress.say(textwrap.indent(f"{call.name}: {duration(seconds)}\n{said}".rstrip(), "    "))

    workers, progress = Workers(WORKERS), Progress(int(10 * seconds), "quickstart", more=now)
    with workers, progress:
        for chapter in left:
            progress.say(f"\n{chapter.title}")
            part = 10 * chapter.seconds / sum(step.seconds for step in chapter.steps)
            calls = []
            for step in chapter.steps:
                words = step.command.split()
                words += ["--resume"] if is_resumed and words[1] in ("train", "sample") else []
                given = {"folder": out.resolve(), "step": step, "words": words}
                calls.append(Call(_do, given | {"units": int(part * step.seconds)}, 0, step.made))
            workers.run(calls, progress, start, end)


def _do(folder: Path, step: Step, words: list[str], units: int, report: Report) -> tuple[float, str]:
    """Do a step in ``folder``; return its seconds and what it said."""
    end_with_parent()
    os.chdir(folder)
    told, started, said = 0, time.perf_counter(), io.StringIO()

    def hear(part: float) -> None:
        nonlocal told
        before, told = told, max(told, int(part * units))
        report(told - before)

    Progress.heard = hear
    Path(step.made).parent.mkdir(parents=True, exist_ok=True)
    if "--save-classifier" in words:
        # Of a start that was killed before it wrote its scores.
        Path(_CLASSIFIER).unlink(missing_ok=True)
    with interruptible(), contextlib.redirect_stdout(said):
        if words[0] == "hddm":
            run_words(words[1 : words.index(">") if ">" in words else None])
        elif step.made == "digits":
            write_old_and_new()
        else:
            train_old_model(Path(step.made), int(words[3]), int(words[-3]))
    if step.made == _COMPARISON:
        disk.write_whole(Path(_COMPARISON), lambda draft: draft.write_text(said.getvalue(), encoding="utf-8"))
    hear(1.0)
    return round(time.perf_counter() - started, 1), said.getvalue()


def run_words(words: list[str]) -> None:
    """Run a command line of hddm."""
    from hddm_cli.app import commands

    commands(args=words, prog_name="hddm", standalone_mode=False)


def write_old_and_new() -> None:
    """Write ``digits`` as `write_digits` does, and the training side once more as ``old`` and ``new``."""
    with disk.new_folder(Path("digits"), STORY_FILE) as draft:
        training, _ = write_digits(draft)
        for image in training.rglob("*.png"):
            digit = image.parent.name
            target = draft / ("old" if int(digit) <= LAST_OLD else "new") / digit / image.name
            target.parent.mkdir(parents=True, exist_ok=True)
            disk.link_or_copy(image, target)


def train_old_model(out: Path, steps: int, seed: int) -> None:
    """Train a DDPM model of ``digits/old`` as anybody would, by torch and diffusers."""
    from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel

    arrays = [np.asarray(Image.open(path)) for path in sorted(Path("digits/old").rglob("*.png"))]
    images = torch.from_numpy(np.stack(arrays))[:, None].float() / 127.5 - 1
    torch.manual_seed(seed)
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    width = {"block_out_channels": (32, 32), "layers_per_block": 1, "norm_num_groups": 8}
    network = UNet2DModel(sample_size=8, in_channels=1, out_channels=1, **blocks, **width)
    scheduler = DDPMScheduler(beta_schedule="squaredcos_cap_v2")
    optimizer = torch.optim.AdamW(network.parameters(), 2e-3)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    with Progress(steps, "train") as progress:
        for _ in range(steps):
            clean = images[torch.randint(len(images), (32,))]
            noise, t = torch.randn_like(clean), torch.randint(1000, (len(clean),))
            loss = F.mse_loss(network(scheduler.add_noise(clean, noise, t), t).sample, noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rates.step()
            progress(1)
    with disk.new_folder(out, "model_index.json") as draft:
        DDPMPipeline(network, scheduler).save_pretrained(draft)


def check_unchanged(place: Path) -> int:
    """Check that the ensemble holds the old model as it was; return the number of samples that are equal.

    Raises `HddmError` if a weight, or a sample of the old model alone, is another than in the ensemble.
    """
    ours, theirs = (
        read_safetensors(place / folder / "diffusion_pytorch_model.safetensors")
        for folder in ("grown/experts/0", "old-pipeline/unet")
    )
    if ours.keys() != theirs.keys() or not all(torch.equal(ours[name], theirs[name]) for name in theirs):
        raise HddmError(f"{place / 'grown'}: the weights of its first expert differ from the old model's")
    old, grown, within = (
        {path.name: path.read_bytes() for path in (place / "samples" / name).glob("*.png")}
        for name in ("old", "grown", "old-in-grown")
    )
    if changed := sorted(name for name in within if within[name] != old[name]):
        raise HddmError(f"{place / 'samples/old-in-grown' / changed[0]}: the old model makes another image")
    return sum(grown[name] == old[name] for name in old)


MODELS = {
    "old": ("the old model", "The old model makes 0–4"),
    "fine-tuned": ("fine-tuned on 5–9", "Fine-tuned on 5–9, it has forgotten 0–4"),
    "grown": ("old + new experts, one expert per image", "Extended by experts of 5–9, it makes all ten"),
    "routed": ("old + new experts, mixed at high noise", ""),
}
"""Names in the table, and what the first samples show."""
SENTENCE = (
    "A model of the digits 0–4 forgets them when it is fine-tuned on 5–9. Extended by experts of 5–9, it "
    "makes all ten digits, and the old model itself stays the same, bit for bit."
)
OTHERWISE = "These trainings did not come out as expected: see the shares of the digits in the table."
HEADS = ("", "share of 0–4 / 5–9", "digits made", "distance to training images", "to held-out images")
LEAST = 0.02
"""Share of the samples of a model from which a digit counts as made."""
JOINED = "\u2060–\u2060"
"""The dash of a range of digits, where no line is broken."""


def conclude(out: Path, story: Sequence[Chapter], record: Mapping[str, Any]) -> str:
    """Check that the old model is what it was, and write the report; return its sentence and table."""
    seeds = range(record["seeds"])
    equal = [check_unchanged(out / _place(seed)) for seed in seeds]
    classifier = load_classifier(out / _CLASSIFIER, 1)
    rows, strips, shares, kinds = [], [], {}, {}

    @torch.no_grad()
    def add(title: str, scores: Sequence[str], folders: Sequence[Path]) -> list[int]:
        digits = [int(k) for one in folders for k in classifier(load_images(one).normalised).argmax(1)]
        read = [disk.read_json(out / "scores" / score) for score in scores]
        share = shares[title] = round(100 * mean(digit <= LAST_OLD for digit in digits))
        distances = [_distance(read, side) for side in ("to_training", "to_held_out")]
        kinds[title] = sum(digits.count(k) >= LEAST * len(digits) for k in range(10))
        rows.append([title, f"{share} % / {100 - share} %", f"{kinds[title]} of 10", *distances])
        return digits

    add("real images, held out", ["real.json"], [out / "digits/held_out"])
    for name, (title, caption) in MODELS.items():
        folders = [out / _place(seed) / "samples" / name for seed in seeds]
        digits = add(title, [f"{name}/{seed}.json" for seed in seeds], folders)
        shown = [base64.b64encode(path.read_bytes()).decode() for path in sorted(folders[0].glob("*.png"))]
        images = list(zip(shown[:STRIP], digits, strict=False))
        strips.append((caption, f"{shares[title]} % are 0–4", images))
    old, tuned, grown, _ = (shares[title] for title, _ in MODELS.values())
    is_so = old > 90 and tuned < 10 and 30 < grown < 70
    sentence = SENTENCE if is_so and [*kinds.values()][1:4] == [5, 5, 10] else OTHERWISE
    pages = Environment(
        loader=ChoiceLoader([PackageLoader(name, "") for name in ("hddm_cli", "hddm.benchmark")]),
        autoescape=True,
        undefined=StrictUndefined,
    )
    given = {
        "sentence": sentence,
        "joined": JOINED,
        "strips": strips,
        "last_old": LAST_OLD,
        "equal": equal,
        "images": len(shown),
    }
    given |= {"heads": HEADS, "rows": rows, "story": story, "record": record, "machine": machine()}
    text = pages.get_template("story.html.j2").render(duration=duration, **given)
    disk.write_whole(out / REPORT_FILE, lambda draft: draft.write_text(text, encoding="utf-8"))
    return "\n".join([sentence, "", *markdown_table(HEADS, rows)])


def _distance(scores: Sequence[Mapping[str, Any]], side: str) -> str:
    """The mean over training seeds; of one, with the half-width over images."""
    found = [one[side] for one in scores if one[side]]
    half = f" ± {number(found[0]['half_width'])}" if len(found) == 1 else ""
    return f"{number(mean(one['value'] for one in found))}{half}" if found else "–"
