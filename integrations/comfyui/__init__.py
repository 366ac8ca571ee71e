"""Nodes for ComfyUI: mix models of one family by velocity, and use hddm's own models."""

from .find_hddm import find_hddm

find_hddm()

from .nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS  # noqa: E402

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
