"""Widgets that several nodes have."""

from typing import Any


def strategy_widget() -> tuple[str, dict[str, Any]]:
    """The strategy of an ensemble, which hddm reads."""
    tip = "draw, full, top-2, nucleus-0.9, commit-0.8 and others; empty for the ensemble's own."
    return "STRING", {"default": "", "tooltip": tip}
