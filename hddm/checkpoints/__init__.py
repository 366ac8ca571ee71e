"""Checkpoints of other tools: recognised, read, converted, checked, written back; and what any folder is.

May import `training` and what is below. Start with `plan` and `convert`; a layout is added in `layouts`.
"""
