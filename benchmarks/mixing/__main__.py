"""``python -m benchmarks.mixing <regime>``: when it pays to mix experts, by proper scores and by distance.

``same-data``: several experts of one data set, averaged, weighed by reliability, drawn, and alone.
``by-noise``: a pair that divides the noise by objective, beside one model and a pair of one objective.
``from-one``: experts of four shards that start from one pretrained model and go on with unlike objectives.
``disjoint``: experts of four shards that start from nothing.
``overlapping``: experts of four shards, each of which shares its classes with two others, by halves.
``native``: experts by their own samplers, and by the common velocity, at equal calls.

Everything that is trained or measured is kept in ``--work``: a run that is cut off goes on where it was, and
each row's scores are written when they are there.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.harness import RESULTS, ResultsOption, SeedsOption, Start, WorkOption, main
from benchmarks.mixing.data import APART, DATA, PARTS, RING, Data, Shards
from benchmarks.mixing.filling import IMAGES, RESAMPLING, Fillers
from benchmarks.mixing.models import CALLS, NOISES, Models, Row
from benchmarks.mixing.verdicts import READING, answers, verdict_table
from hddm.utils.errors import HddmError
from hddm.utils.files import write_json

app = typer.Typer(help="When it pays to mix experts.", no_args_is_help=True, add_completion=False)

LOW = 0.15
"""Noise level below which the pair's first expert runs."""
FEW_CALLS = (10, 15, 25)
DdpmOption = Annotated[str, typer.Option(help="What DDPM experts predict: epsilon or sample.")]
DataOption = Annotated[str, typer.Option(help=f"{' or '.join(DATA)}.")]
PicturesOption = Annotated[
    Path | None, typer.Option(help="Photographs: train/CLASS/*.jpg and test/CLASS/*.jpg.")
]


def prepared(name: str, work: Path, pictures: Path | None) -> Data:
    """A data set of this name, whose shards are below ``work``."""
    if name not in DATA:
        raise HddmError(f"--data {name!r}: is not {' or '.join(DATA)}")
    work.mkdir(parents=True, exist_ok=True)
    DATA[name].prepare(work, pictures)
    return DATA[name]


def same_data(one: Models, ddpm: str) -> dict[str, Row]:
    """Experts of all data: two by flow matching, one by DDPM, and one of flow with twice the steps."""
    steps = f"--steps {one.data.steps}"
    flow = one.expert("flow", "all/shard_0", f"--objective flow {steps}")
    other = one.expert("flow-other", "all/shard_0", f"--objective flow {steps}", one.seed + 100)
    noise = one.expert(
        f"ddpm-{ddpm}",
        "all/shard_0",
        f"--objective ddpm --prediction {ddpm} {steps}",
        one.seed + 200,
    )
    twice = one.expert(
        "flow-twice", "all/shard_0", f"--objective flow --steps {2 * one.data.steps}"
    )
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


def by_noise(one: Models, ddpm: str) -> dict[str, Row]:
    """Pairs that divide t at `LOW`, each expert trained for its part alone, for half of the steps."""
    half = f"--steps {one.data.steps // 2}"
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
    whole = one.expert("flow", "all/shard_0", f"--objective flow --steps {one.data.steps}")
    ddpm_below = f"DDPM ({ddpm}) below {LOW}, flow above"
    rows = {"flow": one.row("flow", whole)}
    for title, low in ((ddpm_below, low_ddpm), (f"flow below {LOW}, flow above", low_flow)):
        pair = one.ensemble(f"pair-{low.name}", [low, high])
        rows[title] = one.row(title, pair)
    return rows


def from_one(one: Models, ddpm: str) -> dict[str, Row]:
    """Experts of four shards from one DDPM model of all data, continued with one objective or two."""
    predicts = f"--prediction {ddpm}"
    before, after = one.data.begun_steps, one.data.continued_steps
    begun = one.expert("begun", "all/shard_0", f"--objective ddpm {predicts} --steps {before}")
    words = {objective: f"--objective {objective} --init {begun}" for objective in ("flow", "ddpm")}
    # One model has the steps of the checkpoint and of four experts.
    return _of_shards(one, ddpm, "from-one", APART, words, after, before + PARTS * after)


def disjoint(one: Models, ddpm: str) -> dict[str, Row]:
    """Experts of four shards, each from scratch, with one objective or two."""
    return _from_scratch(one, ddpm, "disjoint", APART)


def overlapping(one: Models, ddpm: str) -> dict[str, Row]:
    """The same for shards of which each shares its classes with two others, by halves."""
    return _from_scratch(one, ddpm, "overlapping", RING)


def _from_scratch(one: Models, ddpm: str, regime: str, shards: Shards) -> dict[str, Row]:
    words = {"flow": "--objective flow", "ddpm": f"--objective ddpm --prediction {ddpm}"}
    return _of_shards(one, ddpm, regime, shards, words, one.data.steps, PARTS * one.data.steps)


def _of_shards(
    one: Models,
    ddpm: str,
    regime: str,
    shards: Shards,
    words: Mapping[str, str],
    steps: int,
    all_steps: int,
) -> dict[str, Row]:
    """Ensembles of four shards by several strategies, and one model with the steps of all their experts."""
    router = one.router(shards)
    experts: dict[str, list[Path]] = {}
    for objective, own in words.items():
        experts[objective] = []
        for k, shard in enumerate(shards.of_experts):
            expert = one.expert(f"{objective}-{regime}-{k}", shard, f"{own} --steps {steps}")
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


REGIMES: Mapping[str, Callable[[Models, str], dict[str, Row]]] = {
    "same-data": same_data,
    "by-noise": by_noise,
    "from-one": from_one,
    "disjoint": disjoint,
    "overlapping": overlapping,
}


def _figures(
    kind: type[Models], name: str, data: Data, work: Path, seeds: Iterable[int], ddpm: str
) -> dict[str, dict[str, dict[str, float]]]:
    """Figures of all rows of a regime, by training seed."""
    measure = data.measure(work)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for seed in seeds:
        one = kind(data, work, seed, measure)
        one.folder.mkdir(exist_ok=True)
        for title, row in REGIMES[name](one, ddpm).items():
            found.setdefault(title, {})[str(seed)] = row.figures
    return found


@app.command()
def regime(
    name: Annotated[str, typer.Argument(help=f"{', '.join(REGIMES)}.")],
    results: ResultsOption = RESULTS,
    work: WorkOption = Path("runs/mixing"),
    seeds: SeedsOption = 5,
    first: Annotated[int, typer.Option(help="First training seed.")] = 0,
    ddpm: DdpmOption = "epsilon",
    data: DataOption = "digits",
    pictures: PicturesOption = None,
    fill: Annotated[
        bool, typer.Option("--fill", help="How well the lower half of held-out images is filled.")
    ] = False,
) -> None:
    """Scores of all rows of a regime, by training seed."""
    start = Start(results, work, seeds=seeds)
    of = prepared(data, work, pictures)
    kind = Fillers if fill else Models
    found = _figures(kind, name, of, work, range(first, first + seeds), ddpm)
    if fill:
        lines = [f"# Half of each image filled, on {of.name}: {name}", ""]
        lines += [_FILLED.format(seeds=seeds), "", *table(found)]
    else:
        lines = _report(name, of, found)
    print("\n".join(lines))
    content = {"regime": name, "data": of.name, "figures": found, "ddpm": ddpm}
    ending = "-filled" if fill else ""
    typer.echo(start.write(f"mixing-{of.name}-{name}{ending}", lines, content))


_FILLED = (
    f"The lower half of {IMAGES} held-out images is filled by {CALLS} steps, each taken {RESAMPLING} times: "
    "peak signal-to-noise ratio over this half in dB, of one sample and of the mean of several; more is "
    "better. Mean and standard deviation of {seeds} training seeds; in brackets the paired difference from "
    "the first row, over seeds."
)


@app.command()
def together(
    files: Annotated[
        list[Path], typer.Argument(help="JSON files of one regime, of different seeds.")
    ],
    results: ResultsOption = RESULTS,
) -> None:
    """One table and one list of verdicts from runs of one regime that had different training seeds."""
    start = Start(results)
    regimes = set[tuple[str, str]]()
    found: dict[str, dict[str, dict[str, float]]] = {}
    for file in files:
        content = json.loads(file.read_text(encoding="utf-8"))
        # A result that names no data is of digits, the first that were measured.
        regimes.add((content["regime"], content.get("data", "digits")))
        for title, row in content["figures"].items():
            twice = found.setdefault(title, {}).keys() & row.keys()
            if twice:
                raise HddmError(f"{file}: seed {min(twice)} of {title!r} is in another file too")
            found[title] |= row
    if len(regimes) > 1:
        said = " and ".join(f"{name} on {data}" for name, data in sorted(regimes))
        raise HddmError(f"{', '.join(map(str, files))}: are of {said}; name files of one")
    ((name, data),) = regimes
    lines = _report(name, DATA[data], found)
    print("\n".join(lines))
    content = {"regime": name, "data": data, "figures": found, "of": [file.name for file in files]}
    typer.echo(start.write(f"mixing-{data}-{name}", lines, content))


def _report(
    name: str, data: Data, found: Mapping[str, Mapping[str, Mapping[str, float]]]
) -> list[str]:
    """The table of a regime, and its verdicts where there is more than one seed."""
    seeds = min(len(row) for row in found.values())
    text = _TEXT.format(
        seeds=seeds,
        likelihood_images=data.likelihood_images,
        num_samples=data.num_samples,
    )
    lines = [f"# Mixing experts on {data.name}: {name}", text, "", *table(found)]
    lines += ["", DENOISING, "", *table(denoised(found))]
    if seeds > 1:
        lines += ["", READING, "", *verdict_table(answers(name, found))]
    return lines


_TEXT = (
    "Mean and standard deviation of {seeds} training seeds. Errors and bits per dimension on held-out "
    "images, errors at eleven noise levels with one draw of noise, bits of {likelihood_images} images from "
    f"t = 0.02; Fréchet distance of {{num_samples:,}} samples of {CALLS} calls, the mean of {NOISES} seeds "
    "of noise. In brackets the paired difference from the first row, over seeds."
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
    data: DataOption = "digits",
    pictures: PicturesOption = None,
) -> None:
    """DDPM experts, and a DDPM and a flow expert by one coin, by their own samplers and by ours."""
    start = Start(results, work, seeds=seeds)
    of = prepared(data, work, pictures)
    measure = of.measure(work)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for seed in range(seeds):
        one = Models(of, work, seed, measure)
        one.folder.mkdir(exist_ok=True)
        steps = f"--steps {of.steps}"
        words = f"--objective ddpm --prediction {ddpm} {steps}"
        alone = one.expert(f"ddpm-{ddpm}", "all/shard_0", words, seed + 200)
        old = one.expert("old", "parts/shard_0", words)
        new = one.expert("new", "parts/shard_1", f"--objective flow {steps}")
        grown = one.ensemble("grown", [old, new])
        for title, model in (("DDPM expert", alone), ("grown", grown)):
            for way in ("ours", *SAMPLERS):
                options = {} if way == "ours" else {"native": way}
                figures = _by_calls(one, f"{title}, {way}", model, options)
                found.setdefault(f"{title}: {way}", {})[str(seed)] = figures
    lines = [f"# Experts by their own samplers, and by the common velocity, on {of.name}", ""]
    lines += [_NATIVE.format(seeds=seeds, num_samples=of.num_samples), ""]
    for title in ("DDPM expert", "grown"):
        own = {name: row for name, row in found.items() if name.startswith(title)}
        lines += [*table(own), ""]
    print("\n".join(lines))
    content = {"data": of.name, "figures": found, "ddpm": ddpm}
    typer.echo(start.write(f"mixing-{of.name}-native", lines, content))


_NATIVE = (
    "Fréchet distance to held-out images by calls of the network per sample: mean and standard deviation of "
    f"{{seeds}} training seeds, each the mean of {NOISES} seeds of noise, {{num_samples:,}} samples. Ours "
    "is adams-moulton on the common velocity, calibrated; the others are diffusers' schedulers on the "
    "expert's own schedule. In brackets the paired difference from ours."
)


def _by_calls(one: Models, title: str, model: Path, options: Mapping[str, Any]) -> dict[str, float]:
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
