"""The convergence result as tables and a picture."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from benchmarks.conversion.cases import Case
from benchmarks.conversion.curves import Reached, reached
from benchmarks.conversion.starts import AS_THEY_ARE, EXACT, PAPER, SCRATCH, STARTS
from benchmarks.reports import COLOURS, mean_spread, table

_SHARES = (0.125, 0.25, 0.5, 1.0)


def lines(case: Case, content: Mapping[str, Any]) -> list[str]:
    """The report, its title first."""
    runs = content["runs"]
    rows = [
        [
            start,
            f"{content['rates'][start]:g}",
            mean_spread([run["losses"][0] for run in each]),
            mean_spread([run["losses"][-1] for run in each], 4),
            mean_spread([min(run["losses"]) for run in each], 4),
            *(
                mean_spread([run["distances"][k][0] for run in each])
                for k in range(len(each[0]["distance_steps"]))
            ),
        ]
        for start, each in runs.items()
    ]
    far = [f"distance at {step:,}" for step in runs[SCRATCH][0]["distance_steps"]]
    columns = ["start", "rate", "loss at step 0", "last loss", "lowest loss", *far]
    budget = case.training.steps
    targets = {f"after {round(share * budget):,} steps": reached(runs, SCRATCH, share) for share in _SHARES}
    targets["lowest"] = reached(runs, SCRATCH, None)
    steps = [[start, *(str(found[start]) for found in targets.values())] for start in runs]
    faster = [[start, *(found[start].speedup for found in targets.values())] for start in runs]
    text = [
        f"# Flow matching from a DDPM checkpoint: {case.name}",
        *_setting(case, len(runs[SCRATCH])),
        "",
        *table(columns, rows),
        "",
        "Steps that each start needs to the loss that from scratch has after so many steps, and its lowest:",
        "",
        *table(["start", *targets], steps),
        "",
        "The same as a speed-up: from scratch's own first step at that loss over the start's, a seed each:",
        "",
        *table(["start", *targets], faster),
        "",
        *_headline(targets),
        *_folds(content["modulation_errors"]),
        "",
        "Starts:",
        "",
        *(f"- {start}: {STARTS[start]}." for start in runs),
        "",
        "Last loss in tuning, by learning rate: "
        + "; ".join(
            f"{start} {', '.join(f'{rate}: {score:.4f}' for rate, score in each.items())}"
            for start, each in content["tuning"].items()
        )
        + ".",
    ]
    return text


def _setting(case: Case, seeds: int) -> list[str]:
    pretraining, training, size = case.pretraining, case.training, case.size
    tuned = (
        "on the parts the other way round, with another checkpoint and another seed"
        if case.reverse_tuning
        else "on other held-out images and another seed, with the same checkpoint"
    )
    return [
        f"A transformer with adaLN-Zero ({size.depth} blocks of width {size.width}, patch "
        f"{size.patch}) is pretrained as a DDPM without classes on the old part (linear betas 1e-4 … "
        f"0.02, 1,000 steps; {pretraining.steps:,} steps at batch {pretraining.batch_size}, "
        f"{pretraining.learning_rate:g}), then every start is trained on the new part with flow matching: "
        f"{training.steps:,} steps at batch {training.batch_size}, AdamW, constant rate after "
        f"{training.warmup} steps, averaged weights (decay {training.ema_decay:g}). {seeds} "
        f'seed{"s" if seeds > 1 else ""}; "s" is the standard deviation over them.',
        "",
        "Loss: ||v - (eps - x_0)||² a number, t uniform in [0, 1], on held-out images of the new part with "
        "the same noise for all; steps are interpolated between measurements. Distances are Fréchet "
        f"distances on 64 features of a small classifier, {case.samples} samples in "
        f"{case.sampling_steps} steps against the training images of the new part; **not comparable "
        "with published FID**.",
        "",
        "Learning rates are picked for each start alone from "
        f"{', '.join(f'{rate:g}' for rate in case.rates)}, by the loss after "
        f"{case.tuning_steps} steps {tuned}.",
    ]


def _headline(targets: Mapping[str, Mapping[str, Reached]]) -> list[str]:
    """The exact conversion against the others that keep weights, a line a target."""
    text = []
    for name, found in targets.items():
        said = [
            f"{start} {found[start]} ({found[start].speedup})"
            for start in (EXACT, PAPER, AS_THEY_ARE)
            if start in found
        ]
        text.append(f"- Steps to scratch's loss, {name}: {'; '.join(said)}.")
    return text


def _folds(errors: Sequence[Mapping[str, float]]) -> list[str]:
    if not errors or not errors[0]:
        return []
    folded = [f"{start} {statistics.fmean(one[start] for one in errors):.3f}" for start in errors[0]]
    return [f"- Relative error of the folded modulation: {', '.join(folded)}."]


def picture(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Loss and distance over steps."""
    canvas = Figure(figsize=(11, 4.6), layout="constrained")
    loss, distance = canvas.subplots(1, 2)
    targets = [run["losses"][-1] for run in runs[SCRATCH]]
    lowest = min(min(run["losses"]) for each in runs.values() for run in each)
    colours = dict(zip(STARTS, COLOURS, strict=False))
    for start, each in runs.items():
        colour = colours[start]
        _band(loss, each[0]["steps"], [run["losses"] for run in each], colour, start)
        far = [[value for value, _ in run["distances"]] for run in each]
        _band(distance, each[0]["distance_steps"], far, colour, start, marker="o", markersize=3)
    loss.axhline(statistics.fmean(targets), color=COLOURS[0], linewidth=0.8, linestyle="--")
    loss.set_ylim(0.97 * lowest, 2.2 * statistics.fmean(targets))
    loss.set_ylabel("held-out flow-matching loss (dashed: scratch's last)")
    distance.set_ylabel("Fréchet distance to the new part")
    nearest = min(value for each in runs.values() for run in each for value, _ in run["distances"])
    farthest = max(value for run in runs[SCRATCH] for value, _ in run["distances"])
    distance.set_ylim(0.9 * nearest, 1.1 * farthest)
    for panel in (loss, distance):
        panel.set_xscale("symlog", linthresh=runs[SCRATCH][0]["steps"][1])
        panel.set_yscale("log")
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 1.25, 1.5, 2, 3, 4, 5, 6, 8)))
        panel.yaxis.set_minor_locator(NullLocator())
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_formatter("{x:g}")
        panel.set_xlabel("step")
        panel.set_xlim(0, runs[SCRATCH][0]["steps"][-1])
        panel.tick_params(labelsize=8)
    handles = loss.get_legend_handles_labels()
    canvas.legend(*handles, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return canvas


def _band(
    panel: Any, steps: Sequence[int], curves: Sequence[Sequence[float]], colour: str, label: str, **marks: Any
) -> None:
    """The mean over seeds, and a band from the lowest to the highest."""
    each = list(zip(*curves, strict=True))
    mean = [statistics.fmean(one) for one in each]
    panel.plot(steps, mean, color=colour, linewidth=1.5, label=label, **marks)
    panel.fill_between(
        steps, [min(one) for one in each], [max(one) for one in each], color=colour, alpha=0.15
    )
