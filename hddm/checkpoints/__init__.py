"""Checkpoints of other tools: detection, reading, conversion, checks, write-back; descriptions of any folder.

May import `training` and what is below. Start with `plan` and `convert`; a layout is added in `layouts`.
"""
