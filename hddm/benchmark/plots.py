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
        "router (cross-entropy)": ["router"],
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


def use_plot(use: Sequence[ExpertUse]) -> str:
    """Mean router probability of each expert over t, stacked, as an embedded SVG."""
    canvas = Canvas(figsize=(5.5, 2.8), layout="constrained")
    axes = canvas.subplots()
    times = [t for t, _, _ in use]
    shares = np.array([probabilities for _, probabilities, _ in use]).T
    labels = [f"expert {k}" for k in range(len(shares))]
    axes.stackplot(times, shares, labels=labels, alpha=0.85)
    axes.set_xlim(max(times), min(times))
    axes.set_ylim(0, 1)
    axes.set_xlabel("t (noise on the left, data on the right)", fontsize=8)
    axes.set_ylabel("mean probability", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=7, loc="upper right")
    return _svg(canvas)


def _svg(canvas: Canvas) -> str:
    buffer = io.BytesIO()
    # A fixed date keeps equal results equal files.
    canvas.savefig(buffer, format="svg", metadata={"Date": None})
    return embedded(buffer.getvalue(), "svg+xml")
