"""The ablation as a table, a verdict and a picture."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure as Canvas

from benchmarks.conversion.report import COLOURS, head, table, write_result
from benchmarks.summary import figure

_NATIVE = "native DDPM, DDIM"
_CONVERTED = "converted DDPM, calibrated"
_SIDES = {"to_training": "to training images", "to_held_out": "to held-out images"}


def write_ablation(folder: Path, name: str, command: str, content: Mapping[str, Any]) -> Path:
    """Write the result of `benchmarks.conversion.ablation`."""
    runs, settings = content["runs"], content["settings"]
    training = settings["training"]
    rows = [
        [
            row,
            *(str(_distance(runs, row, side)) for side in _SIDES),
            *(str(figure([run["rows"][row][key] for run in runs])) for key in ("diversity", "nearest_ratio")),
        ]
        for row in runs[0]["rows"]
    ]
    text = [
        "# Native and converted experts on digits",
        "",
        head(content["measured_on"], command, content["seconds"]),
        "Two shards of scikit-learn's digits, an expert each, drawn by shard size and kept. Every expert: "
        f"`{training['size']}`, {training['steps']:,} steps at batch {training['batch_size']}, "
        f"{training['learning_rate']:g}; DDPM on linear betas 1e-4 … 0.02, 1,000 steps. The DDPM is sampled "
        "by diffusers' DDIMScheduler (eta 0, clip_sample on, as the config says; its default spacing "
        '"leading", and "trailing"), or goes through `hddm convert`, is calibrated on its shard or on '
        f"{settings['calibration_images']} samples of its own (`hddm calibrate` without --data), and is "
        f"sampled by `hddm.sample` with its defaults. {settings['sampling_steps']} steps and "
        f"{settings['images']:,} images everywhere.",
        "",
        'Fréchet distances on 64 features of a small classifier, **not comparable with published FID**. "±" '
        f'is the 95 % half-width over samples, "s" the standard deviation over {len(runs)} trainings. Real '
        f"held-out images are at {content['real']['value']:.1f} from the training images.",
        "",
        *table(["samples of", *_SIDES.values(), "diversity", "nearest-image ratio"], rows),
        "",
        *verdicts(runs),
    ]
    return write_result(folder, name, text, content, _picture(runs))


def verdicts(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every calibrated conversion against every native sampling of the same DDPM, paired by seed."""
    names = list(runs[0]["rows"])
    lines = []
    for converted in (name for name in names if name.startswith(_CONVERTED)):
        for native in (name for name in names if name.startswith(_NATIVE)):
            said = []
            for side, label in _SIDES.items():
                gaps = [
                    run["rows"][converted][side]["value"] - run["rows"][native][side]["value"] for run in runs
                ]
                gap = figure(gaps)
                if gap.spread is None:
                    judged = "one training, no verdict"
                elif abs(gap.mean) <= 2 * gap.spread:
                    judged = f"within noise (s {gap.spread:.1f})"
                else:
                    judged = f"{'better' if gap.mean < 0 else 'worse'} (s {gap.spread:.1f})"
                said.append(f"{label} {gap.mean:+.1f}, {judged}")
            lines.append(f"- {converted}, against {native}: {'; '.join(said)}")
    return lines


def _distance(runs: Sequence[Mapping[str, Any]], row: str, side: str) -> Any:
    each = [run["rows"][row][side] for run in runs]
    return figure([one["value"] for one in each], [one["half_width"] for one in each])


def _picture(runs: Sequence[Mapping[str, Any]]) -> Canvas:
    names = list(runs[0]["rows"])
    canvas = Canvas(figsize=(9, 0.42 * len(names) + 1.2), layout="constrained")
    panels = canvas.subplots(1, 2, sharey=True)
    for panel, (side, label) in zip(panels, _SIDES.items(), strict=True):
        for place, name in enumerate(names):
            values = [run["rows"][name][side]["value"] for run in runs]
            panel.barh(place, statistics.fmean(values), color=COLOURS[2], height=0.6)
            panel.plot(values, [place] * len(values), "o", color=COLOURS[0], markersize=4)
        panel.set_yticks(range(len(names)), names, fontsize=8)
        panel.set_xlabel(f"Fréchet distance {label}", fontsize=8)
        panel.tick_params(axis="x", labelsize=8)
    panels[0].invert_yaxis()
    return canvas
