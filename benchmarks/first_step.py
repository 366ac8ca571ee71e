"""``python -m benchmarks.first_step <question>``: what the closed-form first step is worth.

``single`` trains DDPM experts with the schedules of Stable Diffusion and DDPM, and compares samples that
begin at t = 1 with a network with samples that begin at the end of the expert, at equal calls. ``mixed``
compares two rules for an expert above its end, in a mix with one that covers all of t: today's, and to leave
it out.
``mixtures`` does so for experts that are exact, as is the solution.
"""

import copy
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from diffusers import DDPMScheduler
from torch import Tensor

import hddm
from benchmarks.harness import (
    RESULTS,
    ResultsOption,
    SeedsOption,
    Start,
    WorkOption,
    main,
    run_once,
    shard_digits,
    shard_photographs,
)
from hddm.calibration import Calibration, Moments
from hddm.conditions import Conditions
from hddm.data.images import to_bytes, to_unit_range
from hddm.evaluation.features import FeatureExtractor, open_extractor
from hddm.evaluation.images import read_data
from hddm.evaluation.measures import Gaussian, frechet_distance
from hddm.noise import Latents
from hddm.routers import MomentsRouter
from hddm.running import Batch, run
from hddm.sampling import integrate, plan, sample, time_grid
from hddm.solvers import SOLVERS
from hddm.velocity import VelocityField
from tests.cases import LINEAR, case_named, oracle_field
from tests.oracles import GaussianMixture, exact_router

app = typer.Typer(help="What the first step is worth.", no_args_is_help=True, add_completion=False)

SCHEDULES = {
    "sd": {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012},
    "ddpm": {"beta_schedule": "linear"},
}
RECIPES = {
    "digits": "--optimizer adamw --steps 1600 --batch-size 32 --learning-rate 8e-3 --ema-decay 0.99 "
    "--size mini",
    "cifar10": "--optimizer muon --steps 400 --batch-size 64 --learning-rate 1.6e-3 --ema-decay 0.99 "
    "--random-flip --size mini",
}
CLASSES = "deer,horse,airplane,automobile"
DEVICE = "--device cpu --threads 1"
CALLS, NOISES, NUM = (8, 15, 25), 2, 1000
"""Calls of the network per sample, seeds of initial noise, and samples per seed."""
MIXED_CALLS, PAIRS, STATES, EXACT_STEPS = (15, 25, 50), 12, 400, 400
STRATEGIES = ("full", "top-1", "nucleus-0.9")
TODAY, LEFT_OUT = "today's rule", "left out above its end"


CifarOption = Annotated[
    Path | None, typer.Option(help="CIFAR-10 as train/CLASS/*.jpg and test/…; else digits.")
]


@app.command()
def single(
    results: ResultsOption = RESULTS,
    work: WorkOption = Path("runs/first-step"),
    seeds: SeedsOption = 3,
    cifar: CifarOption = None,
) -> None:
    """One expert, from t = 1 and from its end."""
    start = Start(results, work, seeds=seeds)
    data = Pictures(work, cifar)
    lines = data.head("The first step of one expert", seeds)
    content: dict[str, Any] = {"threads": torch.get_num_threads()}
    for name in SCHEDULES:
        experts = []
        for seed in range(seeds):
            experts.append(data.trained(f"{name}-{seed}", data.whole, name, seed))
        for calibrated in (True, False):
            title = f"{name}, {'calibrated' if calibrated else 'not calibrated'}"
            figures = _single(experts, calibrated, data.measure)
            content[title] = figures
            lines += [f"## {title}, end of schedule t = {experts[0].range[1]:.4f}", ""]
            lines += [*_table("calls", figures), ""]
            print("\n".join(lines[-7:]), flush=True)
    typer.echo(start.write(f"first-step-{data.name}", lines, content))


@app.command()
def mixed(
    results: ResultsOption = RESULTS,
    work: WorkOption = Path("runs/first-step"),
    seeds: SeedsOption = 3,
    cifar: CifarOption = None,
) -> None:
    """An expert that ends at t = 0.936 mixed with one of flow, by the router of moments."""
    start = Start(results, work, seeds=seeds)
    data = Pictures(work, cifar)
    lines = data.head("An expert above its end, mixed with one of flow", seeds)
    models = []
    for seed in range(seeds):
        pair = [
            data.trained(f"p0-sd-{seed}", data.parts / "shard_0", "sd", seed),
            data.trained(f"p1-flow-{seed}", data.parts / "shard_1", None, seed),
        ]
        models.append(pair)
    figures = _mixed(models, data.measure)
    lines += [f"{CALLS[-1]} calls.", "", *_table("strategy", figures)]
    content = {"threads": torch.get_num_threads(), "figures": figures}
    typer.echo(start.write(f"first-step-mixed-{data.name}", lines, content))


@app.command()
def mixtures(results: ResultsOption = RESULTS) -> None:
    """Exact experts on data whose flow is known, in float64: one from its end, and two mixed."""
    start = Start(results)
    lines = [
        "# The first step of exact experts, and rules for one above its end in a mix",
        f"Root mean square distance of {STATES} samples from the exact flow of the data, mean and standard "
        f"deviation over {PAIRS} mixtures of Gaussians in 8 dimensions, or pairs of them.",
        "",
    ]
    content: dict[str, Any] = {"threads": torch.get_num_threads()}
    for name in ("sd-scaled-linear", "ddpm-linear"):
        end = case_named(name).schedule.range[1]
        for title, errors_of in (("one expert", _errors_of_one), ("two mixed", _errors_of_mix)):
            figures: dict[str, dict[str, list[float]]] = {}
            for pair in range(PAIRS):
                for way, calls, error in errors_of(name, pair):
                    figures.setdefault(str(calls), {}).setdefault(way, []).append(error)
            content[f"{name}, {title}"] = figures
            lines += [f"## {name}, end of schedule t = {end:.4f}, {title}", ""]
            lines += [*_table("calls", figures), ""]
    print("\n".join(lines), flush=True)
    typer.echo(start.write("first-step-mixtures", lines, content))


class Pictures:
    """The digits, or four classes of CIFAR-10 at 16×16 pixels, in one shard and in two."""

    def __init__(self, work: Path, cifar: Path | None) -> None:
        work.mkdir(parents=True, exist_ok=True)
        self._work = work
        self.name = "digits" if cifar is None else "cifar10"
        self.whole, self.parts = work / "all" / "shard_0", work / "parts"
        if cifar is None:
            shard_digits(work, 2)
            training, held_out = work / "digits" / "train", work / "digits" / "held_out"
        else:
            shard_photographs(work, cifar, CLASSES, 2)
            training, held_out = work / "all", work / "test" / "shard_0"
        self.measure = Measure(training, held_out)

    def head(self, title: str, seeds: int) -> list[str]:
        """Title and first paragraph of a result."""
        text = (
            f"Fréchet distance of {NUM:,} samples to held-out images, features of a classifier of the "
            f"training images: mean and standard deviation of {seeds} training seeds, each the mean of "
            f"{NOISES} seeds of noise. Adams-Moulton; both columns have the same noise."
        )
        return [f"# {title}, on {self.name}", text, ""]

    def trained(self, name: str, shard: Path, schedule: str | None, seed: int) -> VelocityField:
        """An expert of a shard, on one of `SCHEDULES` or by flow matching; trained unless it is there."""
        words = ["train", "expert", str(shard), "--objective", "flow"]
        if schedule is not None:
            folder = self._work / f"{schedule}-schedule"
            DDPMScheduler(**SCHEDULES[schedule]).save_pretrained(folder)
            words = [*words[:-1], "ddpm", "--schedule", str(folder / "scheduler_config.json")]
        recipe = [*RECIPES[self.name].split(), *DEVICE.split()]
        run_once(self._work / name, [*words, "--seed", str(seed), *recipe])
        model = hddm.load(self._work / name)
        assert isinstance(model, VelocityField)
        return model


class Measure:
    """Fréchet distance to held-out images, on features of a classifier of the training images."""

    def __init__(self, images: Path, held_out: Path) -> None:
        groups = read_data({"reference": images, "held_out": held_out})
        training, fresh = groups["reference"].images, groups["held_out"].images
        self._extractor: FeatureExtractor = open_extractor(
            "classifier", training, len(fresh.pixels)
        )
        self._real = self._gaussian(fresh.pixels)

    def __call__(self, samples: Tensor) -> float:
        return frechet_distance(self._gaussian(to_bytes(samples)), self._real)

    def _gaussian(self, pixels: Tensor) -> Gaussian:
        features = self._extractor.features(to_unit_range(pixels))
        return Gaussian.of(features.double().numpy())


def _noise(field: VelocityField, seed: int) -> Tensor:
    assert field.sample_shape is not None
    return torch.randn(NUM, *field.sample_shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def _from_one(model: VelocityField, x: Tensor, calls: int) -> Tensor:
    """Samples on the grid from t = 1, where networks run above the end of their schedule too."""

    def velocity(x: Tensor, now: Tensor, then: Tensor) -> Tensor:
        return model.velocity(x, now.expand(len(x)))

    return SOLVERS["adams-moulton"](velocity, x, time_grid(calls))


@torch.no_grad()
def _from_noise(model: VelocityField, x: Tensor, calls: int) -> Tensor:
    """Samples on the grid from the end of the expert, where the state is taken for noise alone."""

    def velocity(x: Tensor, now: Tensor, then: Tensor) -> Tensor:
        return model.velocity(x, now.expand(len(x)))

    return SOLVERS["adams-moulton"](velocity, model.end * x, time_grid(calls, first=model.end))


def _from_end(model: VelocityField, x: Tensor, calls: int) -> Tensor:
    """Samples as hddm makes them: on the grid from the end of the expert, after the first step."""
    how = plan(model, steps=calls, solver="adams-moulton", noise=Latents(x=x))
    return run(how, Batch.of(len(x), Conditions(), torch.zeros(len(x), dtype=torch.long)))


def _single(
    experts: Sequence[VelocityField], calibrated: bool, measure: Measure
) -> dict[str, dict[str, list[float]]]:
    """Distances of both ways to begin, by calls, one per training seed: the mean over noises."""
    figures: dict[str, dict[str, list[float]]] = {}
    ways = {"from t = 1": _from_one, "with the first step": _from_end}
    if not calibrated:
        ways["with m = 0"] = _from_noise
    for calls in CALLS:
        figures[str(calls)] = {way: [] for way in ways}
    for one in experts:
        field = copy.copy(one)
        if not calibrated:
            field.calibration = None
        for calls, (way, samples) in itertools.product(CALLS, ways.items()):
            found = [measure(samples(field, _noise(field, seed), calls)) for seed in range(NOISES)]
            figures[str(calls)][way].append(statistics.mean(found))
    return figures


class LeavingOut:
    """A router that gives experts above the end of their schedule no probability, if another is left."""

    def __init__(self, router: Callable[[Tensor, Tensor], Tensor], ends: Sequence[float]) -> None:
        self._router, self._ends = router, torch.tensor(ends, dtype=torch.float64)

    def __call__(self, x_t: Tensor, t: Tensor) -> Tensor:
        found = self._router(x_t, t)
        covered = t.double().cpu()[:, None] <= self._ends
        kept = found * covered.to(found)
        return kept / kept.sum(1, keepdim=True)


def _mixed(
    models: Sequence[Sequence[VelocityField]], measure: Measure
) -> dict[str, dict[str, list[float]]]:
    """Distances of both rules, by strategy, one per training seed: the mean over noises."""
    figures: dict[str, dict[str, list[float]]] = {}
    for strategy in STRATEGIES:
        figures[strategy] = {TODAY: [], LEFT_OUT: []}
    for pair in models:
        moments = [one.calibration.moments for one in pair if one.calibration is not None]
        router = MomentsRouter(moments, [1.0, 1.0])
        leaving = LeavingOut(router, [one.range[1] for one in pair])
        for rule, route in ((TODAY, router), (LEFT_OUT, leaving)):
            model = hddm.Ensemble(list(pair), route)
            for strategy in STRATEGIES:
                found = []
                for seed in range(NOISES):
                    found.append(
                        measure(sample(model, NUM, seed, CALLS[-1], strategy, batch_size=NUM))
                    )
                figures[strategy][rule].append(statistics.mean(found))
    return figures


EXACT_SHAPE = (1, 2, 4)


def _exact_end(data: GaussianMixture, seed: int) -> tuple[Tensor, Tensor]:
    """Noise, and where the exact flow of the data leads it."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(STATES, *EXACT_SHAPE, generator=generator, dtype=torch.float64)

    def velocity(x: Tensor, now: Tensor, then: Tensor) -> Tensor:
        return data.velocity(x, now.expand(len(x)))

    return x, SOLVERS["heun"](velocity, x, time_grid(EXACT_STEPS))


def _errors_of_one(name: str, number: int) -> list[tuple[str, int, float]]:
    """Way, calls and error of samples of one expert of noise."""
    data = GaussianMixture.random(seed=100 + number, modes=3, dim=8)
    x, target = _exact_end(data, number)
    plain = oracle_field(data, case_named(name), "epsilon", sample_shape=EXACT_SHAPE)
    calibrated = copy.copy(plain)
    values, vectors = torch.linalg.eigh(data.covariance)
    moments = Moments(data.mean, vectors, torch.cat([values, values.new_ones(1)]))
    # Below t = 1 the network is left as it is.
    weights = torch.cat([torch.zeros(2, 9), torch.ones(1, 9)])
    calibrated.calibration = Calibration(moments, torch.tensor([0, 1 - 1e-6, 1]), weights)
    found = []
    for calls in (*MIXED_CALLS, EXACT_STEPS):
        for way, made in (
            ("from t = 1", _from_one(plain, x, calls)),
            ("with m = 0", _from_noise(plain, x, calls)),
            ("with the first step", _from_end(plain, x, calls)),
            ("calibrated", _from_end(calibrated, x, calls)),
        ):
            found.append((way, calls, (made - target).square().mean().sqrt().item()))
    return found


def _errors_of_mix(name: str, pair: int) -> list[tuple[str, int, float]]:
    """Rule, calls and error of samples of one pair of shards."""
    prior = [0.5, 0.5]
    shards = [GaussianMixture.random(seed=2 * pair + k, modes=3, dim=8) for k in range(2)]
    x, target = _exact_end(GaussianMixture.union(shards, prior), pair)
    fields = [
        oracle_field(shards[0], case_named(name), "epsilon", sample_shape=EXACT_SHAPE),
        oracle_field(shards[1], LINEAR, sample_shape=EXACT_SHAPE),
    ]
    router = exact_router(shards, prior)
    leaving = LeavingOut(router, [one.range[1] for one in fields])
    found = []
    for rule, route in ((TODAY, router), (LEFT_OUT, leaving)):
        model = hddm.Ensemble(fields, route, "full")
        for calls in (*MIXED_CALLS, EXACT_STEPS):
            made = integrate(model, x, time_grid(calls), solver="adams-moulton")
            found.append((rule, calls, (made - target).square().mean().sqrt().item()))
    return found


def _table(head: str, figures: Mapping[str, Mapping[str, Sequence[float]]]) -> list[str]:
    """Means and standard deviations by way, and the differences of later ways from the first, by pairs."""
    ways = [*next(iter(figures.values()))]
    heads = [*ways, *(f"difference {way}" for way in ways[1:])]
    lines = [f"| {head} | {' | '.join(heads)} |", f"|---|{'---:|' * len(heads)}"]
    for row, found in figures.items():
        columns = [found[way] for way in ways]
        for other in columns[1 : len(ways)]:
            columns.append([b - a for a, b in zip(columns[0], other, strict=True)])
        lines.append(f"| {row} | {' | '.join(map(_spread, columns))} |")
    return lines


def _spread(values: Sequence[float]) -> str:
    digits = 2 if max(map(abs, values)) >= 1 else 4
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.{digits}f} (s {deviation:.{digits}f})"


if __name__ == "__main__":
    main(app)
