"""``python -m benchmarks.mixing <regime>``: when it pays to mix experts, by proper scores and by distance.

``same-data``: several experts of one data set, averaged, weighed by reliability, drawn, and alone.
``by-noise``: a pair that divides the noise by objective, beside one model and a pair of one objective.
``from-one``: experts of four shards that start from one pretrained model and go on with unlike objectives.
``disjoint``: experts of four shards that start from nothing.
``native``: experts by their own samplers, and by the common velocity, at equal calls.

Everything that is trained or measured is kept in ``--work``: a run that is cut off goes on where it was, and
each row's scores are written when they are there.
"""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

import hddm
from benchmarks.first_step import Measure
from benchmarks.harness import (
    RESULTS,
    ResultsOption,
    SeedsOption,
    Start,
    WorkOption,
    main,
    run_once,
)
from benchmarks.mixing.verdicts import READING, answers, verdict_table
from hddm.objective.records import HeldOutScores
from hddm.objective.scores import score_held_out
from hddm.utils.errors import HddmError
from hddm.utils.files import write_json

app = typer.Typer(help="When it pays to mix experts.", no_args_is_help=True, add_completion=False)

RECIPE = "--optimizer adamw --batch-size 32 --learning-rate 8e-3 --ema-decay 0.99"
"""That of the preset digits, whose rates were chosen on validation images."""
ROUTER = (
    "--optimizer adamw --steps 1600 --batch-size 64 --learning-rate 4e-3 --ema-decay 0.99 --size tiny "
    "--calibrate"
)
DEVICE = "--device cpu --threads 1"
STEPS, CALLS, NUM, NOISES = 1600, 25, 1000, 2
"""Steps of training of a whole budget; calls per sample, samples per seed of noise, and such seeds."""
LOW = 0.15
"""Noise level below which the pair's first expert runs."""
FEW_CALLS = (10, 15, 25)
DdpmOption = Annotated[str, typer.Option(help="What DDPM experts predict: epsilon or sample.")]


@dataclass
class Digits:
    """Data, experts and scores of one training seed, each made unless it is there."""

    work: Path
    seed: int
    measure: Callable[[Tensor], float]

    @property
    def folder(self) -> Path:
        return self.work / f"seed-{self.seed}"

    def expert(self, name: str, shard: str, words: str, seed: int | None = None) -> Path:
        """An expert of a shard (``all/shard_0``), trained with these words beside the recipe."""
        place = self.folder / name
        number = self.seed if seed is None else seed
        given = ["train", "expert", str(self.work / shard), *words.split(), *RECIPE.split()]
        if "--init" not in given:
            given += ["--size", "mini"]
        run_once(place, [*given, *DEVICE.split(), "--seed", str(number)])
        return place

    def ensemble(self, name: str, experts: Sequence[Path], words: str = "") -> Path:
        """An ensemble of experts."""
        place = self.folder / name
        run_once(place, ["assemble", *map(str, experts), *words.split()])
        return place

    def weighed(self, name: str, ensemble: Path) -> Path:
        """An ensemble whose experts are weighed on validation images."""
        place = self.folder / name
        data = str(self.work / "all" / "held_out")
        run_once(place, ["calibrate", str(ensemble), "--data", data, "--seed", str(self.seed)])
        return place

    def row(self, title: str, model: Path, strategy: str | None = None) -> "Row":
        """Scores of a model on held-out images."""
        place = self.folder / "rows" / f"{title}.json"
        if not place.exists():
            place.parent.mkdir(exist_ok=True)
            strategies = () if strategy is None else (strategy,)
            held_out = self.work / "digits" / "held_out"
            scores = score_held_out(
                model, held_out, strategies=strategies, num_images=1000, device="cpu"
            )
            distances = [self.distance(model, strategy, noise) for noise in range(NOISES)]
            content = {"scores": scores.model_dump(mode="json"), "distances": distances}
            write_json(place, content)
        content = json.loads(place.read_text(encoding="utf-8"))
        row = Row(HeldOutScores.model_validate(content["scores"]), content["distances"])
        print(f"seed {self.seed}: {title}: {row}", flush=True)
        return row

    def distance(
        self, model: Path, strategy: str | None, noise: int, calls: int = CALLS, **options: Any
    ) -> float:
        """Fréchet distance of samples to held-out images."""
        opened = hddm.load(model)
        samples = hddm.sample(opened, NUM, noise, calls, strategy, batch_size=500, **options)
        return self.measure(samples)


@dataclass(frozen=True)
class Row:
    """What one model of one training seed scores."""

    scores: HeldOutScores
    distances: Sequence[float]
    figures: dict[str, float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        (own,) = self.scores.strategies
        means = []
        for level in own.levels:
            mean = statistics.fmean(level.by_image)
            self.figures[f"error at t = {level.t:g}"] = mean
            means.append(mean)
        if means:
            self.figures["mean error"] = statistics.fmean(means)
        if own.bits is not None:
            self.figures["bits"] = statistics.fmean(own.bits.by_image)
        self.figures["distance"] = statistics.fmean(self.distances)

    def __str__(self) -> str:
        shown = [name for name in ("mean error", "bits", "distance") if name in self.figures]
        return ", ".join(f"{name} {self.figures[name]:.4g}" for name in shown)


def prepared(work: Path) -> Measure:
    """The digits: all in one shard, and in four; and the distance to held-out images."""
    work.mkdir(parents=True, exist_ok=True)
    run_once(work / "digits", ["data", "digits"])
    training = str(work / "digits" / "train")
    for name, shards in (("all", 1), ("parts", 4)):
        run_once(work / name, ["partition", training, "--shards", str(shards), "--held-out", "0.2"])
    return Measure(work / "all" / "shard_0", work / "digits" / "held_out")


def same_data(one: Digits, ddpm: str) -> dict[str, Row]:
    """Experts of all data: two by flow matching, one by DDPM, and one of flow with twice the steps."""
    steps = f"--steps {STEPS}"
    flow = one.expert("flow", "all/shard_0", f"--objective flow {steps}")
    other = one.expert("flow-other", "all/shard_0", f"--objective flow {steps}", one.seed + 100)
    noise = one.expert(
        f"ddpm-{ddpm}",
        "all/shard_0",
        f"--objective ddpm --prediction {ddpm} {steps}",
        one.seed + 200,
    )
    twice = one.expert("flow-twice", "all/shard_0", f"--objective flow --steps {2 * STEPS}")
    rows = {
        "flow": one.row("flow", flow),
        "another flow": one.row("another flow", other),
        f"DDPM ({ddpm})": one.row(f"DDPM ({ddpm})", noise),
        "flow, twice the steps": one.row("flow, twice the steps", twice),
    }
    for title, pair in (("two flow", [flow, other]), (f"flow and DDPM ({ddpm})", [flow, noise])):
        name = title.replace(" ", "-").replace("(", "").replace(")", "")
        mixed = one.ensemble(name, pair, "--router reliability")
        weighed = one.weighed(f"{name}-weighed", mixed)
        rows[f"{title}: averaged"] = one.row(f"{title}: averaged", mixed, "full")
        rows[f"{title}: by reliability"] = one.row(f"{title}: by reliability", weighed, "full")
        rows[f"{title}: drawn"] = one.row(f"{title}: drawn", mixed, "draw")
    return rows


def by_noise(one: Digits, ddpm: str) -> dict[str, Row]:
    """Pairs that divide t at `LOW`, each expert trained for its part alone, for half of the steps."""
    half = f"--steps {STEPS // 2}"
    high = one.expert("flow-high", "all/shard_0", f"--objective flow --noise-range {LOW}:1 {half}")
    low_flow = one.expert(
        "flow-low", "all/shard_0", f"--objective flow --noise-range 0:{LOW} {half}", one.seed + 100
    )
    low_ddpm = one.expert(
        f"ddpm-{ddpm}-low",
        "all/shard_0",
        f"--objective ddpm --prediction {ddpm} --noise-range 0:{LOW} {half}",
        one.seed + 100,
    )
    whole = one.expert("flow", "all/shard_0", f"--objective flow --steps {STEPS}")
    ddpm_below = f"DDPM ({ddpm}) below {LOW}, flow above"
    rows = {"flow": one.row("flow", whole)}
    for title, low in ((ddpm_below, low_ddpm), (f"flow below {LOW}, flow above", low_flow)):
        pair = one.ensemble(f"pair-{low.name}", [low, high])
        rows[title] = one.row(title, pair)
    return rows


def from_one(one: Digits, ddpm: str) -> dict[str, Row]:
    """Experts of four shards from one DDPM model of all data, continued with one objective or two."""
    predicts = f"--prediction {ddpm}"
    begun = one.expert("begun", "all/shard_0", f"--objective ddpm {predicts} --steps 400")
    words = {objective: f"--objective {objective} --init {begun}" for objective in ("flow", "ddpm")}
    # Four experts of 1,200 steps, and the 400 of the model that they begin with.
    return _of_shards(one, ddpm, "from-one", words, 1200, 400 + 4 * 1200)


def disjoint(one: Digits, ddpm: str) -> dict[str, Row]:
    """Experts of four shards, each from scratch, with one objective or two."""
    words = {"flow": "--objective flow", "ddpm": f"--objective ddpm --prediction {ddpm}"}
    return _of_shards(one, ddpm, "disjoint", words, STEPS, 4 * STEPS)


def _of_shards(
    one: Digits, ddpm: str, regime: str, words: Mapping[str, str], steps: int, all_steps: int
) -> dict[str, Row]:
    """Ensembles of four shards by several strategies, and one model with the steps of all their experts."""
    router = one.folder / "router"
    given = ["train", "router", str(one.work / "parts"), *ROUTER.split(), *DEVICE.split()]
    run_once(router, [*given, "--seed", str(one.seed)])
    experts: dict[str, list[Path]] = {}
    for objective, own in words.items():
        experts[objective] = []
        for k in range(4):
            expert = one.expert(
                f"{objective}-{regime}-{k}", f"parts/shard_{k}", f"{own} --steps {steps}"
            )
            experts[objective].append(expert)
    groups = {
        "four flow": experts["flow"],
        f"four DDPM ({ddpm})": experts["ddpm"],
        "two and two": [*experts["ddpm"][:2], *experts["flow"][2:]],
    }
    rows = {}
    for title, group in groups.items():
        name = title.replace(" ", "-").replace("(", "").replace(")", "")
        whole = one.ensemble(f"{name}-{regime}", group, f"--router {router}")
        for strategy in ("draw", "full", "top-1", "top-2"):
            label = f"{title}, {strategy}"
            if regime != "from-one":
                label = f"{regime}, {label}"
            rows[f"{title}: {strategy}"] = one.row(label, whole, strategy)
    alone = one.expert(f"flow-{all_steps}", "all/shard_0", f"--objective flow --steps {all_steps}")
    rows["one flow model, equal compute"] = one.row(f"flow, {all_steps} steps", alone)
    return rows


REGIMES: Mapping[str, Callable[[Digits, str], dict[str, Row]]] = {
    "same-data": same_data,
    "by-noise": by_noise,
    "from-one": from_one,
    "disjoint": disjoint,
}


@app.command()
def regime(
    name: Annotated[str, typer.Argument(help="same-data, by-noise, from-one or disjoint.")],
    results: ResultsOption = RESULTS,
    work: WorkOption = Path("runs/mixing"),
    seeds: SeedsOption = 5,
    first: Annotated[int, typer.Option(help="First training seed.")] = 0,
    ddpm: DdpmOption = "epsilon",
) -> None:
    """Scores of all rows of a regime, by training seed."""
    start = Start(results, work, seeds=seeds)
    measure = prepared(work)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for seed in range(first, first + seeds):
        one = Digits(work, seed, measure)
        one.folder.mkdir(exist_ok=True)
        for title, row in REGIMES[name](one, ddpm).items():
            found.setdefault(title, {})[str(seed)] = row.figures
    lines = _report(name, found)
    print("\n".join(lines))
    content = {"regime": name, "figures": found, "ddpm": ddpm}
    typer.echo(start.write(f"mixing-{name}", lines, content))


@app.command()
def together(
    files: Annotated[
        list[Path], typer.Argument(help="JSON files of one regime, of different seeds.")
    ],
    results: ResultsOption = RESULTS,
) -> None:
    """One table and one list of verdicts from runs of one regime that had different training seeds."""
    start = Start(results)
    names = set()
    found: dict[str, dict[str, dict[str, float]]] = {}
    for file in files:
        content = json.loads(file.read_text(encoding="utf-8"))
        names.add(content["regime"])
        for title, row in content["figures"].items():
            twice = found.setdefault(title, {}).keys() & row.keys()
            if twice:
                raise HddmError(f"{file}: seed {min(twice)} of {title!r} is in another file too")
            found[title] |= row
    if len(names) > 1:
        raise HddmError(
            f"{', '.join(map(str, files))}: are of {' and '.join(sorted(names))}; name one"
        )
    (name,) = names
    lines = _report(name, found)
    print("\n".join(lines))
    content = {"regime": name, "figures": found, "of": [file.name for file in files]}
    typer.echo(start.write(f"mixing-{name}", lines, content))


def _report(name: str, found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    """The table of a regime, and its verdicts where there is more than one seed."""
    seeds = min(len(row) for row in found.values())
    lines = [f"# Mixing experts on digits: {name}", _TEXT.format(seeds=seeds), "", *table(found)]
    lines += ["", DENOISING, "", *table(denoised(found))]
    if seeds > 1:
        lines += ["", READING, "", *verdict_table(answers(name, found))]
    return lines


_TEXT = (
    "Mean and standard deviation of {seeds} training seeds. Errors and bits per dimension on held-out "
    "images, errors at eleven noise levels with one draw of noise, bits of 64 images from t = 0.02; Fréchet "
    f"distance of {NUM:,} samples of {CALLS} calls, the mean of {NOISES} seeds of noise. In brackets the "
    "paired difference from the first row, over seeds."
)


DENOISING = (
    "Denoising in one step: x - t v of held-out images at noise level t, as a peak signal-to-noise ratio in "
    "dB, 10 log10(4 / (t² error)) with the errors above; more is better. Where one expert is drawn for the "
    "whole image there is no such estimate."
)
DENOISED_FROM = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8)


def denoised(
    found: Mapping[str, Mapping[str, Mapping[str, float]]],
) -> dict[str, dict[str, dict[str, float]]]:
    """Peak signal-to-noise ratios of one-step denoising, by row, seed and noise level.

    The estimate x_0 = x_t - t v has the squared error t² times that of the velocity; pixels span 2.
    """
    ratios: dict[str, dict[str, dict[str, float]]] = {}
    for title, row in found.items():
        for seed, scores in row.items():
            own = {}
            for t in DENOISED_FROM:
                error = scores.get(f"error at t = {t:g}")
                if error is not None:
                    own[f"from t = {t:g}"] = 10 * math.log10(4 / (t**2 * error))
            if own:
                ratios.setdefault(title, {})[seed] = own
    return ratios


def table(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    """A line for each row, a column for each figure."""
    columns = [
        *dict.fromkeys(name for row in found.values() for one in row.values() for name in one)
    ]
    columns.sort(key=lambda name: name.startswith("error at"))
    lines = ["| | " + " | ".join(columns) + " |", "|---" + "|---:" * len(columns) + "|"]
    first = next(iter(found.values()))
    for title, row in found.items():
        cells = []
        for column in columns:
            own = [one[column] for one in row.values() if column in one]
            if not own:
                cells.append("–")
                continue
            text = _spread(own)
            if row is not first and all(column in one for one in first.values()):
                gaps = [one[column] - first[seed][column] for seed, one in row.items()]
                text += f" ({_spread(gaps, '+')})"
            cells.append(text)
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return lines


def _spread(values: Sequence[float], sign: str = "") -> str:
    mean = f"{statistics.fmean(values):{sign}.3f}"
    return mean if len(values) < 2 else f"{mean} s {statistics.stdev(values):.3f}"


SAMPLERS = ("ddim", "dpmsolver++", "unipc")


@app.command()
def native(
    results: ResultsOption = RESULTS,
    work: WorkOption = Path("runs/mixing"),
    seeds: SeedsOption = 5,
    ddpm: DdpmOption = "epsilon",
) -> None:
    """DDPM experts, and a DDPM and a flow expert by one coin, by their own samplers and by ours."""
    start = Start(results, work, seeds=seeds)
    measure = prepared(work)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for seed in range(seeds):
        one = Digits(work, seed, measure)
        one.folder.mkdir(exist_ok=True)
        words = f"--objective ddpm --prediction {ddpm} --steps {STEPS}"
        alone = one.expert(f"ddpm-{ddpm}", "all/shard_0", words, seed + 200)
        half = f"--steps {STEPS}"
        old = one.expert("old", "parts/shard_0", f"--objective ddpm --prediction {ddpm} {half}")
        new = one.expert("new", "parts/shard_1", f"--objective flow {half}")
        grown = one.ensemble("grown", [old, new])
        for title, model in (("DDPM expert", alone), ("grown", grown)):
            for way in ("ours", *SAMPLERS):
                options = {} if way == "ours" else {"native": way}
                figures = _by_calls(one, f"{title}, {way}", model, options)
                found.setdefault(f"{title}: {way}", {})[str(seed)] = figures
    lines = ["# Experts by their own samplers, and by the common velocity, on digits", ""]
    lines += [_NATIVE.format(seeds=seeds), ""]
    for title in ("DDPM expert", "grown"):
        own = {name: row for name, row in found.items() if name.startswith(title)}
        lines += [*table(own), ""]
    print("\n".join(lines))
    typer.echo(start.write("mixing-native", lines, {"figures": found, "ddpm": ddpm}))


_NATIVE = (
    "Fréchet distance to held-out images by calls of the network per sample: mean and standard deviation of "
    f"{{seeds}} training seeds, each the mean of {NOISES} seeds of noise, {NUM:,} samples. Ours is "
    "adams-moulton on the common velocity, calibrated; the others are diffusers' schedulers on the expert's "
    "own schedule. In brackets the paired difference from ours."
)


def _by_calls(one: Digits, title: str, model: Path, options: Mapping[str, Any]) -> dict[str, float]:
    place = one.folder / "rows" / f"native {title}.json"
    if not place.exists():
        place.parent.mkdir(exist_ok=True)
        figures = {}
        for calls in FEW_CALLS:
            found = [one.distance(model, None, noise, calls, **options) for noise in range(NOISES)]
            figures[f"{calls} calls"] = statistics.fmean(found)
        write_json(place, figures)
    figures = json.loads(place.read_text(encoding="utf-8"))
    print(f"seed {one.seed}: {title}: {figures}", flush=True)
    return figures


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(app)
