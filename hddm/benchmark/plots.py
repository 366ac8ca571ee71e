"""Pictures of a comparison: sample grids, losses, expert use over time."""

import base64
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure as Canvas
from torch import Tensor

from hddm.benchmark.jobs import ExpertUse
from hddm.data.images import save_png

GRID_COLUMNS = 8
ENLARGE = 4


def slug(name: str) -> str:
    """A model's name as part of a path."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def grid_path(folder: Path, name: str) -> Path:
    """Where the sample grid of a model lies."""
    return folder / "samples" / f"{slug(name)}.png"


def write_grid(pixels: Tensor, path: Path) -> None:
    """Write images (n, C, H, W) in bytes side by side, enlarged, with a thin border between them."""
    big = pixels.repeat_interleave(ENLARGE, 2).repeat_interleave(ENLARGE, 3)
    big = torch.nn.functional.pad(big, (1, 1, 1, 1), value=96)
    missing = -len(big) % GRID_COLUMNS
    big = torch.cat([big, torch.full((missing, *big.shape[1:]), 96, dtype=torch.uint8)])
    rows = [torch.cat(list(row), dim=2) for row in big.split(GRID_COLUMNS)]
    path.parent.mkdir(parents=True, exist_ok=True)
    save_png(torch.cat(rows, dim=1), path)


def embedded(content: bytes, kind: str) -> str:
    """``content`` as a data address, so that a page needs no other file."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def loss_plot(losses: Mapping[str, Sequence[float]]) -> str:
    """Smoothed losses of experts by objective, as an embedded SVG.

    Losses of different objectives predict different things; only their shapes compare.
    """
    canvas = Canvas(figsize=(7.5, 3.2), layout="constrained")
    panels = canvas.subplots(1, 3)
    groups = {
        "flow": [n for n in losses if n == "single" or n.startswith("flow")],
        "ddpm": [n for n in losses if n.startswith("ddpm")],
        "router (cross-entropy)": [n for n in losses if n == "router"],
    }
    for panel, (title, names) in zip(panels, groups.items(), strict=True):
        for name in names:
            values = np.asarray(losses[name])
            window = max(len(values) // 40, 1)
            smooth = np.convolve(values, np.ones(window) / window, mode="valid")
            panel.plot(np.arange(len(smooth)) + window, smooth, linewidth=1, label=name)
        panel.set_title(title, fontsize=9)
        panel.set_xlabel("step", fontsize=8)
        panel.tick_params(labelsize=7)
        if len(names) > 1:
            panel.legend(fontsize=6, frameon=False)
        panel.set_yscale("log")
    return _svg(canvas)


def use_plot(use: Mapping[str, Sequence[ExpertUse]]) -> str:
    """Mean weight of each expert over t, stacked, a panel a strategy, as an embedded SVG.

    The dashed line is how sure the router is: its largest probability, on average.
    """
    canvas = Canvas(figsize=(2.1 * len(use), 2.6), layout="constrained")
    panels = np.atleast_1d(canvas.subplots(1, len(use), sharey=True))
    for panel, (strategy, entries) in zip(panels, use.items(), strict=True):
        times = [entry.t for entry in entries]
        shares = np.array([entry.weights for entry in entries]).T
        labels = [f"expert {k}" for k in range(len(shares))]
        panel.stackplot(times, shares, labels=labels, alpha=0.8)
        panel.plot(times, [entry.largest for entry in entries], "k--", linewidth=1.2, label="certainty")
        panel.set_xlim(max(times), min(times))
        panel.set_ylim(0, 1)
        panel.set_title(strategy, fontsize=9)
        panel.set_xlabel("t", fontsize=8)
        panel.tick_params(labelsize=7)
    panels[0].set_ylabel("mean weight", fontsize=8)
    canvas.legend(*panels[0].get_legend_handles_labels(), fontsize=7, loc="outside right center")
    return _svg(canvas)


def _svg(canvas: Canvas) -> str:
    buffer = io.BytesIO()
    # A fixed date keeps equal results equal files.
    canvas.savefig(buffer, format="svg", metadata={"Date": None})
    return embedded(buffer.getvalue(), "svg+xml")
