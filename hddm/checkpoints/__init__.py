"""Checkpoints of other tools: detection, reading, conversion, checks, and writing back.

May import `experts` and what is below. Start with `plan` and `convert`; a layout is added in `layouts`.
"""
